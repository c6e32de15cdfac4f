"""What the static lane compiles: units of one launch on one architecture, found anew in every process that compiles.

Launches cannot travel between processes (they hold compilers' objects), so a unit names its launch, and each process
looks for that name among the launches that it saw itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cases.ops import OPS
from tests.static import launches
from tests.static.launches import RELEASED, TileLangLaunch, TritonLaunch

ROOT = Path(__file__).parents[2]
ARCHES = (80, 90, 100, 120)
HOME = 90

Language = Literal["triton", "tilelang"]
Launch = TritonLaunch | TileLangLaunch


@dataclass(frozen=True)
class Unit:
    """One launch to compile for one architecture.

    `module` is "" for the suite's own kernels, else the module whose `launches` it comes from; `function` is the name
    of the kernel's function. `thorough` units are compiled a second time where that takes long, to see what a compiler
    would fuse. `digest` stands for all that a unit's facts depend on.
    """

    language: Language
    module: str
    name: str
    function: str
    op: str
    hc_mult: int
    arch: int
    thorough: bool
    digest: str


def units(language: Language, module: str = "", *, everything: bool = False) -> Iterator[Unit]:
    """The units of one language: all launches on the home architecture, those that represent a kernel on all.

    With `everything`, all launches on all architectures. The kernels are the suite's own, or those of `module`.
    """
    found = known(language, module)
    common = _common(language)
    chosen = set(found) if module else _representatives(found)
    for name in found:
        for arch in ARCHES:
            if arch == HOME or everything or name in chosen:
                thorough = arch == HOME and name in chosen
                yield _unit(language, module, name, arch, thorough, common)


def _unit(language: Language, module: str, name: str, arch: int, thorough: bool, common: str) -> Unit:
    launch = known(language, module)[name]
    digest = _digest(common, _identity(launch), str(arch), str(thorough))
    call = launch.call
    return Unit(language, module, name, function_of(launch), call.op, call.hc_mult, arch, thorough, digest)


@functools.cache
def known(language: Language, module: str = "") -> dict[str, Launch]:
    """Every launch by its name, which says the kernel and the first call that makes it."""
    if module:
        return dict(_named(importlib.import_module(module).launches()))
    from fast.registry import ops

    seen = launches.of_triton if language == "triton" else launches.of_tilelang
    return dict(_named(seen(tuple(op for op in OPS if op in ops(language)))))


def _named(found: Iterable[Launch]) -> Iterator[tuple[str, Launch]]:
    for launch in found:
        yield f"{short(function_of(launch))} n={launch.call.hc_mult} ({launch.call.name})", launch


def function_of(launch: Launch) -> str:
    """The name of the function that a launch compiles, by which `allowed.ENTRIES` knows it."""
    return str(launch.kernel.fn.__name__ if isinstance(launch, TritonLaunch) else launch.make.__name__)


def short(function: str) -> str:
    """A kernel's function name less the part that all of a language's kernels share."""
    return function.removeprefix("_").removeprefix("make_").removesuffix("_kernel")


def _representatives(found: dict[str, Launch]) -> set[str]:
    """The last launch of each kernel for few tokens and for many: ops and options come in the order of what they do."""
    last = {
        (function_of(launch), launch.call.tokens): name
        for name, launch in found.items()
        if launch.call.hc_mult == RELEASED
    }
    return set(last.values())


def _identity(launch: Launch) -> str:
    if isinstance(launch, TritonLaunch):
        return f"{launch.kernel.cache_key} {launch.key}"
    source = Path(launch.make.__code__.co_filename).read_text()
    return f"{launch.make.__name__} {launch.key} {source}"


def _common(language: Language) -> str:
    """What every unit of a language depends on: its versions, options and helpers, and the code that reads it."""
    own = [Path(__file__).with_name(name) for name in ("sass.py", "ptx.py", "compiling.py")]
    if language == "triton":
        from fast.triton_kernels.launch import OPTIONS

        return _digest(importlib.metadata.version("triton"), repr(OPTIONS), *map(_text, own))
    from fast.tilelang_kernels.build import Target

    kernels = sorted((ROOT / "fast" / "tilelang_kernels").glob("*.py"))
    options = repr(Target(cuda=True, arch="sm_90").options())
    return _digest(importlib.metadata.version("tilelang"), compiler(), options, *map(_text, [*own, *kernels]))


def compiler() -> str:
    """The version of the CUDA compiler that TileLang finds."""
    import subprocess

    from tilelang.contrib import nvcc

    said = subprocess.run([nvcc.get_nvcc_compiler(), "--version"], capture_output=True, text=True, check=True)
    return said.stdout.strip().splitlines()[-1]


def _text(path: Path) -> str:
    return path.read_text()


def _digest(*parts: Any) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
