"""What a pytest process sets in its environment before torch, Triton or TileLang is imported.

Each xdist worker gets one torch thread (many workers with a full thread pool each are many times slower), compile
caches of its own (two compilers never publish into one folder), and one GPU. On GPU machines workers share the caches:
there a kernel takes seconds to compile, and both languages publish what they compiled by an atomic rename.
"""

from __future__ import annotations

import itertools
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
# How CUDA_VISIBLE_DEVICES begins where it does not count GPUs: the identifiers of whole ones, and of parts of one.
IDENTIFIERS = ("GPU-", "MIG-")
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
    (numbers, GPU- or MIG-UUIDs) are handed out: a number taken modulo the device count and written back as an absolute
    one would land on a GPU that the caller excluded.
    """
    number = re.fullmatch(r"gw(\d+)", worker)
    if number is None:
        return None
    allowed = visible_gpus(visible, gpus)
    return allowed[int(number.group(1)) % len(allowed)] if allowed else None


def physical_gpus(devices: Path = Path("/dev")) -> list[str]:
    """CUDA's numbers for the NVIDIA GPUs of this machine, counted by device nodes so that CUDA is not started.

    The nodes of a container keep the host's numbers, while CUDA counts from 0: given /dev/nvidia3 alone, it has GPU 0.
    """
    nodes = [node for node in devices.glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", node.name)]
    return [str(number) for number in range(len(nodes))]


def visible_gpus(visible: str | None, gpus: Sequence[str]) -> list[str]:
    """The GPUs that this run may use: all of the machine, or those that CUDA finds in CUDA_VISIBLE_DEVICES.

    ``visible`` lists numbers, or identifiers of the first one's kind, which may be cut short. CUDA reads on to the
    first entry that is something else, or a number past the last GPU, and takes a repeated entry for no GPU at all.
    """
    if visible is None or not gpus:
        return list(gpus)
    entries = [entry.strip() for entry in visible.split(",")]
    if visible.startswith(IDENTIFIERS):
        kind = visible[:4]
        named = list(itertools.takewhile(lambda entry: entry.startswith(kind), entries))
        return [] if _repeats(named) else named
    numbers = list(itertools.takewhile(bool, map(_number, entries)))
    return [] if _repeats(numbers) else list(itertools.takewhile(lambda number: number in gpus, numbers))


def _repeats(entries: Sequence[str]) -> bool:
    return len(set(entries)) < len(entries)


def _number(entry: str) -> str:
    """The number that an entry begins with, as C's strtoul reads it ("1st" is 1); empty where there is none."""
    digits = re.match(r"\+?([0-9]+)", entry)
    return (digits[1].lstrip("0") or "0") if digits else ""


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
