"""The source files that a kernel may owe something to: its module's, and those that this one imports, and so on.

Triton's key of a kernel covers the functions it calls and the constants that it names, but not `module.CONSTANT`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


@functools.cache
def behind(module: str) -> str:
    """The text of every source file behind a loaded module, in order of names; of installed packages its own only."""
    package = module.partition(".")[0]
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found and (path := _file(name)) and (_is_of(name, package) or not _is_installed(path)):
            found[name] = path.read_text(encoding="utf-8")
            waiting += _imports(found[name], sys.modules[name].__package__ or "")
    return "\0".join(f"{name}\0{found[name]}" for name in sorted(found))


def _file(name: str) -> Path | None:
    """The source of a loaded module; None for what has none, as a name that is no module."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return Path(file) if file.endswith(".py") else None


def _is_of(name: str, package: str) -> bool:
    return name.partition(".")[0] == package


def _is_installed(path: Path) -> bool:
    return str(path).startswith(INSTALLED)


def _imports(text: str, package: str) -> Iterator[str]:
    """The modules that a source names in its imports; what it takes from a module may be one, too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
