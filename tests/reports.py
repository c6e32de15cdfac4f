"""The text of a failed trial: one report for the first failing output, and a line for each of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cases.schema import Case
from oracle.explain import explain
from oracle.report import Context, headline, report
from tests.judge import Failure, parameters

SHOWN = 8


def explain_failures(
    case: Case,
    backend: str,
    failures: Sequence[Failure],
    *,
    params: Mapping[str, object],
    rerun: str,
    versions: Mapping[str, str],
) -> str:
    """The report of a trial's failures, the first in full.

    ``params`` are the case's plain parameters, ``rerun`` the command that repeats the trial.
    """
    first, *rest = failures
    context = _context(case, backend, first, rerun, versions)
    lines = [_full(case, first, context, params)]
    lines += [_line(_context(case, backend, failure, rerun, versions), failure) for failure in rest[:SHOWN]]
    if len(rest) > SHOWN:
        lines.append(f"and {len(rest) - SHOWN} more failing outputs of this trial")
    return "\n".join(lines)


def _full(case: Case, failure: Failure, context: Context, params: Mapping[str, object]) -> str:
    if failure.comparison is None:
        return headline(context, failure.violation or "broken rule")
    guesses: Sequence[str] = ()
    if failure.tensors is not None and failure.actual is not None and failure.comparison.mismatching:
        guesses = explain(case.op, failure.tensors, failure.actual, output=failure.output, params=parameters(params))
    return report(failure.comparison, context, guesses)


def _line(context: Context, failure: Failure) -> str:
    if failure.comparison is None:
        return headline(context, failure.violation or "broken rule")
    return report(failure.comparison, context).split("\n", 1)[0]


def _context(case: Case, backend: str, failure: Failure, rerun: str, versions: Mapping[str, str]) -> Context:
    return Context(
        case=case.name,
        op=case.op,
        output=failure.output,
        backend=backend,
        tp=failure.schedule.layout.tp,
        fill=failure.schedule.fill,
        order=failure.schedule.order,
        versions=versions,
        rerun=rerun,
    )
