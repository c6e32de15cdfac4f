"""What the static lane compiles: units of one launch on one architecture, found anew in every process that compiles.

Launches cannot travel between processes (they hold compilers' objects), so a unit names its launch, and each process
looks for that name among the launches that it saw itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cases.ops import OPS
from tests.static import launches, sources
from tests.static.launches import RELEASED, TileLangLaunch, TritonLaunch
from tests.static.toolchain import disassembler, release

ROOT = Path(__file__).parents[2]
ARCHES = (80, 90, 100, 120)
HOME = 90
SWITCHES = ("NVCC_", "PTXAS_", "TRITON_", "TILELANG_", "TL_", "TVM_")

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


def units(
    language: Language,
    module: str,
    *,
    everything: bool,
    wanted: Callable[[str, int], bool],
) -> Iterator[Unit]:
    """The units of one language: all launches on the home architecture, those that represent a kernel on all.

    With `everything`, all launches on all architectures; of these, those that are `wanted` by name and architecture.
    The kernels are the suite's own, or those of `module`. Raises BadLaunches where these cannot be told.
    """
    found = known(language, module)
    chosen = set(found) if module else _representatives(found)
    for name in found:
        for arch in ARCHES:
            if (arch == HOME or everything or name in chosen) and wanted(name, arch):
                yield _unit(language, module, name, arch, thorough=arch == HOME and name in chosen)


def _unit(language: Language, module: str, name: str, arch: int, thorough: bool) -> Unit:
    launch = known(language, module)[name]
    digest = _digest(_common(language), _identity(language, module, name), str(arch), str(thorough))
    call = launch.call
    return Unit(language, module, name, function_of(launch), call.op, call.hc_mult, arch, thorough, digest)


class BadLaunches(Exception):
    """A module whose launches cannot be judged, and why, in one sentence."""


@functools.cache
def known(language: Language, module: str = "") -> dict[str, Launch]:
    """Every launch by its name, which says the kernel and the first call that makes it.

    Raises BadLaunches where `module` has none, and where two have one name, so that one would hide the other.
    """
    if module:
        return _named(_launches_of(module, language))
    from fast.registry import ops

    seen = launches.of_triton if language == "triton" else launches.of_tilelang
    return _named(seen(tuple(op for op in OPS if op in ops(language))))


def _launches_of(module: str, language: Language) -> list[Launch]:
    """The launches of one language that a module of one's own gives."""
    try:
        given = list(importlib.import_module(module).launches())
    except (ImportError, AttributeError) as error:
        raise BadLaunches(f"--kernels {module}: expected a module with a function launches(), got: {error}") from error
    kind = TritonLaunch if language == "triton" else TileLangLaunch
    return [launch for launch in given if isinstance(launch, kind)]


def _named(found: Iterable[Launch]) -> dict[str, Launch]:
    named: dict[str, Launch] = {}
    for launch in found:
        name = f"{short(function_of(launch))} n={launch.call.hc_mult} ({launch.call.name})"
        if name in named:
            raise BadLaunches(f"two launches are named {name}, where each needs its own name: give their calls options")
        named[name] = launch
    return named


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


@functools.cache
def _identity(language: Language, module: str, name: str) -> str:
    """What a launch compiles: the kernel with all that it calls, what it is specialised on, and its own options."""
    launch = known(language, module)[name]
    if isinstance(launch, TritonLaunch):
        return _digest(launch.kernel.cache_key, launch.key, sources.behind(launch.kernel.fn.__module__))
    return _digest(_traced(launch), repr(sorted(launch.options.items())))


def _traced(launch: TileLangLaunch) -> str:
    """The text of what a launch's function traces, by which TileLang keeps kernels, too; what it raises if it fails."""
    from fast.tilelang_kernels.numerics import Numerics

    try:
        return str(launch.make(Numerics(True), *launch.key).script(show_meta=True))
    except Exception as error:  # tracing runs anything; compiling will raise it again, and that is the verdict
        return repr(error)


@functools.cache
def _common(language: Language) -> str:
    """What every unit of a language depends on: versions, options, variables, and the code that reads machine code."""
    own = [Path(__file__).with_name(name) for name in ("sass.py", "ptx.py", "nvcc_flags.py", "compiling.py")]
    tools = [importlib.metadata.version(language), release(str(disassembler()))]
    if language == "triton":
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.backends.nvidia.compiler import get_ptxas

        from fast.triton_kernels.launch import OPTIONS

        tools += [release(get_ptxas(arch).path) for arch in ARCHES]
        options = repr((OPTIONS, sorted(get_cache_invalidating_env_vars().items())))
    else:
        from tilelang.contrib import nvcc

        from fast.tilelang_kernels.build import Target

        tools += [release(nvcc.get_nvcc_compiler())]
        options = repr(Target(cuda=True, arch=f"sm_{HOME}").options())
    return _digest(*tools, options, repr(_switches()), *(path.read_text() for path in own))


def _switches() -> list[tuple[str, str]]:
    """The environment's variables by which compilers are told something."""
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(SWITCHES))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
