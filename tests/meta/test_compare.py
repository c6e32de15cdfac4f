"""The comparator: every kind of mismatch is seen and named, in the right place, and not on the wrong evidence.

Each fault is also put before a weaker comparison that people use instead (equal values, a tolerance, a value test
that ignores NaN), to show that it would have passed there. Wrong comparators caught: float equality, -0 = +0, NaN
never or always equal, relative error, ULP measured from one side, empty shapes taken as equal, a chunk loop that loses
its edges, ranks or padding guessed from a shape, and worst elements that are not mismatches at all.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections import Counter

import pytest
import torch

import oracle.compare
from oracle.compare import POISON, Comparison, compare
from oracle.rearrangement import Move, Rearrangement
from oracle.sp import SpLayout
from oracle.verdict import Block, Fault, Kind, Tally

BF16, F32 = torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")
BIG = {BF16: 3.3895313892515355e38, F32: 3.4028234663852886e38}
PATTERN = {BF16: torch.int16, F32: torch.int32}


def one(value: float, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype)


def pattern(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """One value with the given unsigned bits."""
    width = 8 * dtype.itemsize
    signed = bits - (1 << width) if bits >> (width - 1) else bits
    return torch.tensor([signed], dtype=PATTERN[dtype]).view(dtype)


def same_value(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The usual weak test: equal as numbers, NaN beside NaN forgiven."""
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def step(tensor: torch.Tensor, index: tuple[int, ...], ulps: int = 1) -> None:
    """Move one positive value by some ULP in place."""
    tensor.view(PATTERN[tensor.dtype])[index] += ulps


def noise(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(20)).add(1).to(dtype)


def kinds(actual: torch.Tensor, expected: torch.Tensor, poison: int | None = None) -> dict[Kind, int]:
    return dict(compare(actual=actual, expected=expected, poison=poison).kinds)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1e-40, INF, -INF, NAN])
def test_equal_bits_are_exact(value: float, dtype: torch.dtype) -> None:
    verdict = compare(actual=one(value, dtype), expected=one(value, dtype))
    assert verdict.exact
    assert (verdict.total, verdict.mismatching, verdict.first, verdict.worst) == (1, 0, None, ())


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_sign_of_zero_differs_though_the_values_are_equal(dtype: torch.dtype) -> None:
    actual, expected = one(-0.0, dtype), one(0.0, dtype)
    assert kinds(actual, expected) == {Kind.SIGN_OF_ZERO: 1}
    assert torch.equal(actual, expected)  # what a test by value would have said


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_any_nan_equals_any_nan_though_neither_values_nor_bits_do(dtype: torch.dtype) -> None:
    top = {BF16: 0xFFC1, F32: 0xFFC00001}[dtype]
    actual, expected = pattern(top, dtype), one(NAN, dtype)
    assert compare(actual=actual, expected=expected).exact
    assert not torch.equal(actual, expected)
    assert not torch.equal(actual.view(PATTERN[dtype]), expected.view(PATTERN[dtype]))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("left", "right"), [(NAN, 1.0), (NAN, INF), (NAN, 0.0)])
def test_nan_on_one_side_is_a_kind_without_a_distance(left: float, right: float, dtype: torch.dtype) -> None:
    for actual, expected in [(left, right), (right, left)]:
        verdict = compare(actual=one(actual, dtype), expected=one(expected, dtype))
        assert dict(verdict.kinds) == {Kind.NAN: 1}
        assert verdict.first is not None
        assert verdict.first.ulp is None
        assert (verdict.histogram, verdict.nearer_zero) == ((), 0)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_infinity_is_named_even_one_step_from_the_largest_number(dtype: torch.dtype) -> None:
    """A plain ULP test calls an overflow 1 ULP; a relative error of Inf / Inf is NaN and compares as fine."""
    verdict = compare(actual=one(INF, dtype), expected=one(BIG[dtype], dtype))
    assert dict(verdict.kinds) == {Kind.INF: 1}
    assert verdict.first is not None
    assert verdict.first.ulp == 1
    assert kinds(one(INF, dtype), one(-INF, dtype)) == {Kind.INF: 1}


