"""The two RMSNorms and the learned head."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from oracle import MhcConfig, arith
from oracle.norm import SquaresOf
from tests.oracle import exact
from tests.oracle.exact import U

F = np.float32
UNROUNDED: SquaresOf = "unrounded"
ROUNDED: SquaresOf = "rounded"


def test_norm_worked_by_hand() -> None:
    """Catches a sum in place of the mean, eps outside the root, and a weight left out.

    (1, -7) has squares 50, mean 25, + eps 11 = 36, root 6. r = fl(1/6); times weights 3 and 1/2:
    bf16(3/6) = 1/2 and -7/12 = -0.58333, in bf16 (steps of 2^-8) -149 * 2^-8.
    """
    normed = oracle.norm(exact.bf16([[1, -7]]), exact.bf16([3, 0.5]), norm_eps=11)
    assert normed.tolist() == [[0.5, -149 * 2**-8]]


def test_norm_multiplies_from_the_left_worked_by_hand() -> None:
    """Catches y * (r * w).

    One 9 among eight zeros: the mean square is 9 and r = fl(1/3), a little too large. 9 * r = 3 after
    rounding, and 3 * (1 + 11/128) = 3.2578125 is a bf16 tie that goes to the even 3.25. r * w keeps the
    excess of r, and 9 times it is one step above the tie: 3.265625.
    """
    hidden = exact.bf16([[9] + [0] * 8])
    weight = exact.bf16([1 + 11 / 128] * 9)
    assert oracle.norm(hidden, weight, norm_eps=0)[0, 0] == 3.25
    third = F(1) / F(3)
    assert float(exact.fp32(F(9) * (third * F(1 + 11 / 128))).bfloat16()) == 3.265625


def test_norm_equals_its_steps_in_numpy() -> None:
    """Catches an approximate root or reciprocal in r, on 64 random rows."""
    random = exact.generator(1)
    hidden = exact.fp32(random.normal(size=(64, 512))).bfloat16()
    weight = exact.fp32(random.normal(size=512)).bfloat16()
    squares = oracle.project(hidden, torch.zeros(1, 512))[1].numpy()
    r = (F(1) / np.sqrt(squares / F(512) + F(1e-6)))[:, None]
    expected = exact.fp32((hidden.float().numpy() * r) * weight.float().numpy())
    assert exact.differing(oracle.norm(hidden, weight, norm_eps=1e-6), expected.bfloat16()) == 0


def ties(tokens: int = 64, hidden: int = 96) -> tuple[Tensor, Tensor]:
    """Return a residual and weights whose collapse lies far from bf16 numbers, so that its squares tell."""
    random = exact.generator(2)
    residual = exact.fp32(random.normal(size=(tokens, 4, hidden))).bfloat16()
    return residual, exact.fp32(random.uniform(size=(tokens, 4)))


def test_squares_of_the_unrounded_and_the_rounded_collapse_differ() -> None:
    """Catches V4's and V4.1's sums of squares exchanged: collapse 1 + 2^-8 (a tie, rounds to 1), weight
    181.

    Unrounded: mean (1 + 2^-8)^2, r = 1 / (1 + 2^-8) = 0.99611, so 1 * r * 181 = 180.2959 and bf16 (steps of
    1) 180. Rounded: mean 1, r = 1, so 181.
    """
    residual, pre_mix = exact.bf16([[[1], [2**-8]]]), torch.ones(1, 2)
    weight = exact.bf16([181])
    for squares_of, expected in ((UNROUNDED, 180.0), (ROUNDED, 181.0)):
        normed = oracle.collapse_norm(residual, pre_mix, weight, norm_eps=0, squares_of=squares_of)
        assert normed.tolist() == [[expected]]


def test_the_rounded_variant_is_the_norm_of_the_collapse() -> None:
    """Catches a fused V4.1 norm that differs from collapse and norm apart; V4's differs somewhere."""
    residual, pre_mix = ties()
    weight = exact.fp32(exact.generator(3).normal(size=96)).bfloat16()
    apart = oracle.norm(oracle.collapse(residual, pre_mix), weight, norm_eps=1e-6)
    fused = oracle.collapse_norm(residual, pre_mix, weight, norm_eps=1e-6, squares_of="rounded")
    assert exact.differing(apart, fused) == 0
    other = oracle.collapse_norm(residual, pre_mix, weight, norm_eps=1e-6, squares_of="unrounded")
    assert exact.differing(apart, other) > 10


