"""The nightly matrix: every row names things that are there, and says the versions that it installs."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
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
ARCHES = {"x86-64", "aarch64", "sm_80", "sm_90", "sm_100", "sm_120"}
LANGUAGES = {"triton", "tilelang"}
KEYS = {"name", "runner", "image", "options", "set", "torch", "triton", "tilelang", "arch", "tp", "tox"}


def environments() -> dict[str, str]:
    """Environment name -> the command of tox.ini."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    named = {name.removeprefix("testenv:"): tox[name] for name in tox.sections() if name.startswith("testenv:")}
    return {name: section.get("commands", tox["testenv"]["commands"]) for name, section in named.items()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_names_what_is_there(row: dict[str, Any]) -> None:
    """Catches a row that would fail at night: an environment, a set or a tp that does not exist, a version it lacks."""
    assert set(row) == KEYS
    assert row["tox"] in environments()
    installed = pins(f"{row['set']}.txt")
    for package in ("torch", "triton", "tilelang"):
        assert installed[package].removeprefix("==").partition(",")[0] == row[package], package
    assert set(row["arch"].split(",")) <= ARCHES
    assert set(row["tp"].split(",")) <= {"1", "2", "4", "8"}


def judged(command: str) -> set[str]:
    """The languages that a command judges: all, or those among the backends that it names."""
    return LANGUAGES & set(re.findall(r"--backend (\S+)", command)) or LANGUAGES


def required(command: str) -> set[str]:
    """What a command fails without."""
    return set(re.findall(r"--require (\S+)", command))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_requires_the_languages_that_it_judges(row: dict[str, Any]) -> None:
    """Catches a row that stays green at night while its image has no C++ compiler, or nothing to disassemble with."""
    command = environments()[row["tox"]]
    assert required(command) >= judged(command)


@pytest.mark.parametrize("chosen", sorted({row["set"] for row in ROWS}))
def test_the_rows_of_a_set_judge_every_language_that_it_pins(chosen: str) -> None:
    """Catches a release that the matrix names and no row runs."""
    commands = [environments()[row["tox"]] for row in ROWS if row["set"] == chosen]
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


def test_rows_are_told_apart() -> None:
    """Catches two rows whose artefacts would overwrite each other, and a GPU row that the comparison does not take."""
    names = [row["name"] for row in ROWS]
    assert len(set(names)) == len(names)
    assert all(row["name"].startswith("gpu-") == row["tox"].startswith("gpu") for row in ROWS)
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
