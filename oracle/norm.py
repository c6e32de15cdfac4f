"""RMSNorm of the collapsed hidden states, in the two variants that the models have."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from oracle import arguments
from oracle.arith import packed, round_bf16, widen
from oracle.arithmetic import CONTRACT_1, Arithmetic
from oracle.coefficients import reciprocal_rms
from oracle.collapse import unrounded_collapse
from oracle.reduce import pinned_squares

SquaresOf = Literal["unrounded", "rounded"]


@torch.no_grad()
def norm(hidden: Tensor, norm_weight: Tensor, *, norm_eps: float, arithmetic: Arithmetic = CONTRACT_1) -> Tensor:
    """Return the RMSNorm of `hidden`, bf16 [T, H]: bf16((f32(y) * r) * f32(w)), r = 1 / sqrt(S / H +
    norm_eps).

    hidden: bf16 [T, H]. norm_weight: bf16 [H]. S is the sum of squares in the pinned order of the
    projection (one stream); every step of r and both products are rounded to fp32.
    Raises TypeError for a wrong dtype or type, ValueError for a wrong shape, value or device.
    Source: contract 1; V4.1 norms the rounded collapse so, fused or not.
    """
    _, width = arguments.rows("norm", "hidden", hidden)
    check_weight("norm", norm_weight, width, norm_eps)
    arguments.same_device("norm", hidden=hidden, norm_weight=norm_weight)
    return _scaled(hidden, widen(hidden), norm_weight, norm_eps, arithmetic)


@torch.no_grad()
def collapse_norm(
    residual: Tensor,
    pre_mix: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    squares_of: SquaresOf,
    arithmetic: Arithmetic = CONTRACT_1,
) -> Tensor:
    """Return the RMSNorm of the collapse, bf16 [T, H]; what is scaled is always the collapse rounded to
    bf16.

    residual: bf16 [T, n, H]. pre_mix: fp32 [T, n]. norm_weight: bf16 [H]. squares_of: "unrounded" takes the
    sum of squares from the fp32 accumulator of the collapse (V4), "rounded" from its bf16 value (V4.1), as
    `norm` does. Raises TypeError for a wrong dtype or type, ValueError for a wrong shape, value or device.
    Source: upstream's fused norm kernels, which differ so.
    """
    tokens, streams, hidden = arguments.residual("collapse_norm", residual)
    arguments.sized("collapse_norm", "pre_mix", pre_mix, torch.float32, (tokens, streams))
    check_weight("collapse_norm", norm_weight, hidden, norm_eps)
    if squares_of not in ("unrounded", "rounded"):
        raise ValueError(f"collapse_norm: squares_of must be 'unrounded' or 'rounded', got {squares_of!r}")
    arguments.same_device("collapse_norm", residual=residual, pre_mix=pre_mix, norm_weight=norm_weight)
    exact = unrounded_collapse(residual, pre_mix, arithmetic)
    rounded = round_bf16(exact)
    squared = exact if squares_of == "unrounded" else widen(rounded)
    return _scaled(rounded, squared, norm_weight, norm_eps, arithmetic)


def check_weight(op: str, norm_weight: Tensor, hidden: int, norm_eps: float) -> None:
    """Raise TypeError or ValueError, in the name of `op`, unless the weight is bf16 [H] and the eps is a number."""
    arguments.sized(op, "norm_weight", norm_weight, torch.bfloat16, (hidden,))
    arguments.real(op, "norm_eps", norm_eps)


def _scaled(rounded: Tensor, squared: Tensor, norm_weight: Tensor, norm_eps: float, arithmetic: Arithmetic) -> Tensor:
    squares = pinned_squares(squared.unsqueeze(1), arithmetic.dot)
    r = reciprocal_rms(squares, rounded.shape[1], norm_eps).unsqueeze(1)
    return packed(round_bf16((widen(rounded) * r) * widen(norm_weight)))