@pytest.mark.parametrize(
    ("dtype", "lower", "upper"), [(BF16, 1.0, 1.0078125), (BF16, 4.0, 4.03125), (F32, 1.0, 1 + 2**-23)]
)
def test_neighbours_are_one_ulp_where_tolerances_pass_or_flake(dtype: torch.dtype, lower: float, upper: float) -> None:
    """Bars of 2e-3 and 5e-3 fail on one of these pairs at random ties, bars of 1e-2 pass both: neither counts ULP."""
    verdict = compare(actual=one(upper, dtype), expected=one(lower, dtype))
    assert dict(verdict.kinds) == {Kind.ONE_ULP: 1}
    assert verdict.first is not None
    assert verdict.first.ulp == 1
    assert abs(upper - lower) <= 1e-2 * upper


def test_distances_cross_zero_and_count_subnormals() -> None:
    smallest = 2.0**-149
    verdict = compare(actual=torch.tensor([smallest, -smallest, 1.0]), expected=torch.tensor([0.0, smallest, -1.0]))
    distances = {element.index: element.ulp for element in verdict.worst}
    assert distances == {(0,): 1, (1,): 3, (2,): 2 * 0x3F800000 + 1}
    assert dict(verdict.kinds) == {Kind.ONE_ULP: 1, Kind.MORE: 2}


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_subnormals_are_compared_in_flush_to_zero_mode(dtype: torch.dtype) -> None:
    """A comparison of floats sees two zeros there."""
    actual, expected = pattern(1, dtype), pattern(3, dtype)
    torch.set_flush_denormal(True)
    try:
        verdict = compare(actual=actual, expected=expected)
    finally:
        torch.set_flush_denormal(False)
    assert dict(verdict.kinds) == {Kind.MORE: 1}


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_unwritten_values_are_told_from_wrong_ones(dtype: torch.dtype) -> None:
    poison = POISON[dtype]
    actual = torch.cat([pattern(poison, dtype), one(NAN, dtype), one(2.0, dtype)])
    assert kinds(actual, torch.ones(3, dtype=dtype), poison) == {Kind.UNWRITTEN: 1, Kind.NAN: 1, Kind.MORE: 1}
    assert kinds(actual, torch.ones(3, dtype=dtype)) == {Kind.NAN: 2, Kind.MORE: 1}


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_unwritten_value_is_seen_where_a_nan_is_expected(dtype: torch.dtype) -> None:
    """Outputs poisoned with an ordinary NaN hide the missing store behind the rule that NaN equals NaN."""
    actual = pattern(POISON[dtype], dtype)
    assert kinds(actual, one(NAN, dtype), POISON[dtype]) == {Kind.UNWRITTEN: 1}
    assert compare(actual=actual, expected=one(NAN, dtype)).exact


def test_expected_value_that_is_the_poison_itself_is_exact() -> None:
    """A copy of an input that holds the pattern is a written value."""
    actual = pattern(POISON[BF16], BF16)
    assert compare(actual=actual, expected=actual.clone(), poison=POISON[BF16]).exact


def test_dtype_and_shape_are_verdicts_of_their_own() -> None:
    ones = torch.ones(2, 4)
    wrong_dtype = compare(actual=ones.to(BF16), expected=ones)
    assert (wrong_dtype.faults, wrong_dtype.exact, wrong_dtype.total) == ((Fault.DTYPE,), False, 0)
    assert same_value(ones.to(BF16), ones)
    broadcast = compare(actual=ones[:1], expected=ones)
    assert (broadcast.faults, broadcast.exact) == ((Fault.SHAPE,), False)
    assert same_value(ones[:1], ones)
    assert compare(actual=ones[:1].to(BF16), expected=ones).faults == (Fault.DTYPE, Fault.SHAPE)


def test_empty_results_need_the_right_empty_shape() -> None:
    """Any test over all elements passes on no elements."""
    assert compare(actual=torch.empty(0), expected=torch.empty(0)).exact
    assert compare(actual=torch.empty(0, 4, 8), expected=torch.empty(0, 4, 8), layout=SpLayout(0, 4)).exact
    verdict = compare(actual=torch.empty(0, 4), expected=torch.empty(0, 8))
    assert (verdict.faults, verdict.exact) == ((Fault.SHAPE,), False)
    assert same_value(torch.empty(0, 4), torch.empty(0, 4))
    assert compare(actual=torch.empty(4, 0), expected=torch.empty(0, 4)).faults == (Fault.SHAPE,)


