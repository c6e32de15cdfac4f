"""Wrong definitions of expand, mean, post and draft tail; wrong orders are in `tests.mutants.orders`."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.arith import round_bf16, widen
from oracle.arithmetic import CONTRACT_1
from oracle.reduce import weighted_sum
from oracle.streams import unrounded_post


def post_rounding_dropped(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, pre_mix: Tensor) -> Tensor:
    """Fuses post and collapse, and collapses the FP32 streams that it still holds in registers."""
    new = unrounded_post(x, residual, post_mix, comb_mix, CONTRACT_1)
    return round_bf16(weighted_sum([pre_mix[:, i, None] for i in range(new.shape[1])], new.unbind(1)))


def mean_per_stream(residual: Tensor) -> Tensor:
    """Divides and rounds each stream's share before adding."""
    shares = (widen(residual) / residual.shape[1]).bfloat16()
    return round_bf16(sum(shares.float().unbind(1), torch.zeros_like(shares[:, 0].float())))


def mean_of_last_stream(residual: Tensor) -> Tensor:
    """Takes another aux state than the mean."""
    return residual[:, -1].clone()


def expand_tiled(hidden: Tensor, hc_mult: int) -> Tensor:
    """Tiles the flat buffer instead of repeating rows: streams of one token get other tokens' values."""
    return hidden.repeat(hc_mult, 1).reshape(-1, hc_mult, hidden.shape[1])


def expand_to_four(hidden: Tensor, hc_mult: int) -> Tensor:  # noqa: ARG001 - that is the fault
    """Makes four streams, whatever hc_mult says."""
    return hidden.unsqueeze(1).repeat(1, 4, 1)


def mean_from_first(residual: Tensor) -> Tensor:
    """Starts from the first stream instead of +0: a sum of -0 alone stays -0."""
    total = widen(residual[:, 0])
    for stream in residual.unbind(1)[1:]:
        total = total + widen(stream)
    return round_bf16(total / torch.full((), residual.shape[1], dtype=torch.float32))
