"""The verdict table: counts that cannot hide a failure or a skip."""

from __future__ import annotations

from oracle.report import Outcome
from tests.table import Result, render


def verdict(case: str, tp: int, outcome: Outcome = Outcome.EXACT, reason: str = "", backend: str = "triton") -> Result:
    return Result("collapse", case, backend, tp, outcome, reason)


def test_a_row_counts_exact_out_of_judged() -> None:
    results = [verdict("a", 1), verdict("b", 1), verdict("b", 4), Result("post", "c", "oracle", 4, Outcome.EXACT)]
    assert render(results) == [
        "op        backend  tp 1       tp 4",
        "collapse  triton   exact 2/2  exact 1/1",
        "post      oracle   -          exact 1/1",
        "4 verdicts on 3 cases: 4 exact",
    ]


def test_failures_stand_beside_the_exact_count() -> None:
    outcomes = (Outcome.EXACT, Outcome.MISMATCH, Outcome.ERROR, Outcome.TIMEOUT)
    lines = render([verdict(str(number), 1, outcome, "why") for number, outcome in enumerate(outcomes)])
    assert lines[1] == "collapse  triton   exact 1/4, 1 mismatch, 1 error, 1 timeout"
    assert lines[-1] == "4 verdicts on 4 cases: 1 exact, 1 mismatch, 1 error, 1 timeout"


def test_a_skip_is_never_counted_as_exact_and_says_why() -> None:
    """Catches a table in which a backend that judged nothing looks green."""
    lines = render([verdict("a", 1, Outcome.SKIPPED, "no sm_90"), verdict("b", 1)])
    assert lines[1] == "collapse  triton   exact 1/1, 1 skipped"
    assert "skipped: 1 on triton: no sm_90" in lines
    assert render([verdict("a", 1, Outcome.SKIPPED, "no sm_90")])[1] == "collapse  triton   1 skipped"


def test_missing_backends_are_named_with_their_reason() -> None:
    assert "unavailable: tilelang: no C++ compiler" in render([verdict("a", 1)], [("tilelang", "no C++ compiler")])


def failed(outcome: Outcome, cause: str, backend: str = "triton") -> Result:
    return Result("collapse", "a", backend, 1, outcome, "why", cause)


def test_failures_are_counted_by_cause_most_first() -> None:
    """Catches a run of a thousand failures in which one needs to read all to see that they are one."""
    results = [failed(Outcome.ERROR, "ValueError: no"), verdict("a", 1)]
    results += [failed(Outcome.MISMATCH, "'fma-contraction' gives exactly these bits") for _ in range(3)]
    results += [failed(Outcome.MISMATCH, "'fma-contraction' gives exactly these bits", "tilelang")] * 2
    assert render(results)[-4:-1] == [
        "failed: 3 mismatch on triton: 'fma-contraction' gives exactly these bits",
        "failed: 2 mismatch on tilelang: 'fma-contraction' gives exactly these bits",
        "failed: 1 error on triton: ValueError: no",
    ]


def test_many_causes_are_cut_short_and_nothing_is_lost_in_the_count() -> None:
    lines = render([failed(Outcome.ERROR, f"ValueError: {number} {'x' * 200}") for number in range(11)])
    told = [line for line in lines if line.startswith("failed: ")]
    assert len(told) == 9
    assert told[-1] == "failed: 3 more of 3 other kinds"
    assert all(len(line) < 140 for line in told)


def test_laws_have_a_column_of_their_own() -> None:
    lines = render([verdict("a", 1), verdict("repeatability", 0), verdict("empty_batch", 0, Outcome.MISMATCH, "x")])
    assert lines[0].split() == ["op", "backend", "tp", "1", "laws"]
    assert lines[1] == "collapse  triton   exact 1/1  hold 1/2, 1 mismatch"
    assert lines[-1] == "3 verdicts on 1 case: 2 exact, 1 mismatch"


def test_no_broken_law_is_lost_among_other_kinds() -> None:
    """Catches a summary of many causes that leaves out the one law whose name says what is wrong."""
    results = [failed(Outcome.ERROR, f"ValueError: {number}") for number in range(9) for _ in range(3)]
    laws = ["padding_isolation", "gather_commutes", "padding_isolation"]
    results += [Result("post", f"{law} post", "triton", 0, Outcome.MISMATCH, "why", f"law {law}") for law in laws]
    results += [Result("post", "repeatability post", "tilelang", 0, Outcome.MISMATCH, "why", "law repeatability")]
    assert render(results)[-4:-1] == [
        "failed: 3 mismatch on triton: laws padding_isolation 2, gather_commutes 1",
        "failed: 1 mismatch on tilelang: law repeatability",
        "failed: 3 more of 1 other kind",
    ]


def test_every_backend_has_its_most_frequent_cause() -> None:
    """Catches one bad kernel of several whose failures are all in a count of other kinds."""
    results = [failed(Outcome.ERROR, f"ValueError: {number}") for number in range(9) for _ in range(3)]
    results += [failed(Outcome.MISMATCH, "other values", "impl-mine") for _ in range(2)]
    results += [failed(Outcome.MISMATCH, "wrong dtype", "impl-mine")]
    told = [line for line in render(results) if line.startswith("failed: ")]
    assert told[-2:] == ["failed: 2 mismatch on impl-mine: other values", "failed: 4 more of 2 other kinds"]
