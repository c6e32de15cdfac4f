"""The op table as data: every op's arguments, outputs and parameters, in calling order.

Nothing here computes anything. The schema checks a case against this table, the builder makes tensors by it,
and a judge calls a kernel by it, so that no part of the suite has its own idea of an op's signature.

Dimensions: T tokens, n streams (`hc_mult`), H hidden size, M rows of the projection (n * (n + 2), unless an op
takes any number), K columns of the projection (n * H, or H at the entry, where a token has one row).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

BF16 = "bfloat16"
F32 = "float32"


@dataclass(frozen=True)
class Argument:
    """One tensor argument: `dims` name its axes, `role` tells the builder what its values mean."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    role: str
    optional: bool = False

    @property
    def per_token(self) -> bool:
        """Whether axis 0 counts tokens, so that the argument is sharded over ranks."""
        return self.dims[0] == "T"


@dataclass(frozen=True)
class Output:
    """One result, in the order in which the op returns it."""

    name: str
    dtype: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Op:
    """One op: tensors in calling order, results in returning order, names of its plain parameters.

    `stages` are the steps, words of [stages] in flags.toml, of which each can be wrong alone.
    """

    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    parameters: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[Argument, ...]:
        """Arguments that every call passes, by position."""
        return tuple(argument for argument in self.arguments if not argument.optional)

    @property
    def per_token(self) -> bool:
        """Whether every argument is sharded, so that gathering the inputs first is an order worth judging."""
        return all(argument.per_token for argument in self.arguments)

    @property
    def dims(self) -> frozenset[str]:
        """Every dimension that some argument or output of the op has."""
        return frozenset(dim for dims in self._dims() for dim in dims)

    def _dims(self) -> tuple[tuple[str, ...], ...]:
        return (*(one.dims for one in self.arguments), *(one.dims for one in self.outputs))

    def argument(self, name: str) -> Argument:
        """The argument called `name`; KeyError when the op has none."""
        for argument in self.arguments:
            if argument.name == name:
                return argument
        raise KeyError(name)


_HIDDEN = Argument("hidden", BF16, ("T", "H"), "hidden")
_X = Argument("x", BF16, ("T", "H"), "hidden")
_RESIDUAL = Argument("residual", BF16, ("T", "n", "H"), "streams")
_PRE_MIX = Argument("pre_mix", F32, ("T", "n"), "pre")
_POST_MIX = Argument("post_mix", F32, ("T", "n"), "post")
_COMB_MIX = Argument("comb_mix", F32, ("T", "n", "n"), "comb")
_FN = Argument("fn", F32, ("M", "K"), "projection")
_HC_SCALE = Argument("hc_scale", F32, ("3",), "scale")
_HC_BASE = Argument("hc_base", F32, ("M",), "base")
_NORM_WEIGHT = Argument("norm_weight", BF16, ("H",), "weight")
_WEIGHTS = (_FN, _HC_SCALE, _HC_BASE)
_SUBLAYER = (_X, _RESIDUAL, _POST_MIX, _COMB_MIX)

_ENTRY = Argument("x", BF16, ("T", "H"), "hidden", optional=True)
_CARRIED = Argument("pre_mix", F32, ("T", "n"), "pre", optional=True)
_NORM = Argument("norm_weight", BF16, ("H",), "weight", optional=True)

_NEW_RESIDUAL = Output("residual", BF16, ("T", "n", "H"))
_NEW_PRE = Output("pre_mix", F32, ("T", "n"))
_NEW_POST = Output("post_mix", F32, ("T", "n"))
_NEW_COMB = Output("comb_mix", F32, ("T", "n", "n"))
_LAYER_INPUT = Output("layer_input", BF16, ("T", "H"))
_NEXT_PRE = Output("next_pre_mix", F32, ("T", "n"))
_AUX = Output("aux", BF16, ("T", "H"))

_SCALED = ("projection", "squares", "mixes", "gates")
_NORMED = ("collapse", "norm-squares", "norm")
_BOUNDARY = (*_SCALED, "sinkhorn", *_NORMED)

