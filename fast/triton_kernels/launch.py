"""How kernels are launched: fusion off, on the tensors' device, in blocks that suit the machine.

Blocks are chosen for speed alone. Every kernel computes an element the same way whatever block it lies in, so the
interpreter, which pays by the program, gets a few large blocks and a GPU many small ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from fast.arguments import Arguments
from fast.triton_kernels.numerics import INTERPRETED

# Elements of one interpreted block: enough to hide the cost of a program, few enough to stay in a cache's reach.
INTERPRETED_ELEMENTS = 1 << 17
COMPILED_COLUMNS = 1024

# How every launch compiles its kernel; what is compiled to be read compiles the same.
OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": False}


def arguments(op: str) -> Arguments:
    """Begin the checks of one call: interpreted kernels read CPU memory, compiled ones CUDA memory."""
    if INTERPRETED.value:
        return Arguments(op, "cpu", "TRITON_INTERPRET is set, so kernels are interpreted")
    return Arguments(op, "cuda", "kernels are compiled for GPUs; TRITON_INTERPRET=1 interprets them on the CPU")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, **constants: Any) -> None:
    """Run `kernel` over `grid` on the device of its first argument; a grid with a zero launches nothing."""
    if 0 in grid:
        return
    with _on_device_of(args[0]):
        kernel[grid](*args, **constants, num_warps=warps, **OPTIONS)


@contextlib.contextmanager
def _on_device_of(tensor: Tensor) -> Iterator[None]:
    if INTERPRETED.value:
        # Overflow, Inf - Inf and the like are values here, as they are on a GPU.
        with numpy.errstate(all="ignore"):
            yield
    else:
        with torch.cuda.device(tensor.device):
            yield


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def blocks(total: int, size: int) -> int:
    """How many blocks of `size` cover `total`."""
    return -(-total // size)


@dataclass(frozen=True)
class Tile:
    """A block of tokens by columns, and the warps that a GPU gives it."""

    tokens: int
    columns: int
    warps: int

    @classmethod
    def over(cls, tokens: int, columns: int) -> Tile:
        """The block for an elementwise kernel over [tokens, columns]."""
        width = power_of_two(columns)
        if INTERPRETED.value:
            width = min(width, INTERPRETED_ELEMENTS)
            return cls(min(power_of_two(tokens), INTERPRETED_ELEMENTS // width), width, 1)
        width = min(width, COMPILED_COLUMNS)
        return cls(1, width, max(1, min(4, width // 256)))

    def grid(self, tokens: int, columns: int) -> tuple[int, int]:
        """Tokens first: that axis of a grid may be long, the second not."""
        return blocks(tokens, self.tokens), blocks(columns, self.columns)

    @property
    def constants(self) -> dict[str, int]:
        """The constexpr arguments that every elementwise kernel takes."""
        return {"BLOCK_T": self.tokens, "BLOCK_H": self.columns}
