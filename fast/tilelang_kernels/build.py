"""Compiling TileLang kernels for the device that a call's tensors are on, keeping them, and calling them.

A kernel is a function `make(numerics, *key)` that traces a prim_func whose parameters are the tensors, then the
numbers, then every stride of every tensor in order. On CUDA sizes and options are part of the key; on the CPU they are
numbers, so one compiled kernel serves them all.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast.arguments import Arguments
from fast.backends import probe

os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")

import tilelang

from fast.tilelang_kernels.numerics import Numerics

VECTOR_BYTES = 16
_compiling = threading.Lock()


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for: the C compiler of this machine, or one CUDA architecture ("sm_90")."""

    cuda: bool
    arch: str = ""

    def options(self) -> dict[str, Any]:
        """Return TileLang's compile options: no contraction, no fast maths, no silent bounds checks."""
        if not self.cuda:
            return {
                "target": "c",
                "execution_backend": "cython",
                "pass_configs": {"tirx.disable_vectorize": True, "tl.disable_safe_memory_legalize": True},
                "compile_flags": ["-O2", "-ffp-contract=off", "-fno-strict-aliasing"],
            }
        return {
            "target": {"kind": "cuda", "arch": self.arch},
            "execution_backend": "tvm_ffi",
            "pass_configs": {"tl.enable_lower_ldgstg": True, "tl.disable_safe_memory_legalize": True},
            "compile_flags": ["-fmad=false"],
        }


@dataclass(frozen=True)
class Wide:
    """A tensor whose last dimension a kernel reads or writes `vector` elements at a time."""

    tensor: Tensor
    vector: int

    def strides(self) -> list[int]:
        """Return its strides, the outer ones in vectors, so that the kernel can see that they are multiples.

        The stride of a dimension of size 1 may be any number, and is 0 here.
        """
        *outer, inner = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return [stride // self.vector if size > 1 else 0 for size, stride in outer] + [inner[1]]


Argument = Tensor | Wide


def arguments(op: str) -> Arguments:
    """Begin the checks of one call of `op`; tensors may be on the CPU or on a CUDA device."""
    return Arguments(op)


@functools.cache
def target_of(device: torch.device) -> Target:
    """Return what kernels for tensors on `device` are compiled for; ValueError if it is neither CPU nor CUDA."""
    if device.type == "cpu":
        return Target(cuda=False)
    if device.type != "cuda":
        raise ValueError(f"tilelang kernels run on the CPU or on CUDA, got tensors on {device}")
    major, minor = torch.cuda.get_device_capability(device)
    return Target(cuda=True, arch=f"sm_{major}{minor}")


def fixed(tensor: Tensor, *numbers: int) -> tuple[int | None, ...]:
    """Return `numbers` where a kernel for the device of `tensor` is compiled for them, else as many Nones."""
    return numbers if tensor.is_cuda else (None,) * len(numbers)


def vector_of(*tensors: Tensor) -> int:
    """Return how many elements at a time (a power of two) all of `tensors` may be read: 1 on the CPU.

    Bounded by 16 bytes, the last dimension, its being dense, the outer strides and the address.
    """
    return min(map(_vector_of_one, tensors))


def _vector_of_one(tensor: Tensor) -> int:
    if not tensor.is_cuda or tensor.stride(-1) != 1:
        return 1
    each, address = tensor.element_size(), tensor.data_ptr()
    outer = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1]
    return math.gcd(tensor.shape[-1], *outer, address // each, VECTOR_BYTES // each) if address % each == 0 else 1


def run(make: Callable[..., Any], key: tuple[Any, ...], tensors: Sequence[Argument], numbers: Sequence[float]) -> None:
    """Compile `make(numerics, *key)` for the device of `tensors` if need be, and call it there."""
    views = [tensor if isinstance(tensor, Wide) else Wide(tensor, 1) for tensor in tensors]
    device = views[0].tensor.device
    kernel = compiled(make, target_of(device), key)
    strides = [stride for view in views for stride in view.strides()]
    if device.type == "cpu":
        kernel(*(_c_tensor(view.tensor.detach()) for view in views), *numbers, *strides)
        return
    with torch.cuda.device(device):
        kernel(*(view.tensor.detach() for view in views), *numbers, *strides)


def compiled(make: Callable[..., Any], target: Target, key: tuple[Any, ...]) -> Any:
    """Return the kernel `make(numerics, *key)` compiled for `target`, from memory if this process has it.

    Raises RuntimeError, with the reason, where the compiler that `target` needs is missing.
    """
    with _compiling:
        return _compiled(make, target, key)


@functools.cache
def _compiled(make: Callable[..., Any], target: Target, key: tuple[Any, ...]) -> Any:
    found = probe("cuda" if target.cuda else "cpu")["tilelang"]
    if not found.available and "compiler" in found.reason:
        raise RuntimeError(f"tilelang cannot compile kernels here: {found.reason}")
    return tilelang.compile(make(Numerics(target.cuda), *key), **target.options())


def _c_tensor(tensor: Tensor) -> Tensor:
    """Return `tensor` as the C target takes it: it has no bf16, so patterns travel as uint16."""
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
