"""The options, the header, the verdicts and the exit status, as a user meets them: whole runs in processes of their own.

Each run judges one small case, so that these tests stay quick; what they catch is a wrong kernel that ends a run
with status 0, a failure that takes the rest of the run with it, and an error that only its author understands.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cases.load import load_all
from cases.schema import Case
from tests.plugin import CASES

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


def judge(kernels: Path, function: str, *arguments: str, expect: int) -> str:
    asked = ("--case", CASE, "--tp", "1", "--impl", f"collapse={kernels}:{function}")
    return run(*asked, *arguments, expect=expect)


def test_a_right_kernel_passes_and_the_header_says_where_it_ran(kernels: Path) -> None:
    text = judge(kernels, "right", "--device", "cpu", expect=0)
    assert re.search(r"^mHC oracle suite: python \S+, torch \S+, numpy \S+, triton \S+, tilelang \S+$", text, re.M)
    assert "device: cpu, tier: local" in text
    assert re.search(r"^backend triton: ", text, re.M)
    assert re.search(r"^collapse +impl-right +exact 1/1$", text, re.M)


def test_a_wrong_kernel_fails_with_the_report(kernels: Path) -> None:
    text = judge(kernels, "doubled", expect=1)
    assert re.search(r"^collapse +impl-doubled +exact 0/1, 1 mismatch$", text, re.M)
    assert re.search(r"collapse on impl-doubled, tp 1: \d+ of \d+ layer_input values differ", text)
    assert f"./run check --case {CASE} --tp 1 --impl collapse={kernels}:doubled" in text
    assert "def test_case" not in text, "the report is for kernel engineers: no traceback of the suite"


@pytest.mark.parametrize(
    ("function", "outcome", "words"),
    [
        ("raising", "error", "no kernel image is available"),
        ("listing", "error", "collapse must return one tensor (layer_input), impl-listing returned a list of float"),
        ("touching", "mismatch", "changed its input pre_mix"),
        ("overrunning", "mismatch", "wrote outside out (layer_input)"),
    ],
)
def test_a_kernel_that_misbehaves_is_a_verdict(kernels: Path, function: str, outcome: str, words: str) -> None:
    text = judge(kernels, function, expect=1)
    assert re.search(rf"^collapse +impl-{function} +exact 0/1, 1 {outcome}$", text, re.M)
    assert words in text


def test_a_hanging_or_dying_kernel_does_not_end_the_run(kernels: Path) -> None:
    """One loops in Python, one hangs in C where no signal reaches it, one ends its process; a right one follows."""
    request = [item for name in ("looping", "right") for item in ("--impl", f"collapse={kernels}:{name}")]
    common = ("--case", CASE, "--tp", "1", "-n", "1")
    text = run(*common, *request, "--timeout", "5", expect=1)
    assert re.search(r"^collapse +impl-looping +exact 0/1, 1 timeout$", text, re.M)
    assert re.search(r"^collapse +impl-right +exact 1/1$", text, re.M)
    request = [item for name in ("stuck", "dying", "right") for item in ("--impl", f"collapse={kernels}:{name}")]
    text = run(*common, *request, "-o", "faulthandler_timeout=5", "--timeout", "3", expect=1)
    for name in ("stuck", "dying"):
        assert re.search(rf"^collapse +impl-{name} +exact 0/1, 1 error$", text, re.M)
    assert re.search(r"^collapse +impl-right +exact 1/1$", text, re.M)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--case", "no-such-case"), "--case no-such-case: unknown"),
        (("--op", "colapse"), "--op colapse: unknown, expected one of expand, collapse"),
        (("--tp", "3"), "--tp 3: unknown, expected one of 1, 2, 4, 8"),
        (("--backend", "cuda"), "--backend cuda: unknown, expected one of oracle"),
        (("--impl", "collapse=missing.py:f"), "there is no file missing.py"),
        (("--require", "moon"), "--require moon: unknown, expected one of gpu, triton, tilelang"),
        (("--require", "gpu", "--device", "cpu"), "--require gpu: this run uses no GPU"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_sentence_and_status_4(arguments: tuple[str, ...], words: str) -> None:
    text = run(*arguments, expect=4)
    assert words in text
    assert "Traceback" not in text