def test_layout_fault_is_reported_and_the_values_are_still_compared() -> None:
    expected = noise(3, 4)
    actual = expected.T.contiguous().T
    assert torch.equal(actual, expected)
    verdict = compare(actual=actual, expected=expected)
    assert (verdict.faults, verdict.mismatching, verdict.exact) == ((Fault.LAYOUT,), 0, False)
    step(actual, (2, 1))
    assert [element.index for element in compare(actual=actual, expected=expected).worst] == [(2, 1)]


def test_strides_of_the_expected_side_do_not_matter() -> None:
    expected = noise(3, 4).T.contiguous().T
    assert compare(actual=expected.contiguous(), expected=expected, chunk=5).exact


def test_reported_elements_are_true_mismatches() -> None:
    """[1, 0] against [2, 0]: a relative error is NaN at 0 / 0 and named the equal element as the worst."""
    actual, expected = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])
    verdict = compare(actual=actual, expected=expected)
    assert verdict.first == verdict.worst[0]
    assert [(e.index, e.actual_bits, e.expected_bits, e.ulp) for e in verdict.worst] == [
        ((0,), 0x3F800000, 0x40000000, 1 << 23)
    ]
    relative = (actual - expected).abs() / expected
    assert int(relative.nan_to_num(nan=INF).argmax()) == 1


def test_swapped_arguments_give_the_same_verdict() -> None:
    """An asymmetric measure (error over expected) calls 0.99999988 against 1.0 one ULP or two."""
    values = [0.99999988, 1.0, -0.0, 0.0, NAN, INF, 1e-40, -3.0]
    left = torch.tensor([a for a, _ in itertools.product(values, values)])
    right = torch.tensor([b for _, b in itertools.product(values, values)])
    there, back = (compare(actual=a, expected=e) for a, e in [(left, right), (right, left)])
    assert there.kinds == back.kinds
    assert there.histogram == back.histogram
    assert [(e.index, e.ulp, e.kind) for e in there.worst] == [(e.index, e.ulp, e.kind) for e in back.worst]
    pair = compare(actual=one(0.99999988), expected=one(1.0)), compare(actual=one(1.0), expected=one(0.99999988))
    assert [verdict.worst[0].ulp for verdict in pair] == [2, 2]
    with pytest.raises(TypeError):
        compare(left, right)  # type: ignore[call-arg]


def test_histogram_has_log2_buckets() -> None:
    expected = torch.ones(8)
    actual = expected.clone()
    for index, ulps in enumerate([1, 1, 2, 3, 4, 7, 8]):
        step(actual, (index,), ulps)
    histogram = compare(actual=actual, expected=expected).histogram
    assert histogram == (Block(1, 2, 2), Block(2, 4, 2), Block(4, 8, 2), Block(8, 16, 1))
    farthest = compare(actual=one(INF), expected=one(-INF)).histogram
    assert farthest == (Block(1 << 31, 1 << 32, 1),)


def test_five_worst_by_distance_then_index_and_the_first_besides() -> None:
    expected = torch.ones(4, 100)
    actual = expected.clone()
    for index, ulps in {(0, 7): 1, (0, 9): 5, (1, 0): 9, (1, 1): 5, (2, 3): 5, (3, 0): 5, (3, 99): 12}.items():
        step(actual, index, ulps)
    verdict = compare(actual=actual, expected=expected, chunk=30)
    assert verdict.first is not None
    assert verdict.first.index == (0, 7)
    assert [(e.index, e.ulp) for e in verdict.worst] == [
        ((3, 99), 12),
        ((1, 0), 9),
        ((0, 9), 5),
        ((1, 1), 5),
        ((2, 3), 5),
    ]


def test_a_slightly_worse_value_of_a_later_chunk_takes_its_place() -> None:
    expected = torch.ones(12)
    actual = expected.clone()
    for index in range(12):
        step(actual, (index,), 6 if index == 8 else 5)
    verdict = compare(actual=actual, expected=expected, chunk=6)
    assert [element.index for element in verdict.worst] == [(8,), (0,), (1,), (2,), (3,)]


