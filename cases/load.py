"""Reads case files, and says in one sentence what is wrong with a bad one."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from pydantic import ValidationError

from cases.faults import alike, sentence
from cases.flags import CASES_DIR, FLAGS_FILE
from cases.schema import KEYS, Case


class CaseError(ValueError):
    """A case file that cannot be used; the message names file, key, what was expected and what came."""


def load_case(path: str | Path) -> Case:
    """One case file, checked; raises CaseError when it cannot be read or breaks the schema."""
    path = Path(path)
    case = parse_case(read_text(path), shown(path))
    if case.name != path.stem:
        raise CaseError(f"{shown(path)}: name: expected {path.stem!r}, the file's own name, got {case.name!r}")
    return case


def load_all(root: str | Path = CASES_DIR) -> list[Case]:
    """Every case below `root`, sorted by name; raises CaseError for a bad file or a name used twice."""
    found: dict[str, Path] = {}
    cases = []
    for path in case_files(root):
        case = load_case(path)
        if case.name in found:
            where = f"{shown(path)}: name: expected a name of its own"
            raise CaseError(f"{where}, got {case.name!r}, which {shown(found[case.name])} has")
        found[case.name] = path
        cases.append(case)
    return sorted(cases, key=lambda case: case.name)


def case_files(root: str | Path = CASES_DIR) -> list[Path]:
    """The case files below `root`, sorted by path; raises CaseError when there is no such directory."""
    root = Path(root)
    if not root.is_dir():
        raise CaseError(f"{shown(root)}: expected a directory of case files, got none")
    return sorted(path for path in root.rglob("*.toml") if path.name != FLAGS_FILE.name)


def find_case(name: str, root: str | Path = CASES_DIR) -> Path:
    """The file of the case called `name`; raises CaseError when there is none."""
    for path in case_files(root):
        if path.stem == name:
            return path
    near = alike(name, [path.stem for path in case_files(root)])
    perhaps = f"; did you mean {' or '.join(near)}?" if near else ""
    raise CaseError(f"{shown(Path(root))}: expected the name of a case, got {name!r}{perhaps}")


def parse_case(text: str, where: str) -> Case:
    """A case from TOML text; `where` names its origin in the CaseError that a fault raises."""
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise CaseError(f"{where}: expected TOML, got arrays or tables nested too deeply to read") from None
    except ValueError as fault:
        # Not only TOMLDecodeError: Python itself refuses an integer of thousands of digits.
        raise CaseError(f"{where}: expected TOML, got {fault}") from None
    try:
        return Case.model_validate(data)
    except ValidationError as fault:
        raise CaseError(f"{where}: {sentence(fault, KEYS)}") from None


def read_text(path: Path) -> str:
    """The text of a file; raises CaseError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "bytes that are not UTF-8"
        raise CaseError(f"{shown(path)}: expected a readable case file, got {reason}") from None


def shown(path: Path) -> str:
    """The path as messages show it: relative to the project where it lies inside."""
    project = CASES_DIR.parent
    path = Path(os.path.realpath(path))  # Path.resolve raises where links form a loop
    return str(path.relative_to(project)) if path.is_relative_to(project) else str(path)


def from_caller(path: str) -> Path:
    """A path as the shell means it: `./run` leaves the folder where it is called, and notes it in MHC_CALLED_FROM."""
    return Path(os.environ.get("MHC_CALLED_FROM", ""), path)
