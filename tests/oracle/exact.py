"""Exact arithmetic for the oracle's tests: rationals rounded to fp32 by integers alone, and bit comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

SPECIALS = (0.0, 1.0, 1.5, 2.0**-149, 2.0**-126, 2.0**127 * (2 - 2.0**-23), math.inf, math.nan)
U = 2.0**-24


def generator(seed: int) -> np.random.Generator:
    """Return the generator of a seed; Philox gives the same numbers with every version."""
    return np.random.Generator(np.random.Philox(seed))


def fp32(values: object) -> Tensor:
    """Return numbers as an fp32 tensor."""
    return torch.from_numpy(np.asarray(values, dtype=np.float32).copy())


def bf16(values: Sequence[object]) -> Tensor:
    """Return numbers as a bf16 tensor; each must be exact in bf16, so that a test says what it means."""
    wide = torch.tensor(values, dtype=torch.float32)
    narrow = wide.bfloat16()
    assert bool(((narrow.float() == wide) | wide.isnan()).all()), "a value is not exact in bf16"
    return narrow


def patterns(values: object) -> Tensor:
    """Return unsigned 32-bit patterns as an fp32 tensor."""
    return torch.from_numpy(np.asarray(values, dtype=np.uint64).astype(np.uint32).view(np.float32).copy())


def differing(first: Tensor, second: Tensor) -> int:
    """Return in how many elements two tensors differ in bits, where any NaN equals any NaN."""
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    integer = torch.int16 if first.dtype == torch.bfloat16 else torch.int32
    unequal = first.contiguous().view(integer) != second.contiguous().view(integer)
    return int((unequal & ~(first.isnan() & second.isnan())).sum())


def rounded(value: Fraction) -> float:
    """Return the nearest fp32 number to a rational that is not 0 (ties to even), or an infinity past the largest."""
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    quantum = max(exponent - 23, -149)
    result = size if exponent > 127 else round(size / Fraction(2) ** quantum) * Fraction(2) ** quantum
    return math.copysign(math.inf if result >= 1 << 128 else float(result), value)


def fma(a: float, b: float, c: float) -> float:
    """Return the fp32 fma of three fp32 numbers, by IEEE 754's rules and rational arithmetic."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return rounded(exact)
    # An exact zero: the sum of zeros of one sign keeps it, every other zero is +0.
    return math.copysign(0.0, a) * math.copysign(1.0, b) + c if c == 0 else 0.0


def divide(a: float, b: float) -> float:
    """Return the fp32 quotient of two finite fp32 numbers, b not 0, by rational arithmetic."""
    exact = Fraction(a) / Fraction(b)
    return rounded(exact) if exact else math.copysign(0.0, a) * math.copysign(1.0, b)
