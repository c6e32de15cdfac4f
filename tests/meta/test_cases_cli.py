"""`python -m cases`: each command does what it says, and every misuse is one sentence and status 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cases.__main__ import main
from cases.build import build
from cases.flags import CASES_DIR
from cases.lint import faults
from cases.load import load_all, load_case
from cases.ops import OPS
from cases.schema import json_schema
from oracle.arith import bits
from tests.meta.documents import case, write

NEW = ["--title", "a case that a test of the commands writes", "--flags", "order", "--catches", "reversed-order"]


def new(directory: Path, name: str, op: str, *more: str) -> int:
    """Run `new` into a directory of the test's own."""
    return main(["new", name, "--op", op, *NEW, "--source", "design:6", "--into", str(directory), *more])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """What the last command said on stderr: one line, beginning with error."""
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("op", OPS)
def test_new_writes_a_case_that_can_be_blessed(tmp_path: Path, op: str) -> None:
    """Catches a scaffold that lacks what the op needs, for every op of the table."""
    name = f"made-by-new-{op.replace('_', '-')}"
    assert new(tmp_path, name, op, "--hidden", "8") == 0
    path = tmp_path / f"{name}.toml"
    assert main(["bless", str(path), "--reason", "tests of the commands need it"]) == 0
    made = load_case(path)
    assert made.expected is not None
    assert list(faults(made)) == []


def test_new_refuses_a_name_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a scaffold written over a case, or beside one of the same name."""
    taken = load_all()[0].name
    assert new(tmp_path, taken, "collapse") == 2
    assert f"expected a name that no case has, got '{taken}'" in refused(capsys)
    assert new(tmp_path, "twice", "collapse") == 0
    before = (tmp_path / "twice.toml").read_text()
    capsys.readouterr()
    assert new(tmp_path, "twice", "expand") == 2
    assert (tmp_path / "twice.toml").read_text() == before


def test_new_refuses_bad_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a scaffold that its own linter would refuse."""
    assert new(tmp_path, "Bad_Name", "collapse") == 2
    assert "name: expected text that matches" in refused(capsys)
    assert new(tmp_path, "bad-tokens", "collapse", "--tokens", "-1") == 2
    assert "tokens: expected at least 0" in refused(capsys)
    assert new(tmp_path / "none", "nowhere", "collapse") == 2
    assert "--into: expected a directory" in refused(capsys)
    assert list(tmp_path.iterdir()) == []


def test_new_refuses_a_preset_that_the_op_ignores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that is taken and dropped, and a misspelt preset."""
    assert new(tmp_path, "no-config", "collapse", "--preset", "v4") == 2
    assert "--preset: expected none for op collapse" in refused(capsys)
    assert new(tmp_path, "no-such-preset", "pre", "--preset", "v42") == 2
    assert "config.preset: expected 'v4' or 'v41', got 'v42'" in refused(capsys)
    assert list(tmp_path.iterdir()) == []


def test_new_says_when_no_run_would_read_the_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a scaffold outside cases/ that its author believes to be judged."""
    assert new(tmp_path, "far-away", "collapse") == 0
    assert "no run reads it there" in capsys.readouterr().out


