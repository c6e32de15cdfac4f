"""What a pytest process sets in its environment before torch, Triton or TileLang is imported.

Each xdist worker gets one torch thread (many workers with a full thread pool each are many times slower), compile
caches of its own (two compilers never publish into one folder), and one GPU. On GPU machines workers share the caches:
there a kernel takes seconds to compile, and both languages publish what they compiled by an atomic rename.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

# What one worker needs of its GPU: full-size inputs, their results and the oracle's temporaries; and CUDA itself.
WORKER_BYTES, CUDA_BYTES = 5 << 30, 1 << 30
# What is kept for tensors past 2^31 elements, which the workers of a GPU hold in turn (`tests.memory`).
TURN_BYTES = 24 << 30
# How many GPUs all workers share, kept for a worker before it is shown its own alone.
GPU_COUNT = "MHC_GPU_COUNT"
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
        shared = bool(gpus) and variable != "TILELANG_TMP_DIR"
        folder = cache / ("gpu" if shared else worker) / variable.lower().removesuffix("_dir")
        folder.mkdir(parents=True, exist_ok=True)
        env[variable] = str(folder)
    env.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    chosen = gpu_of_worker(worker, env.get("CUDA_VISIBLE_DEVICES"), gpus)
    if chosen is not None:
        env[GPU_COUNT] = str(len(visible_gpus(env.get("CUDA_VISIBLE_DEVICES"), gpus)))
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
    allowed = visible_gpus(visible, gpus)
    return allowed[int(number.group(1)) % len(allowed)] if allowed else None


def physical_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Indices of this machine's NVIDIA GPUs, read off the device nodes so that CUDA is not started."""
    found = (re.fullmatch(r"nvidia(\d+)", node.name) for node in devices.glob("nvidia*"))
    return sorted((match.group(1) for match in found if match), key=int)


def visible_gpus(visible: str | None, gpus: Sequence[str]) -> list[str]:
    """The GPUs that this run may use: the caller's CUDA_VISIBLE_DEVICES as it stands, else all of the machine."""
    if visible is None:
        return list(gpus)
    return [entry.strip() for entry in visible.split(",") if entry.strip()]


def workers_for(cores: int, gpus: int, bytes_each: int, need: int = WORKER_BYTES + CUDA_BYTES) -> int:
    """How many workers suit a machine with GPUs: as many as its cores run and its GPUs' memory holds, at least one.

    ``bytes_each`` is the memory of its smallest GPU, of which one part is kept for turns, ``need`` what a worker takes.
    ValueError for a need below 1.
    """
    if need < 1:
        raise ValueError(f"workers_for: need must be at least 1 byte, got {need}")
    return max(1, min(cores, gpus * max(1, max(bytes_each - TURN_BYTES, 0) // need)))


def shares_of_gpu(env: Mapping[str, str], total: int) -> tuple[float, float]:
    """The parts of its GPU's ``total`` bytes that this process may take: always, and while it is its turn.

    Read from what `prepare` and xdist left in ``env``. Workers are dealt out to the GPUs in turn, so a GPU has one for
    each full or begun round of them. Where more are asked for than suit the memory, they divide it, and no turn helps.
    """
    workers, gpus = int(env.get("PYTEST_XDIST_WORKER_COUNT", "1")), int(env.get(GPU_COUNT, "1"))
    neighbours = max(1, -(-workers // max(1, gpus)))
    own = (total - TURN_BYTES) / neighbours - CUDA_BYTES
    if neighbours == 1 or own < WORKER_BYTES:
        return 1.0 / neighbours, 1.0 / neighbours
    return own / total, (own + TURN_BYTES) / total


def gpu_bytes() -> int:
    """Memory of the smallest GPU, asked of `nvidia-smi` so that CUDA is not started; one worker's if that fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return WORKER_BYTES
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout
    sizes = [int(line) for line in said.split() if line.isdigit()]
    return min(sizes) << 20 if sizes else WORKER_BYTES


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))