_TABLE = (
    Op("expand", (_HIDDEN,), (_NEW_RESIDUAL,), ("hc_mult",)),
    Op("collapse", (_RESIDUAL, _PRE_MIX), (_LAYER_INPUT,), stages=("collapse",)),
    Op("stream_mean", (_RESIDUAL,), (_AUX,), stages=("mean",)),
    Op("post", _SUBLAYER, (_NEW_RESIDUAL,), stages=("post",)),
    Op("draft_tail", (*_SUBLAYER, _PRE_MIX), (_LAYER_INPUT,), stages=("post", "collapse")),
    Op(
        "project",
        (Argument("x", BF16, ("T", "n", "H"), "streams"), _FN),
        (Output("sums", F32, ("T", "M")), Output("squares", F32, ("T",))),
        stages=("projection", "squares"),
    ),
    Op(
        "mixes",
        (Argument("sums", F32, ("T", "M"), "sums"), Argument("squares", F32, ("T",), "squares")),
        (Output("mixes", F32, ("T", "M")),),
        ("numel", "rms_eps"),
        ("mixes",),
    ),
    Op(
        "sinkhorn",
        (Argument("logits", F32, ("T", "n", "n"), "logits"),),
        (_NEW_COMB,),
        ("sinkhorn_iters", "sinkhorn_eps"),
        ("sinkhorn",),
    ),
    Op(
        "coefficients",
        (Argument("mixes", F32, ("T", "M"), "mixes"), _HC_SCALE, _HC_BASE),
        (_NEW_PRE, _NEW_POST, _NEW_COMB),
        ("config",),
        ("gates", "sinkhorn"),
    ),
    Op(
        "norm",
        (_HIDDEN, _NORM_WEIGHT),
        (Output("normed", BF16, ("T", "H")),),
        ("norm_eps",),
        ("norm-squares", "norm"),
    ),
    Op(
        "collapse_norm",
        (_RESIDUAL, _PRE_MIX, _NORM_WEIGHT),
        (_LAYER_INPUT,),
        ("norm_eps", "squares_of"),
        _NORMED,
    ),
    Op(
        "head",
        (
            _RESIDUAL,
            Argument("fn", F32, ("n", "K"), "projection"),
            Argument("hc_scale", F32, ("1",), "scale"),
            Argument("hc_base", F32, ("n",), "base"),
        ),
        (Output("hidden", BF16, ("T", "H")),),
        ("config",),
        (*_SCALED, "collapse"),
    ),
    Op("fn_broadcast", (_FN,), (Output("fn_broadcast", F32, ("M", "H")),), ("hc_mult",)),
    Op(
        "pre",
        (_RESIDUAL, *_WEIGHTS, _ENTRY, _NORM),
        (_NEW_POST, _NEW_COMB, _LAYER_INPUT),
        ("config",),
        _BOUNDARY,
    ),
    Op(
        "pre_delayed",
        (_RESIDUAL, *_WEIGHTS, _CARRIED, _ENTRY, _NORM),
        (_NEW_POST, _NEW_COMB, _LAYER_INPUT, _NEXT_PRE),
        ("config",),
        _BOUNDARY,
    ),
    Op(
        "post_pre",
        (*_SUBLAYER, *_WEIGHTS, _NORM),
        (_NEW_RESIDUAL, _NEW_POST, _NEW_COMB, _LAYER_INPUT),
        ("config",),
        ("post", *_BOUNDARY),
    ),
    Op(
        "post_pre_delayed",
        (*_SUBLAYER, *_WEIGHTS, _CARRIED, _NORM),
        (_NEW_RESIDUAL, _NEW_POST, _NEW_COMB, _LAYER_INPUT, _NEXT_PRE, _AUX),
        ("config", "capture_aux"),
        ("post", *_BOUNDARY, "mean"),
    ),
)

OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _TABLE})

ANY_ROWS = frozenset({"project", "mixes", "fn_broadcast"})
"""Ops whose M is free; everywhere else it is n * (n + 2)."""

ENTRY_OPS = frozenset({"project", "pre", "pre_delayed"})
"""Ops that also take one row per token, x [T, H], with the broadcast projection [M, H]."""
