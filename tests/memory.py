"""A GPU's memory among the workers that share it: each has a part, and one at a time what is kept for big tensors."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tests import environment

TURNS = Path(__file__).parents[1] / ".cache" / "turns"


def hold_to_share() -> None:
    """Let this process take its part of its GPU's memory and no more."""
    torch.cuda.set_per_process_memory_fraction(_shares()[0])


@contextlib.contextmanager
def turn(device: str, wanted: bool = True) -> Iterator[None]:
    """Hold the big part of the GPU's memory, which one worker has at a time; the others wait for it here.

    On a CPU, and where it is not ``wanted``, nothing happens.
    """
    if device != "cuda" or not wanted:
        yield
        return
    own, more = _shares()
    TURNS.mkdir(parents=True, exist_ok=True)
    with (TURNS / os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace("/", "-")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.set_per_process_memory_fraction(more)
        try:
            yield
        finally:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(own)


def free_bytes() -> int:
    """Memory that this process may still take on its GPU while it is its turn."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(min(free, total * _shares()[1] - torch.cuda.memory_allocated()))


def _shares() -> tuple[float, float]:
    return environment.shares_of_gpu(os.environ, torch.cuda.mem_get_info()[1])
