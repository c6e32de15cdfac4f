"""Which kernel backends this machine offers, and why not where it does not.

Nothing here starts CUDA (devices are counted, never touched) and nothing here imports a kernel
language: versions come from package metadata, and a language that may abort while it is imported
is tried in a process of its own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

Mode = Literal["interpreted", "compiled", "c", "cuda"]

# The oldest releases whose bits were seen to be right; docs/lanes.md says where.
TRITON_MINIMUM = (3, 6)
TILELANG_MINIMUM = (0, 1, 12)
IMPORT_SECONDS = 120


@dataclass(frozen=True)
class Backend:
    """One kernel language on this machine: usable or not, and the reason when it is not.

    `mode` is how kernels would run ("interpreted" or "compiled" Triton, "c" or "cuda" TileLang) and
    `device` is the torch device type that their tensors must live on. `reason` is empty when available.
    """

    name: str
    available: bool
    reason: str
    version: str | None
    mode: Mode
    device: str


def probe(device: str = "auto", *, try_import: bool = False) -> dict[str, Backend]:
    """Say for each backend whether this machine can run it, without starting CUDA.

    `device` is "cpu", "cuda" or "auto" (CUDA when a device is present). With `try_import` each
    available language is also imported once, in a subprocess, so that one which aborts at import is
    reported and not met. Raises ValueError for another device.
    """
    chosen = _device(device)
    found = {name: check(chosen) for name, check in _CHECKS.items()}
    if not try_import:
        return found
    return {name: _tried(backend) for name, backend in found.items()}


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"probe: device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if device != "auto":
        return device
    return "cuda" if torch.cuda.device_count() > 0 else "cpu"


def interpreting() -> bool:
    """Whether TRITON_INTERPRET asks Triton to interpret kernels, read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _triton(device: str) -> Backend:
    mode: Mode = "interpreted" if interpreting() else "compiled"
    version = _version("triton")
    reason = _version_reason("triton", version, TRITON_MINIMUM)
    reason = reason or _device_reason(device) or _triton_mode_reason(device, mode)
    return Backend("triton", not reason, reason, version, mode, "cuda" if mode == "compiled" else "cpu")


def _triton_mode_reason(device: str, mode: Mode) -> str:
    if mode == "interpreted" and device == "cuda":
        return "TRITON_INTERPRET is set, so Triton would interpret its kernels and not use the CUDA device"
    if mode == "compiled" and device == "cpu":
        return "Triton compiles for GPUs only; on the CPU set TRITON_INTERPRET=1 before Triton is imported"
    return ""


def _tilelang(device: str) -> Backend:
    mode: Mode = "cuda" if device == "cuda" else "c"
    version = _version("tilelang")
    reason = _version_reason("tilelang", version, TILELANG_MINIMUM)
    reason = reason or _device_reason(device) or _compiler_reason(mode)
    return Backend("tilelang", not reason, reason, version, mode, device)


def _compiler_reason(mode: Mode) -> str:
    if mode == "cuda":
        return "" if cuda_compiler() else "no CUDA compiler (CUDA_HOME, CUDA_PATH, nvcc, nvidia-cuda-nvcc)"
    return _cxx_reason()


def _cxx_reason() -> str:
    """Why TileLang finds no C++ compiler: where CXX, or else CC, is set, it runs that one word and looks no further."""
    for variable in ("CXX", "CC"):
        if named := os.environ.get(variable):
            return "" if shutil.which(named) else f"no C++ compiler: {variable} is {named!r}, which is no program"
    return "" if any(map(shutil.which, ("g++", "clang++", "c++"))) else "no C++ compiler (CXX, CC, g++, clang++, c++)"


def cuda_compiler() -> str | None:
    """Return the CUDA compiler that TileLang would find, or the version of its package; None where there is none."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and (path := Path(home) / "bin" / "nvcc").exists():
            return str(path)
    return shutil.which("nvcc") or _version("nvidia-cuda-nvcc")


def _device_reason(device: str) -> str:
    return "no CUDA device" if device == "cuda" and torch.cuda.device_count() == 0 else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_reason(package: str, version: str | None, minimum: tuple[int, ...]) -> str:
    if version is None:
        return f"{package} is not installed"
    if importlib.util.find_spec(package) is None:
        return f"{package} {version} is listed as installed, but its module cannot be found"
    if _numbers(version) < minimum:
        oldest = ".".join(map(str, minimum))
        return f"{package} {version} is older than {oldest}, the oldest that these kernels are for"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def _tried(backend: Backend) -> Backend:
    if not backend.available:
        return backend
    reason = import_failure(backend.name)
    return replace(backend, available=not reason, reason=reason)


@functools.cache
def import_failure(module: str) -> str:
    """Import `module` in a subprocess and say in one sentence how that failed; empty when it did not."""
    try:
        command = [sys.executable, "-c", f"import {module}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"importing {module} took longer than {IMPORT_SECONDS} s"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or ["no message"])[-1].strip()
    how = f"died of signal {-done.returncode}" if done.returncode < 0 else "failed"
    return f"importing {module} {how}: {last}"


_CHECKS: dict[str, Callable[[str], Backend]] = {"triton": _triton, "tilelang": _tilelang}
