"""The verdict table: op x backend x tp, one line an op, from outcomes that may come from several processes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oracle.report import Outcome

CAUSES = 8  # kinds of failure that are told, with the most frequent of each backend and all laws besides
WIDTH = 100  # characters of each


@dataclass(frozen=True)
class Result:
    """How one trial ended; ``reason`` explains every outcome but exact, ``cause`` is what failures are counted by.

    ``tp`` is 0 for a law, whose name and subject then stand in ``case``.
    """

    op: str
    case: str
    backend: str
    tp: int
    outcome: Outcome
    reason: str = ""
    cause: str = ""


def render(results: Sequence[Result], unavailable: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Lines of the table, then each reason for what was not run, then what failed, by cause.

    ``unavailable`` names backends that this machine does not offer, each with the reason.
    """
    cells: dict[tuple[str, str], dict[int, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        cells[result.op, result.backend][result.tp].append(result)
    sizes = sorted({result.tp for result in results}, key=lambda tp: tp or math.inf)
    rows = [("op", "backend", *(f"tp {tp}" if tp else "laws" for tp in sizes))]
    rows += [(op, backend, *(_cell(by_tp.get(tp, [])) for tp in sizes)) for (op, backend), by_tp in cells.items()]
    return [*_aligned(rows), *_reasons(results, unavailable), *_causes(results), _summary(results)]


def _cell(results: Sequence[Result]) -> str:
    """``exact k/k``, followed by every other outcome with its count; a dash where no case has this tp."""
    if not results:
        return "-"
    counts = Counter(result.outcome for result in results)
    judged = len(results) - counts[Outcome.SKIPPED]
    word = "exact" if results[0].tp else "hold"
    parts = [f"{word} {counts[Outcome.EXACT]}/{judged}"] if judged else []
    parts += [
        f"{counts[outcome]} {outcome.value}" for outcome in Outcome if outcome != Outcome.EXACT and counts[outcome]
    ]
    return ", ".join(parts)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _reasons(results: Sequence[Result], unavailable: Iterable[tuple[str, str]]) -> list[str]:
    skipped = Counter((r.backend, r.reason) for r in results if r.outcome == Outcome.SKIPPED)
    lines = [f"unavailable: {backend}: {reason}" for backend, reason in unavailable]
    return lines + [f"skipped: {count} on {backend}: {reason}" for (backend, reason), count in skipped.items()]


def _causes(results: Sequence[Result]) -> list[str]:
    """How many failed on each backend of what, most first; ops and cases are in the reports.

    A law is broken a few times at most and says more than most causes, so broken laws have a line for each backend.
    """
    broken = [result for result in results if result.outcome.failed]
    failed = Counter((r.outcome, r.backend, r.cause[:WIDTH]) for r in broken if not _names_a_law(r))
    most = failed.most_common()
    first = {what[1]: what for what, _ in reversed(most)}.values()
    told = [what for place, (what, _) in enumerate(most) if place < CAUSES or what in first]
    lines = [f"failed: {failed[what]} {what[0].value} on {what[1]}: {what[2]}" for what in told]
    lines += _laws([result for result in broken if _names_a_law(result)])
    rest = [count for what, count in most if what not in told]
    return [*lines, f"failed: {sum(rest)} more of {_count(len(rest), 'other kind')}"] if rest else lines


def _names_a_law(result: Result) -> bool:
    return not result.tp and result.cause.startswith("law ")


def _laws(broken: Sequence[Result]) -> list[str]:
    """Each backend's broken laws in a line, each with how often where there are several."""
    lines = []
    for backend in dict.fromkeys(result.backend for result in broken):
        names = Counter(result.cause.removeprefix("law ") for result in broken if result.backend == backend)
        each = ", ".join(f"{name} {count}" for name, count in names.most_common())
        word = f"law {next(iter(names))}" if len(names) == 1 else f"laws {each}"
        lines.append(f"failed: {names.total()} {Outcome.MISMATCH.value} on {backend}: {word}")
    return lines


def _summary(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    cases = len({result.case for result in results if result.tp})
    detail = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
    return f"{_count(len(results), 'verdict')} on {_count(cases, 'case')}: {detail or 'none'}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
