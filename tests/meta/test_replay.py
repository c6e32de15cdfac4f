"""Failing inputs written to a file and judged from it, and the verdicts of two runs compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import oracle
from cases.build import Inputs, build
from cases.schema import Case
from oracle.arith import bits
from tests import replay, verdicts
from tests.implementations import Implementation, UsageError
from tests.judge import REPLAYED, Failure, digests, judge
from tests.subjects import subject

ROOT = Path(__file__).parents[2]
WRONG_KERNEL = """
import torch

def doubled(residual, pre_mix):
    return (2 * (residual.float() * pre_mix[:, :, None]).sum(1)).to(torch.bfloat16)
"""


def failures_from(case: Case, token: int) -> list[Failure]:
    """What a collapse gets that is wrong from one token on."""

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


def patched(made: str) -> Case:
    """A collapse case with one element set by hand, in the recipe of all arguments or in that of its streams."""
    document = subject("collapse", tokens=6).model_dump(by_alias=True, exclude_unset=True, mode="json")
    table = {"recipe": "normal", "set": [{"index": [5], "value": 1.0}]}
    inputs = {"default": table} if made == "default" else {"arguments": {made: table}}
    return Case.model_validate(document | {"inputs": inputs})


@pytest.mark.parametrize("made", ["default", "residual"])
def test_a_cut_leaves_behind_what_was_set_by_hand(made: str, tmp_path: Path) -> None:
    """Catches a dump that its own replay refuses: the index of a patch lies past the tokens that are left."""
    case = patched(made)
    limit = sum(tensor.numel() * tensor.element_size() for tensor in build(case).tensors.values()) // 3
    assert "tokens 4 to 5 of 6" in replay.dump(tmp_path, case, "late", 1, failures_from(case, 4), limit)
    again, _ = replay.load(next(tmp_path.iterdir()))
    assert again.tokens == 2


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


def test_a_folder_is_refused_with_a_file_in_it(tmp_path: Path) -> None:
    """Catches "No such device" for the name that --dump itself was given."""
    refusal = f"--replay {tmp_path}: expected one file that --dump wrote, got a folder"
    with pytest.raises(UsageError) as raised:
        replay.load(tmp_path)
    assert str(raised.value) == f"{refusal} without any"
    for tokens in (1, 2):
        replay.dump(tmp_path, subject("collapse", tokens=tokens, variant=f"t{tokens}"), "late", 1, [])
    with pytest.raises(UsageError) as raised:
        replay.load(tmp_path)
    assert str(raised.value) == f"{refusal} of 2; the first is {tmp_path}/collapse-t1-late-tp1.safetensors"


def rewritten(folder: Path, op: str, **changes: Any) -> Path:
    """A dumped file whose metadata was changed: ``metadata`` replaces all of its JSON, other names a part of it."""
    replay.dump(folder, subject(op, tokens=2), "late", 1, [])
    (path,) = folder.iterdir()
    with safe_open(path, framework="pt") as stored:
        about = json.loads(stored.metadata()[replay.KEY])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    about["case"] |= changes.pop("case", {})
    text = changes.pop("metadata", json.dumps(about | changes))
    save_file(tensors, path, metadata={replay.KEY: text})
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metadata": "[]"}, "expected an object, got []"),
        ({"metadata": '"x"'}, "expected an object, got 'x'"),
        ({"metadata": "null"}, "expected an object, got None"),
        ({"metadata": "["}, "expected JSON, got "),
        ({"metadata": "[" * 200_000 + "]" * 200_000}, "expected JSON, got recursion limit exceeded"),
        ({"metadata": "{}"}, "case: expected a value, got none"),
        ({"case": {"schema": 2}}, "case.schema: expected 1, got 2"),
        ({"case": {"name": "A"}}, "case.name: expected text that matches "),
        ({"case": {"colour": 2}}, "case.colour: expected no such key, got 2"),
        ({"case": {"tp": [3]}}, "case.tp.0: expected 1, 2, 4 or 8, got 3"),
        ({"case": {"rows": 5}}, "case: rows: expected nothing, because op collapse fixes M"),
        ({"case": {"tokens": 1000}}, "residual: expected bfloat16 [1000, "),
        ({"params": []}, "params: expected an object, got []"),
        ({"params": {"numel": 1}}, "params: expected [], got ['numel']"),
    ],
)
def test_damaged_metadata_is_refused_in_a_sentence(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Catches a traceback for JSON of another form, and inputs that are not those of the case beside them."""
    path = rewritten(tmp_path, "collapse", **changes)
    with pytest.raises(UsageError) as raised:
        replay.load(path)
    assert str(raised.value).startswith(f"--replay {path}: not a file that --dump wrote: {words}")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("config", [[], {"moon": 1}, {"hc_mult": 0}, {"rms_eps": 10**400}])
