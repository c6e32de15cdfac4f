"""The options, the header, the verdicts and the exit status, as a user meets them.

Runs in processes of their own judge one small case, so that they stay quick; they catch a wrong kernel that ends a run
with status 0, a failure that takes the rest of the run with it, and an error that only its author understands.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, cast

import pytest
import torch

from cases.load import load_all
from cases.schema import Case
from oracle.report import Outcome
from tests import environment, table
from tests.__main__ import PARALLEL
from tests.implementations import UsageError
from tests.plugin import CASES, NOTHING_RAN, Session, unmet

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


def packed_only(residual, pre_mix):
    for name, tensor in (("residual", residual), ("pre_mix", pre_mix)):
        if not tensor.is_contiguous() or tensor.storage_offset() % 8:
            raise ValueError(f"{name} must be contiguous and aligned")
    return oracle.collapse(residual, pre_mix)


def strides_ignored(residual, pre_mix):
    return oracle.collapse(residual.as_strided(residual.shape, residual.contiguous().stride()), pre_mix)


def strided_only(residual, pre_mix):
    if residual.is_contiguous():
        raise ValueError("residual must not be contiguous")
    return oracle.collapse(residual, pre_mix)


def vague(residual, pre_mix):
    if not residual.is_contiguous():
        raise ValueError("unsupported input")
    return oracle.collapse(residual, pre_mix)


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


def laid_out_case() -> Case:
    """A collapse case whose streams have gaps."""
    return next(
        case
        for case in load_all(CASES)
        if case.op == "collapse" and case.size == "small" and case.made_by("residual").layout == "columns"
    )


LAID_OUT = laid_out_case()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "kernels.py"
    path.write_text(KERNELS)
    return path


def run(*arguments: str, expect: int, tests: str = "tests/test_cases.py") -> str:
    """Run pytest on tests, those of the case files unless named, from the root and return what it printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tests, *arguments]
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
    error = text[text.index("collapse on impl-raising, tp 1: error: RuntimeError: no kernel image is available") :]
    told, ending = error.split("  rerun ", 1)
    assert re.search(r"(?m)^  about    \S.*\n  catches  \S", told)
    assert "kernels.py:17 in raising: raise RuntimeError(" in told
    assert "judge.py" not in told
    assert ending.split("\n")[0].strip() == f"./run check --case {CASE} --tp 1 --impl collapse={kernels}:raising"
    for line in (
        "failed: 1 mismatch on impl-touching: changed its input pre_mix",
        "failed: 1 mismatch on impl-wide: wrong dtype",
        "failed: 1 error on impl-raising: RuntimeError: no kernel image is available",
    ):
        assert line in text.split("\n")


def test_a_refusal_of_strides_is_a_skip_where_there_are_some_and_an_error_elsewhere(kernels: Path) -> None:
    """Catches a right kernel failed for what it says it does not take, and a wrong one let off."""
    names = ("packed_only", "strides_ignored", "vague", "right")
    asked = ["--case", LAID_OUT.name, "--case", CASE, "--tp", str(LAID_OUT.tp[0])]
    own = [item for name in (*names, "strided_only") for item in ("--impl", f"collapse={kernels}:{name}")]
    text = run(*asked, *own, "--device", "cpu", expect=1)
    verdicts = ("exact 1/1, 1 skipped", "exact 1/2, 1 mismatch", "exact 1/2, 1 error", "exact 2/2")
    for name, verdict in zip(names, verdicts, strict=True):
        assert re.search(row(name, verdict), text), name
    assert "skipped: 1 on impl-packed_only: refuses strides: " in text
    assert re.search(row("strided_only", "exact 1/2, 1 error"), text), "packed inputs must be taken"
    wrong = text[text.index("collapse on impl-strides_ignored, tp 1: ") :]
    assert re.search(r"(?m)^  strides  residual \[\d+, \d+, \d+\] by \[\d+, \d+, 2\], columns$", wrong)


def test_a_law_reports_as_a_case_does_and_its_command_repeats_it(kernels: Path) -> None:
    """Catches a breach of which nobody learns on what it was seen, or how to see it again."""
    own = f"collapse={kernels}:strides_ignored"
    text = run("--law", "layout_independence", "--impl", own, "--device", "cpu", expect=1, tests="tests/test_laws.py")
    assert "collapse on impl-strides_ignored, law layout_independence: residual as " in text
    assert "  subject  collapse, T = 17, n = 4, H = 97" in text
    assert "failed: 2 mismatch on impl-strides_ignored: law layout_independence" in text
    command = f"./run check --law layout_independence --subject collapse --impl {own}"
    assert re.search(rf"(?m)^  rerun    {re.escape(command)}$", text)
    again = run(*command.split()[2:], "--device", "cpu", expect=1, tests="tests/test_laws.py")
    assert "1 verdict on 0 cases: 1 mismatch" in again


