"""Collapse: the streams of a token weighted by its pre-mix."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle import arguments
from oracle.arith import packed, round_bf16, widen
from oracle.arithmetic import CONTRACT_1, Arithmetic
from oracle.reduce import weighted_sum


@torch.no_grad()
def collapse(residual: Tensor, pre_mix: Tensor, *, arithmetic: Arithmetic = CONTRACT_1) -> Tensor:
    """Return the layer input, bf16 [T, H]: the sum over streams of pre_mix * residual, rounded once.

    residual: bf16 [T, n, H]. pre_mix: fp32 [T, n]. Sequence: a = +0; for i ascending a = a + (pre[i] *
    res[i]), each product and sum rounded to fp32; out = bf16(a). So -0 becomes +0, and 0 * Inf is NaN.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    Source: contract 1; upstream's hc_collapse keeps product and sum apart as well.
    """
    tokens, streams, _ = arguments.residual("collapse", residual)
    arguments.sized("collapse", "pre_mix", pre_mix, torch.float32, (tokens, streams))
    arguments.same_device("collapse", residual=residual, pre_mix=pre_mix)
    return packed(round_bf16(unrounded_collapse(residual, pre_mix, arithmetic)))


def unrounded_collapse(residual: Tensor, pre_mix: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return the fp32 [T, H] accumulator of `collapse` before its rounding; arguments are not checked."""
    weights = [pre_mix[:, i, None] for i in range(residual.shape[1])]
    return weighted_sum(weights, widen(residual).unbind(1), arithmetic.collapse)
