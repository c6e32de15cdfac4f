"""Every planted schedule bug is caught, and the report's first line names it; the right schedule passes there.

These are the tests of `tests/test_model.py`: a bug that its comparison cannot see, or can see and not name, would be
found here.
"""

from __future__ import annotations

import pytest

from tests.mutants.schedules import BUGS, PlantedBug
from tests.stream_model import RowMemo, Schedule, execute, judge, verdict

IDS = [bug.name for bug in BUGS]


@pytest.fixture(scope="module")
def kernels() -> RowMemo:
    return RowMemo()


@pytest.mark.parametrize("bug", BUGS, ids=IDS)
def test_the_report_names_it(bug: PlantedBug, kernels: RowMemo) -> None:
    """The first finding is the cause, not one of the hundreds of states behind it."""
    outcome = execute(bug.at, kernels, bug.schedule)
    findings = judge(bug.at, outcome)
    assert findings, f"{bug.name} is not caught at {bug.at}"
    assert str(findings[0]).startswith(bug.state), verdict(bug.at, outcome)
    assert bug.says in findings[0].problem, verdict(bug.at, outcome)


@pytest.mark.parametrize("bug", BUGS, ids=IDS)
def test_the_right_schedule_passes_there(bug: PlantedBug, kernels: RowMemo) -> None:
    assert verdict(bug.at, execute(bug.at, kernels, Schedule())) == ""


def test_there_are_bugs_of_every_part() -> None:
    """A list that shrank to one part of the schedule would prove little of the others."""
    parts = {"target": 0, "draft": 0, "rows": 0, "stages": 0}
    for bug in BUGS:
        for part in parts:
            parts[part] += getattr(bug.schedule, part) is not getattr(Schedule(), part)
    assert len(BUGS) == len(set(IDS)) >= 12
    assert all(parts.values()), parts
