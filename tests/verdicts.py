"""One run's verdicts as a JSON file, and the comparison of two: `python -m tests.verdicts A.json B.json`.

A row of the nightly matrix ends with such a file (``--verdict-json FILE``). Two rows agree when every output that both
judged has one digest, whatever the backend, device and versions.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cases.digest import digest
from cases.load import from_caller
from cases.schema import Case
from oracle.compare import POISON
from tests.judge import Failure, digests
from tests.table import Result

SCHEMA = 1
SHOWN = 40
Digests = Mapping[str, Mapping[str, Mapping[str, str]]]


def found_digests(case: Case, failures: Sequence[Failure]) -> dict[str, str]:
    """The digest of each output of a trial: the oracle's where the bits are the same, else that of what came out."""
    found = digests(case)
    for failure in failures:
        if failure.actual is not None and failure.actual.dtype in POISON and failure.output in found:
            found[failure.output] = digest(failure.actual)
    return found


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


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """A line for each output of which the two runs hold more than one digest."""
    for case in sorted(set(one["digests"]) & set(other["digests"])):
        holders: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for side, run in (("A", one), ("B", other)):
            for trial, outputs in run["digests"][case].items():
                for output, value in outputs.items():
                    holders[output][value].append(f"{side} {trial}")
        for output, by_digest in holders.items():
            if len(by_digest) > 1:
                parts = (f"{value[:12]} by {', '.join(names)}" for value, names in by_digest.items())
                yield f"{case}: {output}: {'; '.join(parts)}"


def introduction(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """What the two runs are, and which cases one of them lacks."""
    for side, run in (("A", one), ("B", other)):
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        counts = ", ".join(f"{number} {outcome}" for outcome, number in run["counts"].items())
        yield f"{side}: {run['device']}, {versions}: {counts or 'no verdicts'}"
    for side, run, rest in (("A", one, other), ("B", other, one)):
        alone = sorted(set(run["digests"]) - set(rest["digests"]))
        if alone:
            yield f"only in {side}: {len(alone)} cases ({', '.join(alone[:5])}{', ...' if len(alone) > 5 else ''})"


def load(path: Path) -> dict[str, Any]:
    """One run's verdicts. Ends with a sentence and status 2 for a file that holds none."""
    try:
        run: dict[str, Any] = json.loads(path.read_text())
        known = run["schema"] == SCHEMA and isinstance(run["digests"], dict)
    except OSError as error:
        refuse(f"{path} cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        refuse(f"{path} is no file of --verdict-json, schema {SCHEMA}")
    return run


def refuse(sentence: str) -> NoReturn:
    """End with status 2, which is not the 1 of runs that differ."""
    print(f"verdicts: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def main(arguments: Sequence[str]) -> int:
    """Compare two files; return 0 when their digests agree, 1 when some differ or the runs share no case."""
    parser = argparse.ArgumentParser(prog="./run verdicts", description=__doc__)
    parser.add_argument("one", type=from_caller, metavar="A")
    parser.add_argument("other", type=from_caller, metavar="B")
    options = parser.parse_args(arguments)
    one, other = load(options.one), load(options.other)
    shared = set(one["digests"]) & set(other["digests"])
    differing = list(compare(one, other))
    lines = [*introduction(one, other), *differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"and {len(differing) - SHOWN} more")
    lines.append(f"{len(shared)} cases in both: {f'{len(differing)} outputs differ' if differing else 'same digests'}")
    print("\n".join(lines))
    return int(bool(differing) or not shared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
