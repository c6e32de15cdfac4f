"""Every op has a case for every stream count from 1 to 8, and kernels right for powers of two alone show why."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cases.load import load_all
from cases.ops import OPS
from cases.schema import MAX_STREAMS, Case
from tests.implementations import Implementation
from tests.judge import judge
from tests.mutants import streams

COUNTS = range(1, MAX_STREAMS + 1)
POWERS = tuple(n for n in COUNTS if streams.rounded_up(n) == n)
COUNTED = tuple(op for op, spec in OPS.items() if not spec.dims.isdisjoint("nM"))
PLANTED = [(op, kind) for op, by_class in streams.BY_OP.items() for kind in by_class if kind != "hc-mult-fixed"]
ALL = load_all()


def shows_count(case: Case) -> bool:
    """Whether a case runs anywhere and its bits depend on the stride that a stream count gives: two rows or more."""
    more_than_one = case.tokens > 1 or "T" not in case.spec.dims
    return case.expected is not None and case.size != "large" and case.rows is None and more_than_one


def missing(cases: Iterable[Case]) -> dict[str, list[int]]:
    """The stream counts, by op, that no case shows; an op that lacks none is left out."""
    shown = {(case.op, case.hc_mult) for case in cases if shows_count(case)}
    lacking = {op: [n for n in COUNTS if (op, n) not in shown] for op in COUNTED}
    return {op: counts for op, counts in lacking.items() if counts}


def test_every_op_has_a_case_for_every_stream_count() -> None:
    """Catches an op whose kernel may be wrong for some hc_mult with no case to say so."""
    assert missing(ALL) == {}


@pytest.mark.parametrize("op", COUNTED)
def test_a_stream_count_without_a_case_is_noticed(op: str) -> None:
    """Catches a rule that counts another op's cases, single rows, or cases that nobody blessed."""
    others = [case for case in ALL if (case.op, case.hc_mult) != (op, 6)]
    own = next(case for case in ALL if (case.op, case.hc_mult) == (op, 6) and shows_count(case))
    useless = own.model_copy(update={"expected": None}), own.model_copy(update={"size": "large"})
    assert missing([*others, *useless]) == {op: [6]}


@pytest.mark.parametrize(("op", "kind"), PLANTED, ids=[":".join(pair) for pair in PLANTED])
def test_a_count_rounded_up_shows_at_no_power_of_two(op: str, kind: str) -> None:
    """Why 1, 2, 4 and 8 are not enough: a kernel that rounds its count up is exact there, and wrong elsewhere."""
    wrong = Implementation(op, kind, streams.BY_OP[op][kind], accepts_out=False)
    caught = {n for n in COUNTS if any(judge(case, wrong, 1) for case in likely(op, n, kind))}
    assert caught == set(COUNTS) - set(POWERS)


def likely(op: str, count: int, kind: str) -> list[Case]:
    """Two cases of an op with so many streams: those that claim the class first, then the smallest."""
    shown = [case for case in ALL if (case.op, case.hc_mult) == (op, count) and shows_count(case)]
    return sorted(shown, key=lambda case: (kind not in case.catches, case.tokens * case.hidden))[:2]