def test_a_damaged_config_is_refused_in_a_sentence(config: object, tmp_path: Path) -> None:
    """Catches a table of constants that only the first call finds to be none."""
    params = {**build(subject("pre", tokens=2)).params, "config": config}
    with pytest.raises(UsageError, match=r"not a file that --dump wrote: params\.config: "):
        replay.load(rewritten(tmp_path, "pre", params=params))


def test_a_file_of_other_tensors_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Catches weights taken for a dump, and a message that is only the name of a key."""
    path = tmp_path / "weights.safetensors"
    save_file({"residual": torch.zeros(2)}, path)
    with pytest.raises(UsageError, match=r"not a file that --dump wrote: its metadata has no mhc_replay$"):
        replay.load(path)


def run(*arguments: str, expect: int) -> str:
    """What pytest prints when it judges case files with `arguments`."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "cpu", "tests/test_cases.py"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def test_a_failure_is_dumped_replayed_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    first, second, third = map(verdicts.load, (wrong, right, replayed))
    assert (first.counts, second.counts) == ({"mismatch": 1}, {"exact": 1})
    assert second.digests == third.digests
    (line,) = verdicts.compare(first, second)
    assert line.startswith("collapse-integer: layer_input: ")
    assert "by A impl-doubled tp1" in line
    assert "by B oracle tp1" in line
    assert verdicts.main([str(right), str(replayed)]) == 0
    assert capsys.readouterr().out.endswith("in both: 1 outputs of 1 cases: same digests\n")
    assert verdicts.main([str(wrong), str(right)]) == 1
    assert capsys.readouterr().out.endswith("in both: 1 outputs of 1 cases: 1 of them differ\n")