def test_nan_ranks_as_worse_than_any_number() -> None:
    verdict = compare(actual=torch.tensor([-INF, NAN]), expected=torch.tensor([INF, 1.0]))
    assert [element.index for element in verdict.worst] == [(1,), (0,)]


def test_nearer_zero_counts_magnitudes() -> None:
    expected = torch.tensor([1.0, -1.0, 1.0, NAN, 0.0])
    actual = torch.tensor([0.5, -0.5, 2.0, 1.0, -0.0])
    assert compare(actual=actual, expected=expected).nearer_zero == 2


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 24, 25, 10**6])
def test_chunks_change_nothing(chunk: int) -> None:
    """Every chunk edge falls inside some row, stream and column block."""
    expected = noise(6, 2, 2)
    actual = expected.clone()
    for index in [(0, 0, 0), (0, 1, 1), (1, 0, 0), (3, 1, 0), (3, 1, 1), (5, 1, 1)]:
        step(actual, index, 1 + sum(index))
    layout = SpLayout(5, 2)
    whole = compare(actual=actual, expected=expected, layout=layout)
    assert compare(actual=actual, expected=expected, layout=layout, chunk=chunk) == whole
    assert whole.mismatching == 6


def test_rows_ranks_streams_and_columns_are_counted() -> None:
    expected = torch.ones(6, 2, 130)
    actual = expected.clone()
    for index in [(1, 0, 0), (1, 0, 63), (1, 1, 64), (4, 1, 129), (5, 1, 128)]:
        step(actual, index)
    verdict = compare(actual=actual, expected=expected, layout=SpLayout(5, 2))
    assert verdict.ranks == (Tally(0, 3, 780), Tally(1, 2, 780))
    assert verdict.rows == (Tally(1, 3, 260), Tally(4, 1, 260), Tally(5, 1, 260))
    assert (verdict.rows_affected, verdict.last_row) == (3, 5)
    assert verdict.streams == (Tally(0, 2, 780), Tally(1, 3, 780))
    assert verdict.columns == (Block(0, 64, 2), Block(64, 128, 1), Block(128, 130, 2))
    assert (verdict.pad_total, verdict.pad_mismatching, verdict.valid_mismatching) == (260, 1, 4)


def test_narrow_axes_are_counted_column_by_column() -> None:
    expected = torch.ones(2, 24)
    actual = expected.clone()
    step(actual, (1, 23))
    columns = compare(actual=actual, expected=expected).columns
    assert len(columns) == 24
    assert [block for block in columns if block.wrong] == [Block(23, 24, 1)]


@pytest.mark.parametrize(("tokens", "tp"), [(5, 2), (1, 4), (9, 8), (8, 4)])
def test_rank_local_row_and_padding_follow_the_layout(tokens: int, tp: int) -> None:
    """With 9 tokens on 8 ranks, three ranks hold padding only: a rank guessed as row * tp // T is wrong there."""
    layout = SpLayout(tokens, tp)
    expected = torch.ones(layout.padded_tokens, 3)
    for row in range(layout.padded_tokens):
        actual = expected.clone()
        step(actual, (row, 2))
        verdict = compare(actual=actual, expected=expected, layout=layout)
        first = verdict.first
        assert first is not None
        assert first.rank is not None
        assert first.local_row is not None
        assert layout.global_row(first.rank, first.local_row) == row
        assert (first.pad, verdict.pad_mismatching) == (row >= tokens, int(row >= tokens))
        assert [tally.key for tally in verdict.ranks if tally.wrong] == [first.rank]


def test_trimmed_result_keeps_its_ranks_and_has_no_padding() -> None:
    expected = torch.ones(5, 2)
    actual = expected.clone()
    step(actual, (4, 0))
    verdict = compare(actual=actual, expected=expected, layout=SpLayout(5, 4))
    assert verdict.ranks == (Tally(0, 0, 4), Tally(1, 0, 4), Tally(2, 1, 2), Tally(3, 0, 0))
    assert verdict.pad_total == 0


