"""Every planted wrong kernel is caught by the cases that claim it, and ordinary random data is shown to miss most.

These are the tests of the tests. `test_every_claim_is_proven` walks the claims of all cases; the flagships of
`tests.power` record for each class of fault whether the same situation with random inputs would have caught it.
"""

from __future__ import annotations

import pytest

from cases.load import load_all
from tests.implementations import of_oracle
from tests.judge import judge
from tests.mutants import MUTANTS
from tests.power import FLAGSHIPS, Flagship, caught, on_random_inputs

ALL = {case.name: case for case in load_all()}
CLAIMS = [(case.name, kind) for case in ALL.values() if case.size != "large" for kind in case.catches]
IDS = [f"{flagship.kind}:{flagship.case}" for flagship in FLAGSHIPS]


@pytest.mark.parametrize(("name", "kind"), CLAIMS, ids=[":".join(claim) for claim in CLAIMS])
def test_every_claim_is_proven(name: str, kind: str) -> None:
    """A case catches each class that it claims, at one of its tp sizes at least."""
    case = ALL[name]
    assert (kind, case.op) in MUTANTS, f"no planted wrong {case.op} of class {kind} proves the claim of {name}"
    tried = (Flagship(kind, case.op, name, False, tp) for tp in reversed(case.tp))
    assert any(caught(flagship, case) for flagship in tried), f"{name} does not catch {kind}"


@pytest.mark.parametrize("flagship", FLAGSHIPS, ids=IDS)
def test_random_inputs_see_a_fault_or_not_as_recorded(flagship: Flagship) -> None:
    """The record is a fact about inputs: most faults of order, rounding and special values do not show."""
    case = ALL[flagship.case]
    assert flagship.kind in case.catches
    assert bool(caught(flagship, on_random_inputs(case))) == flagship.random_sees


@pytest.mark.parametrize("flagship", FLAGSHIPS, ids=IDS)
def test_the_right_kernel_is_exact_where_the_wrong_one_is_caught(flagship: Flagship) -> None:
    """Nothing but the fault is seen: the unchanged kernel passes the same case through the same steps."""
    assert judge(ALL[flagship.case], of_oracle(flagship.op), flagship.tp) == []
