"""Expand, collapse, mean, post and the draft tail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from oracle import arith
from oracle.arithmetic import CONTRACT_1, KNOWN, Arithmetic, Mean, Post, WeightedSum, candidates
from tests.oracle import exact

BIG = 2.0**24


def others(op: str) -> list[str]:
    """Return the names of the sequences for `op` that are not contract 1."""
    return [name for name in candidates(op) if name != CONTRACT_1.name]


def cancelling(seed: int, tokens: int, n: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Return a residual and fp32 weights whose streams nearly cancel in pairs, so that every order shows."""
    random = exact.generator(seed)
    residual = random.normal(size=(tokens, n, hidden))
    residual[:, 1::2] = -residual[:, 0 : n - n % 2 : 2]
    weights = random.uniform(0.5, 1, (tokens, n))
    weights[:, 1::2] = weights[:, 0 : n - n % 2 : 2] * (1 + 1e-6 * random.normal(size=(tokens, n // 2)))
    return exact.fp32(residual).bfloat16(), exact.fp32(weights)


def test_expand_copies_bits_to_every_stream() -> None:
    """Catches a copy through arithmetic: -0, a NaN payload and Inf arrive unchanged."""
    pattern = torch.tensor([[-0x8000, 0x7FC1, 0x7F80, 1]], dtype=torch.int16)
    expanded = oracle.expand(arith.from_bits(pattern), 3)
    assert torch.equal(arith.bits(expanded), pattern.unsqueeze(1).expand(1, 3, 4))
    assert expanded.is_contiguous()


def test_collapse_worked_by_hand() -> None:
    """Catches every order but ascending with separate roundings.

    Streams B, 1, 1, -B with weights 1, B = 2^24: ascending gives ((B + 1) + 1) - B = 0; descending
    ((-B + 1) + 1) + B = 2; pairwise (B + 1) + (1 - B) = 1.
    Contraction: weights -(1 + 2^-7 + 2^-23) and 1 + 2^-23 over streams 1 and 1 + 2^-7. The second product
    is 1 + 2^-7 + 2^-23 + 2^-30, and rounds to the first: separate gives 0, an fma leaves 2^-30.
    """
    residual = exact.bf16([[[BIG], [1], [1], [-BIG]]])
    ones = torch.ones(1, 4)
    for order, expected in (("ascending", 0.0), ("descending", 2.0), ("pairwise", 1.0)):
        record = Arithmetic("try", collapse=WeightedSum(order=order))  # type: ignore[arg-type]
        assert oracle.collapse(residual, ones, arithmetic=record).tolist() == [[expected]]
    assert oracle.collapse(residual, ones).tolist() == [[0.0]]
    residual = exact.bf16([[[1], [1 + 2**-7]]])
    pre_mix = exact.fp32([[-(1 + 2**-7 + 2**-23), 1 + 2**-23]])
    assert oracle.collapse(residual, pre_mix).tolist() == [[0.0]]
    fused = oracle.collapse(residual, pre_mix, arithmetic=KNOWN["collapse contracted to fma"])
    assert fused.tolist() == [[2**-30]]


@pytest.mark.parametrize("name", [name for name in others("collapse") if "first product" not in name])
def test_every_other_order_changes_a_cancelling_collapse(name: str) -> None:
    """Shows the power of cancelling data: each other order changes bits here, and none on ordinary data."""
    residual, pre_mix = cancelling(1, 8, 4, 64)
    ours, theirs = (oracle.collapse(residual, pre_mix, arithmetic=rule) for rule in (CONTRACT_1, KNOWN[name]))
    assert exact.differing(ours, theirs) > 20
    random = exact.generator(2)
    plain = exact.fp32(random.normal(size=(8, 4, 64))).bfloat16(), exact.fp32(random.uniform(size=(8, 4)))
    ours, theirs = (oracle.collapse(*plain, arithmetic=rule) for rule in (CONTRACT_1, KNOWN[name]))
    assert exact.differing(ours, theirs) == 0


def test_collapse_of_zeros_infinities_and_nans() -> None:
    """Catches a lost start from +0 and a skipped stream: -0 becomes +0, 0 * Inf is NaN, Inf - Inf is NaN."""
    residual = exact.bf16([[[-0.0, math.inf, math.inf, math.nan], [-0.0, 1, -math.inf, 0]]])
    one_hot, both = exact.fp32([[0, 1]]), exact.fp32([[1, 1]])
    expected = exact.bf16([[0.0, math.nan, math.nan, math.nan]])
    assert exact.differing(oracle.collapse(residual, one_hot), expected) == 0
    expected = exact.bf16([[0.0, math.inf, math.nan, math.nan]])
    assert exact.differing(oracle.collapse(residual, both), expected) == 0
    kept = oracle.collapse(residual, both, arithmetic=KNOWN["collapse starting at the first product"])
    assert arith.bits(kept)[0, 0] == -0x8000


def test_collapse_with_one_hot_weights_returns_that_stream() -> None:
    """Catches streams or weights taken in another order: upstream's exact case, for each stream."""
    residual = exact.fp32(exact.generator(3).normal(size=(4, 4, 33))).bfloat16()
    collapsed = oracle.collapse(residual, torch.eye(4))
    assert exact.differing(collapsed, residual.diagonal(dim1=0, dim2=1).t()) == 0


def test_collapse_rounds_once_at_the_end() -> None:
    """Catches products or partial sums rounded to bf16: 1 + 2^-9 + 2^-9 = 1 + 2^-8 is a tie, each half is
    lost alone.

    The weight 1 + 2^-10 of the first stream lifts the sum above the tie, to 1 + 2^-7.
    """
    residual = exact.bf16([[[1], [2**-9], [2**-9]]])
    assert oracle.collapse(residual, torch.ones(1, 3)).tolist() == [[1.0]]
    assert oracle.collapse(residual, exact.fp32([[1 + 2**-10, 1, 1]])).tolist() == [[1 + 2**-7]]


def test_stream_mean_worked_by_hand() -> None:
    """Catches other orders and a division before the sum, with B = 2^24.

    B, 1, 1, -B: ascending 0 / 4, descending 2 / 4, pairwise 1 / 4.
    """
    residual = exact.bf16([[[BIG], [1], [1], [-BIG]]])
    for order, expected in (("ascending", 0.0), ("descending", 0.5), ("pairwise", 0.25)):
        record = Arithmetic("try", mean=Mean(order=order))  # type: ignore[arg-type]
        assert oracle.stream_mean(residual, arithmetic=record).tolist() == [[expected]]
    assert oracle.stream_mean(residual).tolist() == [[0.0]]


def test_the_mean_divides_worked_by_hand() -> None:
    """Catches total * (1 / n).

    Seven streams: 1.5 five times, 2.5, and 0.5 + 7 * 2^-8, all exact in bf16, sum to 7 * (1.5 + 2^-8)
    exactly. The quotient 1.5 + 2^-8 is a bf16 tie, which goes to the even 1.5. 1/7 in fp32 is too large by
    0.375 of a step of 2^-23, which 1.5 times is more than half a step: the product lies above the tie and
    goes to 1.5 + 2^-7.
    """
    residual = exact.bf16([[[1.5]] * 5 + [[2.5], [0.5 + 7 * 2**-8]]])
    assert oracle.stream_mean(residual).tolist() == [[1.5]]
    by_reciprocal = oracle.stream_mean(residual, arithmetic=KNOWN["mean by a rounded reciprocal"])
    assert by_reciprocal.tolist() == [[1.5 + 2**-7]]


def test_mean_of_zeros_is_plus_zero() -> None:
    """Catches a sum that starts with stream 0."""
    assert arith.bits(oracle.stream_mean(exact.bf16([[[-0.0], [-0.0]]]))).tolist() == [[0]]


def test_post_worked_by_hand() -> None:
    """Catches comb used as [output, input], post and comb exchanged, and streams exchanged.

    x = 3; residual = 10, 100; post = 2, 4; comb = [[1, 5], [0, 7]] as [input, output].
    new[0] = 2*3 + comb[0][0]*10 + comb[1][0]*100 = 6 + 10 + 0 = 16.
    new[1] = 4*3 + comb[0][1]*10 + comb[1][1]*100 = 12 + 50 + 700 = 762, rounded to bf16 (steps of 4): a tie
    between 760 and 764 that goes to 760 = 190 * 4, the even one.
    Transposed: new[0] = 6 + 10 + 500 = 516.
    """
    x, residual = exact.bf16([[3]]), exact.bf16([[[10], [100]]])
    post_mix, comb_mix = exact.fp32([[2, 4]]), exact.fp32([[[1, 5], [0, 7]]])
    assert oracle.post(x, residual, post_mix, comb_mix).flatten().tolist() == [16, 760]
    transposed = oracle.post(x, residual, post_mix, comb_mix.transpose(1, 2).contiguous())
    assert transposed.flatten().tolist() == [516, 712]


def post_arguments(terms: list[tuple[float, float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return post arguments of one output column that matters: term 0 is post * x, the others comb[i, 0] * res[i]."""
    n = len(terms) - 1
    x, residual = exact.bf16([[terms[0][1]]]), exact.bf16([[[value] for _, value in terms[1:]]])
    post_mix, comb_mix = torch.zeros(1, n), torch.zeros(1, n, n)
    post_mix[0, 0] = terms[0][0]
    comb_mix[0, :, 0] = exact.fp32([weight for weight, _ in terms[1:]])
    return x, residual, post_mix, comb_mix


def test_the_post_order_worked_by_hand() -> None:
    """Catches post * x added last, streams from the last down, and a first term contracted into post * x.

    post * x = B, then 1, -B: first ((B + 1) - B) = 0; last (0 + 1 - B) + B = 1; descending (B - B) + 1 = 1.
    Into the first term: post * x = (1 + 2^-23)(1 + 2^-7) keeps its 2^-30 only inside an fma with comb *
    residual = -(1 + 2^-7 + 2^-23), a product by 1 and so exact.
    """
    integers = post_arguments([(1, BIG), (1, 1), (1, -BIG)])
    for rule, expected in ((Post(), 0), (Post(first="last"), 1), (Post(order="descending"), 1)):
        assert float(oracle.post(*integers, arithmetic=Arithmetic("try", post=rule))[0, 0, 0]) == expected
    halves = post_arguments([(1 + 2**-23, 1 + 2**-7), (-(1 + 2**-7 + 2**-23), 1)])
    for rule, small in ((Post(), 0), (Post(contraction="fused"), 0), (Post(first="into_first"), 2**-30)):
        assert float(oracle.post(*halves, arithmetic=Arithmetic("try", post=rule))[0, 0, 0]) == small


@pytest.mark.parametrize("name", others("post"))
def test_every_other_post_order_gives_other_bits(name: str) -> None:
    """Shows that cancelling data tells contract 1 from every sequence that the suite can name."""
    arguments = cancelling_post(4)
    ours, theirs = (oracle.post(*arguments, arithmetic=rule) for rule in (CONTRACT_1, KNOWN[name]))
    assert exact.differing(ours, theirs) > 20


def cancelling_post(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return post arguments (T = 8, n = 4, H = 64) in which post * x nearly cancels with stream 0, and 1 with 2."""
    random = exact.generator(seed)
    x, residual = random.normal(size=(8, 64)), random.normal(size=(8, 4, 64))
    residual[:, 0], residual[:, 2], residual[:, 3] = -x, -residual[:, 1], 1e-6 * residual[:, 3]
    post_mix, comb_mix = random.uniform(0.5, 2, (8, 4)), random.uniform(0.5, 1, (8, 4, 4))
    nearly = 1 + 1e-6 * random.normal(size=(2, 8, 4))
    comb_mix[:, 0], comb_mix[:, 2] = post_mix * nearly[0], comb_mix[:, 1] * nearly[1]
    return exact.fp32(x).bfloat16(), exact.fp32(residual).bfloat16(), exact.fp32(post_mix), exact.fp32(comb_mix)


def test_upstreams_tilelang_post_is_named_as_it_was_measured() -> None:
    """Catches a change of the record that equals vLLM's kernel on an H200, rebuilt here from the fma alone."""
    x, residual, post_mix, comb_mix = cancelling_post(5)
    wide = arith.widen(residual)
    for k in range(4):
        comb = comb_mix[:, :, k, None]
        value = arith.fma(post_mix[:, k, None], arith.widen(x), comb[:, 0] * wide[:, 0])
        for i in range(1, 4):
            value = arith.fma(comb[:, i], wide[:, i], value)
        named = oracle.post(x, residual, post_mix, comb_mix, arithmetic=KNOWN["vLLM 0.33 separate TileLang kernels"])
        assert exact.differing(named[:, k], arith.round_bf16(value)) == 0


def test_the_draft_tail_worked_by_hand() -> None:
    """Catches a fused tail that collapses the unrounded post, and one that collapses the old residual.

    post * x is 1 + 2^-9 in stream 0, which rounds to 1, and 1 in stream 1: weighted 1 and -1 they give 0;
    without the rounding between them 2^-9. The old residual would give 5 - 3 = 2.
    """
    x, residual = exact.bf16([[1]]), exact.bf16([[[5], [3]]])
    post_mix, comb_mix = exact.fp32([[1 + 2**-9, 1]]), torch.zeros(1, 2, 2)
    tail = oracle.draft_tail(x, residual, post_mix, comb_mix, exact.fp32([[1, -1]]))
    assert tail.tolist() == [[0.0]]


def test_dropping_the_rounding_of_the_tail_is_caught_by_cancelling_data() -> None:
    """Shows that a tail without the bf16 rounding differs in many of 512 elements of cancelling streams."""
    x, residual, post_mix, comb_mix = cancelling_post(6)
    pre_mix = exact.fp32([[1.0, -1.0, 1.0, -1.0]] * 8)
    unrounded = torch.zeros(8, 64)
    for k in range(4):
        value = post_mix[:, k, None] * arith.widen(x)
        for i in range(4):
            value = value + comb_mix[:, i, k, None] * arith.widen(residual[:, i])
        unrounded = unrounded + pre_mix[:, k, None] * value
    ours = oracle.draft_tail(x, residual, post_mix, comb_mix, pre_mix)
    assert exact.differing(ours, arith.round_bf16(unrounded)) > 150


@pytest.mark.parametrize("n", range(1, 9))
def test_integers_are_exact_for_every_stream_count(n: int) -> None:
    """Catches any indexing fault for n = 1..8: with small integers every order is exact, numpy agrees."""
    random = exact.generator(n)
    x, residual, post_mix, comb_mix, pre_mix = (
        random.integers(-3, 4, shape) for shape in ((5, 9), (5, n, 9), (5, n), (5, n, n), (5, n))
    )
    new = post_mix[:, :, None] * x[:, None] + np.einsum("tik,tih->tkh", comb_mix, residual)
    narrow = exact.fp32(x).bfloat16(), exact.fp32(residual).bfloat16()
    mixes = exact.fp32(post_mix), exact.fp32(comb_mix)
    assert oracle.post(*narrow, *mixes).tolist() == new.tolist()
    tail = (pre_mix[:, :, None] * new).sum(1)
    assert (
        oracle.draft_tail(*narrow, *mixes, exact.fp32(pre_mix)).float().tolist()
        == exact.fp32(tail).bfloat16().float().tolist()
    )
    collapsed = (pre_mix[:, :, None] * residual).sum(1)
    assert oracle.collapse(narrow[1], exact.fp32(pre_mix)).tolist() == collapsed.tolist()
    mean = exact.fp32(residual.sum(1)) / exact.fp32(n)
    assert exact.differing(oracle.stream_mean(narrow[1]), mean.bfloat16()) == 0
