"""Planted wrong kernels: each a small change to a right one, of a class that has been shipped somewhere.

A case file claims in ``catches`` which classes it sees. For every claim of every case there is a mutant here, and
`tests/test_mutants.py` shows that the case catches it on the CPU: a case that no wrong kernel fails proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import oracle
from cases.ops import OPS
from oracle.arithmetic import WeightedSum
from tests.implementations import Implementation
from tests.judge import Pipeline
from tests.mutants import boundaries, coefficients, generic, norms, orders, streams
from tests.mutants.pipelines import PIPELINES

__all__ = ["MUTANTS", "Mutant"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Mutant:
    """One wrong kernel, or one wrong SP step around the right kernel.

    ``kind`` is its class, a word of ``[catches]`` in cases/flags.toml. ``stage`` is the step of the op that alone is
    wrong, a word of ``[stages]``; it is empty where the fault is not in one step, such as one of addressing.
    """

    kind: str
    op: str
    function: Function
    pipeline: Pipeline = field(default_factory=Pipeline)
    stage: str = ""

    @property
    def implementation(self) -> Implementation:
        """The mutant as something to judge; only the one that leaves a column unwritten needs ``out=``."""
        name = "-".join(part for part in ("mutant", self.kind, self.stage) if part)
        return Implementation(self.op, name, self.function, self.kind == "tail-column-unwritten")


_EVERY_OP = {
    "truncating-store": generic.truncating_store,
    "round-half-up": generic.round_half_up,
    "subnormal-flushed": generic.subnormal_flushed,
    "nan-lost": generic.nan_lost,
    "overflow-clamped": generic.overflow_clamped,
    "row-misplaced": generic.row_misplaced,
    "tail-column-unwritten": generic.tail_column_unwritten,
    "strides-ignored": generic.strides_ignored,
    "vector-misaligned": generic.vector_misaligned,
    "hc-mult-fixed": generic.hc_mult_fixed,
}
_OPS_WITH_TOKENS = {
    "row-crosstalk": generic.row_crosstalk,
    "pad-row-read": generic.pad_row_read,
    "offset-32bit": generic.offset_32bit,
    "empty-launch": generic.empty_launch,
}
_OPS_WITH_MIXES = {
    "mix-rounded": generic.mix_rounded,
    "comb-transposed": generic.comb_transposed,
    "nan-rounded": generic.nan_rounded,
}

_OWN: dict[str, dict[str, Function]] = {
    "collapse": {"negative-zero-lost": generic.under("collapse", collapse=WeightedSum(start="first"))},
    "draft_tail": {
        "negative-zero-lost": generic.under("draft_tail", collapse=WeightedSum(start="first")),
        "post-rounding-dropped": streams.post_rounding_dropped,
    },
    "post": {"negative-zero-lost": generic.negative_zero_lost("post")},
    "expand": {
        "negative-zero-lost": generic.negative_zero_lost("expand"),
        "row-misplaced": streams.expand_tiled,
        "hc-mult-fixed": streams.expand_to_four,
    },
    "stream_mean": {
        "negative-zero-lost": streams.mean_from_first,
        "mean-per-stream": streams.mean_per_stream,
        "wrong-stream-mean": streams.mean_of_last_stream,
    },
    **coefficients.BY_OP,
}


def _all_mutants() -> Iterator[Mutant]:
    for op, spec in OPS.items():
        names = {argument.name for argument in spec.required}
        with_tokens = any(argument.per_token for argument in spec.required)
        functions = {kind: make(op) for kind, make in _EVERY_OP.items()}
        functions |= {kind: make(op) for kind, make in _OPS_WITH_TOKENS.items() if with_tokens}
        functions |= {
            kind: make(op) for kind, make in _OPS_WITH_MIXES.items() if "comb_mix" in names or "pre_mix" in names
        }
        functions |= _OWN.get(op, {}) | norms.BY_OP.get(op, {}) | streams.BY_OP.get(op, {})
        staged = _staged(op)
        yield from (Mutant(kind, op, function) for kind, function in functions.items() if kind not in staged)
        for kind, stages in staged.items():
            yield from (Mutant(kind, op, one, stage=stage) for stage, wrong in stages.items() for one in wrong)
        if with_tokens:
            right = getattr(oracle, op)
            yield from (Mutant(kind, op, right, pipeline) for kind, pipeline in PIPELINES.items())


def _staged(op: str) -> boundaries.Staged:
    """The wrong kernels of an op that are wrong in one known step, by class and stage."""
    steps = boundaries.STAGED.get(op, {})
    if op in boundaries.BOUNDARIES:
        return steps
    departed: boundaries.Staged = {
        kind: {stage: (one,) for stage, one in by.items()} for kind, by in orders.departures(op).items()
    }
    return departed | steps


def _by_class() -> dict[tuple[str, str], tuple[Mutant, ...]]:
    found: dict[tuple[str, str], tuple[Mutant, ...]] = {}
    for mutant in _all_mutants():
        key = mutant.kind, mutant.op
        found[key] = (*found.get(key, ()), mutant)
    return found


MUTANTS = _by_class()
"""Every planted wrong kernel of a class and an op: one, or one for each stage and way in which it can be wrong."""
