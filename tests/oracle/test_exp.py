"""The suite's own exp and the sigmoid made from it."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from oracle import arith
from tests.oracle import exact, exp_bound

STRIDE = 523  # a prime: all mantissa endings occur; about 2^22 floats


def test_exp_is_within_one_ulp_over_the_whole_range() -> None:
    """Catches a short polynomial, a one-step ln 2 and a flush of subnormal results (each planted below)."""
    tried, worst = exp_bound.prove(STRIDE)
    assert tried > 1 << 22
    assert worst <= 1


def test_the_fp64_reference_of_the_proof_is_good_enough() -> None:
    """Third opinion: mpmath agrees with the fp64 exp far within what the proof grants it."""
    values = [make()[:: 1 << 15] for make in exp_bound.all_floats(STRIDE, "cpu")]
    points = torch.cat(values)
    with mpmath.workprec(120):
        for value, reference in zip(points.tolist(), points.double().exp().tolist(), strict=True):
            truth = mpmath.exp(mpmath.mpf(value))
            assert abs(mpmath.mpf(reference) / truth - 1) < exp_bound.REFERENCE_ERROR / 8


def test_exp_against_mpmath() -> None:
    """Catches what an fp64 reference could share with the code: correctly rounded by 120 bits, on 1,500 floats."""
    random = exact.generator(4)
    points = exact.fp32(np.concatenate([random.uniform(-104, 89, 1000), random.uniform(-1, 1, 500)]))
    with mpmath.workprec(120):
        truth = [float_of(mpmath.exp(mpmath.mpf(value))) for value in points.tolist()]
    assert int(arith.ulp_distance(arith.exp(points), exact.fp32(truth)).max()) <= 1


def float_of(value: mpmath.mpf) -> float:
    """Return the nearest fp32 number to a positive mpmath number."""
    mantissa, exponent = mpmath.frexp(value)
    return exact.rounded(Fraction(int(mpmath.ldexp(mantissa, 120))) * Fraction(2) ** (int(exponent) - 120))


PLANTED = {
    "Taylor's polynomial": (
        "EXP_POLYNOMIAL",
        tuple(float(np.float32(1 / math.factorial(k))) for k in range(6, -1, -1)),
    ),
    "a polynomial one degree short": ("EXP_POLYNOMIAL", (0.0, *arith.EXP_POLYNOMIAL[1:])),
    "ln 2 in one step": ("LN2_LOW", 0.0),
    "subnormals cut at -87": ("EXP_LOWEST", -87.0),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_worse_exp_exceeds_the_bound(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the proof has power: four tempting variants break it."""
    name, value = PLANTED[planted]
    monkeypatch.setattr(arith, name, value)
    assert exp_bound.prove(STRIDE * 64)[1] > 1


def test_exp_at_the_ends() -> None:
    """Catches overflow or underflow too early, a clamp that returns a finite number, and NaN made a number.

    88.72283 is the last float below ln(2^128), whose exp is finite; -103.97207 is the last above
    ln(2^-150), half the smallest subnormal, whose exp rounds up to it.
    """
    values = [math.inf, 1e30, 89.5, 88.72284, 88.72283, -103.97207, -103.97209, -104.5, -1e30, -math.inf]
    largest = arith.exp(exact.fp32([88.72283]))
    assert math.isfinite(float(largest))
    expected = exact.fp32([math.inf] * 4 + [float(largest), 2.0**-149] + [0.0] * 4)
    assert exact.differing(arith.exp(exact.fp32(values)), expected) == 0
    assert bool(arith.exp(exact.patterns([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])).isnan().all())


def test_exp_of_zero_and_of_tiny_numbers_is_one() -> None:
    """Catches a reduction that is not exact at 0."""
    values = exact.fp32([0.0, -0.0, 2.0**-149, -(2.0**-126), 2.0**-25, -(2.0**-26)])
    assert exact.differing(arith.exp(values), torch.ones(6)) == 0


def test_exp_leaves_the_normal_range_gradually() -> None:
    """Catches 2^k in one factor, which has no pattern below k = -126, and a flush: all results differ from 0."""
    values = torch.arange(-103.5, -87, 0.125)
    result = arith.exp(values)
    assert bool(((result > 0) & (result < 2.0**-125)).all())
    assert bool((result.diff() >= 0).all())
    assert bool((result[values > -98].diff() > 0).all())
    assert exp_bound.worst_distance(values, result) <= 1


def test_exp_never_falls() -> None:
    """Catches a jump where the reduction changes k: neighbours around every half-integer multiple of ln 2."""
    k = torch.arange(-149, 128, dtype=torch.float64)
    middle = ((k + 0.5) * math.log(2)).float()
    pattern = arith.bits(middle)[:, None] + torch.arange(-64, 65, dtype=torch.int32) * middle.sign().int()[:, None]
    result = arith.exp(arith.from_bits(pattern))
    assert bool((arith.ordered(result).diff(dim=1) >= -1).all())
    assert exp_bound.worst_distance(arith.from_bits(pattern), result) <= 1


def test_sigmoid_by_hand() -> None:
    """Catches 1 - sigmoid, a missing negation and a saturating approximation.

    sigmoid(0) = 1 / (1 + 1). At z = 17 exp(-17) = 4.14e-8 < 2^-24 is lost in 1 + e, so the result is 1; at
    z = -88 the 1 is lost in 1 + exp(88) instead and the result is 1 / exp(88) = 6.05e-39, a subnormal; at z
    = -89 exp overflows.
    """
    values = exact.fp32([0.0, -0.0, 17.0, -88.0, -89.0, math.inf, -math.inf, math.nan])
    small = 1 / arith.exp(exact.fp32([88.0]))
    expected = exact.fp32([0.5, 0.5, 1.0, float(small), 0.0, 1.0, 0.0, math.nan])
    assert exact.differing(arith.sigmoid(values), expected) == 0
    assert 6.0e-39 < float(small) < 6.1e-39


def test_sigmoid_error_is_within_its_derived_bound() -> None:
    """Catches an approximate exp or division in the gate.

    With e = exp(-z): exp is within 1 ULP of the rounded one, so within 3u relative (u = 2^-24); 1 + e and
    the division add u each. e is weighted by e / (1 + e) < 1, so the whole is within 5u, plus second-order
    terms: 5.01u.
    """
    z = exact.fp32(exact.generator(5).uniform(-80, 80, 1 << 18))
    truth = torch.special.expit(z.double())
    error = ((arith.sigmoid(z).double() - truth) / truth).abs()
    assert float(error.max()) < 5.01 * exact.U
    planted = (torch.tanh((z / 2).half().float()) + 1) / 2
    assert float(((planted.double() - truth) / truth).abs().max()) > 5.01 * exact.U
