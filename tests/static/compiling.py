"""Compiles one unit without a GPU and reads its facts off the machine code."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import fast.backends
from tests.static import nvcc_flags, ptx, sass
from tests.static.launches import TileLangLaunch, TritonLaunch
from tests.static.rules import Facts
from tests.static.toolchain import disassembler, packaged_toolkit
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
    """PTX, machine code, None (the compiler does not say), and whether nvcc has fused, or would if it might.

    What it would do is tried of `thorough` units only. What it has done, of every launch whose options let it.
    """
    text, code, apart = _by_nvcc(launch, arch)
    otherwise = "-fmad=true" if apart else "-fmad=false"
    fusable = (thorough or not apart) and _differ(_by_nvcc(launch, arch, otherwise)[1], code)
    return text, code, None, fusable


def _by_nvcc(launch: TileLangLaunch, arch: int, contraction: str = "") -> tuple[str, str, bool]:
    """PTX and machine code of a launch that TileLang compiles, and whether its options kept nvcc from contracting.

    `contraction` is an option in place of all others of that kind.
    """
    import tilelang
    from tilelang.contrib import nvcc

    from fast.tilelang_kernels import build
    from fast.tilelang_kernels.numerics import Numerics

    compile_cuda, binaries, apart = nvcc.compile_cuda, [], []
    target = build.Target(cuda=True, arch=f"sm_{arch}")
    with tempfile.TemporaryDirectory() as folder:

        def watched(code: str, form: str, arch: Any, options: Any = None, **rest: Any) -> Any:
            given = [options] if isinstance(options, str) else list(options or [])
            apart.append(nvcc_flags.keep_apart(given, os.environ))
            kept, around = _with_contraction(given, contraction)
            with mock.patch.dict(os.environ, around):
                kept += ["--keep", f"--keep-dir={folder}"]
                binaries.append(compile_cuda(code, form, arch, options=kept, **rest))
            return binaries[-1]

        with mock.patch.object(nvcc, "compile_cuda", watched):
            tilelang.compile(launch.make(Numerics(True), *launch.key), **{**target.options(), **launch.options})
        (text,) = (path.read_text() for path in Path(folder).glob("*.ptx"))
    return text, disassembled(bytes(binaries[-1])), all(apart)


def _with_contraction(options: list[str], contraction: str) -> tuple[list[str], dict[str, str]]:
    """nvcc's options, and the variables that hold more of them, with `contraction` for what they say of it, if any."""
    around = nvcc_flags.surroundings(os.environ)
    if not contraction:
        return list(options), around
    without = {name: shlex.join(nvcc_flags.others(shlex.split(text))) for name, text in around.items()}
    return [*nvcc_flags.others(options), contraction], without


def disassembled(binary: bytes) -> str:
    """The machine code of a cubin as text. Raises RuntimeError when the disassembler refuses it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([str(disassembler()), "-c", file.name], capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(f"nvdisasm: {said.stderr.strip()}")
    return said.stdout


def unavailable(language: str) -> str:
    """Why kernels of a language cannot be compiled and read here, in one sentence; empty when they can."""
    if importlib.util.find_spec(language) is None:
        return f"{language} is not installed"
    if disassembler() is None:
        return "no nvdisasm: it comes with Triton, which is not installed"
    if language == "tilelang" and not (packaged_toolkit() or fast.backends.cuda_compiler()):
        return "no CUDA compiler: install the extra `static`, or name a toolkit in CUDA_HOME"
    return ""
