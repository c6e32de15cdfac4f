"""Sets the expected digests of a case from the oracle, and keeps the file's history.

The tail of a case file, from its [expected] table on, belongs to this module; what a person wrote above it stays as
it is, comments included.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w
import torch

import oracle
from cases.build import build
from cases.digest import digest
from cases.load import CaseError, load_case, parse_case, read_text, shown
from cases.schema import CONTRACT, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

_TAIL = re.compile(r"^\[(expected|\[history)\b", re.MULTILINE)
_SHORTEST_REASON = 10


@dataclass(frozen=True)
class Change:
    """What a blessing would do to one file: digests before (None when new) and after, by output, and both texts."""

    path: Path
    original: str
    before: dict[str, str | None]
    after: dict[str, str]
    text: str

    @property
    def differs(self) -> bool:
        """Whether any digest changes."""
        return self.before != self.after

    def lines(self) -> Iterator[str]:
        """What changes, one output a line."""
        for name, new in self.after.items():
            old = self.before.get(name)
            said = "unchanged" if old == new else f"{(old or 'none')[:12]} -> {new[:12]}"
            yield f"{self.path.stem}: {name}: {said}"


def outputs_of(case: Case) -> dict[str, torch.Tensor]:
    """The oracle's results for the whole, unsharded case, by output name.

    Raises CaseError when the oracle has no such op yet, or refuses the inputs.
    """
    op = getattr(oracle, case.op, None)
    if op is None:
        raise CaseError(f"{case.name}: op: expected an op that the oracle has, got {case.op!r}")
    try:
        inputs = build(case)
        positional = [inputs.tensors[argument.name] for argument in case.spec.required]
        optional = {one.name: inputs.tensors[one.name] for one in case.arguments if one.optional}
        results = op(*positional, **optional, **_parameters(inputs.params))
    except (ValueError, TypeError) as fault:
        raise CaseError(f"{case.name}: {fault}") from None
    tensors = results if isinstance(results, tuple) else (results,)
    return {output.name: tensor for output, tensor in zip(case.spec.outputs, tensors, strict=True)}


def _parameters(params: dict[str, object]) -> dict[str, object]:
    config = params.get("config")
    return {**params, "config": oracle.MhcConfig(**config)} if isinstance(config, dict) else params


def expected_digests(case: Case) -> dict[str, str]:
    """The digest of each output under the current contract; raises CaseError as `outputs_of` does."""
    return {name: digest(tensor) for name, tensor in outputs_of(case).items()}


def propose(path: Path, reason: str, today: date) -> Change:
    """What blessing a file would change; writes nothing.

    Raises CaseError when the file is bad, the reason too short to mean anything, or the oracle cannot run it.
    """
    if len(reason.strip()) < _SHORTEST_REASON:
        raise CaseError(f"--reason: expected {_SHORTEST_REASON} characters or more that say why, got {reason!r}")
    original, case = read_text(path), load_case(path)
    after = expected_digests(case)
    before = dict.fromkeys(after) if case.expected is None else dict(case.expected.digests)
    text = _blessed_text(original, case, after, {"date": today, "contract": CONTRACT, "reason": reason})
    _check_same_case(case, parse_case(text, shown(path)), path)
    return Change(path, original, {**before}, after, text)


def apply(change: Change) -> None:
    """Put a proposed text in place of the file, all of it or nothing.

    Raises CaseError when somebody edited the file after it was read: their edit stays, and nothing is written.
    """
    if read_text(change.path) != change.original:
        raise CaseError(f"{shown(change.path)}: expected the file as it was read, got one edited since; bless it again")
    replace_file(change.path, change.text)


def _blessed_text(text: str, case: Case, digests: dict[str, str], line: dict[str, object]) -> str:
    found = _TAIL.search(text)
    head = text[: found.start()] if found else text
    expected = tomli_w.dumps({"expected": {"contract": CONTRACT, "digests": digests}})
    entries = [*(entry.model_dump() for entry in case.history), line]
    history = [f"[[history]]\n{tomli_w.dumps(entry)}" for entry in entries]
    return "\n".join((f"{head.rstrip()}\n", expected, *history))


def _check_same_case(old: Case, new: Case, path: Path) -> None:
    """Refuse a file in which a person's keys stand below the tail that is rewritten."""
    own = {"expected", "history"}
    # As text, since a patch of NaN is not equal to itself.
    if old.model_dump_json(exclude=own) != new.model_dump_json(exclude=own):
        raise CaseError(f"{shown(path)}: expected [expected] and [[history]] to be its last tables, got others after")


def replace_file(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash at any moment, finds the old text or the new one.

    A link stays one; the file that it leads to is written.
    Raises CaseError when the directory or the disk refuses; the old file then stands untouched.
    """
    path = Path(os.path.realpath(path))
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    except OSError as fault:
        raise CaseError(f"{shown(path)}: expected to write beside it, got {fault.strerror}") from None
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except OSError as fault:
        raise CaseError(f"{shown(path)}: expected to replace it, got {fault.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
