"""The pinned order of sums: over lanes, segments and streams."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle import reduce
from oracle.arithmetic import CONTRACT_1, KNOWN, Dot, WeightedSum, candidates
from tests.oracle import exact

BIG = 2.0**24  # BIG + 1 rounds back to BIG, BIG - 1 does not


def scalar_dot(streams: Tensor, fn: Tensor) -> float:
    """The pinned order for one token and one output, [n, H] each, one rational fma at a time."""
    hidden = streams.shape[1]
    total = 0.0
    for start in range(0, hidden, 512):
        lanes = [0.0] * 64
        for block in range(start, min(start + 512, hidden), 64):
            for j in range(streams.shape[0]):
                for h in range(block, min(block + 64, hidden)):
                    lanes[h % 64] = exact.fma(float(fn[j, h]), float(streams[j, h]), lanes[h % 64])
        while len(lanes) > 1:
            lanes = [float(np.float32(a) + np.float32(b)) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        total = float(np.float32(total) + np.float32(lanes[0]))
    return total


def wide(seed: int, *shape: int) -> Tensor:
    """Return numbers of both signs over 40 binades, of which any two orders differ."""
    random = exact.generator(seed)
    return exact.fp32(random.normal(size=shape) * np.exp2(random.uniform(-20, 20, shape)))


@pytest.mark.parametrize(("n", "hidden"), [(1, 1), (3, 63), (2, 65), (4, 130), (1, 513), (2, 575), (2, 1100)])
def test_pinned_dot_equals_one_scalar_step_at_a_time(n: int, hidden: int) -> None:
    """Catches every wrong order and a wrong tail: the model is a plain loop over rationals that shares no code."""
    streams, fn = wide(1, 2, n, hidden), wide(2, 3, n, hidden)
    result = reduce.pinned_dot(streams, fn)
    expected = exact.fp32([[scalar_dot(f, w) for w in fn] for f in streams])
    assert exact.differing(result, expected) == 0


@pytest.mark.parametrize(("n", "hidden"), [(1, 1), (3, 63), (2, 65), (1, 513), (2, 1100)])
def test_pinned_squares_are_the_dot_of_a_row_with_itself(n: int, hidden: int) -> None:
    """Catches squares accumulated per stream or in another order than the projection."""
    streams = wide(3, 2, n, hidden)
    expected = exact.fp32([scalar_dot(f, f) for f in streams])
    assert exact.differing(reduce.pinned_squares(streams), expected) == 0


def row(values: dict[int, float], hidden: int) -> Tensor:
    """Return one stream [1, 1, hidden] that is 0 but at the given places."""
    result = torch.zeros(1, 1, hidden)
    for place, value in values.items():
        result[0, 0, place] = value
    return result


def sum_of(streams: Tensor, rule: Dot = reduce.CONTRACT_DOT) -> float:
    """Return the sum of the streams by a projection with weights of 1."""
    return float(reduce.pinned_dot(streams, torch.ones(1, *streams.shape[1:]), rule))


def test_the_lane_tree_worked_by_hand() -> None:
    """Catches a serial sum and a tree of distant pairs.

    Lanes 0..3 hold B, 1, 1, -B with B = 2^24. Adjacent pairs: (B + 1) + (1 - B) = B + (1 - B) = 1. In index
    order: ((B + 1) + 1) - B = (B + 1) - B = 0. Distant pairs put each of the four alone first (lanes 32..63
    are 0), until two steps before the end: (B + 1) + (1 + -B) with a[i] + a[i + 2]: (B + 1), (1 - B), the
    same 1; so lanes 0, 1, 2, 3 hold B, 1, -B, 1 for that: adjacent (B + 1) + (-B + 1) = 1, distant (B - B)
    + (1 + 1) = 2.
    """
    first, second = row({0: BIG, 1: 1, 2: 1, 3: -BIG}, 64), row({0: BIG, 1: 1, 2: -BIG, 3: 1}, 64)
    serial, distant = Dot(lane_sum="serial"), Dot(lane_sum="distant")
    assert (sum_of(first), sum_of(first, serial)) == (1, 0)
    assert (sum_of(second), sum_of(second, distant)) == (1, 2)


def test_squares_share_a_lane_over_streams_worked_by_hand() -> None:
    """Catches one sum of squares per stream: lane 0 holds (B + 1) + 1 = B, two sums would give B + (1 + 1)."""
    streams = torch.zeros(1, 2, 128)
    streams[0, 0, 0], streams[0, 1, 0], streams[0, 1, 64] = 2.0**12, 1, 1
    assert reduce.pinned_squares(streams).tolist() == [BIG]
    assert sum(float(reduce.pinned_squares(streams[:, j : j + 1])) for j in (0, 1)) == BIG + 2


def test_the_segment_order_worked_by_hand() -> None:
    """Catches segments added from the last down, or pairwise, or not kept apart at all.

    Three segments hold B, 1 and -B in lane 0. Ascending: (B + 1) - B = 0. Descending: (-B + 1) + B = 1.
    With B in segment 0 and 1, -B in lane 0 of segment 1: segments give B + (1 - B) = 1, one lane for all
    gives 0.
    """
    three = row({0: BIG, 512: 1, 1024: -BIG}, 1536)
    assert (sum_of(three), sum_of(three, Dot(segments="descending"))) == (0, 1)
    two = row({0: BIG, 512: 1, 576: -BIG}, 1024)
    assert (sum_of(two), sum_of(two, Dot(splits=1))) == (1, 0)


def test_streams_are_interleaved_by_blocks_worked_by_hand() -> None:
    """Catches stream after stream.

    Lane 0 sees stream 0 at h = 0, stream 1 at h = 0, stream 0 at h = 64, stream 1 at h = 64: B, 1, -B, 0,
    so (B + 1) - B = 0. Stream after stream it would be (B - B) + 1 = 1.
    """
    streams = torch.zeros(1, 2, 128)
    streams[0, 0, 0], streams[0, 1, 0], streams[0, 0, 64] = BIG, 1, -BIG
    assert (sum_of(streams), sum_of(streams, Dot(streams="flat"))) == (0, 1)


def test_the_dot_is_contracted_worked_by_hand() -> None:
    """Catches a product rounded before it is added: (1 + 2^-12)^2 - (1 + 2^-11) = 2^-24, which the product loses."""
    streams = row({0: 1 + 2**-11, 64: 1 + 2**-12}, 128)
    fn = row({0: -1, 64: 1 + 2**-12}, 128)
    assert float(reduce.pinned_dot(streams, fn)) == 2**-24
    assert float(reduce.pinned_dot(streams, fn, Dot(contraction="separate"))) == 0


@pytest.mark.parametrize("name", [name for name in candidates("project") if name != CONTRACT_1.name])
def test_every_other_known_order_gives_other_bits(name: str) -> None:
    """Shows that cancelling rows tell the pinned order from all that the suite can name."""
    random = exact.generator(7)
    half = random.normal(size=(8, 2, 550))
    streams = exact.fp32(np.concatenate([half, -half * (1 + 1e-6 * random.normal(size=half.shape))], axis=2))
    fn = exact.fp32(1 + 1e-6 * random.normal(size=(4, 2, 1100)))
    theirs = reduce.pinned_dot(streams, fn, KNOWN[name].dot)
    assert exact.differing(reduce.pinned_dot(streams, fn), theirs) > 8


def test_a_step_with_zeros_in_place_of_a_missing_h_changes_nothing() -> None:
    """Shows what a kernel may do at a tail: add 0 * 0, though a lane may hold the -0 of an underflow."""
    streams, fn = torch.full((1, 1, 65), 2.0**-100), torch.full((1, 1, 65), -(2.0**-100))
    padded = [torch.nn.functional.pad(values, (0, 511 - 64)) for values in (streams, fn)]
    result = reduce.pinned_dot(streams, fn)
    assert exact.differing(result, torch.zeros(1, 1)) == 0
    assert exact.differing(result, reduce.pinned_dot(padded[0], padded[1])) == 0


def test_clamped_places_of_a_tail_are_never_used() -> None:
    """Catches a tail that reads the last column again, as Inf there would show in every lane."""
    streams = row({64: 3.0}, 65)
    assert sum_of(streams) == 3.0
    assert float(reduce.pinned_squares(streams)) == 9.0


def test_batches_of_every_size_give_each_token_its_own_bits() -> None:
    """Catches a split, chunk or order chosen by T: every prefix of 130 tokens, and every token alone."""
    streams, fn = wide(5, 130, 1, 70), wide(6, 3, 1, 70)
    whole = reduce.pinned_dot(streams, fn)
    for tokens in range(131):
        assert exact.differing(reduce.pinned_dot(streams[:tokens], fn), whole[:tokens]) == 0
    for token in range(130):
        alone = slice(token, token + 1)
        assert exact.differing(reduce.pinned_dot(streams[alone], fn), whole[alone]) == 0


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a token lost or doubled where one chunk of tokens ends: chunks of 1, 3 and all tokens."""
    streams, fn = wide(5, 7, 2, 70), wide(6, 3, 2, 70)
    whole = reduce.pinned_dot(streams, fn)
    for tokens in (1, 3, 7):
        monkeypatch.setattr(reduce, "_CPU_CHUNK", tokens * 3 * 128)
        assert exact.differing(reduce.pinned_dot(streams, fn), whole) == 0


