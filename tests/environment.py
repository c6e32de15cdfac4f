"""What a pytest process sets in its environment before torch, Triton or TileLang is imported.

Each xdist worker gets one torch thread (many workers with a full thread pool each are many times slower), compile
caches of its own (two compilers never publish into one folder), and one GPU.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from pathlib import Path

CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TILELANG_TMP_DIR")


def prepare(env: MutableMapping[str, str], *, cache: Path, gpus: Sequence[str]) -> None:
    """Set threads, compile caches and the visible GPU of this process, in place.

    ``env`` is the environment to change, ``cache`` the folder under which each worker gets its own compile caches,
    ``gpus`` the machine's GPUs as `physical_gpus` lists them.
    """
    worker = env.get("PYTEST_XDIST_WORKER", "main")
    if worker != "main":
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = "1"
    for variable in CACHE_VARIABLES:
        folder = cache / worker / variable.lower().removesuffix("_dir")
        folder.mkdir(parents=True, exist_ok=True)
        env[variable] = str(folder)
    env.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    chosen = gpu_of_worker(worker, env.get("CUDA_VISIBLE_DEVICES"), gpus)
    if chosen is not None:
        env["CUDA_VISIBLE_DEVICES"] = chosen


def gpu_of_worker(worker: str, visible: str | None, gpus: Sequence[str]) -> str | None:
    """The CUDA_VISIBLE_DEVICES value of one xdist worker, or None where it must stay as it is.

    ``worker`` is xdist's name ("gw3") or "main"; ``visible`` the caller's own CUDA_VISIBLE_DEVICES, whose entries
    (indices, GPU- or MIG-UUIDs) are handed out as they stand: an index taken modulo the device count and written
    back as an absolute id would land on a GPU that the caller excluded.
    """
    number = re.fullmatch(r"gw(\d+)", worker)
    if number is None:
        return None
    allowed = [entry.strip() for entry in visible.split(",") if entry.strip()] if visible is not None else list(gpus)
    return allowed[int(number.group(1)) % len(allowed)] if allowed else None


def physical_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Indices of this machine's NVIDIA GPUs, read off the device nodes so that CUDA is not started."""
    found = (re.fullmatch(r"nvidia(\d+)", node.name) for node in devices.glob("nvidia*"))
    return sorted((match.group(1) for match in found if match), key=int)
