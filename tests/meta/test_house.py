"""The house rules as tests: style, types, import contracts, one table of jobs, every requirement pinned.

Each rule is also shown to fail on a planted fault, so that a rule which stopped looking is noticed.
"""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.__main__ import JOBS

ROOT = Path(__file__).parents[2]
PACKAGES = ("oracle", "fast", "cases", "tests")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {
    contract["id"]: (contract["name"], contract["source_modules"], contract["forbidden_modules"])
    for contract in PROJECT["tool"]["importlinter"]["contracts"]
}
LONGEST_FUNCTION = 60
LINT_IMPORTS = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
FAULTS_OF_STYLE = {
    "a tolerance": "import torch\n\nprint(torch.allclose(torch.ones(1), torch.ones(1)))\n",
    "an unused import": "import os\n",
    "a long line": f"print({'1 + ' * 40}1)\n",
}


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with `arguments` in `cwd` and capture what it says."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def sources() -> list[Path]:
    """Every Python file of the project."""
    return [ROOT / "conftest.py", *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))]


@pytest.mark.lint
def test_the_source_is_in_style() -> None:
    """Catches unused names, tolerances and whatever else the chosen ruff rules refuse."""
    found = python("-m", "ruff", "check", "--no-cache", ".")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.lint
def test_the_source_is_formatted() -> None:
    """Catches lines broken otherwise than the formatter breaks them, over which a later change would be unreadable."""
    found = python("-m", "ruff", "format", "--no-cache", "--diff", ".")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.lint
@pytest.mark.parametrize("fault", FAULTS_OF_STYLE)
def test_a_fault_of_style_is_found(fault: str, tmp_path: Path) -> None:
    """Catches a ruff configuration that no longer selects the rule, the ban on tolerances above all."""
    planted = tmp_path / "planted.py"
    planted.write_text(FAULTS_OF_STYLE[fault])
    assert python("-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(planted)).returncode == 1


@pytest.mark.types
@pytest.mark.timeout(600)
def test_the_source_is_typed() -> None:
    """Catches calls that disagree with a signature, on paths that no test walks."""
    found = python("-m", "mypy")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.types
def test_an_untyped_function_is_found(tmp_path: Path) -> None:
    """Catches a mypy configuration that is no longer strict."""
    planted = tmp_path / "planted.py"
    planted.write_text("def twice(value):\n    return value + value\n")
    found = python(
        "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path), str(planted)
    )
    assert found.returncode == 1, found.stdout + found.stderr
    assert "no-untyped-def" in found.stdout


@pytest.mark.lint
def test_the_import_contracts_hold() -> None:
    """Catches an oracle that borrows from what it judges, and a kernel that borrows from its oracle."""
    found = python("-c", LINT_IMPORTS)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.fixture
def empty_house(tmp_path: Path) -> Path:
    """A copy of the project in which every module is there and imports nothing."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for path in sources():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    return tmp_path


def breaches() -> list[tuple[str, str, str]]:
    """(contract, importing module, imported module) such that each module of each contract comes up once."""
    found = []
    for contract, (_, importers, forbidden) in CONTRACTS.items():
        pairs = zip_longest(importers, forbidden)
        found += [(contract, importer or importers[0], imported or forbidden[0]) for importer, imported in pairs]
    return found


@pytest.mark.lint
def test_an_empty_house_breaks_no_contract(empty_house: Path) -> None:
    """Catches a contract that is broken whatever is imported, which would hide what the planted imports show."""
    found = python("-c", LINT_IMPORTS, cwd=empty_house)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.lint
@pytest.mark.parametrize(("contract", "importer", "imported"), breaches())
def test_a_forbidden_import_breaks_its_contract(contract: str, importer: str, imported: str, empty_house: Path) -> None:
    """Catches a contract that names no module any more, or that forgives the import it was written for."""
    module = empty_house.joinpath(*importer.split("."))
    source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    source.write_text(f"def later():\n    import {imported}\n")
    found = python("-c", LINT_IMPORTS, cwd=empty_house)
    assert found.returncode == 1, found.stdout + found.stderr
    assert f"{CONTRACTS[contract][0]} BROKEN" in found.stdout


def outside_imports(source: str, own: str) -> set[str]:
    """The packages that `source` imports anywhere, less the standard library and the package `own`."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or own for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {own}


@pytest.mark.lint
@pytest.mark.parametrize("path", sorted((ROOT / "oracle").rglob("*.py")), ids=lambda path: path.name)
def test_the_oracle_imports_only_torch(path: Path) -> None:
    """Catches any third-party help in the oracle; the contract above can only name the packages one thought of."""
    assert outside_imports(path.read_text(), "oracle") <= {"torch"}


def test_a_hidden_import_is_found() -> None:
    """Catches a look at top-level imports only."""
    assert outside_imports("import os, torch\ndef f():\n    from scipy.special import expit\n", "oracle") == {
        "torch",
        "scipy",
    }


def long_functions(source: str) -> list[str]:
    """The functions of `source` that are too long to be read at once."""
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION]


@pytest.mark.lint
def test_functions_are_short() -> None:
    """Catches a function that has become several."""
    found = {str(path.relative_to(ROOT)): names for path in sources() if (names := long_functions(path.read_text()))}
    assert not found


def test_a_long_function_is_found() -> None:
    """Catches a limit that counts nothing."""
    body = "    print()\n" * LONGEST_FUNCTION
    assert long_functions(f"def short():\n    pass\n\n\nclass Kind:\n  def long(self):\n{body}") == ["long"]


def test_tox_offers_every_job_in_the_same_words() -> None:
    """Catches a job that tox lacks, or whose description has drifted from the table of jobs; a-b is a form of a."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    described = {name.removeprefix("testenv:"): tox[name]["description"] for name in tox.sections() if ":" in name}
    described = {name: text for name, text in described.items() if "-" not in name}
    jobs = {name: job.summary for name, job in JOBS.items() if job.module in ("pytest", "tests.static")}
    assert described == jobs
    assert tox["testenv"]["commands"] == "{tox_root}/run {env_name} {posargs}"


def pins(name: str) -> dict[str, str]:
    """Package -> version specifier of one constraints file, with the files that it reads in."""
    lines = [line for line in (ROOT / "constraints" / name).read_text().splitlines() if line and line[0] != "#"]
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("-c "):
            found |= pins(line.removeprefix("-c "))
        else:
            package, equal, version = line.partition("==")
            found[package] = equal + version
    return found


def names(requirements: Sequence[str]) -> set[str]:
    """The package names of requirement lines."""
    return {re.split(r"[^A-Za-z0-9-]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("chosen", ["cpu.txt", "cpu-oldest.txt", "static.txt", "gpu.txt", "gpu-oldest.txt"])
def test_every_requirement_is_pinned(chosen: str) -> None:
    """Catches a requirement whose next release would change the suite unseen."""
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = names([*PROJECT["project"]["dependencies"], *extras["triton"], *extras["tilelang"], *extras["dev"]])
    assert wanted <= set(pins(chosen))


def test_the_cpu_set_never_takes_a_cuda_build() -> None:
    """Catches a torch pin without its local tag, with which pip may fetch several GiB of CUDA."""
    assert pins("cpu.txt")["torch"].endswith("+cpu")
    assert "+cpu" in pins("gpu.txt")["torch"].partition("!=")[2]
