"""Compiles one unit without a GPU and reads its facts off the machine code."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import fast.backends
from tests.static import ptx, sass
from tests.static.launches import TileLangLaunch, TritonLaunch
from tests.static.rules import Facts
from tests.static.units import Unit, known


def facts_of(unit: Unit, keep: Path | None = None) -> Facts:
    """Compile a unit as its launcher would, disassemble it, and read it; with `keep`, leave PTX and SASS there.

    Raises whatever the compiler raises.
    """
    launch = known(unit.language, unit.module)[unit.name]
    if isinstance(launch, TritonLaunch):
        text, code, requested, fusable = _triton(launch, unit.arch)
    else:
        text, code, requested, fusable = _tilelang(launch, unit.arch, unit.thorough)
    if keep is not None:
        stem = f"{unit.language} {unit.name} sm_{unit.arch}".replace("/", " ")
        (keep / f"{stem}.ptx").write_text(text)
        (keep / f"{stem}.sass").write_text(code)
    read = sass.instructions(code)
    if not read:
        raise RuntimeError("the disassembly holds no instruction")
    return Facts(dict(sass.opcodes(read)), dict(ptx.arithmetic(text)), tuple(sass.unrefined(read)), requested, fusable)


Compiled = tuple[str, str, int | None, bool]


def _triton(launch: TritonLaunch, arch: int) -> Compiled:
    """PTX, machine code, the fma that LLVM was asked for, and whether the assembler would fuse more."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fast.triton_kernels.launch import OPTIONS

    place = {name: (index,) for index, name in enumerate(launch.kernel.arg_names)}
    source = ASTSource(
        fn=launch.kernel,
        signature={name: launch.signature[name] for name in launch.kernel.arg_names},
        constexprs={place[name]: value for name, value in launch.constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in launch.aligned},
    )
    options = {"num_warps": launch.warps, **OPTIONS, **launch.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    code = disassembled(compiled.asm["cubin"])
    text: str = compiled.asm["ptx"]
    fusable = _differ(_fused_if_allowed(text, arch), code)
    return text, code, ptx.requested(compiled.asm["llir"]), fusable


def _differ(one: str, other: str) -> bool:
    """Whether two builds of a kernel compute by other instructions; their order is the compilers' to choose."""
    return sass.arithmetic(sass.instructions(one)) != sass.arithmetic(sass.instructions(other))


def _fused_if_allowed(text: str, arch: int) -> str:
    """The machine code of PTX whose assembler may contract."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        name = text.partition(".target ")[2].split()[0].rstrip(",")
        command = [get_ptxas(arch).path, "--fmad=true", f"--gpu-name={name}", source, "-o", target]
        subprocess.run(command, check=True, capture_output=True)
        return disassembled(target.read_bytes())


def _tilelang(launch: TileLangLaunch, arch: int, thorough: bool) -> Compiled:
    """PTX, machine code, None (the compiler does not say), and whether it would fuse more, if that is to be tried."""
    text, code = _by_nvcc(launch, arch, [])
    fusable = thorough and _differ(_by_nvcc(launch, arch, ["-fmad=true"])[1], code)
    return text, code, None, fusable


def _by_nvcc(launch: TileLangLaunch, arch: int, flags: list[str]) -> tuple[str, str]:
    """PTX and machine code of a launch, compiled by TileLang with `flags` after its own."""
    import tilelang
    from tilelang.contrib import nvcc

    from fast.tilelang_kernels import build
    from fast.tilelang_kernels.numerics import Numerics

    compile_cuda, binaries = nvcc.compile_cuda, []
    target = build.Target(cuda=True, arch=f"sm_{arch}")
    with tempfile.TemporaryDirectory() as folder:

        def watched(code: str, form: str, arch: Any, options: Any = None, **rest: Any) -> Any:
            kept = [*_without_overruled(options or [], flags), "--keep", f"--keep-dir={folder}"]
            binaries.append(compile_cuda(code, form, arch, options=kept, **rest))
            return binaries[-1]

        with mock.patch.object(nvcc, "compile_cuda", watched):
            tilelang.compile(launch.make(Numerics(True), *launch.key), **{**target.options(), **launch.options})
        (text,) = (path.read_text() for path in Path(folder).glob("*.ptx"))
    return text, disassembled(bytes(binaries[-1]))


def _without_overruled(options: list[str], flags: list[str]) -> list[str]:
    """Compiler options with `flags` in place of those of the same name; nvcc takes no option twice."""
    names = {flag.partition("=")[0] for flag in flags}
    return [*(option for option in options if option.partition("=")[0] not in names), *flags]


def disassembled(binary: bytes) -> str:
    """The machine code of a cubin as text. Raises RuntimeError when the disassembler refuses it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([str(disassembler()), "-c", file.name], capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(f"nvdisasm: {said.stderr.strip()}")
    return said.stdout


@functools.cache
def disassembler() -> Path | None:
    """The `nvdisasm` that comes with Triton, else the machine's; None where there is neither."""
    found = importlib.util.find_spec("triton")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm"
        if path.exists():
            return path
    machine = shutil.which("nvdisasm")
    return Path(machine) if machine else None


def unavailable(language: str) -> str:
    """Why kernels of a language cannot be compiled and read here, in one sentence; empty when they can."""
    if importlib.util.find_spec(language) is None:
        return f"{language} is not installed"
    if disassembler() is None:
        return "no nvdisasm: it comes with Triton, which is not installed"
    if language == "tilelang" and not (packaged_toolkit() or fast.backends.cuda_compiler()):
        return "no CUDA compiler: install the extra `static`, or name a toolkit in CUDA_HOME"
    return ""


def packaged_toolkit() -> str:
    """The folder of the CUDA compiler that is pinned as a Python package, "" where it is not installed.

    It comes before the machine's own, so that the lane reads the same code everywhere.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((str(Path(str(file.locate())).parents[1]) for file in files if file.name == "nvcc"), "")