def test_one_dimensional_output_has_rows_only() -> None:
    expected = torch.ones(4)
    actual = expected.clone()
    step(actual, (2,))
    verdict = compare(actual=actual, expected=expected, layout=SpLayout(4, 2))
    assert (verdict.rows, verdict.columns, verdict.streams) == ((Tally(2, 1, 1),), (), ())


def test_random_faults_are_all_found() -> None:
    """Against a count in plain Python over bit patterns, special values included."""
    chooser = random.Random(3)
    special = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F7F, 0x0001, 0x3F80, 0x3F81]
    for _ in range(50):
        left, right = ([chooser.choice(special) for _ in range(37)] for _ in range(2))
        actual, expected = (torch.cat([pattern(p, BF16) for p in side]) for side in (left, right))
        verdict = compare(actual=actual, expected=expected, chunk=chooser.randint(1, 40))
        assert dict(verdict.kinds) == _kinds_in_python(left, right)


def _kinds_in_python(left: list[int], right: list[int]) -> Counter[Kind]:
    def key(bits: int) -> int:
        return -(bits & 0x7FFF) - 1 if bits >> 15 else bits

    def kind(a: int, b: int) -> Kind:
        magnitudes = {a & 0x7FFF, b & 0x7FFF}
        if max(magnitudes) > 0x7F80:
            return Kind.NAN
        if 0x7F80 in magnitudes:
            return Kind.INF
        if magnitudes == {0}:
            return Kind.SIGN_OF_ZERO
        return Kind.ONE_ULP if abs(key(a) - key(b)) == 1 else Kind.MORE

    pairs = zip(left, right, strict=True)
    return Counter(kind(a, b) for a, b in pairs if a != b and not (a & b & 0x7FFF) > 0x7F80)