def in_fp16(residual: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    return oracle.collapse(residual, pre_mix).half()


def in_fp32(residual: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    return oracle.collapse(residual, pre_mix).float()


def in_fewer_rows(residual: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    return oracle.collapse(residual, pre_mix)[:-1].double()


@pytest.mark.parametrize(
    ("kernel", "remark"),
    [(in_fp16, "dtype:float16 shape:3,97"), (in_fewer_rows, "dtype:float64 shape:2,97"), (in_fp32, "")],
)
def test_an_output_of_another_dtype_never_has_the_oracles_digest(
    kernel: Callable[..., torch.Tensor], remark: str
) -> None:
    """Catches a kernel that returns FP16, recorded with the bits that it should have had."""
    case = subject("collapse", tokens=3)
    failures = judge(case, Implementation("collapse", "other", kernel, accepts_out=False), 1)
    (value,) = verdicts.found_digests(case, failures).values()
    assert value == remark if remark else verdicts.is_digest(value)
    assert value not in digests(case).values()


def test_poison_where_a_nan_is_due_has_no_digest_of_the_oracle() -> None:
    """Catches an element that was never written, recorded as the NaN that it should have become: digests know one."""
    case = subject("collapse", tokens=1).model_copy(update={"name": "nothing-but-nan"})
    inputs = build(case)
    inputs.tensors["residual"].fill_(torch.nan)

    def unwritten(*_: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out

    with mock.patch.dict(REPLAYED, {case.name: inputs}):
        failures = judge(case, Implementation("collapse", "unwritten", unwritten, accepts_out=True), 1)
        (value,), (exact,) = verdicts.found_digests(case, failures).values(), digests(case).values()
    assert failures
    assert value == f"not-exact:{exact}"


SAME, OTHER = "a" * 64, "b" * 64


def verdict_file(**changes: Any) -> dict[str, Any]:
    """A small file of ``--verdict-json``, with some of its parts replaced."""
    trials = {"triton tp1": {"layer_input": SAME}, "triton tp4": {"layer_input": SAME}}
    plain = {"schema": 1, "versions": {"torch": "2"}, "device": "cpu", "counts": {"exact": 2}, "digests": {"c": trials}}
    return plain | changes


def a_run(**changes: Any) -> verdicts.Run:
    return verdicts.Run.model_validate(verdict_file(**changes))


def test_runs_agree_across_backends_and_shards() -> None:
    """Catches a comparison of like with like only: a Triton row and a TileLang row would share nothing."""
    other = a_run(digests={"c": {"tilelang tp8": {"layer_input": SAME, "aux": SAME}}, "d": {"tilelang tp1": {}}})
    assert not list(verdicts.compare(a_run(), other))
    assert list(verdicts.introduction(a_run(), other))[2:] == ["only in B: 1 outputs (c aux)"]
    (line,) = verdicts.compare(a_run(), a_run(digests={"c": {"tilelang tp8": {"layer_input": OTHER}}}))
    assert line == f"c: layer_input: {SAME[:12]} by A triton tp1, A triton tp4; {OTHER[:12]} by B tilelang tp8"


def test_a_remark_agrees_with_nothing() -> None:
    """Catches two kernels that both return FP16 taken for equal: of their bits nothing is known."""
    half = a_run(digests={"c": {"impl-half tp1": {"layer_input": "dtype:float16 shape:3,5"}}})
    (line,) = verdicts.compare(half, half)
    assert line == "c: layer_input: dtype:float16 shape:3,5 by A impl-half tp1, B impl-half tp1"


@pytest.mark.parametrize("found", [{}, {"c": {}}, {"c": {"gpu tp1": {}}}, {"c": {"gpu tp1": {"aux": SAME}}}])
def test_runs_without_a_common_output_do_not_agree(
    found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches two rows that judged nothing, or nothing in common, reported as equal because a case has one name."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(verdict_file()))
    other.write_text(json.dumps(verdict_file(digests=found)))
    assert verdicts.main([str(one), str(other)]) == 1
    text = capsys.readouterr().out
    assert text.endswith("in both: 0 outputs of 0 cases: nothing to compare\n")
    assert "only in A: 1 outputs (c layer_input)" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("", "expected JSON, got EOF"),
        ("\udc80", "expected JSON, got "),
        ("{}", "schema: expected a value, got none"),
        ("[]", "expected an object, got []"),
        ("[" * 200_000, "expected JSON, got recursion limit exceeded"),
        (verdict_file(schema=2), "schema: expected 1, got 2"),
        (verdict_file(versions=[]), "versions: expected an object, got []"),
        (verdict_file(device=None), "device: expected a string, got None"),
        (verdict_file(counts={"exact": "2"}), "counts.exact: expected an integer, got '2'"),
        (verdict_file(digests={"c": 1}), "digests.c: expected an object, got 1"),
        (verdict_file(digests={"c": {"x": "y"}}), "digests.c.x: expected an object, got 'y'"),
        (verdict_file(digests={"c": {"x": {"aux": 1}}}), "digests.c.x.aux: expected a string, got 1"),
    ],
)
def test_a_damaged_file_of_verdicts_is_refused_in_a_sentence(
    content: str | dict[str, Any] | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback, whose status 1 reads as runs that differ."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(verdict_file()))
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        other.write_text(text, errors="surrogateescape")
    with pytest.raises(SystemExit) as ended:
        verdicts.main([str(one), str(other)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith(f"verdicts: {other} ")
    assert said.count("\n") == 1
