"""The nightly matrix: every row names things that are there, and says the versions that it installs."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.__main__ import JOBS
from tests.meta.test_house import pins

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PULL_REQUEST = (ROOT / ".github" / "workflows" / "pull-request.yml").read_text()
NIGHTLY = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
ROWS: list[dict[str, Any]] = json.loads((ROOT / ".github" / "matrix.json").read_text())
SETS = {path.stem for path in (ROOT / "constraints").glob("*.txt")} - {"shared"}
ARCHES = {"x86-64", "aarch64", "sm_80", "sm_90", "sm_100", "sm_120"}
TPS = {"1", "2", "4", "8"}
LANGUAGES = {"triton", "tilelang"}
KEYS = {"name", "runner", "image", "options", "set", "torch", "triton", "tilelang", "arch", "tp", "tox"}


def environments() -> dict[str, str]:
    """Environment name -> the command of tox.ini."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    named = {name.removeprefix("testenv:"): tox[name] for name in tox.sections() if name.startswith("testenv:")}
    return {name: section.get("commands", tox["testenv"]["commands"]) for name, section in named.items()}


def judged(command: str) -> set[str]:
    """The languages that a command judges: all, or those among the backends that it names."""
    return LANGUAGES & set(re.findall(r"--backend (\S+)", command)) or LANGUAGES


def required(command: str) -> set[str]:
    """What a command fails without."""
    return set(re.findall(r"--require (\S+)", command))


def faults(row: dict[str, Any]) -> Iterator[str]:
    """Each thing that is wrong with a row, as a sentence that begins with the row's name."""
    if set(row) != KEYS:
        yield f"{row.get('name')}: expected the keys {sorted(KEYS)}, got {sorted(row)}"
        return
    for fault in (*_words(row), *_versions(row), *_command(row)):
        yield f"{row['name']}: {fault}"


def _words(row: dict[str, Any]) -> Iterator[str]:
    """Names of things that are not there."""
    given = {"set": [row["set"]], "tox": [row["tox"]], "arch": row["arch"].split(","), "tp": row["tp"].split(",")}
    known: dict[str, Collection[str]] = {"set": SETS, "tox": environments(), "arch": ARCHES, "tp": TPS}
    for key, words in given.items():
        for word in words:
            if word not in known[key]:
                yield f"{key}: expected one of {', '.join(sorted(known[key]))}, got {word!r}"


def _versions(row: dict[str, Any]) -> Iterator[str]:
    """Versions that the row's set does not install."""
    installed = pins(f"{row['set']}.txt") if row["set"] in SETS else {}
    for package in ("torch", "triton", "tilelang") if installed else ():
        pinned = installed.get(package, "none").removeprefix("==").partition(",")[0]
        if row[package] != pinned:
            yield f"{package}: expected {pinned!r}, which constraints/{row['set']}.txt pins, got {row[package]!r}"


def _command(row: dict[str, Any]) -> Iterator[str]:
    """A name that the comparison does not read, and languages that may be missing without a failure."""
    if row["name"].startswith("gpu-") != row["tox"].startswith("gpu"):
        rule = (
            "'gpu-' first where tox is an environment of the gpu job, and nowhere else: the last job reads rows/gpu-*"
        )
        yield f"name: expected {rule}, got {row['name']!r} with tox {row['tox']!r}"
    command = environments().get(row["tox"])
    if command is not None and not required(command) >= judged(command):
        missing = sorted(judged(command) - required(command))
        yield f"tox: expected an environment that requires what it judges, {row['tox']!r} judges {missing} without"


@pytest.mark.lint
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.get("name"))
def test_a_row_is_right(row: dict[str, Any]) -> None:
    """Catches a row that fails at night, or stays green while nothing of a language was judged or compared."""
    found = "\n".join(faults(row))
    assert not found, found


