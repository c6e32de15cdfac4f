"""Compiling with a cache: what was read off a unit is kept, under the digest of all that it depends on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.static.compiling import facts_of
from tests.static.rules import Facts
from tests.static.units import ROOT, Unit

CACHE = ROOT / ".cache" / "static"


def attempt(unit: Unit, keep: Path | None) -> Facts | str:
    """The facts of one unit, kept in the cache, or the last line of what its compiler says."""
    try:
        facts = facts_of(unit, keep)
    except Exception as error:  # a compiler may raise anything, and the others go on
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"{type(error).__name__}: {lines[-1].strip()}"
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = CACHE / f"{unit.digest}.{os.getpid()}"
    partial.write_text(json.dumps(facts.dump()))
    partial.rename(CACHE / f"{unit.digest}.json")
    return facts


def cached(unit: Unit) -> Facts | None:
    """The facts of a unit that was compiled before from the same content; a file that makes no sense is no fact."""
    try:
        return Facts.load(json.loads((CACHE / f"{unit.digest}.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def quiet() -> None:
    """Send what compilers of this process say to nowhere: what went wrong is in the verdict."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
