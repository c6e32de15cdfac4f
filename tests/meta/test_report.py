"""The report: whole texts of a few crafted mismatches, each hint with its evidence and without, each outcome.

A report that names the wrong rank, calls padding a token, hides the sign of a zero or prints numbers that do not tell
two bit patterns apart fails here by its own text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from textwrap import dedent, indent

import pytest
import torch

from oracle.compare import POISON, compare
from oracle.report import Context, Outcome, cause, failure, headline, report
from oracle.sp import SpLayout
from tests.reports import explain_breaches

BF16, F32 = torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")
CONTEXT = Context(
    case="collapse-tail",
    op="collapse",
    output="layer_input",
    backend="triton",
    tp=4,
    fill="nan",
    order="gather-then-op",
    versions={"torch": "2.13.0", "triton": "3.9.0"},
    rerun="./run check --case collapse-tail --backend triton --tp 4",
)
BARE = Context(case="c", op="post", output="residual", backend="tilelang")


def noise(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(20)).add(1).to(dtype)


def step(tensor: torch.Tensor, index: tuple[int, ...], ulps: int = 1) -> None:
    """Move one positive value by some ULP in place."""
    tensor.view(torch.int16 if tensor.dtype == BF16 else torch.int32)[index] += ulps


def text(
    actual: torch.Tensor,
    expected: torch.Tensor,
    context: Context = BARE,
    layout: SpLayout | None = None,
    poison: int | None = None,
) -> str:
    return report(compare(actual=actual, expected=expected, layout=layout, poison=poison), context)


def hints(*arguments: object, **options: object) -> list[str]:
    lines = text(*arguments, **options).split("\n")  # type: ignore[arg-type]
    start = next((number for number, line in enumerate(lines) if line.startswith("  hint ")), len(lines))
    found = []
    for line in lines[start:]:
        if not line.startswith(("  hint ", " " * 11)):
            break
        found.append(line[11:])
    return found


def indented(first: str, rest: str) -> str:
    """The whole text from its first line and the others, which all keep their indentation of two."""
    return "\n".join([first, indent(dedent(rest).strip("\n"), "  ")])


def test_three_values_of_a_tail_in_one_rank() -> None:
    expected = torch.ones(12, 1650, dtype=BF16)
    expected[6, 1649] = 0.0
    actual = expected.clone()
    actual[6, 1649] = -0.0
    step(actual, (7, 1640))
    step(actual, (8, 1641), -1)
    assert text(actual, expected, CONTEXT, SpLayout(10, 4)) == indented(
        "collapse on triton, tp 4, pad fill nan: "
        "3 of 19800 layer_input values differ (2 by 1 ULP, 1 sign of zero), all in rank 2",
        """
          case     collapse-tail, order gather-then-op
          hint     every mismatch is in the last column block [1600, 1650): tail
          every mismatch, by index:
            [token, column]  rank:row  expected     actual              ULP
            [6, 1649]        2:0       0x0000    0  0x8000  -0          1    sign of zero
            [7, 1640]        2:1       0x3f80    1  0x3f81  1.0078125   1
            [8, 1641]        2:2       0x3f80    1  0x3f7f  0.99609375  1
          rank     2: 3/4950, others exact
          padding  valid rows 3/16500, pad rows 0/3300
          token    6: 1/1650, 7: 1/1650, 8: 1/1650
          column   [1600, 1650): 3, others exact
          versions torch 2.13.0, triton 3.9.0
          rerun    ./run check --case collapse-tail --backend triton --tp 4
        """,
    )


def test_a_wide_mismatch_of_three_axes_shows_the_first_and_the_worst() -> None:
    expected = torch.ones(9, 2, 640)
    actual = expected.clone()
    for row in range(7):
        for ulps in (1, 5, 70, 900, 3000, 10**5, 10**6, 10**7):
            step(actual, (row, ulps % 2, (ulps + 64 * row) % 640), ulps + row)
    actual[8, 0, 0], actual[8, 1, 0] = NAN, INF
    context = replace(BARE, rank=1, tp=2, seed=7, candidate="cases/candidates/post.toml")
    assert text(actual, expected, context) == indented(
        "post on tilelang, tp 2, rank 1: "
        "58 of 11520 residual values differ (55 by more than 1 ULP, 1 NaN, 1 infinity, 1 by 1 ULP)",
        """
          case     c, seed 7
          the first and the 5 worst, by index:
            [token, stream, column]  expected       actual                  ULP
            [0, 0, 0]                0x3f800000  1  0x40189680  2.38418579  10000000
            [4, 0, 256]              0x3f800000  1  0x40189684  2.38418674  10000004
            [5, 0, 320]              0x3f800000  1  0x40189685  2.38418698  10000005
            [6, 0, 384]              0x3f800000  1  0x40189686  2.38418722  10000006
            [8, 0, 0]                0x3f800000  1  0x7fc00000  nan         -           NaN
            [8, 1, 0]                0x3f800000  1  0x7f800000  inf         1073741824  infinity
          ULP      1: 1, 2..3: 2, 4..7: 7, 8..15: 4, 64..127: 7, 512..1023: 7, from 2^11: 29, NaN: 1
          token    8 rows differ, from 0 to 8, most in 0: 8/1280, 1: 8/1280, 2: 8/1280
          stream   0: 43/5760, 1: 15/5760
          column   all 10 blocks differ, most in [0, 64): 8, [384, 448): 8, [320, 384): 7
          smaller  cases/candidates/post.toml
        """,
    )


def test_outputs_without_a_value_compared() -> None:
    ones = torch.ones(2, 4)
    assert text(ones.to(BF16), ones) == indented(
        "post on tilelang: residual has dtype bfloat16, expected float32; no value was compared",
        """
          case     c
        """,
    )
    first = text(ones[:1].to(BF16), ones).split("\n")[0]
    assert first == (
        "post on tilelang: residual has dtype bfloat16, expected float32 and has shape [1, 4], expected [2, 4]; "
        "no value was compared"
    )


def test_a_layout_fault_says_what_the_values_are() -> None:
    expected = noise(2, 4)
    actual = expected.T.contiguous().T
    told = "post on tilelang: residual is not contiguous (strides [1, 2], expected [4, 1]); "
    assert text(actual, expected).startswith(f"{told}all 8 residual values are exact\n")
    step(actual, (1, 1))
    assert text(actual, expected).startswith(f"{told}1 of 8 residual values differs (by 1 ULP)\n")


def test_explanations_come_first() -> None:
    actual, expected = torch.tensor([2.0]), torch.tensor([1.0])
    told = report(compare(actual=actual, expected=expected), BARE, ["a chain of fma", "a pairwise sum"])
    assert told.split("\n")[2:4] == ["  cause    a chain of fma", "           a pairwise sum"]


def test_counts_name_the_axes_of_each_output() -> None:
    expected = torch.ones(2, 4, 4)
    actual = expected.clone()
    step(actual, (1, 2, 3))
    lines = text(actual, expected, replace(BARE, output="comb_mix")).split("\n")
    assert "    [token, in, out]  expected       actual                  ULP" in lines
    assert lines[-3:] == ["  token    1: 1/16", "  in       2: 1/8, others exact", "  out      3: 1, others exact"]
    unknown = text(actual.reshape(2, 2, 2, 4), expected.reshape(2, 2, 2, 4))
    assert "[axis 0, axis 1, axis 2, axis 3]" in unknown
    squares = text(actual.reshape(32), expected.reshape(32), replace(BARE, output="squares"))
    assert squares.split("\n")[-1] == "  token    27: 1/1"


@pytest.mark.parametrize(
    ("wrong_rows", "where"),
    [
        ([0], ", all in rank 0"),
        ([1, 5], ", all in ranks 0, 2"),
        ([0, 2, 4, 6], ""),
        ([5, 6], ", all in ranks 2, 3"),
        ([7], ", all in pad rows of rank 3"),
        ([6, 7], ", all in rank 3"),
    ],
)
def test_the_first_line_says_where_when_that_is_narrow(wrong_rows: list[int], where: str) -> None:
    expected = torch.ones(8, 4)
    actual = expected.clone()
    actual[wrong_rows] = 2.0
    first = text(actual, expected, layout=SpLayout(7, 4)).split("\n")[0]
    count = 4 * len(wrong_rows)
    assert first == f"post on tilelang: {count} of 32 residual values differ (all by more than 1 ULP){where}"


def test_everything_wrong_on_a_single_rank_is_called_all() -> None:
    told = text(torch.zeros(2, 2), torch.ones(2, 2), layout=SpLayout(2, 1))
    assert told.split("\n")[0] == "post on tilelang: all 4 residual values differ (all by more than 1 ULP)"
    assert "rank" not in told


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_neighbouring_numbers_print_differently(dtype: torch.dtype) -> None:
    """Six digits, the default of many printers, show two different fp32 numbers as one."""
    for value in (1.0, 1 / 3, 123456.7, 3e-39, 6.1e37):
        expected = torch.tensor([value], dtype=dtype)
        actual = expected.clone()
        step(actual, (0,))
        row = text(actual, expected).split("\n")[-2].split()
        _, expected_bits, expected_text, actual_bits, actual_text, ulp = row
        assert (int(actual_bits, 16) - int(expected_bits, 16), ulp) == (1, "1")
        assert len(expected_bits) == 2 + 2 * dtype.itemsize
        assert torch.equal(torch.tensor([float(expected_text)]).to(dtype), expected)
        assert torch.equal(torch.tensor([float(actual_text)]).to(dtype), actual)


def test_hint_pad_rows_only() -> None:
    expected = noise(8, 4)
    actual = expected.clone()
    actual[7] *= 3
    told = "every mismatch is in pad rows, which are judged like tokens: a row may read another, or be left out"
    assert hints(actual, expected, layout=SpLayout(7, 4)) == [told]
    actual[6, 0] = 9
    assert hints(actual, expected, layout=SpLayout(7, 4)) == []


def test_hint_pad_row_read() -> None:
    expected = noise(8, 4)
    actual = expected.clone()
    actual[6] = NAN
    told = "NaN or infinity in valid rows with pad fill nan: a pad row may be read"
    context = replace(BARE, fill="nan")
    assert hints(actual, expected, context, SpLayout(7, 4)) == [told]
    assert hints(actual, expected, replace(BARE, fill="zero"), SpLayout(7, 4)) == []
    actual[2, 2] = 9
    assert hints(actual, expected, context, SpLayout(7, 4)) == []


def test_hint_unwritten() -> None:
    expected = noise(4, 4, dtype=BF16)
    actual = expected.clone()
    actual.view(torch.int16)[2] = POISON[BF16]
    told = "every wrong value is the fill put there before the run: the kernel did not write it"
    assert hints(actual, expected, poison=POISON[BF16]) == [told]
    step(actual, (0, 0))
    assert hints(actual, expected, poison=POISON[BF16]) == []


def test_hint_tail_needs_the_last_of_several_blocks_alone() -> None:
    expected = noise(4, 200)
    actual = expected.clone()
    actual[:, 195] = 9
    assert hints(actual, expected) == ["every mismatch is in the last column block [192, 200): tail"]
    actual[0, 0] = 9
    assert hints(actual, expected) == []
    narrow = expected[:, :60].clone()
    narrow[0, 59] = 9
    assert hints(narrow, expected[:, :60]) == []


@pytest.mark.parametrize(
    ("width", "wrong", "tail"),
    [
        (31, [30], 30),
        (65, [64], 64),
        (513, [512], 512),
        (1025, [1024], 1024),
        (35, [33, 34], 32),
        (64, [63], None),
        (31, [29], None),
        (24, [20, 23], None),
        (4, [3], None),
    ],
)
def test_hint_tail_of_a_column_or_two(width: int, wrong: list[int], tail: int | None) -> None:
    """Catches a missed last column that is called other values, and the last of some streams that is called a tail."""
    expected = noise(3, width)
    actual = expected.clone()
    actual[1, wrong] = 9
    told = f"every mismatch is in the last column block [{tail}, {width}): tail"
    assert hints(actual, expected) == ([] if tail is None else [told])
    assert cause(compare(actual=actual, expected=expected)) == (
        "other values" if tail is None else "every mismatch is in the last column block: tail"
    )


def test_hint_one_stream() -> None:
    expected = noise(4, 4, 8)
    actual = expected.clone()
    actual[:, 2] += 1
    assert hints(actual, expected) == ["every mismatch is at stream 2"]
    assert hints(actual[:, 2:3], expected[:, 2:3]) == []


def test_hint_sign_of_zero_only() -> None:
    expected = torch.zeros(2, 4)
    assert hints(-expected, expected) == ["only signs of zero differ: a sum not started from +0, or a -0 lost"]


def test_hint_truncation_needs_one_side_and_eight_values() -> None:
    exact = noise(8, 32)
    nearest = exact.to(BF16)
    truncated = (exact.view(torch.int32) >> 16).to(torch.int16).view(BF16)
    told = "every actual value is 1 ULP nearer to zero: a conversion that truncates"
    assert hints(truncated, nearest) == [told]
    assert hints(truncated[:1, :6], nearest[:1, :6]) == []
    away = "all within 1 ULP: the order, contraction or rounding of a sum, not an index"
    assert hints(nearest, truncated) == [away]


@pytest.mark.parametrize(
    ("output", "shape", "permute", "told"),
    [
        (
            "layer_input",
            (8, 4),
            lambda t: t.roll(-1, 0),
            "right values, wrong row: token t holds the expected token t+1",
        ),
        (
            "layer_input",
            (8, 4),
            lambda t: t.roll(2, 0),
            "right values, wrong rank: rank r holds the expected rows of rank r-1",
        ),
        ("residual", (8, 3, 4), lambda t: t[:, [0, 2, 1]], "right values, wrong stream: 1 holds 2, 2 holds 1"),
        (
            "layer_input",
            (8, 90),
            lambda t: t.roll(3, 1),
            "right values, wrong column: column h holds the expected column h-3",
        ),
        ("comb_mix", (8, 4, 4), lambda t: t.mT.contiguous(), "transposed: in and out are swapped"),
    ],
)
def test_hint_right_values_in_the_wrong_place(
    output: str, shape: tuple[int, ...], permute: Callable[[torch.Tensor], torch.Tensor], told: str
) -> None:
    expected = noise(*shape)
    assert hints(permute(expected), expected, replace(BARE, output=output), SpLayout(8, 4)) == [told]


def test_failure_without_a_comparison() -> None:
    assert failure(CONTEXT, "error: RuntimeError: boom") == indented(
        "collapse on triton, tp 4, pad fill nan: error: RuntimeError: boom",
        """
          case     collapse-tail, order gather-then-op
          versions torch 2.13.0, triton 3.9.0
          rerun    ./run check --case collapse-tail --backend triton --tp 4
        """,
    )


def test_a_case_says_what_it_is_for_and_how_its_inputs_lie() -> None:
    about = {"about": "streams with gaps", "catches": ("strides-ignored", "row-misplaced")}
    strides = {"residual": "[3, 4, 16] by [128, 32, 2], columns", "pre_mix": "[3, 4] by [1, 3], transposed"}
    context = replace(CONTEXT, strides=strides, versions={}, rerun=None, **about)  # type: ignore[arg-type]
    assert failure(context, "error: RuntimeError: boom", [("raised", "k.py:3 in f: boom()")]) == indented(
        "collapse on triton, tp 4, pad fill nan: error: RuntimeError: boom",
        """
          case     collapse-tail, order gather-then-op
          about    streams with gaps
          catches  strides-ignored, row-misplaced
          strides  residual [3, 4, 16] by [128, 32, 2], columns
                   pre_mix [3, 4] by [1, 3], transposed
          raised   k.py:3 in f: boom()
        """,
    )


def test_a_law_is_named_with_its_subject() -> None:
    context = replace(BARE, law="repeatability", case="post-six, T = 3", about="Every run gives one result.")
    assert failure(context, "run 2 gives other bits") == indented(
        "post on tilelang, law repeatability: run 2 gives other bits",
        """
          subject  post-six, T = 3
          about    Every run gives one result.
        """,
    )


def test_breaches_are_counted_in_words() -> None:
    """Catches a count of one breach that reads as of several, and a breach that is counted and not told."""
    lines = explain_breaches(BARE, ["first", "second"]).split("\n")
    assert lines[0] == "post on tilelang: first, and 1 more breach"
    assert lines[-1].split() == ["breach", "second"]
    assert explain_breaches(BARE, ["first", "b", "c"]).startswith("post on tilelang: first, and 2 more breaches\n")


@pytest.mark.parametrize(
    ("explanations", "told"),
    [
        (["'fma' gives exactly these bits"], "'fma' gives exactly these bits"),
        (
            ["'fma' gives exactly these bits in the 3 of 9 tokens that differ, the others follow contract 1"],
            "'fma' gives",
        ),
        (["'fma' gives exactly these bits (first 64 of 99 rows tried)"], "'fma' gives exactly these bits"),
        ([], "every mismatch is in the last column block: tail"),
    ],
)
def test_a_cause_is_the_same_for_all_that_share_it(explanations: list[str], told: str) -> None:
    """Catches counts of failures that fall apart by the numbers of one shape."""
    expected = noise(4, 200)
    actual = expected.clone()
    actual[:, 195] = 9
    found = cause(compare(actual=actual, expected=expected), explanations)
    assert found.startswith(told)
    assert not re.search(r"\d{2}", found)


@pytest.mark.parametrize("fill", ["nan", "inf"])
def test_a_pad_row_read_is_a_cause_of_its_own(fill: str) -> None:
    """Catches a kernel that reads pad rows counted among those with other values, as though nothing were known."""
    expected = noise(8, 4)
    actual = expected.clone()
    actual[6] = NAN
    comparison = compare(actual=actual, expected=expected, layout=SpLayout(7, 4))
    assert cause(comparison, fill=fill) == "NaN or infinity in valid rows: a pad row may be read"
    assert cause(comparison, fill="zero") == cause(comparison) == "other values"


def test_the_cause_of_a_wrong_form_is_that() -> None:
    assert cause(compare(actual=torch.ones(1, 4).to(BF16), expected=torch.ones(2, 4))) == "wrong dtype, shape"
    scattered = noise(64, 64)
    scattered[::7, ::5] += 0.5
    assert cause(compare(actual=scattered, expected=noise(64, 64))) == "other values"


def test_headline_leaves_out_what_is_unknown() -> None:
    assert headline(BARE, "done") == "post on tilelang: done"
    assert headline(replace(BARE, tp=8, rank=3), "done") == "post on tilelang, tp 8, rank 3: done"


def test_outcomes_that_fail_a_run() -> None:
    assert {outcome.value for outcome in Outcome} == {
        "exact",
        "mismatch",
        "error",
        "timeout",
        "skipped",
        "unavailable",
    }
    assert {outcome.value for outcome in Outcome if outcome.failed} == {"mismatch", "error", "timeout"}


def test_the_same_mismatch_gives_the_same_text() -> None:
    """No address, time or set order may leak into a text that people compare between runs."""
    expected = noise(8, 4)
    told = {text(expected + 1, expected, CONTEXT, SpLayout(8, 4)) for _ in range(3)}
    assert len(told) == 1
    assert not re.search(r"0x[0-9a-f]{9,}", told.pop())


def test_even_spread_is_told_in_one_word() -> None:
    lines = text(torch.zeros(9, 20), torch.ones(9, 20)).split("\n")
    assert lines[-2:] == [
        "  token    9 rows differ, from 0 to 8, each 20/20",
        "  column   all 20 columns differ, each 9",
    ]