def test_lint_passes_every_committed_case(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a case committed unblessed, with a bad word or of a wrong size class."""
    assert main(["lint"]) == 0, capsys.readouterr().err


def test_lint_finds_an_unblessed_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a case without expected bits, which would be judged against nothing; a fault is no misuse."""
    write(tmp_path)
    assert main(["lint", "--root", str(tmp_path)]) == 1
    assert "a-case: expected: digests under contract 1 needed, got none" in refused(capsys)


def test_lint_finds_a_wrong_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a digest typed by hand, or left behind by a change of inputs; a plain lint cannot see it."""
    path = write(tmp_path)
    main(["bless", str(path), "--reason", "tests of the commands need it"])
    path.write_text(path.read_text().replace("tokens = 3", "tokens = 4"))
    capsys.readouterr()
    assert main(["lint", "--root", str(tmp_path)]) == 0
    assert main(["lint", "--root", str(tmp_path), "--recompute"]) == 1
    assert "a-case: expected.digests.layer_input: expected " in refused(capsys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 4096}, "size: expected 'full' or 'large'"),
        ({"tokens": 9000, "hidden": 64}, "size: expected 'full' or 'large'"),
        ({"flags": ["order", "order"]}, "flags: expected each word once"),
        ({"title": "A title that ends with a stop."}, "title: expected one sentence"),
        (
            {"inputs": {"arguments": {"residual": {"recipe": "file", "file": "no.safetensors", "key": "k"}}}},
            "inputs.arguments.residual.file: expected a file in cases/data",
        ),
        (
            {"inputs": {"arguments": {"pre_mix": {"recipe": "bits", "bits": ["3f800000"]}}}},
            "inputs.arguments.pre_mix.bits: expected 12 patterns, got 1",
        ),
    ],
)
def test_lint_looks_past_the_schema(change: dict[str, object], words: str) -> None:
    """Catches a linter that stopped looking at one of its rules."""
    assert any(words in fault for fault in faults(case(**change)))


def test_lint_says_what_it_did_not_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an author who takes a plain lint's word for digests that it never looks at."""
    named = ["lint", "collapse-tie-to-even-by-hand"]
    assert main(named) == 0
    assert capsys.readouterr().out == "1 cases, no fault; digests not compared, which --recompute does\n"
    assert main([*named, "--recompute"]) == 0
    assert capsys.readouterr().out == "1 cases, no fault\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["lint"], 1),
        (["lint", "--recompute"], 1),
        (["show"], 2),
        (["bless", "--reason", "tests of the commands need it"], 2),
    ],
)
def test_too_few_patterns_are_one_sentence(
    arguments: list[str], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a lint that passes what no command can build, a traceback, and a fault that is told twice."""
    path = write(tmp_path)
    main(["bless", str(path), "--reason", "tests of the commands need it"])
    few = '[inputs.arguments.pre_mix]\nrecipe = "bits"\nbits = ["3f800000"]\n\n[expected]'
    path.write_text(path.read_text().replace("[expected]", few))
    capsys.readouterr()
    command, *options = arguments
    assert main([command, str(path), *options]) == status
    assert refused(capsys) == "error: a-case: inputs.arguments.pre_mix.bits: expected 12 patterns, got 1\n"


def test_show_prints_shapes_values_and_digests(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a report without the expected bits, or one that does not compare them."""
    made = load_case(CASES_DIR / "edge" / "collapse-tie-to-even-by-hand.toml")
    assert made.expected is not None
    assert main(["show", made.name]) == 0
    said = capsys.readouterr().out
    assert "in  residual: bfloat16 [1, 2, 4] [1 1.00781 -1 -1.00781 0.00390625 0.00390625 ...]" in said
    assert f"out layer_input: bfloat16 [1, 4] [1 1.01562 -1 -1.01562], {made.expected.digests['layer_input']}" in said
    assert "as blessed" in said


def test_bless_shows_changes_and_can_only_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a dry run that writes."""
    path = write(tmp_path)
    before = path.read_text()
    assert main(["bless", str(path), "--dry-run"]) == 0
    assert "a-case: layer_input: none -> " in capsys.readouterr().out
    assert path.read_text() == before


def test_bless_leaves_an_unchanged_case_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a history that grows with every run."""
    path = write(tmp_path)
    for said in ("none -> ", "unchanged"):
        assert main(["bless", str(path), "--reason", "tests of the commands need it"]) == 0
        assert said in capsys.readouterr().out
    assert len(load_case(path).history) == 1


def test_bless_refuses_all_when_one_is_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that blesses some of its cases before it meets the bad one."""
    good, bad = write(tmp_path, name="good-case"), write(tmp_path, name="bad-case", hiden=1)
    before = good.read_text()
    assert main(["bless", str(good), str(bad), "--reason", "tests of the commands need it"]) == 2
    assert "hiden: expected no such key" in refused(capsys)
    assert good.read_text() == before


def test_bless_needs_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that became optional."""
    path = write(tmp_path)
    before = path.read_text()
    assert main(["bless", str(path)]) == 2
    assert "--reason: expected 10 characters or more" in refused(capsys)
    assert path.read_text() == before


def test_list_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a filter without effect."""
    assert main(["list", "--op", "expand", "--flag", "empty"]) == 0
    named = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert named == [one.name for one in load_all() if one.op == "expand" and "empty" in one.flags]


def test_the_inputs_that_contributing_shows_can_be_built() -> None:
    """Catches an example with a key, a recipe or a number of patterns that its reader would be refused."""
    text = (CASES_DIR.parent / "CONTRIBUTING.md").read_text()
    (shown,) = re.findall(r"^ *```toml\n( *\[inputs\.default\].*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    made = case(op="post", tokens=1, **tomllib.loads(shown))
    assert list(faults(made.model_copy(update={"expected": "any"}))) == []
    assert bits(build(made).tensors["post_mix"]).tolist() == [[0x3F800000, 0x7FFFFFFF, -0x80000000, 1]]
    assert bits(build(made).tensors["residual"])[0, 2, 3] == -0x8000


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command whose output cannot be committed as it is."""
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "no-such-case"],
        ["lint", "no-such-case"],
        ["lint", "--root", "no-such-directory"],
        ["bless", "no-such-case", "--reason", "tests of the commands need it"],
        ["bless", "no-such-file.toml", "--reason", "tests of the commands need it"],
    ],
)
def test_unknown_names_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, and a status that a script would take for success."""
    assert main(arguments) == 2
    assert "no-such-" in refused(capsys)


@pytest.mark.parametrize("arguments", [[], ["grow"], ["new", "a-name"], ["list", "--op", "colapse"]])
def test_misuse_is_status_2(arguments: list[str]) -> None:
    """Catches a command line that runs something else than was asked for."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_a_reader_that_stops_is_no_fault() -> None:
    """Catches a traceback behind `python -m cases list | head -1`."""
    command = f"{sys.executable} -m cases list | head -1"
    run = subprocess.run(["bash", "-c", command], cwd=CASES_DIR.parent, capture_output=True, text=True, check=True)
    assert run.stdout.count("\n") == 1
    assert run.stderr == ""


def test_the_module_runs_without_the_oracle_or_torch() -> None:
    """Catches a listing that takes seconds because it loads torch, in a process of its own."""
    code = "import sys; from cases.__main__ import main; main(['list']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=CASES_DIR.parent, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"
