"""The exact fma against rational arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle import arith
from tests.oracle import exact

Triples = tuple[Tensor, Tensor, Tensor]
COUNT = 20_000


def scaled(mantissas: np.ndarray, exponents: np.ndarray) -> Tensor:
    """Return mantissa * 2^exponent, exact in fp32."""
    return exact.fp32(np.ldexp(mantissas.astype(np.float64), exponents))


def any_pattern(random: np.random.Generator) -> Triples:
    """Random patterns: every exponent, every sign, NaN and Inf."""
    a, b, c = (exact.patterns(random.integers(0, 1 << 32, COUNT)) for _ in range(3))
    return a, b, c


def near(random: np.random.Generator) -> Triples:
    """Exponents within 30 of each other, where product and addend overlap."""
    a, b, c = (
        scaled(random.integers(-(1 << 24) + 1, 1 << 24, COUNT), random.integers(-15, 16, COUNT)) for _ in range(3)
    )
    return a, b, c


def cancelling(random: np.random.Generator) -> Triples:
    """The addend is the rounded product's negative, so that the result is the product's rounding error."""
    a, b, _ = near(random)
    return a, b, -(a * b)


def double_rounding(random: np.random.Generator) -> Triples:
    """The product is a 25-bit odd number, halfway between two fp32 numbers; the addend is far too small for fp64."""
    a = 2 * random.integers(1 << 11, 1 << 12, COUNT) + 1
    b = (1 << 24) // a + random.integers(0, 1 << 11, COUNT) | 1
    shift = random.integers(-10, 11, COUNT)
    c = scaled(random.choice([-1, 1], COUNT) * random.integers(1, 1 << 24, COUNT), random.integers(-140, -90, COUNT))
    return scaled(a * random.choice([-1, 1], COUNT), shift), scaled(b, -shift), c


def subnormal(random: np.random.Generator) -> Triples:
    """Results around and below the normal range, with product bits far below the last subnormal bit."""
    a = scaled(random.integers(1, 1 << 24, COUNT), random.integers(-110, -80, COUNT))
    b = scaled(random.integers(-(1 << 24) + 1, 1 << 24, COUNT), random.integers(-90, -70, COUNT))
    c = scaled(random.integers(-(1 << 24) + 1, 1 << 24, COUNT), np.full(COUNT, -149))
    return a, b, c


def subnormal_ties(random: np.random.Generator) -> Triples:
    """A product just below half the last subnormal bit: (2^23 + d)(2^23 - d) 2^-196 = 2^-150 (1 - d^2
    2^-46).

    In the sum with a subnormal of 2^-144 or more fp64 cannot tell it from 2^-150.
    """
    d = random.integers(-99, 100, COUNT)
    a = scaled((1 << 23) + d, np.full(COUNT, -98))
    b = scaled(random.choice([-1, 1], COUNT) * ((1 << 23) - d), np.full(COUNT, -98))
    c = scaled(random.integers(-(1 << 24) + 1, 1 << 24, COUNT), np.full(COUNT, -149))
    return a, b, c


def overflowing(random: np.random.Generator) -> Triples:
    """The addend is the largest finite number, the product about half its last place."""
    a = scaled(np.full(COUNT, 1 << 23) + random.integers(-3, 4, COUNT), np.full(COUNT, 40))
    b = scaled(random.choice([-1, 1], COUNT), np.full(COUNT, 40))
    c = scaled((1 << 24) - random.integers(1, 4, COUNT), np.full(COUNT, 104))
    return a, b, c * exact.fp32(random.choice([-1, 1], COUNT))


def specials(random: np.random.Generator) -> Triples:
    """Every triple of zeros, ones, ends of the range, infinities and NaN, with both signs."""
    assert random is not None
    values = [sign * value for value, sign in product(exact.SPECIALS, (1, -1))]
    a, b, c = exact.fp32(list(product(values, repeat=3))).unbind(1)
    return a, b, c


KINDS = [any_pattern, near, cancelling, double_rounding, subnormal, subnormal_ties, overflowing, specials]


def rational(triples: Triples) -> Tensor:
    """Return the exact fma of each triple."""
    return exact.fp32([exact.fma(*map(float, triple)) for triple in torch.stack(triples, 1).tolist()])


def twice_rounded(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The tempting variant: everything in fp64, then a second rounding."""
    return (a.double() * b.double() + c.double()).float()


@pytest.mark.parametrize("kind", KINDS)
def test_fma_equals_rational_arithmetic(kind: Callable[[np.random.Generator], Triples]) -> None:
    """Catches two roundings, double rounding through fp64, flushed subnormals and wrong signs of zero.

    Seven kinds of 20,000 triples and every triple of sixteen special values.
    """
    triples = kind(exact.generator(3))
    assert exact.differing(arith.fma(*triples), rational(triples)) == 0


@pytest.mark.parametrize("kind", [double_rounding, subnormal_ties])
def test_rounding_the_fp64_sum_again_is_caught(kind: Callable[[np.random.Generator], Triples]) -> None:
    """Shows the power of the traps: fp64 alone fails on them, and random patterns would hardly tell."""
    triples = kind(exact.generator(3))
    assert exact.differing(twice_rounded(*triples), arith.fma(*triples)) > 100


def test_multiply_then_add_is_caught() -> None:
    """Shows that a missing contraction cannot pass for an fma."""
    a, b, c = near(exact.generator(3))
    assert exact.differing(a * b + c, arith.fma(a, b, c)) > COUNT // 10


def test_a_double_rounding_worked_by_hand() -> None:
    """Catches double rounding on one triple that can be followed.

    a * b = 4097 * 4097 = 2^24 + 2^13 + 1, which lies halfway between the fp32 numbers ...+0 and ...+2 (they
    are even there). 16785408 = 2 * 8392704 has an even mantissa, so the tie alone falls to it; with c =
    +2^-60 the truth lies above the tie, and 16785410 is right.
    """
    factor, tiny = exact.fp32([4097.0]), exact.fp32([2.0**-60])
    assert arith.fma(factor, factor, 0 * tiny).tolist() == [16785408.0]
    assert arith.fma(factor, factor, tiny).tolist() == [16785410.0]
    assert twice_rounded(factor, factor, tiny).tolist() == [16785408.0]


def test_arguments_broadcast() -> None:
    """Catches a doubtful element repaired with the operand of another place."""
    a, b, c = (part[:120] for part in double_rounding(exact.generator(3)))
    grid = arith.fma(a[:, None], b[None, :], c[:1])
    assert exact.differing(grid.diagonal(), arith.fma(a, b, c[:1].expand(120))) == 0
    assert exact.differing(grid[3], arith.fma(a[3].expand(120), b, c[:1].expand(120))) == 0
    assert arith.fma(a[:0], b[:0], c[:0]).shape == (0,)
