"""The programs that compile and read machine code: where they are, and which release of each."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import shutil
import subprocess
from pathlib import Path


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


def packaged_toolkit() -> str:
    """The folder of the CUDA compiler that is pinned as a Python package, "" where it is not installed.

    It comes before the machine's own, so that the lane reads the same code everywhere.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((str(Path(str(file.locate())).parents[1]) for file in files if file.name == "nvcc"), "")


@functools.cache
def release(program: str) -> str:
    """What a program says of its version."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