def test_what_is_required_must_be_judged() -> None:
    """Catches a run that is green because what it was for never ran, and one that is red for a skip by design."""
    large = next(case for case in load_all(CASES) if case.op == "collapse" and case.size == "large")
    asked = ("--case", large.name, "--tp", str(large.tp[-1]), "--device", "cpu", "--require", "tilelang")
    text = run(*asked, "--backend", "tilelang", expect=1)
    assert "required, but nothing was judged on it: tilelang" in text
    text = run(*asked, "--case", CASE, "--tp", "1", "--backend", "tilelang", expect=0)
    assert "a large case: it needs a GPU" in text


def test_a_missing_compiler_is_a_reason_unless_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a nightly row that is green without what it names, and a laptop refused for want of a compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    lone = session()
    assert "tilelang" not in lone.backends
    assert [name for name, _ in lone.unavailable()] == ["tilelang"]
    with pytest.raises(UsageError, match=r"^--require tilelang: no C\+\+ compiler"):
        session(require=["tilelang"])


def judged(backend: str, outcome: Outcome = Outcome.EXACT) -> table.Result:
    return table.Result("collapse", "a", backend, 1, outcome)


def gpu_test(outcome: Literal["passed", "skipped"]) -> pytest.TestReport:
    return pytest.TestReport("tests/gpu/test_a.py::test_a", ("", None, ""), {"gpu": 1}, outcome, None, "call")


@pytest.mark.parametrize(
    ("required", "results", "reports", "missing"),
    [
        (["triton"], [judged("triton"), judged("triton", Outcome.SKIPPED)], [], []),
        (["triton", "tilelang"], [judged("triton"), judged("tilelang", Outcome.SKIPPED)], [], ["tilelang"]),
        (["triton"], [judged("oracle"), judged("impl-mine")], [], ["triton"]),
        (["triton"], [judged("triton", Outcome.ERROR)], [], []),
        (["gpu"], [judged("impl-mine")], [], []),
        (["gpu"], [judged("triton", Outcome.SKIPPED)], [gpu_test("skipped")], ["gpu"]),
        (["gpu"], [], [gpu_test("passed")], []),
        (["gpu", "triton"], [], [], ["gpu", "triton"]),
    ],
)
def test_one_judged_result_is_what_meets_a_requirement(
    required: list[str], results: list[table.Result], reports: list[pytest.TestReport], missing: list[str]
) -> None:
    assert unmet(required, results, reports) == missing


def test_a_hanging_or_dying_kernel_does_not_end_the_run(kernels: Path) -> None:
    """One loops in Python, one hangs in C where no signal reaches it, one ends its process; a right one follows."""
    names = ("looping", "stuck", "dying", "right")
    limits = (*PARALLEL, "-n", "2", "--timeout", "2", "-o", "faulthandler_timeout=4")
    text = run(*impls(kernels, *names), *limits, expect=1)
    for name, outcome in zip(names[:-1], ("timeout", "timeout", "error"), strict=True):
        assert re.search(row(name, f"exact 0/1, 1 {outcome}"), text), name
    assert re.search(row("right", "exact 1/1"), text)
    for words in (
        "collapse on impl-looping, tp 1: timeout: Failed: Timeout (>2.0s) from pytest-timeout.",
        "in looping: ",
        "collapse on impl-stuck, tp 1: timeout: hung where no signal reaches it, and was ended",
        "collapse on impl-dying, tp 1: error: the process died",
        f"./run check --case {CASE} --tp 1 --impl collapse={kernels}:dying",
        "failed: 1 timeout on impl-looping: ran into the time limit",
    ):
        assert words in text


def test_a_request_that_cannot_be_met_ends_with_status_4() -> None:
    text = run("--op", "colapse", expect=4)
    assert "--op colapse: unknown, expected one of expand, collapse" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("how", [(), ("-q",), (*PARALLEL, "-n", "2")], ids=["alone", "quiet", "parallel"])
def test_the_verdicts_are_the_last_that_is_said(kernels: Path, how: tuple[str, ...]) -> None:
    """Catches a table that pytest's own list of failed trials, one line each, pushes off the screen."""
    text = run(*impls(kernels, "doubled", "right"), *how, expect=1)
    after = text[text.index("= verdicts =") :].rstrip().split("\n")
    assert [line.split()[0] for line in after[1:-1]] == ["op", "collapse", "collapse", "failed:", "2"]
    assert "1 failed, 1 passed" in after[-1]


