"""Every law on every op of every backend, with no reference: `tests/laws.py` says what each catches.

The matrix: a subject and a backend, because each kernel is code of its own and each optional input a path of its own; a
law, because each sees another class of faults; T = 17 tokens on an op's main subject, because 2 * 8 + 1 is past two
full shards of the largest tp, and 3 on the others, whose stream counts differ. The shard law tries smaller T too (all
of them on a GPU; 0, 1, 3, 9 and 17 on a CPU), and the token law batches of up to 130.
"""

from __future__ import annotations

import pytest

from fast.registry import Unsupported
from tests.laws import LAWS, Bench
from tests.plugin import Mismatch, Session
from tests.reports import explain_breaches
from tests.trials import LawTrial


def test_law(law_trial: LawTrial, session: Session, device: str) -> None:
    """One law on one kernel; kernels that break each law are in `tests/test_laws_power.py`."""
    implementation = session.implementation(law_trial.case.op, law_trial.backend)
    try:
        breaches = list(LAWS[law_trial.law](Bench(implementation, law_trial.case, device)))
    except Unsupported as reason:
        pytest.skip(str(reason))
    if breaches:
        raise Mismatch(explain_breaches(session.context(law_trial), breaches), f"law {law_trial.law}")
