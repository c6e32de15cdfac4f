"""Projection, mixes, gates and Sinkhorn: worked by hand, and what special inputs give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from oracle import MhcConfig, arith, reduce
from oracle.arithmetic import KNOWN, UPSTREAM_FUSED
from tests.oracle import exact

F = np.float32
INF, NAN = math.inf, math.nan


def sinkhorn(logits: object, iters: int = 20, eps: float = 1e-6) -> Tensor:
    """Return the mixing matrix of one token."""
    return oracle.sinkhorn(exact.fp32([logits]), sinkhorn_iters=iters, sinkhorn_eps=eps)[0]


def test_project_worked_by_hand() -> None:
    """Catches streams and columns of fn exchanged, and squares that are weighted.

    Streams (1, 2) and (3, 4); fn rows are 1000, 100, 10, 1 and 1, 0, 0, 0, stream after stream:
    1000 + 200 + 30 + 4 = 1234; 1; squares 1 + 4 + 9 + 16 = 30.
    """
    residual, fn = exact.bf16([[[1, 2], [3, 4]]]), exact.fp32([[1000, 100, 10, 1], [1, 0, 0, 0]])
    sums, squares = oracle.project(residual, fn)
    assert (sums.tolist(), squares.tolist()) == ([[1234, 1]], [30])
    sums, squares = oracle.project(residual.reshape(1, 4), fn)
    assert (sums.tolist(), squares.tolist()) == ([[1234, 1]], [30])


def test_a_row_is_projected_as_one_stream() -> None:
    """Catches [T, H] taken as n streams: the order of one stream of 2H is not that of two streams of H."""
    random = exact.generator(1)
    residual = exact.fp32(random.normal(size=(4, 2, 640))).bfloat16()
    fn = exact.fp32(random.normal(size=(3, 1280)))
    flat = oracle.project(residual.flatten(1), fn)[0]
    assert exact.differing(flat, reduce.pinned_dot(arith.widen(residual.flatten(1)).unsqueeze(1), fn.unsqueeze(1))) == 0
    assert exact.differing(flat, oracle.project(residual, fn)[0]) > 0


def test_mixes_worked_by_hand() -> None:
    """Catches eps outside the root, a root of the sum, a multiplied mean.

    squares 36 over numel 4 is 9; eps 7 makes 16; the root is 4, r = 1/4: sums 6, -2 become 1.5, -0.5.
    eps outside would give 1 / (3 + 7), no mean 1 / sqrt(43).
    """
    mixed = oracle.mixes(exact.fp32([[6, -2]]), exact.fp32([36]), numel=4, rms_eps=7)
    assert mixed.tolist() == [[1.5, -0.5]]


def test_mixes_round_every_step() -> None:
    """Catches rsqrt, and sums / root in place of sums * (1 / root), on random numbers; numpy repeats the five steps."""
    random = exact.generator(2)
    sums, squares = random.normal(size=(999, 2)).astype(F), random.uniform(1, 1e4, 999).astype(F)
    root = np.sqrt(squares / F(5120) + F(1e-6))
    ours = oracle.mixes(exact.fp32(sums), exact.fp32(squares), numel=5120, rms_eps=1e-6)
    assert exact.differing(ours, exact.fp32(sums * (F(1) / root)[:, None])) == 0
    assert exact.differing(ours, exact.fp32(sums / root[:, None])) > 100


@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_an_all_zero_row_stays_finite(eps: float) -> None:
    """Catches 0 * Inf: with eps 1e-20 the factor is 1e10 and the mixes are 0; eps added after the root, as
    1 / (0 + eps) would give, is finite as well, but eps dropped is not."""
    residual = torch.zeros(2, 4, 64).bfloat16()
    sums, squares = oracle.project(residual, torch.ones(24, 256))
    mixed = oracle.mixes(sums, squares, numel=256, rms_eps=eps)
    assert exact.differing(mixed, torch.zeros(2, 24)) == 0
    dropped = oracle.mixes(sums, squares, numel=256, rms_eps=0.0)
    assert bool(dropped.isnan().all())


def test_coefficients_of_zero_mixes_worked_by_hand() -> None:
    """Catches a dropped pre eps, an eps on post, and the post multiplier 1.

    With mixes and base 0 every gate is sigmoid(0) = 1/2: pre = 1/2 + eps, post = 2 * 1/2 = 1. comb is
    uniform: softmax 1/4, + eps; columns: divided by 4 (1/4 + eps) + eps, and so on; symmetry keeps all
    entries equal.
    """
    config = MhcConfig.v4()
    pre_mix, post_mix, comb_mix = oracle.coefficients(torch.zeros(1, 24), torch.ones(3), torch.zeros(24), config=config)
    assert pre_mix.tolist() == [[float(F(0.5) + F(1e-6))] * 4]
    assert post_mix.tolist() == [[1.0] * 4]
    entry = F(0.25) + F(1e-6)
    for _ in range(39):
        total = F(0) + entry + entry + entry + entry
        entry = entry / (total + F(1e-6))
    assert comb_mix.unique().tolist() == [float(entry)]


def test_the_rows_of_mixes_scale_and_base_worked_by_hand() -> None:
    """Catches pre, post and comb exchanged, a scale used for another part, and comb read by columns.

    n = 2: M = 8. scale = (0, 0, 1) and base 0 but for comb leave pre and post at sigmoid(base). Base: pre
    0, post 0, comb (0, -Inf, 0, 0), so that the softmax rows are (1, 0) and (1/2, 1/2). With iters 1 and
    eps 0 the columns are divided by 3/2 and 1/2: (2/3, 0), (1/3, 1).
    """
    config = MhcConfig(hc_mult=2, hc_pre_eps=0, hc_sinkhorn_eps=0, sinkhorn_iters=1)
    base = exact.fp32([0, 100, 100, 0, 0, -INF, 0, 0])
    mixes = exact.fp32([[5, 5, 5, 5, 0, 0, 0, 0]])
    pre_mix, post_mix, comb_mix = oracle.coefficients(mixes, exact.fp32([0, 0, 1]), base, config=config)
    assert pre_mix.tolist() == [[0.5, 1.0]]
    assert post_mix.tolist() == [[2.0, 1.0]]
    third = F(1) / F(1.5)
    assert comb_mix[0].tolist() == [[float(third), 0.0], [float(F(0.5) / F(1.5)), 1.0]]


def test_each_scale_reaches_its_own_part() -> None:
    """Catches scale[0] used throughout: with mixes of 1 and large scales one part at a time saturates."""
    config = MhcConfig(hc_mult=2, hc_pre_eps=0)
    for part in range(3):
        scale = torch.zeros(3)
        scale[part] = 50.0
        mixes = torch.ones(1, 8)
        mixes[0, 5] = -1.0
        pre_mix, post_mix, comb_mix = oracle.coefficients(mixes, scale, torch.zeros(8), config=config)
        assert (pre_mix[0, 0] == 1.0) == (part == 0)
        assert (post_mix[0, 0] == 2.0) == (part == 1)
        assert (float(comb_mix[0, 0, 1]) < 1e-3) == (part == 2)


def test_gates_have_two_roundings() -> None:
    """Catches a contracted mix * scale + base: (1 + 2^-12)^2 - (1 + 2^-11) is 0 in two roundings, 2^-24 in
    one.

    The gate multiplies by 2^20 through nothing here, so the logits are read from the pre gate of a large
    scale: with scale and mix 4097 * 2^-6 and base -(4097^2 - 1) * 2^-12 the logit is 0, or 2^-12 when
    contracted.
    """
    mix, base = 4097 * 2.0**-6, -(4097.0**2 - 1) * 2.0**-12
    mixes, scale = torch.full((1, 8), mix), torch.full((3,), mix)
    config = MhcConfig(hc_mult=2, hc_pre_eps=0)
    logit = torch.full((8,), base)
    assert oracle.coefficients(mixes, scale, logit, config=config)[0].tolist() == [[0.5, 0.5]]
    contracted = oracle.coefficients(mixes, scale, logit, config=config, arithmetic=UPSTREAM_FUSED)
    assert (contracted[0] > 0.5).all()


def test_sinkhorn_for_two_streams_worked_by_hand() -> None:
    """Catches rows before columns, 19 or 21 rounds, a transposed matrix.

    Softmax of (0, -Inf), (0, 0) and eps 0:   1    0        1/2  1/2
    round 1, columns / (3/2, 1/2):            2/3  0        1/3  1
    round 2, rows / (2/3, 4/3):               1    0        1/4  3/4
             columns / (5/4, 3/4):            4/5  0        1/5  1
    round 3, rows / (4/5, 6/5):               1    0        1/6  5/6
             columns / (7/6, 5/6):            6/7  0        1/7  1
    The second column's 1 is exact in every round; fp32 divisions give the rest.
    """
    logits = [[0, -INF], [0, 0]]
    for rounds, top in ((1, 2 / 3), (2, 4 / 5), (3, 6 / 7)):
        comb = sinkhorn(logits, rounds, 0)
        assert comb[:, 1].tolist() == [0.0, 1.0]
        assert int(arith.ulp_distance(comb[:, 0], exact.fp32([top, 1 - top])).max()) <= 1
    first = sinkhorn(logits, 1, 0)
    assert first[:, 0].tolist() == [float(F(1) / F(1.5)), float(F(0.5) / F(1.5))]


def test_sinkhorn_for_four_streams_worked_by_hand() -> None:
    """Catches eps inside the first denominator, eps missing in rows or columns, and sums over the wrong
    axis.

    Logits 0 in the first column and -Inf elsewhere, eps = 1/4 and one round: the softmax rows are (1, 0, 0,
    0), + eps (5/4, 1/4, 1/4, 1/4). Columns: 5/4 / (5 + 1/4) = 5/21, and 1/4 / (1 + 1/4) = 1/5.
    eps inside the first denominator would make 1 / (1 + 1/4) = 4/5 of the 1; no eps in columns 5/4 / 5 =
    1/4. Round 2, rows: 5/21 + 3/5 + 1/4 = 457/420; 5/21 becomes 100/457, 1/5 becomes 84/457. Columns:
    100/457 / (400/457 + 1/4) = 400/2057 = 0.19446, 84/457 / (336/457 + 1/4) = 336/1801 = 0.18656.
    """
    logits = [[0, -INF, -INF, -INF]] * 4
    first = sinkhorn(logits, 1, 0.25)
    assert first.tolist() == [[float(F(5) / F(21)), *[float(F(1) / F(5))] * 3]] * 4
    second = sinkhorn(logits, 2, 0.25)
    expected = exact.fp32([[400 / 2057, *[336 / 1801] * 3]] * 4)
    assert int(arith.ulp_distance(second, expected).max()) <= 3


@pytest.mark.parametrize("iters", [1, 2, 3, 19, 20, 21])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_sinkhorn_equals_its_steps_one_number_at_a_time(n: int, iters: int) -> None:
    """Catches any order of sums or steps but the contract's: numpy scalars repeat it, from the suite's exp."""
    logits = exact.fp32(exact.generator(n).normal(size=(n, n)) * 3)
    eps = F(1e-6)
    comb = [[F(0)] * n for _ in range(n)]
    for j in range(n):
        powers = [F(v) for v in arith.exp(logits[j] - logits[j].max()).tolist()]
        comb[j] = [power / in_order(powers) + eps for power in powers]
    for step in range(2 * iters - 1):
        if step % 2 == 0:
            sums = [in_order([row[k] for row in comb]) + eps for k in range(n)]
            comb = [[row[k] / sums[k] for k in range(n)] for row in comb]
        else:
            comb = [[value / (in_order(row) + eps) for value in row] for row in comb]
    assert exact.differing(sinkhorn(logits.tolist(), iters), exact.fp32(comb)) == 0


def in_order(terms: list[np.float32]) -> np.float32:
    """Return the fp32 sum from +0 in index order."""
    total = F(0)
    for term in terms:
        total = F(total + term)
    return total


@pytest.mark.parametrize("name", ["Sinkhorn sums from the last down", "Sinkhorn sums pairwise"])
def test_other_orders_of_the_four_sums_show(name: str) -> None:
    """Shows that ordinary logits tell the order of a sum of four after twenty rounds."""
    logits = exact.fp32(exact.generator(9).normal(size=(64, 4, 4)))
    ours, theirs = (
        oracle.sinkhorn(logits, sinkhorn_iters=20, sinkhorn_eps=1e-6, arithmetic=rule)
        for rule in (KNOWN["contract 1"], KNOWN[name])
    )
    assert exact.differing(ours, theirs) > 100


def test_where_eps_stands_decides_seven_orders_of_magnitude() -> None:
    """Catches eps in the denominators only: 0 on the diagonal and -30 elsewhere give 1.0e-6, not 9.4e-14 = e^-30."""
    logits = np.full((4, 4), -30.0)
    np.fill_diagonal(logits, 0)
    off = sinkhorn(logits)[0, 1:]
    assert bool(((off > 0.99e-6) & (off < 1.01e-6)).all())
    tempting = torch.softmax(exact.fp32(logits), 1)
    for _ in range(20):
        tempting = tempting / (tempting.sum(0) + 1e-6)
        tempting = tempting / (tempting.sum(1, keepdim=True) + 1e-6)
    assert float(tempting[0, 1]) < 1e-13


def test_a_column_at_minus_80_stays_finite_and_fills_up() -> None:
    """Catches a division by a column sum that underflowed: exp(-80) = 1.8e-35 is lost against eps, never 0
    / 0.

    One round: the column holds eps four times, divided by 4 eps + eps: 1/5 each, so it sums to 0.8 and not
    to 1.
    """
    logits = np.zeros((4, 4))
    logits[:, 2] = -80
    once = sinkhorn(logits, 1)[:, 2]
    assert int(arith.ulp_distance(once, torch.full((4,), 0.2)).max()) <= 2
    comb = sinkhorn(logits)
    assert bool(comb.isfinite().all())
    assert 0.999 < float(comb[:, 2].sum()) <= 1
    without_eps = sinkhorn(logits, 20, 0)
    assert bool(without_eps.isfinite().all())


SPECIAL_LOGITS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "one -Inf": (lambda z: z[0, 1].fill_(-INF), True),
    "a column of -Inf": (lambda z: z[:, 1].fill_(-INF), True),
    "all but the diagonal -Inf": (lambda z: z.fill_(-INF).fill_diagonal_(0), True),
    "a row of -Inf": (lambda z: z[1].fill_(-INF), False),
    "one +Inf": (lambda z: z[0, 1].fill_(INF), False),
    "one NaN": (lambda z: z[2, 3].fill_(NAN), False),
    "+Inf and -Inf": (lambda z: z[0].copy_(exact.fp32([INF, -INF, 0, 0])), False),
    "largest finite": (lambda z: z.fill_(3e38), True),
    "largest against smallest": (lambda z: z.copy_(exact.fp32([[3e38, -3e38, 0, 0]] * 4)), True),
}


@pytest.mark.parametrize("name", SPECIAL_LOGITS)
def test_special_logits_give_what_the_docstring_says(name: str) -> None:
    """Catches a maximum that skips NaN, a cleaned-up Inf and a NaN that leaks into the next token."""
    plant, stays_finite = SPECIAL_LOGITS[name]
    logits = torch.zeros(3, 4, 4)
    plant(logits[1])
    comb = oracle.sinkhorn(logits, sinkhorn_iters=20, sinkhorn_eps=1e-6)
    assert bool(comb[1].isfinite().all()) is stays_finite
    assert bool(comb[1].isnan().all()) is not stays_finite
    assert exact.differing(comb[0], comb[2]) == 0
    assert exact.differing(comb[0], sinkhorn(np.zeros((4, 4)))) == 0


def test_one_round_and_twenty_differ_as_they_should() -> None:
    """Catches an ignored round count: rows sum to 1 only after many rounds, columns after each."""
    logits = exact.generator(3).normal(size=(4, 4)) * 2
    once, often = sinkhorn(logits, 1), sinkhorn(logits, 20)
    row_gap = [float((comb.double().sum(1) - 1).abs().max()) for comb in (once, often)]
    column_gap = [float((comb.double().sum(0) - 1).abs().max()) for comb in (once, often)]
    assert row_gap[0] > 0.1
    assert row_gap[1] < 1e-3
    assert max(column_gap) < 1e-5
    neighbours = [sinkhorn(logits, rounds) for rounds in (19, 21)]
    assert all(exact.differing(often, other) > 0 for other in neighbours)


def test_streams_scaled_by_eight_keep_coefficients() -> None:
    """Catches a sum of squares forgotten or scaled twice: with eps far below, a power of two cancels exactly."""
    random = exact.generator(4)
    residual = exact.fp32(random.normal(size=(5, 4, 96))).bfloat16()
    fn, base = exact.fp32(random.normal(size=(24, 384))), exact.fp32(random.normal(size=24))
    config = MhcConfig.v41()
    before, after = (
        oracle.pre_delayed(streams, fn, torch.ones(3), base, config=config) for streams in (residual, residual * 8)
    )
    for i in (0, 1, 3):
        assert exact.differing(before[i], after[i]) == 0
    assert exact.differing(before[2], after[2]) > 100
    x = exact.fp32(random.normal(size=(5, 96))).bfloat16()
    new = [oracle.post(x, streams, before[0], before[1]) for streams in (residual, residual * 8)]
    assert exact.differing(new[0] * 8, new[1]) > 100


def test_fn_broadcast_sums_streams_in_index_order() -> None:
    """Catches torch's sum and any other order: B, 1, 1, -B with B = 2^24 is 0 in index order only."""
    big = 2.0**24
    fn = exact.fp32([[big, 5, 1, 6, 1, 7, -big, 8]])
    assert oracle.fn_broadcast(fn, 4).tolist() == [[0, 26]]
    assert exact.differing(oracle.fn_broadcast(exact.fp32([[-0.0, -0.0]]), 2), torch.zeros(1, 1)) == 0


