"""Bit views, bf16 rounding, ordered integers, square root and division."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from oracle import arith
from tests.oracle import exact

ALL_BF16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def test_every_bf16_pattern_survives_widening_and_rounding() -> None:
    """Catches a flush of subnormals, a lost -0 and a rounding that moves exact values; NaN becomes 0x7FC0."""
    values = arith.from_bits(ALL_BF16)
    back = arith.bits(arith.round_bf16(arith.widen(values)))
    assert torch.equal(back[~values.isnan()], ALL_BF16[~values.isnan()])
    assert (back[values.isnan()] == arith.BF16_NAN).all()


def test_every_bf16_pattern_widens_as_torch_and_ml_dtypes_do() -> None:
    """Catches the interpreter's fault of misread subnormals; NaN payloads and signs move up unchanged."""
    wide = arith.widen(arith.from_bits(ALL_BF16))
    assert torch.equal(arith.bits(wide), ALL_BF16.to(torch.int32) << 16)
    assert exact.differing(wide, arith.from_bits(ALL_BF16).float()) == 0
    other = ALL_BF16.numpy().view(ml_dtypes.bfloat16).astype(np.float32)
    assert exact.differing(wide, torch.from_numpy(other)) == 0


def halves_and_neighbours() -> Tensor:
    """Return every bf16 value with the six low halves around a tie and around none."""
    low = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return arith.from_bits(((ALL_BF16.to(torch.int32) << 16)[:, None] | low).flatten())


def random_floats() -> Tensor:
    """Return 2^20 floats of random pattern, so of every exponent and NaN too."""
    return exact.patterns(exact.generator(1).integers(0, 1 << 32, 1 << 20))


@pytest.mark.parametrize("floats", [halves_and_neighbours, random_floats])
def test_rounding_equals_ml_dtypes_and_torch(floats: Callable[[], Tensor]) -> None:
    """Catches truncation and ties away from zero; both are shown to differ on these inputs."""
    values = floats()
    ours = arith.round_bf16(values)
    with np.errstate(invalid="ignore"):
        other = values.numpy().astype(ml_dtypes.bfloat16).view(np.int16)
    assert exact.differing(ours, arith.from_bits(torch.from_numpy(other))) == 0
    assert exact.differing(ours, values.bfloat16()) == 0
    pattern = arith.bits(values)
    truncated = arith.from_bits((pattern >> 16).to(torch.int16))
    assert exact.differing(ours, truncated) > len(values) // 3


def test_ties_go_to_even_and_not_away_from_zero() -> None:
    """Catches the half-up rounding of a missing even bit: 1 + 2^-8 is a tie that must fall to 1."""
    tie = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    assert arith.round_bf16(tie).tolist() == [1.0, 1 + 2**-6, -1.0]
    half_up = arith.from_bits(((arith.bits(tie) + 0x8000) >> 16).to(torch.int16))
    assert exact.differing(arith.round_bf16(tie), half_up) == 2


def test_the_largest_finite_numbers_round_to_infinity_at_the_tie() -> None:
    """Catches a saturating rounding: the tie above bf16's largest number is even at infinity."""
    below, tie = exact.patterns([0x7F7F7FFF, 0x7F7F8000])
    assert arith.round_bf16(torch.stack([below, tie, -tie])).tolist() == [
        float.fromhex("0x1.fep127"),
        math.inf,
        -math.inf,
    ]


def test_ordered_integers_count_every_bf16_number_once() -> None:
    """Catches sign-magnitude taken as two's complement and one zero counted for two."""
    values = arith.from_bits(ALL_BF16)
    numbers = values[~values.isnan()]
    keys = arith.ordered(numbers)
    order = keys.argsort()
    assert (keys[order].diff() == 1).all()
    rising = arith.widen(numbers[order])
    assert (rising[1:] >= rising[:-1]).all()
    assert arith.ordered(exact.bf16([-0.0, 0.0])).tolist() == [-1, 0]


@pytest.mark.parametrize("start", [-1.0, -(2.0**-149), 0.0, 2.0**-126, 1.0, 3.4028234e38])
def test_neighbours_are_one_step_apart(start: float) -> None:
    """Catches a distance in values or in patterns of unlike sign; checked against numpy's nextafter."""
    here = np.float32(start)
    with np.errstate(all="ignore"):
        above = np.nextafter(here, np.float32(np.inf), dtype=np.float32)
    distance = arith.ulp_distance(exact.fp32([here]), exact.fp32([above]))
    assert distance.tolist() == [1]


def test_distance_of_zeros_and_nans() -> None:
    """Catches +0 = -0 counted as equal, and NaN compared as if it were a number."""
    first = exact.fp32([0.0, -(2.0**-149), math.nan, math.nan, math.inf])
    second = exact.fp32([-0.0, 2.0**-149, math.nan, 1.0, -math.inf])
    far = arith.NAN_DISTANCE
    assert arith.ulp_distance(first, second).tolist() == [1, 3, 0, far, 2 * 0x7F800000 + 1]
    assert arith.ulp_distance(second, first).tolist() == arith.ulp_distance(first, second).tolist()
    assert arith.NAN_DISTANCE > 2 * 0x7F800000 + 1


