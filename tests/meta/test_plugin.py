"""The options, the header, the verdicts and the exit status, as a user meets them.

Runs in processes of their own judge one small case, so that they stay quick; they catch a wrong kernel that ends a run
with status 0, a failure that takes the rest of the run with it, and an error that only its author understands.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from cases.load import load_all
from cases.schema import Case
from tests.__main__ import PARALLEL
from tests.implementations import UsageError
from tests.plugin import CASES, Session

ROOT = CASES.parent

KERNELS = """
import itertools
import os

import oracle


def right(residual, pre_mix):
    return oracle.collapse(residual, pre_mix)


def doubled(residual, pre_mix):
    return oracle.collapse(residual, pre_mix) * 2


def raising(residual, pre_mix):
    raise RuntimeError("no kernel image is available")


def wide(residual, pre_mix):
    return oracle.collapse(residual, pre_mix).float()


def listing(residual, pre_mix):
    return [1.0]


def looping(residual, pre_mix):
    while True:
        pass


def stuck(residual, pre_mix):
    sum(itertools.repeat(0))


def dying(residual, pre_mix):
    os._exit(7)


def touching(residual, pre_mix):
    out = oracle.collapse(residual, pre_mix)
    pre_mix.mul_(2)
    return out


def overrunning(residual, pre_mix, *, out):
    out.copy_(oracle.collapse(residual, pre_mix))
    out.as_strided((out.numel() + 1,), (1,)).view(-1)[-1] = 0
    return out
"""


def small_case() -> Case:
    """A collapse case with tokens, the cheapest there is."""
    candidates = [case for case in load_all(CASES) if case.op == "collapse" and case.tokens and 1 in case.tp]
    return min(candidates, key=lambda case: case.tokens * case.hidden * case.hc_mult)


CASE = small_case().name


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "kernels.py"
    path.write_text(KERNELS)
    return path


def run(*arguments: str, expect: int) -> str:
    """Run pytest on the case file tests from the project's root and return what it printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_cases.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def impls(kernels: Path, *names: str) -> list[str]:
    asked = ["--case", CASE, "--tp", "1"]
    return asked + [item for name in names for item in ("--impl", f"collapse={kernels}:{name}")]


def row(name: str, verdict: str) -> str:
    return rf"(?m)^collapse +impl-{name} +{re.escape(verdict)}$"


def test_a_right_kernel_passes_and_the_header_says_where_it_ran(kernels: Path) -> None:
    text = run(*impls(kernels, "right"), "--device", "cpu", expect=0)
    assert re.search(r"(?m)^mHC oracle suite: python \S+, torch \S+, numpy \S+, triton \S+, tilelang \S+$", text)
    assert "device: cpu, tier: local" in text
    assert re.search(r"(?m)^backend triton: ", text)
    assert re.search(row("right", "exact 1/1"), text)


def test_every_way_to_be_wrong_is_a_verdict_and_a_report(kernels: Path) -> None:
    names = ("doubled", "raising", "listing", "touching", "overrunning", "wide", "right")
    text = run(*impls(kernels, *names), expect=1)
    for name, outcome in zip(
        names[:-1], ("mismatch", "error", "error", "mismatch", "mismatch", "mismatch"), strict=True
    ):
        assert re.search(row(name, f"exact 0/1, 1 {outcome}"), text), name
    assert re.search(row("right", "exact 1/1"), text)
    for words in (
        "no kernel image is available",
        "collapse must return one tensor (layer_input), impl-listing returned a list of float",
        "changed its input pre_mix",
        "wrote outside out (layer_input)",
        "layer_input has dtype float32, expected bfloat16",
        f"./run check --case {CASE} --tp 1 --impl collapse={kernels}:doubled",
    ):
        assert words in text
    assert re.search(r"collapse on impl-doubled, tp 1: .*layer_input values differ", text)
    assert "raise Mismatch" not in text, "a report is for kernel engineers: no traceback of the suite"


def test_a_hanging_or_dying_kernel_does_not_end_the_run(kernels: Path) -> None:
    """One loops in Python, one hangs in C where no signal reaches it, one ends its process; a right one follows."""
    names = ("looping", "stuck", "dying", "right")
    limits = (*PARALLEL, "-n", "2", "--timeout", "2", "-o", "faulthandler_timeout=4")
    text = run(*impls(kernels, *names), *limits, expect=1)
    for name, outcome in zip(names[:-1], ("timeout", "error", "error"), strict=True):
        assert re.search(row(name, f"exact 0/1, 1 {outcome}"), text), name
    assert re.search(row("right", "exact 1/1"), text)


def test_a_request_that_cannot_be_met_ends_with_status_4() -> None:
    text = run("--op", "colapse", expect=4)
    assert "--op colapse: unknown, expected one of expand, collapse" in text
    assert "Traceback" not in text


class Asked:
    """A pytest config that was given some of the suite's options."""

    def __init__(self, **options: object) -> None:
        lists: dict[str, object] = {name: [] for name in ("op", "case", "tp", "backend", "impl", "require")}
        self.options = lists | {"device": "cpu", "dump": None, "replay": None} | options

    def getoption(self, name: str) -> object:
        return self.options[name]


def session(**options: object) -> Session:
    return Session(cast(pytest.Config, Asked(**options)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"case": ["no-such-case"]}, "--case no-such-case: unknown"),
        ({"op": ["colapse"]}, "--op colapse: unknown, expected one of expand, collapse"),
        ({"tp": [3]}, "--tp 3: unknown, expected one of 1, 2, 4, 8"),
        ({"backend": ["cuda"]}, "--backend cuda: unknown, expected one of oracle"),
        ({"impl": ["collapse=missing.py:f"]}, "there is no file missing.py"),
        ({"require": ["moon"]}, "--require moon: unknown, expected one of gpu, triton, tilelang"),
        ({"require": ["gpu"]}, "--require gpu: this run uses no GPU"),
        (
            {"impl": ["collapse=oracle:collapse", "collapse=oracle.collapse:collapse"]},
            "a function of that name is given",
        ),
        ({"op": ["fn_broadcast"], "tp": [8]}, "nothing to judge"),
        ({"case": [CASE], "op": ["post"]}, "nothing to judge"),
    ],
)
def test_what_was_asked_wrongly_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        session(**options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_options_select_trials() -> None:
    trials = list(session(op=["collapse"], tp=[8], backend=["oracle"]).trials())
    assert {(trial.case.op, trial.backend, trial.tp) for trial in trials} == {("collapse", "oracle", 8)}
    assert [trial.case.name for trial in session(case=[CASE], tp=[1], backend=["oracle"]).trials()] == [CASE]


def test_a_users_function_is_judged_alone_and_only_on_its_op() -> None:
    own = session(impl=["stream_mean=oracle.streams:stream_mean"])
    assert {(trial.case.op, trial.backend) for trial in own.trials()} == {("stream_mean", "impl-stream_mean")}
    assert {op for _, op, _ in own.laws()} == {"stream_mean"}


def test_a_backend_asked_for_is_judged_beside_the_users_function() -> None:
    both = session(impl=["stream_mean=oracle.streams:stream_mean"], backend=["oracle"], op=["stream_mean"])
    assert both.backends == ("oracle", "impl-stream_mean")


def test_laws_are_left_out_when_a_case_is_asked_for() -> None:
    assert not list(session(case=[CASE]).laws())
    assert list(session(op=["collapse"], backend=["oracle"]).laws())
