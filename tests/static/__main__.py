"""`./run static`: compile every kernel for every architecture without a GPU, judge its machine code, print a table."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from cases.load import from_caller
from tests.static import attempts, compiling, records, toolchain
from tests.static.allowed import ENTRIES
from tests.static.records import Verdict
from tests.static.rules import Facts, Finding, findings
from tests.static.units import ARCHES, BadLaunches, Language, Unit, units

# Kernels are compiled in every process that starts from here, and languages are imported later; nothing is interpreted.
# What is kept is kept by `attempts`, under a key of its own: a compiler's cache may know less of what a kernel owes.
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TILELANG_DISABLE_CACHE"] = "1"
os.environ["TRITON_ALWAYS_COMPILE"] = "1"
os.environ["TRITON_CACHE_DIR"] = str(attempts.CACHE / "triton")

LANGUAGES: tuple[Language, ...] = ("triton", "tilelang")
NOT_COMPILED = "."
LOGGED = 20
"""How many compiled kernels a line of a log stands for."""


def main(arguments: Sequence[str]) -> int:
    """Compile, judge, print; return 0 when all is well, 1 when something is wrong.

    2 when a required language was not judged or launches cannot be told apart, 5 when nothing was judged.
    """
    options = parser().parse_args(arguments)
    options.language = options.language or list(LANGUAGES)
    start = time.monotonic()
    if packaged := toolchain.packaged_toolkit():
        os.environ["CUDA_HOME"] = packaged
    missing = {language: reason for language in options.language if (reason := compiling.unavailable(language))}
    try:
        chosen = list(listed(options, missing))
    except BadLaunches as error:
        return failed(str(error), 2)
    verdicts = list(judged(chosen, options))
    for line in report(verdicts, missing):
        print(line)
    print(summary(verdicts, missing, time.monotonic() - start))
    if options.verdict_json:
        options.verdict_json.write_text(json.dumps(records.document(verdicts, missing), indent=1) + "\n")
    if options.junitxml:
        options.junitxml.write_bytes(records.junit(verdicts, missing))
    if unjudged := set(options.require) - {verdict.unit.language for verdict in verdicts}:
        return failed(f"required, but no kernel of it was judged: {', '.join(sorted(unjudged))}", 2)
    if not verdicts:
        return failed("nothing was judged: no kernel has the language, name and architecture that were asked for", 5)
    return int(any(verdict.found for verdict in verdicts))


def failed(sentence: str, status: int) -> int:
    """Say why the run is a failure, and return its exit status."""
    print(f"static: {sentence}", file=sys.stderr)
    return status


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="./run static", description=__doc__)
    made.add_argument("-k", metavar="TEXT", default="", help="only kernels whose name contains this")
    made.add_argument("--language", action="append", choices=LANGUAGES, help="only this language (may be repeated)")
    made.add_argument(
        "--arch", action="append", type=int, choices=ARCHES, help="only this sm_ number (may be repeated)"
    )
    made.add_argument("--all", action="store_true", help="every launch on every architecture: much longer")
    made.add_argument("--kernels", metavar="MODULE", default="", help="the launches of this module instead")
    made.add_argument(
        "--require", action="append", default=[], choices=LANGUAGES, help="fail where none of it is judged"
    )
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes (default: all cores)")
    made.add_argument("--keep", metavar="DIR", type=from_caller, help="leave PTX and machine code here; compiles anew")
    made.add_argument("--verdict-json", metavar="FILE", type=from_caller, help="write versions and verdicts here")
    made.add_argument("--junitxml", metavar="FILE", type=from_caller, help="write the verdicts here as JUnit XML")
    return made


def listed(options: argparse.Namespace, missing: Iterable[str]) -> Iterator[Unit]:
    """The selected units of every language that can be compiled here."""
    for language in options.language:
        if language not in missing:
            wanted = functools.partial(selected, options)
            yield from units(language, options.kernels, everything=options.all, wanted=wanted)


def selected(options: argparse.Namespace, name: str, arch: int) -> bool:
    """Whether the command line selects a kernel for an architecture."""
    return options.k in name and (not options.arch or arch in options.arch)


def judged(chosen: Sequence[Unit], options: argparse.Namespace) -> Iterator[Verdict]:
    """Verdicts in the order of the units, compiled by several processes where the cache does not have them."""
    known = {} if options.keep else {unit: facts for unit in chosen if (facts := attempts.cached(unit))}
    fresh = compiled([unit for unit in chosen if unit not in known], options)
    for unit in chosen:
        result = known.get(unit) or fresh[unit]
        found = tuple(verdict(unit, result)) if isinstance(result, Facts) else (Finding("error", result),)
        yield Verdict(unit, found, unit in known)


def verdict(unit: Unit, facts: Facts) -> list[Finding]:
    """What is wrong with a unit; a kernel that the table does not know is wrong, too."""
    entry = ENTRIES.get(unit.function)
    if entry is None:
        return [Finding("unknown", f"tests/static/allowed.py says nothing of {unit.function}")]
    return findings(facts, entry.allowed(unit.op, unit.hc_mult))


def compiled(needed: Sequence[Unit], options: argparse.Namespace) -> dict[Unit, Facts | str]:
    """The facts of units, or why there are none; each is kept in the cache."""
    if not needed:
        return {}
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    results: dict[Unit, Facts | str] = {}
    processes = max(1, min(options.jobs, len(needed)))
    with ProcessPoolExecutor(processes, get_context("spawn"), attempts.quiet) as pool:
        started = {pool.submit(attempts.attempt, unit, options.keep): unit for unit in needed}
        for done in as_completed(started):
            results[started[done]] = done.result()
            progress(len(results), len(needed))
    return results


def progress(done: int, total: int) -> None:
    """Show how far the compilers are: one line that is written over on a terminal, a few lines in a log."""
    if sys.stderr.isatty():
        print(f"\rcompiled {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total or done % LOGGED == 0:
        print(f"compiled {done} of {total}", file=sys.stderr, flush=True)


def report(verdicts: Sequence[Verdict], missing: dict[Language, str]) -> Iterator[str]:
    """The table, kernels by architectures, then a line for everything that is wrong."""
    rows: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for one in verdicts:
        rows[one.unit.language, one.unit.name][one.unit.arch] = one.cell
    arches = sorted({one.unit.arch for one in verdicts})
    table = [("language", "kernel", *(f"sm_{arch}" for arch in arches))]
    table += [(*key, *(cells.get(arch, NOT_COMPILED) for arch in arches)) for key, cells in rows.items()]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield from (f"{language}: all kernels unavailable: {reason}" for language, reason in missing.items())
    for one in verdicts:
        for finding in one.found:
            yield f"{one.unit.language} {one.unit.name} sm_{one.unit.arch}: {finding.kind}: {finding.sentence}"


def summary(verdicts: Sequence[Verdict], missing: dict[Language, str], seconds: float) -> str:
    """The last line: counts, what is missing, how long it took."""
    good = sum(not one.found for one in verdicts)
    cache = sum(one.cached for one in verdicts)
    parts = [f"{good} of {len(verdicts)} ok"] + [f"{language} unavailable" for language in missing]
    return f"static: {', '.join(parts)}; {seconds:.0f} s, {cache} from the cache"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
