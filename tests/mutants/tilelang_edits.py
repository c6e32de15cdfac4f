"""The suite's TileLang kernels with a few words of their source replaced, loaded beside the right ones.

Nothing is copied: a planted kernel is the files of `fast/tilelang_kernels` under another package name, read when it
is asked for, and the words that differ are all that the fault is. Words to be replaced must stand in their file once,
so an edit also says that the arithmetic it spoils is written in one place.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from fast import tilelang_kernels
from tests.implementations import Implementation

RIGHT = tilelang_kernels.__name__
FOLDER = Path(tilelang_kernels.__path__[0])
CACHE = "TILELANG_CACHE_DIR"
_numbers = itertools.count()


@dataclass(frozen=True)
class Edit:
    """In one file of the kernels, by its name without ".py", ``new`` words for ``old`` ones."""

    file: str
    old: str
    new: str

    def applied(self, source: str) -> str:
        """``source`` with the words replaced; ValueError unless the old ones stand in it once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file}.py has these words {source.count(self.old)} times, not once:\n{self.old}")
        return source.replace(self.old, self.new)


class _Edited(MetaPathFinder, SourceLoader):  # type: ignore[misc]  # typeshed: SourceLoader contradicts its own base
    """Finds and loads one package of edited kernels; TileLang reads their source through it too."""

    def __init__(self, package: str, edits: Sequence[Edit]) -> None:
        self.package = package
        self.edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return spec_from_loader(fullname, self) if fullname.partition(".")[0] == self.package else None

    def get_filename(self, fullname: str) -> str:
        package, _, module = fullname.partition(".")
        return f"{package}/{module or '__init__'}.py"

    def get_data(self, path: str | bytes) -> bytes:
        name = Path(os.fsdecode(path)).stem
        source = (FOLDER / f"{name}.py").read_text().replace(RIGHT, self.package)
        for edit in self.edits:
            source = edit.applied(source) if edit.file == name else source
        return source.encode()


# Smaller blocks, on which no result depends, since TileLang takes its time over unrolled loops.
SMALLER = (
    Edit("sweep", "Tile(tokens=2, warps=2, rows=4)", "Tile(tokens=1, warps=1, rows=1)"),
    Edit("coefficients", "max(1, 64 // n) if tensor.is_cuda else 3", "max(1, 64 // n) if tensor.is_cuda else 1"),
)


@contextmanager
def edited(edits: Sequence[Edit], cache: Path) -> Iterator[Callable[[str], Implementation]]:
    """The kernels as they are after ``edits``, by op, while the block lasts; their compilations go to ``cache``.

    Neither the right kernels nor what they have compiled is touched. Asking for an op imports TileLang, and raises
    ValueError where the words of an edit are not there once, or are in a file that the op does not read.
    """
    finder, before = _Edited(f"planted_{next(_numbers)}", (*SMALLER, *edits)), os.environ.get(CACHE)
    sys.meta_path.insert(0, finder)
    os.environ[CACHE] = str(cache)
    try:
        yield functools.partial(_kernel, finder.package, edits)
    finally:
        sys.meta_path.remove(finder)
        for name in _modules(finder.package):
            del sys.modules[name]
        os.environ.pop(CACHE)
        if before is not None:
            os.environ[CACHE] = before


def _kernel(package: str, edits: Sequence[Edit], op: str) -> Implementation:
    module = importlib.import_module(f"{package}.{tilelang_kernels.MODULES[op]}")
    unread = {edit.file for edit in edits} - {name.rpartition(".")[2] for name in _modules(package)}
    if unread:
        raise ValueError(f"{op} does not read {', '.join(sorted(unread))}")
    return Implementation(op, "tilelang-planted", getattr(module, op), accepts_out=True)


def _modules(package: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == package]
