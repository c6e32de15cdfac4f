"""The jobs: one table, called as `python -m tests JOB [arguments]` by `./run`, tox and continuous integration.

Standard library only, so that `./run` can list the jobs and refuse an unknown one before anything is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

NEEDED = {"pytest": "pytest", "xdist": "pytest-xdist", "pytest_timeout": "pytest-timeout", "torch": "torch"}
# Plain "load" keeps neighbours together, so a case's trials share its inputs; the grouping schedulers of xdist end the
# whole run when a worker dies, and a kernel that kills its process must stay one verdict among others.
PARALLEL = ("-n", "auto", "--dist", "load")
OWN_PARALLELISM = ("-n", "--numprocesses", "-pno:xdist", "no:xdist", "--pdb", "--trace")


@dataclass(frozen=True)
class Job:
    """What one job does, and the arguments its module gets before the user's own."""

    summary: str
    arguments: tuple[str, ...] = ()
    module: str = "pytest"
    parallel: bool = True


HOUSE = "tests/meta/test_house.py"
CHECKED = ("tests/test_cases.py", "tests/test_laws.py")
JOBS = {
    "check": Job(
        "every case and every law, on every backend that this machine offers",
        CHECKED,
    ),
    "test": Job("all tests, with the oracle's own, the tests of the tests, lint and types"),
    "power": Job(
        "which wrong kernels the cases catch, and which of them random data would have caught",
        module="tests.power",
        parallel=False,
    ),
    "static": Job(
        "machine code of every kernel for four GPU generations, compiled and judged without a GPU",
        module="tests.static",
        parallel=False,
    ),
    "gpu": Job(
        "all of check at full size on a GPU, with graphs, streams, big offsets, torch.compile; fails without a GPU",
        ("tests/gpu", "tests/test_torch_ops.py", *CHECKED, "--device", "cuda", "--require", "gpu"),
    ),
    "verdicts": Job("compare two runs by their --verdict-json files", module="tests.verdicts", parallel=False),
    "lint": Job(
        "style, import contracts and the rows of the nightly matrix only",
        (HOUSE, "tests/meta/test_nightly.py", "-m", "lint"),
        parallel=False,
    ),
    "types": Job("static types only", (HOUSE, "-m", "types"), parallel=False),
    "cases": Job("make, check, show, bless and list case files", module="cases", parallel=False),
}


def main(arguments: Sequence[str]) -> int:
    """Run one job and return its exit status; 2 when it is unknown or its packages are missing."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    checking = arguments[0] == "--known"
    name, *rest = arguments[1:] if checking else arguments
    if name not in JOBS:
        return refuse(f"unknown job {name!r}; expected one of: {', '.join(JOBS)}.")
    if checking:
        return 0
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        return refuse(f"{sys.executable} lacks {', '.join(missing)}; unset MHC_PYTHON, or install them there.")
    return replace_this_process(command(JOBS[name], rest))


def replace_this_process(line: Sequence[str]) -> NoReturn:
    """Become the program of `line`, so that signals and exit status are its own."""
    os.execv(line[0], list(line))


def command(job: Job, rest: Sequence[str]) -> list[str]:
    """The command line of `job` with the user's own arguments `rest` after the job's."""
    parallel = PARALLEL if job.parallel and not any(item.startswith(OWN_PARALLELISM) for item in rest) else ()
    return [sys.executable, "-m", job.module, *parallel, *job.arguments, *_hard_limit(rest), *rest]


def _hard_limit(rest: Sequence[str]) -> tuple[str, ...]:
    """The limit for hangs that no Python signal reaches follows the user's own ``--timeout``, half a minute later."""
    words = [word for item in rest for word in item.split("=", 1)]
    values = [value for option, value in itertools.pairwise(words) if option == "--timeout"]
    seconds = values[-1] if values and values[-1].isdecimal() else ""
    return ("-o", f"faulthandler_timeout={int(seconds) + 30}") if seconds else ()


def usage() -> str:
    """The text of `./run` alone: every job with its one line."""
    rows = [f"  {name:<10}{job.summary}" for name, job in JOBS.items()]
    ending = "Arguments go to pytest; cases, power, static and verdicts explain theirs with --help."
    return "\n".join(["usage: ./run JOB [arguments]", "", *rows, "", ending])


def refuse(sentence: str) -> int:
    """Say on the error stream why nothing ran; return the exit status for it."""
    print(f"run: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
