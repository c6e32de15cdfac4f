"""The text of a trial that failed: a headline that names it, what is known, and the command that repeats it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cases.layouts import relayout
from cases.schema import Case
from oracle.explain import explain
from oracle.report import Context, Outcome, cause, failure, headline, report
from tests.judge import Failure, parameters
from tests.laws import LAWS
from tests.trials import LawTrial, Trial

SHOWN = 8
LINES = 20  # of a long message, such as a compiler's
OURS = ("tests/implementations.py", "pytest_timeout.py")


def context_of(trial: Trial | LawTrial, rerun: str, versions: Mapping[str, str]) -> Context:
    """What is known of a trial before it ran; ``rerun`` is the command that repeats it."""
    case = trial.case
    known = Context(case=case.name, op=case.op, output="", backend=trial.backend, versions=versions, rerun=rerun)
    if isinstance(trial, LawTrial):
        named = {"tokens": "T", "hc_mult": "n", "hidden": "H"}
        sizes = [f"{word} = {getattr(case, key)}" for key, word in named.items() if key in case.model_fields_set]
        demand = (LAWS[trial.law].__doc__ or "").split("\n", 1)[0]
        return replace(known, law=trial.law, case=", ".join([case.name, *sizes]), about=demand)
    rows = -(-case.tokens // trial.tp)
    known = replace(known, tp=trial.tp, about=case.title, catches=case.catches)
    return replace(known, strides=dict(_strides(case, rows)))


def explain_failures(
    context: Context, case: Case, failures: Sequence[Failure], params: Mapping[str, object]
) -> tuple[str, str]:
    """The report of a trial's failures, the first in full, and what the first comes from in words that many share.

    ``params`` are the case's plain parameters.
    """
    first, *rest = failures
    guesses = _guesses(case, first, params)
    lines = [_full(_at(context, first), first, guesses)]
    lines += [_line(_at(context, failed), failed) for failed in rest[:SHOWN]]
    if len(rest) > SHOWN:
        lines.append(f"and {len(rest) - SHOWN} more failing outputs of this trial")
    return "\n".join(lines), _cause(first, guesses)


def _cause(failed: Failure, guesses: Sequence[str]) -> str:
    if failed.comparison is None:
        return failed.violation or "broken rule"
    return cause(failed.comparison, guesses, failed.schedule.fill)


def explain_breaches(context: Context, breaches: Sequence[str]) -> str:
    """The report of a broken law: each breach is a sentence."""
    first, *rest = breaches
    more = f", and {len(rest)} more {'breach' if len(rest) == 1 else 'breaches'}" if rest else ""
    shown = [("breach", text) for text in rest[:SHOWN]]
    if len(rest) > SHOWN:
        shown.append(("breach", f"and {len(rest) - SHOWN} more"))
    return failure(context, first + more, shown)


def explain_error(context: Context, outcome: Outcome, error: BaseException) -> str:
    """The report of a trial that raised or ran out of time: the message, and where in the kernel it came from."""
    first, *rest = f"{type(error).__name__}: {error}".split("\n")
    details = [("message", line) for line in rest[:LINES] if line.strip()]
    details += [("note", note) for note in getattr(error, "__notes__", ())]
    details += [("raised", frame) for frame in _frames(error)]
    return failure(context, f"{outcome.value}: {first}", details)


def _frames(error: BaseException) -> Iterator[str]:
    """The last frames below the call of the kernel; those of the suite when none is below it."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [at for at, frame in enumerate(frames) if frame.filename.endswith(OURS[0])]
    below = [frame for frame in frames[calls[0] if calls else 0 :] if not frame.filename.endswith(OURS)]
    for frame in [one for one in below if "_pytest" not in one.filename][-SHOWN:]:
        path = Path(frame.filename)
        place = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        yield f"{place}:{frame.lineno} in {frame.name}: {frame.line}"


def _full(context: Context, failed: Failure, guesses: Sequence[str]) -> str:
    if failed.comparison is None:
        return failure(context, failed.violation or "broken rule")
    return report(failed.comparison, context, guesses)


def _guesses(case: Case, failed: Failure, params: Mapping[str, object]) -> Sequence[str]:
    if failed.tensors is None or failed.actual is None or not (failed.comparison and failed.comparison.mismatching):
        return ()
    return explain(case.op, failed.tensors, failed.actual, output=failed.output, params=parameters(params))


def _line(context: Context, failed: Failure) -> str:
    if failed.comparison is None:
        return headline(context, failed.violation or "broken rule")
    return report(failed.comparison, context).split("\n", 1)[0]


def _at(context: Context, failed: Failure) -> Context:
    return replace(context, output=failed.output, fill=failed.schedule.fill, order=failed.schedule.order)


def _strides(case: Case, rows: int) -> Iterator[tuple[str, str]]:
    """How each input that is not packed lies, of a rank with so many rows."""
    for argument in case.arguments:
        layout, shape = case.made_by(argument.name).layout, case.shape(argument)
        if layout != "contiguous":
            shape = (rows, *shape[1:]) if argument.per_token else shape
            lies = relayout(torch.empty(shape, dtype=getattr(torch, argument.dtype), device="meta"), layout)
            yield argument.name, f"{list(shape)} by {list(lies.stride())}, {layout}"
