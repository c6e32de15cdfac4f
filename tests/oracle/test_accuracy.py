"""The contract is the right function: every coefficient against upstream's formula, within derived bounds.

These are the only tests of the suite that grant a distance, because they compare a rounded evaluation with
exact mathematics; each bound is derived beside it. What is measured is pinned too, so that a loss of
accuracy shows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from oracle import MhcConfig
from tests.oracle import exact, formula
from tests.oracle.exact import U

TOKENS = 2000
RECIPES = ("normal", "wide", "saturated", "tiny", "integer")


# The largest distances measured here, rounded up, in units of u = 2^-24 (half an ULP of 1): 2.8, 4.7.
MEASURED_GATE, MEASURED_COMB = 3, 5


def inputs(recipe: str, n: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return mixes [T, M], hc_scale [3] and hc_base [M] of a recipe."""
    random = exact.generator(RECIPES.index(recipe))
    size = n * (n + 2)
    mixes, base = random.normal(size=(TOKENS, size)), random.normal(size=size)
    if recipe == "wide":
        mixes *= np.exp2(random.uniform(-20, 2, mixes.shape))
    elif recipe == "saturated":
        mixes *= 6
    elif recipe == "tiny":
        mixes, base = mixes * 1e-4, base * 1e-3
    elif recipe == "integer":
        mixes, base = np.rint(mixes), np.rint(base)
    return exact.fp32(mixes), exact.fp32([0.5, 0.25, 1.0]), exact.fp32(base)


def relative(values: Tensor, truth: Tensor) -> Tensor:
    """Return |values - truth| / truth in fp64."""
    return ((values.double() - truth) / truth).abs()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gates_are_within_a_few_ulp_of_the_formula(recipe: str) -> None:
    """Catches an approximate exp or division, a wrong sign and a dropped eps.

    sigmoid is within 5u relative of that of the rounded logit (see the test of sigmoid), and moves by at
    most |dz| relative with it. pre adds u for + eps, post u for the multiplier (none, as 2 is exact).
    """
    arguments = inputs(recipe)
    config = MhcConfig.v41()
    ours = oracle.coefficients(*arguments, config=config)
    truth = formula.gates(*arguments, config)
    errors = formula.logit_error(*arguments, 4)
    for i in (0, 1):
        assert bool((relative(ours[i], truth[i]) <= 1.01 * (6 * U + errors[i])).all())
        assert float((ours[i].double() - truth[i]).abs().max()) < MEASURED_GATE * U
    half = torch.sigmoid(arguments[0][:, :4].bfloat16()).float()
    assert float(relative(half, truth[0]).max()) > 100 * U


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("recipe", RECIPES)
def test_comb_is_within_its_derived_bound_of_the_formula(recipe: str, iters: int) -> None:
    """Catches any other function: rounds, eps and axis all change far more than the bound of
    `formula.sinkhorn_bound`.

    The bound is a worst case; errors of single steps fade by contraction and mostly cancel, so the measured
    distance is pinned as well, in relative steps of 2^-24.
    """
    mixes, scale, base = inputs(recipe)
    config = MhcConfig(sinkhorn_iters=iters)
    ours = oracle.coefficients(mixes, scale, base, config=config)[2]
    truth = formula.gates(mixes, scale, base, config)[2]
    logits = formula.split(mixes, scale, base, 4)[2]
    errors = formula.logit_error(mixes, scale, base, 4)[2]
    bound = formula.sinkhorn_bound(logits, errors, iters, config.hc_sinkhorn_eps)
    assert bool((relative(ours, truth).amax((1, 2)) <= bound).all())
    assert float((ours.double() - truth).abs().max()) < MEASURED_COMB * U


