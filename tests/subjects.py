"""What the laws are tried on: for each op a subject of the released sizes, and small ones for all else that it takes.

The small ones give and leave out each optional input, both ways with each other one, and each has a stream count of
its own, so that the subjects of all ops together have every count from 1 to 8. Counts are low where every row of a
projection costs the interpreter its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cases.ops import OPS
from cases.schema import Case

TOKENS = 17
"""T of the main subject: past two full shards of the largest tp."""

FEW = 3
"""T of the others."""


def subject(op: str, *, tokens: int, hidden: int = 97, hc_mult: int = 4, variant: str = "", **changes: Any) -> Case:
    """An unblessed case of ``op`` on data that gives every order of additions other bits.

    97 columns leave a tail behind any vector or block; ``variant`` is a word for the name; ``changes`` replace keys of
    the case document.
    """
    spec = OPS[op]
    document: dict[str, Any] = {
        "schema": 1,
        "name": "-".join(filter(None, (op.replace("_", "-"), variant))),
        "title": f"the subject on which the laws try {op}",
        "op": op,
        "tp": [1, 2, 4, 8] if "T" in spec.dims else [1],
        "flags": ["order"],
        "catches": ["row-crosstalk"],
        "source": "design:4",
        "inputs": {"default": {"recipe": "cancelling"}, "arguments": {}},
    }
    sizes = {"tokens": tokens, "hidden": hidden, "hc_mult": hc_mult}
    document |= {key: size for key, size in sizes.items() if not spec.dims.isdisjoint(_MEASURES[key])}
    document |= _NUMBERS.get(op, {})
    return Case.model_validate(document | changes)


_MEASURES = {"tokens": "T", "hidden": "HK", "hc_mult": "nMK"}


def _inputs(*optional: str) -> dict[str, Any]:
    """Data that cancels, with some optional arguments.

    The row of an entry is of ordinary size: one as small as what streams leave behind would vanish beside the epsilon.
    """
    recipes = {"x": "normal", "norm_weight": "normal", "pre_mix": "cancelling"}
    arguments = {name: {"recipe": recipes[name]} for name in optional}
    return {"default": {"recipe": "cancelling"}, "arguments": arguments}


_NUMBERS: dict[str, dict[str, Any]] = {
    "stream_mean": {"inputs": {"default": {"recipe": "absorbing"}}},  # the mean of pairs that cancel is zero throughout
    "mixes": {"params": {"numel": 388, "rms_eps": 1e-6}},
    "sinkhorn": {"params": {"sinkhorn_iters": 20, "sinkhorn_eps": 1e-6}},
    "norm": {"params": {"norm_eps": 1e-6}},
    "collapse_norm": {"params": {"norm_eps": 1e-6, "squares_of": "rounded"}},
    "coefficients": {"config": {"preset": "v4"}},
    "head": {"config": {"preset": "v4"}},
    "pre": {"config": {"preset": "v4"}},
    "post_pre": {"config": {"preset": "v4"}},
    "pre_delayed": {"config": {"preset": "v41"}, "inputs": _inputs("pre_mix")},
    "post_pre_delayed": {
        "config": {"preset": "v41"},
        "params": {"capture_aux": True},
        "inputs": _inputs("pre_mix"),
    },
}

_ENTRY = {"entry": "hidden"}
_OTHERS: Mapping[str, Mapping[str, tuple[int, dict[str, Any]]]] = {
    "expand": {"alone": (1, {})},
    "collapse": {"five": (5, {})},
    "stream_mean": {"seven": (7, {})},
    "post": {"six": (6, {})},
    "draft_tail": {"three": (3, {})},
    "project": {"entry": (2, {"entry": "hidden", "inputs": {"default": {"recipe": "normal"}}})},
    "mixes": {"eight": (8, {})},
    "sinkhorn": {"seven": (7, {})},
    "coefficients": {"five": (5, {})},
    "collapse_norm": {"unrounded": (6, {"params": {"norm_eps": 1e-6, "squares_of": "unrounded"}})},
    "head": {"three": (3, {})},
    "fn_broadcast": {"eight": (8, {})},
    "pre": {
        "norm": (3, {"inputs": _inputs("norm_weight")}),
        "entry": (1, _ENTRY | {"inputs": _inputs("x")}),
        "entry-norm": (2, _ENTRY | {"inputs": _inputs("x", "norm_weight")}),
    },
    "pre_delayed": {
        "norm": (2, {"inputs": _inputs("norm_weight")}),
        "entry": (1, _ENTRY | {"inputs": _inputs("x")}),
        "entry-mix-norm": (3, _ENTRY | {"inputs": _inputs("x", "pre_mix", "norm_weight")}),
    },
    "post_pre": {"norm": (2, {"inputs": _inputs("norm_weight")})},
    "post_pre_delayed": {
        "plain": (1, {"params": {"capture_aux": False}, "inputs": _inputs()}),
        "norm-aux": (2, {"inputs": _inputs("norm_weight")}),
        "mix-norm": (3, {"params": {"capture_aux": False}, "inputs": _inputs("pre_mix", "norm_weight")}),
    },
}


def _all_subjects() -> dict[str, Case]:
    cases = []
    for op in OPS:
        cases.append(subject(op, tokens=TOKENS))
        for variant, (streams, changes) in _OTHERS.get(op, {}).items():
            cases.append(subject(op, tokens=FEW, hc_mult=streams, variant=variant, **changes))
    return {case.name: case for case in cases}


SUBJECTS: Mapping[str, Case] = MappingProxyType(_all_subjects())
"""Every subject by name; those of an op stand together, the main one first."""