@pytest.mark.lint
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"set": "gpuu"}, "gpu-triton: set: expected one of cpu, cpu-oldest, gpu, gpu-oldest, static, got 'gpuu'"),
        ({"set": "shared"}, "gpu-triton: set: expected one of "),
        ({"tox": "gpu-both"}, "gpu-triton: tox: expected one of "),
        ({"tox": "check-both"}, "gpu-triton: name: expected 'gpu-' first where tox is an environment of the gpu job"),
        ({"name": "h200"}, "h200: name: expected 'gpu-' first where tox is an environment of the gpu job"),
        ({"name": "cpu-2", "tox": "check"}, "cpu-2: tox: expected an environment that requires what it judges"),
        ({"triton": "0.1"}, "gpu-triton: triton: expected '"),
        ({"arch": "sm_90,sm_91"}, "gpu-triton: arch: expected one of "),
        ({"tp": "1,3"}, "gpu-triton: tp: expected one of 1, 2, 4, 8, got '3'"),
        ({"colour": "red"}, "gpu-triton: expected the keys "),
    ],
)
def test_a_wrong_row_is_told_in_a_sentence(change: dict[str, str], words: str) -> None:
    """Catches a check that stopped looking at one of its rules, and one that answers a slip with a traceback."""
    (right,) = (row for row in ROWS if row["name"] == "gpu-triton")
    (fault,) = faults(right | change)
    assert fault.startswith(words)


@pytest.mark.lint
@pytest.mark.parametrize("chosen", sorted(SETS & {row.get("set") for row in ROWS}))
def test_the_rows_of_a_set_judge_every_language_that_it_pins(chosen: str) -> None:
    """Catches a release that the matrix names and no row runs."""
    known = environments()
    commands = [known[row["tox"]] for row in ROWS if row.get("set") == chosen and row.get("tox") in known]
    assert set().union(*map(judged, commands)) == LANGUAGES


def test_a_pull_request_requires_both_languages() -> None:
    """Catches a change that is merged on the word of half the kernels."""
    (command,) = re.findall(r"- run: (\./run .*)", PULL_REQUEST)
    assert required(command) >= LANGUAGES


@pytest.mark.parametrize("name", ["check", "static"])
def test_a_job_requires_nothing_of_a_laptop(name: str) -> None:
    """Catches a check by hand that ends for want of a compiler, where a line in its report would do."""
    assert not required(environments()[name])
    assert not required(" ".join(JOBS[name].arguments))


@pytest.mark.lint
def test_rows_are_told_apart() -> None:
    """Catches two rows whose artefacts would overwrite each other, and a matrix without the row `cpu`."""
    names = [row.get("name") for row in ROWS]
    assert len(set(names)) == len(names)
    assert "cpu" in names


def test_the_workflow_reads_the_rows() -> None:
    """Catches a workflow that no longer reads the matrix, or asks a row for a key that it does not have."""
    assert ".github/matrix.json" in NIGHTLY
    asked = set(re.findall(r"matrix\.(\w+) }}", NIGHTLY)) - {"json"}
    assert asked <= KEYS
    assert {"runner", "image", "set", "tox"} <= asked


def test_every_environment_runs_a_job() -> None:
    """Catches a tox environment that calls a job which ./run does not know, or none."""
    for name, command in environments().items():
        job = re.match(r"\{tox_root\}/run (\S+)", command)
        assert job is not None
        assert job[1].replace("{env_name}", name) in JOBS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pass_zizmor(path: Path) -> None:
    """Catches a workflow that does not parse or is unsafe: templates in scripts, broad rights, kept credentials."""
    linter = shutil.which("zizmor", path=str(Path(sys.executable).parent)) or shutil.which("zizmor")
    if linter is None:
        pytest.skip("zizmor is not installed")
    found = subprocess.run([linter, "--offline", "--no-progress", path], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pass_actionlint(path: Path) -> None:
    """Catches expressions that name no context, and keys in the wrong place."""
    linter = shutil.which("actionlint")
    if linter is None:
        pytest.skip("actionlint is not installed")
    found = subprocess.run([linter, path], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