def test_outputs_do_not_depend_on_each_other() -> None:
    """Catches an output tile that changes the order: one row of fn alone gives the bits it has among all."""
    streams, fn = wide(5, 4, 3, 600), wide(6, 24, 3, 600)
    whole = reduce.pinned_dot(streams, fn)
    for output in (0, 7, 23):
        alone = reduce.pinned_dot(streams, fn[output : output + 1])
        assert exact.differing(alone, whole[:, output : output + 1]) == 0


@pytest.mark.parametrize(("order", "expected"), [("ascending", 0.0), ("descending", 2.0), ("pairwise", 1.0)])
def test_index_sum_worked_by_hand(order: str, expected: float) -> None:
    """Catches one order taken for another: B, 1, 1, -B.

    Ascending: B + 1 = B twice, then 0. Descending: -B + 1 + 1 = -(B - 2), then 2. Pairwise: B + (1 - B) =
    1.
    """
    terms = [torch.tensor([value]) for value in (BIG, 1.0, 1.0, -BIG)]
    assert reduce.index_sum(terms, order).tolist() == [expected]  # type: ignore[arg-type]


def test_sums_start_from_plus_zero() -> None:
    """Catches a sum that starts with its first term and so keeps -0."""
    minus = [torch.tensor([-0.0])] * 3
    ones = [torch.ones(1)] * 3
    zero = torch.zeros(1)
    assert exact.differing(reduce.index_sum(minus), zero) == 0
    assert exact.differing(reduce.weighted_sum(ones, minus), zero) == 0
    kept = reduce.weighted_sum(ones, minus, WeightedSum(start="first"))
    assert exact.differing(kept, -zero) == 0


