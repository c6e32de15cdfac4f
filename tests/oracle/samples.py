"""Valid arguments of every oracle op, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import oracle
from oracle import MhcConfig
from tests.oracle import exact

OPS = tuple(name for name in oracle.__all__ if name[0].islower())
BOUNDARIES = ("pre", "pre_delayed", "post_pre", "post_pre_delayed")
TENSORS = {
    "expand": ("hidden",),
    "collapse": ("residual", "pre_mix"),
    "stream_mean": ("residual",),
    "post": ("x", "residual", "post_mix", "comb_mix"),
    "draft_tail": ("x", "residual", "post_mix", "comb_mix", "pre_mix"),
    "project": ("x", "fn"),
    "mixes": ("sums", "squares"),
    "sinkhorn": ("logits",),
    "coefficients": ("mixes", "hc_scale", "hc_base"),
    "norm": ("hidden", "norm_weight"),
    "collapse_norm": ("residual", "pre_mix", "norm_weight"),
    "head": ("residual", "fn", "hc_scale", "hc_base"),
    "fn_broadcast": ("fn",),
    "pre": ("residual", "fn", "hc_scale", "hc_base", "norm_weight"),
    "pre_delayed": ("residual", "fn", "hc_scale", "hc_base", "pre_mix", "norm_weight"),
    "post_pre": ("x", "residual", "post_mix", "comb_mix", "fn", "hc_scale", "hc_base", "norm_weight"),
    "post_pre_delayed": (
        "x",
        "residual",
        "post_mix",
        "comb_mix",
        "fn",
        "hc_scale",
        "hc_base",
        "pre_mix",
        "norm_weight",
    ),
}
WITHOUT_TOKENS = ("fn", "hc_scale", "hc_base", "norm_weight")


@dataclass(frozen=True)
class Sample:
    """One call of an op: its tensors by name, and its plain arguments."""

    op: str
    tensors: dict[str, Tensor]
    plain: dict[str, Any]

    def call(self, **changes: Any) -> tuple[Tensor, ...]:
        """Return the outputs, always as a tuple, with some arguments changed."""
        function: Callable[..., Any] = getattr(oracle, self.op)
        result = function(**{**self.tensors, **self.plain, **changes})
        return result if isinstance(result, tuple) else (result,)

    def rows(self, tokens: slice | Tensor) -> dict[str, Tensor]:
        """Return the tensors that have tokens, with only the given ones."""
        return {name: value[tokens] for name, value in self.tensors.items() if name not in WITHOUT_TOKENS}


def plain_arguments(op: str, n: int, hidden: int) -> dict[str, Any]:
    """Return the arguments of an op that are no tensors."""
    config = MhcConfig(hc_mult=n, rms_eps=1e-20, norm_eps=1e-20)
    table: dict[str, dict[str, Any]] = {
        "expand": {"hc_mult": n},
        "mixes": {"numel": n * hidden, "rms_eps": 1e-6},
        "sinkhorn": {"sinkhorn_iters": 3, "sinkhorn_eps": 1e-6},
        "coefficients": {"config": config},
        "norm": {"norm_eps": 1e-6},
        "collapse_norm": {"norm_eps": 1e-6, "squares_of": "unrounded"},
        "head": {"config": config},
        "fn_broadcast": {"hc_mult": n},
        "pre": {"config": config},
        "pre_delayed": {"config": config},
        "post_pre": {"config": config},
        "post_pre_delayed": {"config": config, "capture_aux": True},
    }
    return table.get(op, {})


def sample(op: str, tokens: int = 3, n: int = 4, hidden: int = 70, seed: int = 0) -> Sample:
    """Return random arguments of `op` for a shape."""
    random, size = exact.generator(seed), n * (n + 2)
    outputs, scales = (n, 1) if op == "head" else (size, 3)
    wide = {
        "pre_mix": (tokens, n),
        "post_mix": (tokens, n),
        "comb_mix": (tokens, n, n),
        "sums": (tokens, size),
        "squares": (tokens,),
        "logits": (tokens, n, n),
        "mixes": (tokens, size),
        "fn": (outputs, n * hidden),
        "hc_scale": (scales,),
        "hc_base": (outputs,),
    }
    narrow = {"residual": (tokens, n, hidden), "norm_weight": (hidden,), "hidden": (tokens, hidden)}
    narrow["x"] = (tokens, n, hidden) if op == "project" else (tokens, hidden)

    def make(name: str) -> Tensor:
        if name in wide:
            values = exact.fp32(random.normal(size=wide[name]))
            return values.abs() + 0.1 if name == "squares" else values
        return exact.fp32(random.normal(size=narrow[name])).bfloat16()

    return Sample(op, {name: make(name) for name in TENSORS[op]}, plain_arguments(op, n, hidden))


def scattered(values: Tensor) -> Tensor:
    """Return the same values with strides that no dense tensor has, among NaN."""
    shape = [2 * size + 1 for size in reversed(values.shape)]
    room = torch.full(shape, float("nan"), dtype=values.dtype)
    view = room.permute(*reversed(range(values.dim())))[tuple(slice(1, None, 2) for _ in values.shape)]
    return view.copy_(values)
