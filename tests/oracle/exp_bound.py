"""How far the suite's exp is from the correctly rounded one, for any subset of the floats, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle import arith

# Beyond these patterns (positive and negative) exp is Inf and 0, which single values test.
HIGHEST, LOWEST = 0x42B30000, 0x42D10000
# Far more than the error of any fp64 exp in use, far less than an fp32 step.
REFERENCE_ERROR = 2.0**-48


def all_floats(stride: int, device: torch.device | str, chunk: int = 1 << 22) -> list[Callable[[], Tensor]]:
    """Return makers of fp32 tensors that together hold every `stride`-th float from -104.5 to 89.5."""
    makers: list[Callable[[], Tensor]] = []
    for sign, end in ((0, HIGHEST), (-(1 << 31), LOWEST)):
        for first in range(0, end, chunk * stride):
            last = min(end, first + chunk * stride)

            def make(first: int = first, last: int = last, sign: int = sign) -> Tensor:
                pattern = torch.arange(first, last, stride, dtype=torch.int64, device=device) + sign
                return arith.from_bits(pattern.to(torch.int32))

            makers.append(make)
    return makers


def worst_distance(values: Tensor, result: Tensor) -> int:
    """Return the largest ULP distance of `result` to the correctly rounded exp of `values`.

    The fp64 exp is moved by `REFERENCE_ERROR` both ways; the correctly rounded number is one of the two
    roundings or lies between, so the larger distance bounds the true one.
    """
    reference = values.double().exp()
    return max(
        int(arith.ulp_distance((reference * (1 + error)).float(), result).max())
        for error in (-REFERENCE_ERROR, REFERENCE_ERROR)
    )


def prove(stride: int = 1, device: torch.device | str = "cpu") -> tuple[int, int]:
    """Return (how many floats were tried, the worst ULP distance); stride 1 tries all 2.2 thousand million."""
    tried = worst = 0
    for make in all_floats(stride, device):
        values = make()
        tried += values.numel()
        worst = max(worst, worst_distance(values, arith.exp(values)))
    return tried, worst
