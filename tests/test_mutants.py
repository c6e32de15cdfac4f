"""Every planted wrong kernel is caught by the cases that claim it, and ordinary random data is shown to miss most.

These are the tests of the tests. `test_every_claim_is_proven` walks the claims of all cases; the flagships of
`tests.power` record for each class of fault whether the same situation with random inputs would have caught it.
"""

from __future__ import annotations

import pytest

from cases.load import load_all
from cases.schema import Case
from tests.implementations import Implementation, of_oracle
from tests.judge import judge
from tests.mutants import MUTANTS, Mutant
from tests.mutants.boundaries import BOUNDARIES, Steps
from tests.power import FLAGSHIPS, Flagship, caught, fails, on_random_inputs

ALL = {case.name: case for case in load_all()}
CLAIMS = [(case.name, kind) for case in ALL.values() if case.size != "large" for kind in case.catches]
PRECISE = [
    (case.name, kind, stage)
    for case in ALL.values()
    if case.size != "large"
    for kind, stages in case.shows.items()
    for stage in stages
]
IDS = [":".join(part for part in (one.kind, one.stage, one.case) if part) for one in FLAGSHIPS]


@pytest.mark.parametrize(("name", "kind"), CLAIMS, ids=[":".join(claim) for claim in CLAIMS])
def test_every_claim_is_proven(name: str, kind: str) -> None:
    """A case catches each class that it claims, at one of its tp sizes at least."""
    case = ALL[name]
    assert MUTANTS.get((kind, case.op)), f"no planted wrong {case.op} of class {kind} proves the claim of {name}"
    tried = (Flagship(kind, case.op, name, False, tp) for tp in reversed(case.tp))
    assert any(caught(flagship, case) for flagship in tried), f"{name} does not catch {kind}"


@pytest.mark.parametrize(("name", "kind", "stage"), PRECISE, ids=[":".join(claim) for claim in PRECISE])
def test_every_precise_claim_is_proven(name: str, kind: str, stage: str) -> None:
    """Every planted kernel of the class that is wrong in this stage alone changes every output that the case names.

    Catches a title or a claim that promises more stages than the inputs can show.
    """
    case, planted = ALL[name], Flagship(kind, ALL[name].op, name, False, stage=stage)
    assert planted.mutants, f"no planted wrong {case.op} of class {kind} is wrong in {stage} alone"
    for number, mutant in enumerate(planted.mutants):
        hidden = set(case.shows[kind][stage]) - changed(mutant, case)
        assert not hidden, f"way {number} of {kind} in {stage} does not show in {sorted(hidden)}"


def changed(mutant: Mutant, case: Case) -> set[str]:
    """The outputs whose bits a mutant changes at some tp size of a case; none where it raises."""
    found = [fails(mutant, case, tp) for tp in case.tp]
    return {one.output for failures in found if not isinstance(failures, str) for one in failures if one.comparison}


@pytest.mark.parametrize("op", BOUNDARIES)
def test_the_steps_are_the_boundary(op: str) -> None:
    """Without this, a mutant could be caught for how it is put together instead of for its one wrong step."""
    right = Implementation(op, "steps", Steps().boundary(op), accepts_out=False)
    for case in ALL.values():
        if case.op == op and case.size == "small":
            assert judge(case, right, 1) == [], case.name


@pytest.mark.parametrize("op", [*BOUNDARIES, "coefficients", "project"])
def test_no_wrong_stage_survives(op: str) -> None:
    """Some case claims each class at each stage: catches cases that see the first stage of a fused op and no other."""
    planted = {(one.kind, one.stage) for (_, of), some in MUTANTS.items() if of == op for one in some if one.stage}
    own = [case for case in ALL.values() if case.op == op and case.size != "large"]
    claimed = {(kind, stage) for case in own for kind, stages in case.shows.items() for stage in stages}
    assert planted - claimed == set()


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
