"""Every case on every backend at every tp: exact bits, or a report that says why not.

The matrix: every case, because each is one situation that has been, or could be, got wrong; every backend, because
each is code of its own, the oracle's own sharded run included; every tp that the case names, because a shard's size,
its pad rows and its empty ranks come from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from cases.schema import Case
from tests import memory
from tests.implementations import REFUSALS
from tests.judge import built, digests, judge, skip_reason
from tests.plugin import DIGESTS, Mismatch, Session
from tests.replay import dump
from tests.reports import explain_failures
from tests.trials import Trial
from tests.verdicts import found_digests


def test_case(trial: Trial, session: Session, device: str, record_property: Callable[[str, object], None]) -> None:
    """One verdict; catches whatever the case's ``catches`` names, on any backend."""
    if trial.case.size == "large" and device == "cpu":
        pytest.skip("a large case: it needs a GPU")
    with memory.turn(device, wanted=is_far(trial.case)):
        judge_trial(trial, session, device, record_property)


def judge_trial(trial: Trial, session: Session, device: str, record_property: Callable[[str, object], None]) -> None:
    """Raise Mismatch with a report where a kernel has other bits than the oracle, or the oracle than the case's."""
    case = trial.case
    implementation = session.implementation(case.op, trial.backend)
    try:
        failures = judge(case, implementation, trial.tp, device=device)
    except REFUSALS as error:
        if reason := skip_reason(case, implementation, error):
            pytest.skip(reason)
        raise
    record_property(DIGESTS, json.dumps(found_digests(case, failures)))
    if failures:
        text, cause = explain_failures(session.context(trial), case, failures, built(case).params)
        if session.dump is not None:
            text += "\n" + dump(session.dump, case, trial.backend, trial.tp, failures)
        raise Mismatch(text, cause)
    if session.replay is None:
        require_blessed(trial, device)


def is_far(case: Case) -> bool:
    """Whether an input spans more than 2^31 elements."""
    return any(case.made_by(argument.name).layout == "far" for argument in case.arguments)


def require_blessed(trial: Trial, device: str) -> None:
    """Hold the expected bits to the digests in the case file, so that no change of them goes unseen.

    On every backend: a kernel that changes the process (its rounding, say) would change what it is compared with too.
    """
    name, expected = trial.case.name, trial.case.expected
    if expected is None:
        raise Mismatch(
            f"{name}: the case has no expected digests yet; `./run cases bless {name} --reason WHY` sets them",
            "no blessed digests",
        )
    if digests(trial.case, device) != expected.digests:
        raise Mismatch(
            f"{name}: the oracle's bits are not those that the case file blesses; "
            f"`./run cases bless {name} --dry-run` shows what changed",
            "not the blessed bits",
        )