@pytest.mark.parametrize("workers", [(), (*PARALLEL, "-n", "2")], ids=["alone", "parallel"])
def test_a_run_without_a_test_says_so(workers: tuple[str, ...]) -> None:
    """Catches a mistyped -k, which ends in a status that says nothing to who does not know pytest's."""
    text = run("-k", "no-such-test", "--case", CASE, *workers, expect=5)
    assert text.split("\n").count(NOTHING_RAN) == 1


OPTIONS = ("op", "case", "tp", "law", "subject", "backend", "impl", "require")


class Asked:
    """A pytest config that was given some of the suite's options."""

    def __init__(self, **options: object) -> None:
        lists: dict[str, object] = {name: [] for name in OPTIONS}
        self.options = lists | {"device": "cpu", "dump": None, "replay": None} | options

    def getoption(self, name: str) -> object:
        return self.options[name]


def session(**options: object) -> Session:
    return Session(cast(pytest.Config, Asked(**options)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"case": ["no-such-case"]},
            "--case no-such-case: unknown, expected one of those that `./run cases list` shows",
        ),
        ({"case": ["colapse-ties"]}, "--case colapse-ties: unknown, expected one of collapse-ties, "),
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
        ({"case": [CASE], "law": ["repeatability"]}, "nothing to judge"),
        ({"law": ["gravity"]}, "--law gravity: unknown, expected one of shard_invariance, "),
        ({"subject": ["colapse"]}, "--subject colapse: unknown, expected one of expand, "),
    ],
)
def test_what_was_asked_wrongly_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        session(**options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("hidden", ["", " ", "-1", "NoDevFiles", ",0", "0,0", "1"])
def test_a_gpu_hidden_in_any_way_is_not_used(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run kept off the GPU that ends because it has none."""
    monkeypatch.setattr(environment, "physical_gpus", lambda: ["0"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert session(device="auto").device == "cpu"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("auto", "--device auto: this machine has a GPU, but no CUDA device is visible to this torch; --device cpu "),
        ("cuda", "--device cuda: no CUDA device is visible to this torch"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_named(device: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a complaint of an option that was not given, and a run that goes to the CPU and says nothing of it."""
    monkeypatch.setattr(environment, "physical_gpus", lambda: ["0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError) as raised:
        session(device=device)
    assert str(raised.value).startswith(words)


def test_options_select_trials() -> None:
    trials = list(session(op=["collapse"], tp=[8], backend=["oracle"]).trials())
    assert {(trial.case.op, trial.backend, trial.tp) for trial in trials} == {("collapse", "oracle", 8)}
    assert [trial.case.name for trial in session(case=[CASE], tp=[1], backend=["oracle"]).trials()] == [CASE]


def test_a_users_function_is_judged_alone_and_only_on_its_op() -> None:
    own = session(impl=["stream_mean=oracle.streams:stream_mean"])
    assert {(trial.case.op, trial.backend) for trial in own.trials()} == {("stream_mean", "impl-stream_mean")}
    assert {trial.case.op for trial in own.laws()} == {"stream_mean"}


def test_a_backend_asked_for_is_judged_beside_the_users_function() -> None:
    both = session(impl=["stream_mean=oracle.streams:stream_mean"], backend=["oracle"], op=["stream_mean"])
    assert both.backends == ("oracle", "impl-stream_mean")


def test_laws_are_left_out_when_a_case_is_asked_for() -> None:
    assert not list(session(case=[CASE]).laws())
    assert list(session(op=["collapse"], backend=["oracle"]).laws())


def test_a_law_or_a_subject_asked_for_leaves_out_cases_and_other_laws() -> None:
    chosen = session(law=["repeatability"], subject=["pre-entry", "pre-norm"], backend=["oracle"])
    assert not list(chosen.trials())
    assert not list(chosen.kernels())
    trials = list(chosen.laws())
    assert {(one.law, one.case.name) for one in trials} == {("repeatability", f"pre-{v}") for v in ("entry", "norm")}
    assert not list(session(subject=["pre-entry"], op=["post", "pre"], law=["gather_commutes", "own_outputs"]).trials())


def test_laws_that_say_nothing_of_a_kernel_are_left_out() -> None:
    """Catches a law counted as kept by a kernel that it never called in that way."""
    own = session(impl=["stream_mean=oracle.streams:stream_mean"])
    assert "out_layout_independence" not in {trial.law for trial in own.laws()}
    assert "own_outputs" in {trial.law for trial in own.laws()}