def wrong_roots(root: Tensor, mantissa: Tensor, shift: int) -> int:
    """Return how many fp32 roots (in 1..2) are not the nearest, by integers: (2R-1)^2 < 4M < (2R+1)^2."""
    steps = (root.double() * 2**23).to(torch.int64)
    square = mantissa.to(torch.int64) << (23 + shift + 2)
    return int(((square < (2 * steps - 1) ** 2) | (square > (2 * steps + 1) ** 2)).sum())


@pytest.mark.parametrize("shift", [0, 1])
def test_sqrt_is_correctly_rounded_for_every_mantissa(shift: int) -> None:
    """Catches torch's fp32 sqrt and a root by reciprocal root; exhaustive over mantissas, for both
    parities.

    With M = mantissa * 2^(23 + shift) the root in steps of 2^-23 is the integer nearest to sqrt(M), so the
    check needs no floating point. Other exponents only scale it by a power of two.
    """
    for first in range(1 << 23, 1 << 24, 1 << 20):
        mantissa = torch.arange(first, first + (1 << 20), dtype=torch.int32)
        values = mantissa.double().mul(2.0 ** (shift - 23)).float()
        assert wrong_roots(arith.sqrt(values), mantissa, shift) == 0
    planted = wrong_roots(values * (1 / arith.sqrt(values)), mantissa, shift)
    assert planted > 1 << 16


def test_sqrt_of_special_values_and_subnormals() -> None:
    """Catches a flush of subnormal arguments and a lost -0."""
    values = exact.fp32([0.0, -0.0, 4.0, 2.0**-149, 2.0**-148, math.inf, -1.0, -math.inf, math.nan])
    expected = exact.fp32([0.0, -0.0, 2.0, 2.0**-74.5, 2.0**-74, math.inf, math.nan, math.nan, math.nan])
    assert exact.differing(arith.sqrt(values), expected) == 0


def division_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Return 60,000 finite pairs: any exponents, near ones, and quotients at both ends of the range."""
    random = exact.generator(2)
    patterns = random.integers(0, 1 << 32, (2, 60_000), dtype=np.uint64).astype(np.uint32)
    top, bottom = patterns.view(np.float32).copy()
    near = slice(0, 20_000)
    top[near] = random.uniform(1, 4, 20_000)
    bottom[near] = random.uniform(1, 4, 20_000)
    ends = slice(20_000, 40_000)
    bottom[ends] = random.uniform(1, 4, 20_000) * np.float32(2.0**100)
    top[ends] = random.uniform(1, 4, 20_000) * np.float32(2.0**-40)
    finite = np.isfinite(top) & np.isfinite(bottom) & (bottom != 0)
    return top[finite], bottom[finite]


def test_division_is_correctly_rounded() -> None:
    """Catches an approximate or flushing division; the product with a reciprocal is shown to fail.

    The oracle uses torch's fp32 division as it is, so this test guards the machine.
    """
    top, bottom = division_pairs()
    expected = exact.fp32([exact.divide(float(a), float(b)) for a, b in zip(top, bottom, strict=True)])
    ours = exact.fp32(top) / exact.fp32(bottom)
    assert exact.differing(ours, expected) == 0
    by_reciprocal = exact.fp32(top) * (1 / exact.fp32(bottom))
    assert exact.differing(by_reciprocal, expected) > 1000


def test_dividing_by_a_constant_is_a_division() -> None:
    """Catches x * (1 / 3): torch does so on CUDA for a Python number, which is why `constant` makes a tensor."""
    x = exact.fp32(np.arange(1, 200))
    expected = exact.fp32([exact.divide(float(value), 3.0) for value in x])
    assert exact.differing(x / arith.constant(3, x), expected) == 0
    assert exact.differing(x * (1 / arith.constant(3, x)), expected) > 10


def test_sums_and_products_round_to_even_and_keep_subnormals() -> None:
    """Catches a machine that flushes subnormals or contracts a product and a sum, where the oracle adds on its own."""
    values = [sign * value for value, sign in product(exact.SPECIALS, (1, -1))]
    pairs = [(a, b) for a, b in product(values, values)]
    a, b = exact.fp32([p[0] for p in pairs]), exact.fp32([p[1] for p in pairs])
    with np.errstate(all="ignore"):
        total = torch.from_numpy(a.numpy() + b.numpy())
        scaled = torch.from_numpy(a.numpy() * b.numpy())
    assert exact.differing(a + b, total) == 0
    assert exact.differing(a * b, scaled) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: arith.bits(torch.zeros(2, dtype=torch.int32)), "bits: values must be a floating tensor"),
        (lambda: arith.from_bits(torch.zeros(2)), "from_bits: patterns must be int16, int32 or int64"),
        (lambda: arith.widen(torch.zeros(2)), "widen: values must be bfloat16, got torch.float32"),
        (lambda: arith.round_bf16(torch.zeros(2).double()), "round_bf16: values must be float32"),
        (
            lambda: arith.ulp_distance(torch.zeros(2), torch.zeros(2).bfloat16()),
            "ulp_distance: dtypes must be equal, got torch.float32 and torch.bfloat16",
        ),
    ],
)
def test_a_wrong_dtype_is_refused(call: Callable[[], Tensor], says: str) -> None:
    """Catches a silent cast, which would hide a wrong input behind plausible numbers."""
    with pytest.raises(TypeError, match=says):
        call()