def test_what_is_scaled_is_rounded_in_both_variants() -> None:
    """Catches a norm of the unrounded collapse: 1 + 2^-8 scaled by r = 1/4 and 512 would give 128.5, not 128."""
    residual = exact.bf16([[[1], [2**-8]]])
    for squares_of in (UNROUNDED, ROUNDED):
        normed = oracle.collapse_norm(
            residual,
            torch.ones(1, 2),
            exact.bf16([512]),
            norm_eps=15.0,
            squares_of=squares_of,
        )
        assert normed.tolist() == [[128.0]]


def test_norm_of_zeros_infinities_and_nans() -> None:
    """Catches 0 * Inf at eps 1e-20, a lost sign of zero, and NaN that leaks to other rows.

    A row with Inf has r = 0: finite values become zeros of their sign and Inf becomes NaN.
    """
    rows = [[0.0, -0.0], [math.inf, -1.0], [math.nan, 1.0], [3.0, -3.0]]
    normed = oracle.norm(exact.bf16(rows), exact.bf16([1, 1]), norm_eps=1e-20)
    expected = exact.bf16([[0.0, -0.0], [math.nan, -0.0], [math.nan, math.nan], [1.0, -1.0]])
    assert exact.differing(normed, expected) == 0


def test_norm_is_within_one_bf16_rounding_of_the_formula() -> None:
    """Catches any other function: r within 4u and the squares' sum, two products 2u, then the bf16 rounding 2^-9."""
    random = exact.generator(4)
    hidden = exact.fp32(random.normal(size=(32, 513))).bfloat16()
    weight = exact.fp32(random.normal(size=513)).bfloat16()
    normed = oracle.norm(hidden, weight, norm_eps=1e-6).double()
    wide = hidden.double()
    truth = wide / (wide.square().mean(1, keepdim=True) + float(torch.tensor(1e-6))).sqrt() * weight.double()
    assert bool(((normed - truth).abs() <= truth.abs() * (2.0**-8 + 30 * U)).all())


def test_head_worked_by_hand() -> None:
    """Catches Sinkhorn or a multiplier in the head, eps left out, and scale and base exchanged.

    Residual (2), (6) in n = 2, H = 1: squares 40 / 2 = 20, + eps 5 = 25, r = fl(1/5). fn rows (4, -1) and
    (0, 5/2) give sums 2 and 15: mixes 0.4 and 3. With scale 0 and base 0 both gates are 1/2 + eps = 1/2 +
    1/4: 3/4 * 2 + 3/4 * 6 = 6. With scale 1 and base -3 the second gate is sigmoid(0) + 1/4 = 3/4.
    """
    config = MhcConfig(hc_mult=2, rms_eps=5.0, hc_pre_eps=0.25)
    residual, fn = exact.bf16([[[2], [6]]]), exact.fp32([[4, -1], [0, 2.5]])
    flat = oracle.head(residual, fn, torch.zeros(1), torch.zeros(2), config=config)
    assert flat.tolist() == [[6.0]]
    second = oracle.head(residual, fn, torch.ones(1), exact.fp32([-1000, -3]), config=config)
    assert second.tolist() == [[0.25 * 2 + 0.75 * 6]]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_head_is_project_mixes_gate_and_collapse(n: int) -> None:
    """Catches a head that rounds the scaled values to bf16 before the projection, as one upstream kernel does."""
    random = exact.generator(5)
    residual = exact.fp32(random.normal(size=(6, n, 130))).bfloat16()
    fn, base = exact.fp32(random.normal(size=(n, n * 130))), exact.fp32(random.normal(size=n))
    config = MhcConfig(hc_mult=n)
    sums, squares = oracle.project(residual, fn)
    mix = oracle.mixes(sums, squares, numel=n * 130, rms_eps=1e-6)
    pre_mix = arith.sigmoid(mix * 0.5 + base) + arith.constant(1e-6, mix)
    ours = oracle.head(residual, fn, torch.full((1,), 0.5), base, config=config)
    assert exact.differing(ours, oracle.collapse(residual, pre_mix)) == 0
    r = oracle.mixes(torch.ones(6, 1), squares, numel=n * 130, rms_eps=1e-6)
    rounded = (residual.float() * r[:, :, None]).bfloat16()
    other = arith.sigmoid(oracle.project(rounded, fn)[0] * 0.5 + base) + 1e-6
    assert exact.differing(ours, oracle.collapse(residual, other)) > 0
