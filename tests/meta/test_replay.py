"""Failing inputs written to a file and judged from it, and the verdicts of two runs compared."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.build import Inputs, build
from cases.schema import Case
from oracle.arith import bits
from tests import replay, verdicts
from tests.implementations import Implementation, UsageError
from tests.judge import Failure, judge
from tests.subjects import subject

ROOT = Path(__file__).parents[2]
WRONG_KERNEL = """
import torch

def doubled(residual, pre_mix):
    return (2 * (residual.float() * pre_mix[:, :, None]).sum(1)).to(torch.bfloat16)
"""


def failures_from(case: Case, token: int) -> list[Failure]:
    """What a collapse gets that is wrong from one token on."""
    import oracle

    def late(residual: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
        result = oracle.collapse(residual, pre_mix)
        result[token:] += 1
        return result

    return judge(case, Implementation("collapse", "late", late, accepts_out=False), 1)


def same(one: Inputs, other: Inputs) -> bool:
    """Whether two inputs have the same tensors, bit by bit."""
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(bits(tensor), bits(other.tensors[name])) for name, tensor in one.tensors.items()
    )


def test_a_file_gives_the_inputs_back(tmp_path: Path) -> None:
    """Catches tensors written with their gaps, in another order, or without the layout that made a kernel fail."""
    case = subject("collapse", tokens=5)
    said = replay.dump(tmp_path, case, "late", 1, failures_from(case, 3))
    (path,) = tmp_path.iterdir()
    assert said.endswith(f"./run check --replay {path}")
    again, inputs = replay.load(path)
    assert (again.op, again.tokens, again.arguments) == (case.op, case.tokens, case.arguments)
    assert same(inputs, build(case))


def test_large_inputs_keep_the_first_wrong_token(tmp_path: Path) -> None:
    """Catches a cut that leaves out what failed, and a file that is as large as a GPU test."""
    case = subject("collapse", tokens=40)
    whole = build(case).tensors
    limit = sum(tensor.numel() * tensor.element_size() for tensor in whole.values()) // 8
    said = replay.dump(tmp_path, case, "late", 1, failures_from(case, 17), limit)
    assert "tokens 17 to 21 of 40" in said
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 2 * limit
    again, inputs = replay.load(path)
    assert again.tokens == 5
    assert torch.equal(bits(inputs.tensors["residual"]), bits(whole["residual"][17:22]))


def test_a_token_past_the_limit_is_not_written(tmp_path: Path) -> None:
    """Catches a disk that fills up in a nightly run."""
    case = subject("collapse", tokens=2)
    said = replay.dump(tmp_path, case, "late", 1, failures_from(case, 0), limit=10)
    assert "not written" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"not tensors", None])
def test_another_file_is_refused_in_a_sentence(content: bytes | None, tmp_path: Path) -> None:
    """Catches a traceback where a name was mistyped."""
    path = tmp_path / "other.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="not a file that --dump wrote"):
        replay.load(path)


def run(*arguments: str, expect: int) -> str:
    """What pytest prints when it judges case files with `arguments`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "cpu", "tests/test_cases.py"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def test_a_failure_is_dumped_replayed_and_compared(tmp_path: Path) -> None:
    """Catches a dump that is never written, a replay that judges other inputs, digests of the wrong bits."""
    kernel, dumped = tmp_path / "kernel.py", tmp_path / "dumped"
    kernel.write_text(WRONG_KERNEL)
    wrong, right, replayed = (tmp_path / f"{name}.json" for name in ("wrong", "right", "replayed"))
    chosen = ("--case", "collapse-integer", "--tp", "1")
    ours = (*chosen, "--impl", f"collapse={kernel}:doubled", "--dump", str(dumped), "--verdict-json", str(wrong))
    text = run(*ours, expect=1)
    (path,) = dumped.iterdir()
    assert f"inputs written: ./run check --replay {path}" in text
    run(*chosen, "--backend", "oracle", "--verdict-json", str(right), expect=0)
    run("--replay", str(path), "--tp", "1", "--backend", "oracle", "--verdict-json", str(replayed), expect=0)
    first, second, third = (json.loads(file.read_text()) for file in (wrong, right, replayed))
    assert (first["counts"], second["counts"]) == ({"mismatch": 1}, {"exact": 1})
    assert second["digests"] == third["digests"]
    (line,) = verdicts.compare(first, second)
    assert line.startswith("collapse-integer: layer_input: ")
    assert "by A impl-doubled tp1" in line
    assert "by B oracle tp1" in line
    assert verdicts.main([str(right), str(replayed)]) == 0
    assert verdicts.main([str(wrong), str(right)]) == 1


RUN: dict[str, Any] = {
    "schema": 1,
    "versions": {"torch": "2"},
    "device": "cpu",
    "counts": {"exact": 2},
    "digests": {"c": {"triton tp1": {"layer_input": "aa"}, "triton tp4": {"layer_input": "aa"}}},
}


def test_runs_agree_across_backends_and_shards() -> None:
    """Catches a comparison of like with like only: a Triton row and a TileLang row would share nothing."""
    other = copy.deepcopy(RUN)
    other["digests"] = {"c": {"tilelang tp8": {"layer_input": "aa"}}, "d": {}}
    assert not list(verdicts.compare(RUN, other))
    assert "only in B: 1 cases (d)" in "\n".join(verdicts.introduction(RUN, other))
    other["digests"]["c"]["tilelang tp8"]["layer_input"] = "bb"
    assert len(list(verdicts.compare(RUN, other))) == 1


def test_runs_without_a_common_case_do_not_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches two rows that judged nothing, or nothing in common, reported as equal."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(RUN))
    other.write_text(json.dumps({**RUN, "digests": {}}))
    assert verdicts.main([str(one), str(other)]) == 1
    assert "0 cases in both" in capsys.readouterr().out
    other.write_text("{}")
    for file, says in ((other, "no file of --verdict-json"), (tmp_path / "none.json", "cannot be read: No such file")):
        with pytest.raises(SystemExit) as ended:
            verdicts.main([str(one), str(file)])
        assert ended.value.code == 2, "not the status of runs that differ"
        assert says in capsys.readouterr().err