@pytest.mark.parametrize("count", range(1, 9))
def test_a_weighted_sum_of_integers_is_the_same_in_every_order(count: int) -> None:
    """Catches a term forgotten, doubled or paired with a wrong weight in any of the twelve rules."""
    weights = [torch.tensor([float(2 + i)]) for i in range(count)]
    values = [torch.tensor([float(7 - 3 * i)]) for i in range(count)]
    expected = float(sum(int(w) * int(v) for w, v in zip(weights, values, strict=True)))
    for order in ("ascending", "descending", "pairwise"):
        for contraction in ("separate", "fused"):
            rule = replace(WeightedSum(), order=order, contraction=contraction)
            assert reduce.weighted_sum(weights, values, rule).tolist() == [expected]
            assert reduce.weighted_sum(weights, values, replace(rule, start="first")).tolist() == [expected]


def test_a_fused_sum_keeps_the_sign_of_an_underflow() -> None:
    """Catches +0 + round(p) taken for fma(w, x, +0): the product -2^-200 rounds to -0, which only the fma keeps."""
    weight, value = [torch.tensor([2.0**-100])], [torch.tensor([-(2.0**-100)])]
    fused = reduce.weighted_sum(weight, value, WeightedSum(contraction="fused"))
    assert math.copysign(1, float(fused)) == -1
    assert math.copysign(1, float(reduce.weighted_sum(weight, value))) == 1


def test_lanes_and_segment_are_those_of_contract_1() -> None:
    """Catches a change of the frozen constants, which would change every blessed digest."""
    assert (reduce.LANES, reduce.SEGMENT) == (64, 512)
    assert (CONTRACT_1.dot.lanes, CONTRACT_1.dot.segment) == (64, 512)
    assert CONTRACT_1.dot == reduce.CONTRACT_DOT
    assert CONTRACT_1.collapse == reduce.CONTRACT_SUM