@pytest.mark.parametrize("contiguous", [True, False])
def test_temporaries_do_not_grow_with_the_tensor(contiguous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read takes more than a chunk; a comparator that converts or copies a 4 GB output whole runs out of memory."""
    sizes = []
    read = oracle.compare._read

    def watched(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        part = read(tensor, start, stop)
        sizes.append(part.numel())
        shares = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert shares is contiguous
        assert shares or part.untyped_storage().nbytes() <= 1000 * part.itemsize
        return part

    monkeypatch.setattr(oracle.compare, "_read", watched)
    expected = noise(64, 1024)
    actual = expected.clone() if contiguous else expected.T.contiguous().T
    assert compare(actual=actual, expected=actual, chunk=1000).mismatching == 0
    assert max(sizes) == 1000
    assert sum(sizes) == 2 * actual.numel()


def test_python_side_stays_small_when_everything_differs() -> None:
    """Mismatches are counted in tensors, not gathered in lists."""
    expected = noise(1 << 16)
    tracemalloc.start()
    verdict = compare(actual=-expected, expected=expected, chunk=1 << 12)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert verdict.mismatching == 1 << 16
    assert peak < 1 << 20


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_kernels_device_changes_nothing(device: str, dtype: torch.dtype, contiguous: bool) -> None:
    """A result that stayed on the GPU against an expected one on the CPU, and both there."""
    layout = SpLayout(11, 4)
    expected = noise(12, 4, 96, dtype=dtype)
    actual = expected.roll(3, 0)
    actual[2, 1, 5], actual[7, 0, 0] = NAN, -0.0
    actual = actual if contiguous else actual.mT.contiguous().mT
    here = compare(actual=actual, expected=expected, layout=layout, chunk=1000)
    for theirs in (expected, expected.to(device)):
        assert compare(actual=actual.to(device), expected=theirs, layout=layout, chunk=1000) == here
    assert here.mismatching


def test_gradients_are_ignored() -> None:
    actual = torch.ones(2, requires_grad=True)
    assert compare(actual=actual, expected=torch.ones(2)).exact


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"actual": [1.0]}, TypeError, "compare: actual must be a tensor, got list"),
        ({"expected": None}, TypeError, "compare: expected must be a tensor, got NoneType"),
        (
            {"expected": torch.ones(2, 2, dtype=torch.float64)},
            TypeError,
            "compare: expected must be bfloat16 or float32, got torch.float64",
        ),
        ({"chunk": 0}, ValueError, "compare: chunk must be at least 1, got 0"),
        (
            {"layout": SpLayout(5, 4)},
            ValueError,
            "compare: expected must have 5 or 8 rows for SpLayout(tokens=5, tp=4), got (2, 2)",
        ),
        (
            {"poison": 0x7FC00000},
            ValueError,
            "compare: poison must be a 32-bit signalling NaN, which no kernel makes, got 0x7fc00000",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    given: dict[str, object] = {"actual": torch.ones(2, 2), "expected": torch.ones(2, 2), **arguments}
    with pytest.raises(error) as caught:
        compare(**given)  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize("poison", [-1, 0, 0x7F80, 0x7FC0, 0xFFC0, 0x17FA5])
def test_poison_that_a_kernel_could_write_is_refused(poison: int) -> None:
    with pytest.raises(ValueError, match="16-bit signalling NaN"):
        compare(actual=one(1.0, BF16), expected=one(1.0, BF16), poison=poison)


def moved(actual: torch.Tensor, expected: torch.Tensor, layout: SpLayout | None = None) -> Rearrangement | None:
    verdict: Comparison = compare(actual=actual, expected=expected, layout=layout)
    assert verdict.mismatching
    return verdict.rearrangement


def test_shifted_rows_are_recognised() -> None:
    expected = noise(12, 8)
    assert moved(expected.roll(-1, 0), expected) == Rearrangement(Move.ROWS, by=1)
    late = expected.clone()
    late[4:] = expected[3:-1]
    assert moved(late, expected, SpLayout(12, 4)) == Rearrangement(Move.ROWS, by=-1)


def test_wrong_rank_is_recognised() -> None:
    expected = noise(12, 8)
    off_by_one = expected.roll(-3, 0)
    assert moved(off_by_one, expected, SpLayout(11, 4)) == Rearrangement(Move.RANKS, by=1)


def test_one_rank_that_holds_another_ranks_rows_is_recognised() -> None:
    expected = noise(12, 8)
    actual = expected.clone()
    actual[6:9] = expected[:3]
    assert moved(actual, expected, SpLayout(12, 4)) == Rearrangement(Move.RANKS, by=-2)


def test_transposed_comb_is_recognised() -> None:
    expected = noise(3, 4, 4)
    assert moved(expected.mT.contiguous(), expected) == Rearrangement(Move.TRANSPOSED)


def test_permuted_streams_are_recognised() -> None:
    expected = noise(3, 4, 10)
    swapped = expected[:, [0, 2, 1, 3]]
    assert moved(swapped, expected) == Rearrangement(Move.STREAMS, order=(0, 2, 1, 3))
    assert moved(expected[:, [0, 0, 0, 0]], expected) == Rearrangement(Move.STREAMS, order=(0, 0, 0, 0))


def test_shifted_columns_are_recognised() -> None:
    expected = noise(3, 200)
    assert moved(expected.roll(2, 1), expected) == Rearrangement(Move.COLUMNS, by=-2)


def test_nan_rows_move_like_others() -> None:
    expected = noise(6, 8)
    expected[:, 3] = NAN
    actual = expected.roll(-1, 0)
    actual[:, 3] = -actual[:, 3]
    assert moved(actual, expected) == Rearrangement(Move.ROWS, by=1)


def test_no_move_is_claimed_without_evidence() -> None:
    """Constant rows equal each other wherever they stand; wrong values that are nowhere expected moved from nowhere."""
    expected = noise(6, 8)
    zeros = expected.clone()
    expected[5] = 0
    zeros[5], zeros[2] = 0, 0
    assert moved(zeros, expected) is None
    assert moved(expected + 1, expected) is None
    half = noise(6, 8)
    wrong = half.clone()
    wrong[1], wrong[2] = half[2], half[2] * 2
    assert moved(wrong, half) is None
    outside = half.clone()
    outside[1], outside[5] = half[1] * 2, half[2]
    assert moved(outside, half) is None
    lone = half.clone()
    lone[1], lone[2] = half[1] * 2, half[0]
    assert moved(lone, half) is None


def test_a_large_result_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oracle.rearrangement.LARGEST", 95)
    expected = noise(12, 8)
    assert moved(expected.roll(1, 0), expected) is None