def test_fn_broadcast_refreshes_in_place() -> None:
    """Catches a fresh tensor, which a captured graph would never see: the address stays, the values change."""
    fn = exact.fp32(exact.generator(5).normal(size=(24, 40)))
    buffer = torch.full((24, 10), NAN)
    address = buffer.data_ptr()
    assert oracle.fn_broadcast(fn, 4, out=buffer) is buffer
    assert buffer.data_ptr() == address
    assert exact.differing(buffer, oracle.fn_broadcast(fn, 4)) == 0


@pytest.mark.parametrize("n", range(1, 9))
def test_coefficients_for_every_stream_count(n: int) -> None:
    """Catches a hard-wired 4: shapes, ranges and one independent gate for n = 1..8."""
    random = exact.generator(n)
    size = n * (n + 2)
    mixes, base = exact.fp32(random.normal(size=(3, size))), exact.fp32(random.normal(size=size))
    config = replace(MhcConfig(), hc_mult=n)
    pre_mix, post_mix, comb_mix = oracle.coefficients(mixes, torch.ones(3), base, config=config)
    assert (pre_mix.shape, post_mix.shape, comb_mix.shape) == ((3, n), (3, n), (3, n, n))
    gate = arith.sigmoid(mixes[:, : 2 * n] * 1.0 + base[: 2 * n])
    assert exact.differing(pre_mix, gate[:, :n] + arith.constant(1e-6, gate)) == 0
    assert exact.differing(post_mix, 2 * gate[:, n:]) == 0
    assert float((comb_mix.sum(1) - 1).abs().max()) < 1e-5
