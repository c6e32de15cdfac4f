"""One run's verdicts as a JSON file, and the comparison of two: `python -m tests.verdicts A.json B.json`.

A row of the nightly matrix ends with such a file (``--verdict-json FILE``). Two rows agree when they share outputs and
each of these has one digest, whatever the backend, device and versions.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cases.digest import digest
from cases.faults import sentence
from cases.load import from_caller
from cases.schema import SHA256, Case
from oracle.compare import POISON
from tests.judge import Failure, digests
from tests.table import Result

SCHEMA = 1
SHOWN = 40
Digests = Mapping[str, Mapping[str, Mapping[str, str]]]


class Run(BaseModel):
    """What a file of ``--verdict-json`` must hold to be compared; ``digests`` are by case, trial and output."""

    model_config = ConfigDict(strict=True, frozen=True)
    schema_: Literal[1] = Field(alias="schema")
    versions: dict[str, str]
    device: str
    counts: dict[str, int]
    digests: dict[str, dict[str, dict[str, str]]]


def found_digests(case: Case, failures: Sequence[Failure]) -> dict[str, str]:
    """What each output of a trial was: the oracle's digest where it is exact, else that of what came out."""
    found = digests(case)
    exact = dict(found)
    for failure in failures:
        if failure.actual is not None:
            found[failure.output] = came_out(failure.actual, exact[failure.output])
    return found


def came_out(actual: torch.Tensor, exact: str) -> str:
    """The digest of an output that is not exact, or a remark where a digest would not show that.

    Digests are for the contract's dtypes, and take poison where a NaN is due for that NaN.
    """
    if actual.dtype not in POISON:
        return f"dtype:{str(actual.dtype).removeprefix('torch.')} shape:{','.join(map(str, actual.shape))}"
    found = digest(actual)
    return f"not-exact:{found}" if found == exact else found


def document(
    results: Iterable[Result], found: Digests, versions: Mapping[str, str], device: str, tests: Mapping[Any, int]
) -> dict[str, Any]:
    """The verdicts of one run as plain data: versions, counts, what was not exact, and digests.

    ``found`` maps case, trial ("triton tp4") and output to a digest; ``tests`` counts all tests of the run by outcome.
    """
    results = list(results)
    wrong = [result for result in results if result.outcome.value != "exact"]
    return {
        "schema": SCHEMA,
        "versions": dict(versions),
        "machine": platform.machine(),
        "device": device,
        "counts": dict(Counter(result.outcome.value for result in results)),
        "tests": dict(tests),
        "not_exact": [
            {"op": one.op, "case": one.case, "backend": one.backend, "tp": one.tp}
            | {"outcome": one.outcome.value, "reason": one.reason}
            for one in wrong
        ],
        "digests": {
            case: {trial: dict(outputs) for trial, outputs in trials.items()} for case, trials in found.items()
        },
    }


def outputs(run: Run) -> dict[tuple[str, str], dict[str, str]]:
    """For each case and output of a run, what each trial gave."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for case, trials in run.digests.items():
        for trial, values in trials.items():
            for output, value in values.items():
                found[case, output][trial] = value
    return found


def compare(one: Run, other: Run) -> Iterator[str]:
    """A line for each output of both runs that has more than one digest, or anything but a digest."""
    sides = {"A": outputs(one), "B": outputs(other)}
    for case, output in sorted(sides["A"].keys() & sides["B"].keys()):
        holders: dict[str, list[str]] = defaultdict(list)
        for side, found in sides.items():
            for trial, value in found[case, output].items():
                holders[value].append(f"{side} {trial}")
        if len(holders) > 1 or not all(map(is_digest, holders)):
            parts = (f"{shown(value)} by {', '.join(names)}" for value, names in holders.items())
            yield f"{case}: {output}: {'; '.join(parts)}"


def is_digest(value: str) -> bool:
    """Whether a value stands for bits; remarks on two outputs may be the same where the bits are not."""
    return re.fullmatch(SHA256, value) is not None


def shown(value: str) -> str:
    """The beginning of a digest, the whole of a remark."""
    return value[:12] if is_digest(value) else value


def introduction(one: Run, other: Run) -> Iterator[str]:
    """What the two runs are, and which outputs one of them lacks."""
    for side, run in (("A", one), ("B", other)):
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        counts = ", ".join(f"{number} {outcome}" for outcome, number in run.counts.items())
        yield f"{side}: {run.device}, {versions}: {counts or 'no verdicts'}"
    for side, run, rest in (("A", one, other), ("B", other, one)):
        alone = [" ".join(names) for names in sorted(outputs(run).keys() - outputs(rest).keys())]
        if alone:
            yield f"only in {side}: {len(alone)} outputs ({', '.join(alone[:5])}{', ...' if len(alone) > 5 else ''})"


def load(path: Path) -> Run:
    """One run's verdicts. Ends with a sentence and status 2 for a file that holds none."""
    try:
        return Run.model_validate_json(path.read_bytes())
    except OSError as error:
        refuse(f"{path} cannot be read: {error.strerror}")
    except ValidationError as fault:
        refuse(f"{path} is no file of --verdict-json, schema {SCHEMA}: {sentence(fault)}")


def refuse(sentence: str) -> NoReturn:
    """End with status 2, which is not the 1 of runs that differ."""
    print(f"verdicts: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: Sequence[str]) -> int:
    """Compare two files; return 0 when their digests agree, 1 when some differ or the runs share no output."""
    parser = argparse.ArgumentParser(prog="./run verdicts", description=__doc__)
    parser.add_argument("one", type=from_caller, metavar="A")
    parser.add_argument("other", type=from_caller, metavar="B")
    options = parser.parse_args(arguments)
    one, other = load(options.one), load(options.other)
    shared = outputs(one).keys() & outputs(other).keys()
    differing = list(compare(one, other))
    lines = [*introduction(one, other), *differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"and {len(differing) - SHOWN} more")
    result = f"{len(differing)} of them differ" if differing else "same digests" if shared else "nothing to compare"
    lines.append(f"in both: {len(shared)} outputs of {len({case for case, _ in shared})} cases: {result}")
    print("\n".join(lines))
    return int(bool(differing) or not shared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