def test_the_bound_would_catch_the_tempting_variants() -> None:
    """Shows power: 19 rounds, rows before columns, transposed and eps left out each exceed the bound somewhere."""
    mixes, scale, base = inputs("normal")
    logits = formula.split(mixes, scale, base, 4)[2]
    errors = formula.logit_error(mixes, scale, base, 4)[2]
    eps = 1e-6
    truth = formula.sinkhorn(logits, 20, eps)
    bound = formula.sinkhorn_bound(logits, errors, 20, eps)
    variants = {
        "19 rounds": formula.sinkhorn(logits, 19, eps),
        "rows and columns exchanged": formula.sinkhorn(logits.transpose(1, 2), 20, eps).transpose(1, 2),
        "transposed": truth.transpose(1, 2),
        "no eps": formula.sinkhorn(logits, 20, 0.0),
    }
    for name, variant in variants.items():
        assert bool((relative(variant, truth).amax((1, 2)) > bound).any()), name


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_comb_against_mpmath(n: int) -> None:
    """Third opinion with 50 digits, from code that shares neither torch's softmax nor its sums."""
    logits = exact.fp32(exact.generator(n + 50).normal(size=(6, n, n)))
    ours = oracle.sinkhorn(logits, sinkhorn_iters=20, sinkhorn_eps=1e-6)
    eps = float(torch.tensor(1e-6))
    truth = torch.tensor([formula.sinkhorn_mpmath(token, 20, eps) for token in logits.tolist()], dtype=torch.float64)
    bound = formula.sinkhorn_bound(logits, torch.zeros_like(logits), 20, eps)
    assert bool((relative(ours, truth).amax((1, 2)) <= bound).all())
    assert bool((relative(formula.sinkhorn(logits, 20, eps), truth) < 1e-13).all())


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("iters", [1, 20])
def test_columns_and_rows_sum_to_one_as_far_as_the_last_step_allows(n: int, iters: int) -> None:
    """Catches a last step over rows, or eps applied twice.

    The last step divides each column by S + eps, S its sum: the result sums to S / (S + eps) within n + 2
    roundings (n - 1 of S, its + eps, the division, and one granted for S itself). Row i then sums to a mean
    of 1 / (S + eps) over columns, weighted by a row that sums to R / (R + eps), R its sum before the last
    row step: it lies between the extremes of that, within 2(n + 2) roundings.
    """
    logits = exact.fp32(exact.generator(n).normal(size=(500, n, n)) * 2)
    comb = oracle.sinkhorn(logits, sinkhorn_iters=iters, sinkhorn_eps=1e-6).double()
    eps = float(torch.tensor(1e-6))
    before, row_sums = formula_before_the_last_step(logits, iters, eps)
    sums = before.sum(1)
    slack = 1.01 * (formula.sinkhorn_bound(logits, torch.zeros_like(logits), iters, eps) * eps + (n + 2) * U)
    assert bool(((comb.sum(1) - sums / (sums + eps)).abs() <= slack[:, None]).all())
    factor = 1 / (sums + eps)
    rows = comb.sum(2)
    room = 2 * formula.sinkhorn_bound(logits, torch.zeros_like(logits), iters, eps)[:, None]
    assert bool((rows <= row_sums * factor.amax(1, keepdim=True) * (1 + room)).all())
    assert bool((rows >= row_sums * factor.amin(1, keepdim=True) * (1 - room)).all())


def formula_before_the_last_step(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the fp64 matrices before their last column step, and their row sums."""
    if iters == 1:
        before = torch.softmax(logits.double(), 2) + eps
    else:
        before = formula.sinkhorn(logits, iters - 1, eps)
        before = before / (before.sum(2, keepdim=True) + eps)
    return before, before.sum(2)


@pytest.mark.parametrize(("n", "hidden"), [(1, 1), (4, 513), (4, 1280), (8, 96)])
def test_project_is_within_its_derived_bound(n: int, hidden: int) -> None:
    """Catches a sum in bf16 or TF32, and a term left out.

    Every term passes through at most as many roundings as its lane has steps, six of the tree and one a
    segment, so the error is at most that many u of the sum of the terms' sizes.
    """
    random = exact.generator(hidden)
    residual = exact.fp32(random.normal(size=(8, n, hidden))).bfloat16()
    fn = exact.fp32(random.normal(size=(24, n * hidden)))
    sums, squares = oracle.project(residual, fn)
    streams = residual.double().flatten(1)
    bound = formula.sum_bound(*formula.lane_terms(n, hidden))
    assert bool(((sums - streams @ fn.double().t()).abs() <= bound * (streams.abs() @ fn.double().abs().t())).all())
    assert bool(((squares - streams.square().sum(1)).abs() <= bound * streams.square().sum(1)).all())
    if hidden > 1:
        narrow = streams @ fn.bfloat16().double().t()
        assert bool(
            ((narrow - streams @ fn.double().t()).abs() > bound * (streams.abs() @ fn.double().abs().t())).any()
        )


@pytest.mark.parametrize("eps", [1e-6, 1e-20])
def test_mixes_are_within_their_derived_bound(eps: float) -> None:
    """Catches an approximate rsqrt.

    r: division u, + eps u, both halved by the root, u of the root, u of the reciprocal; u of the product:
    4u together.
    """
    random = exact.generator(6)
    sums = exact.fp32(random.normal(size=(4000, 3)))
    squares = exact.fp32(np.exp2(random.uniform(-40, 20, 4000)))
    truth = sums.double() / (squares.double() / 20480 + float(torch.tensor(eps))).sqrt()[:, None]
    mixed = oracle.mixes(sums, squares, numel=20480, rms_eps=eps)
    assert float(((mixed - truth) / truth).abs().max()) <= 4.01 * U
