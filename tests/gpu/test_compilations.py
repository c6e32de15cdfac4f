"""Kernels are compiled once: after a warm-up on a few token counts, no other token count compiles anything.

A serving engine meets new token counts all the time; one that compiled then would stall for seconds.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import fast
from fast import torch_ops
from fast.registry import Kernel
from tests.gpu.full_size import arguments, inputs, largest, run

HIDDEN = 5120
WARM = (1, 2, 16, 31, 32, 33, 48)
LATER = (3, 4, 7, 8, 15, 17, 30, 47, 64, 100, 127, 128, 255, 256, 257, 511, 512, 1000, 1024, 2047)


def compiled_triton() -> int:
    """Compiled variants of every Triton kernel in this process."""
    from triton.runtime.jit import JITFunction

    from fast.triton_kernels import MODULES

    modules = [importlib.import_module(f"fast.triton_kernels.{name}") for name in set(MODULES.values())]
    kernels = {
        id(value): value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)
    }
    return sum(len(caches[0]) for kernel in kernels.values() for caches in kernel.device_caches.values())


def compiled_tilelang() -> int:
    """Compiled TileLang kernels in this process."""
    from fast.tilelang_kernels import build

    return int(build._compiled.cache_info().currsize)


COUNT = {"triton": compiled_triton, "tilelang": compiled_tilelang}


@pytest.mark.ops_with("tokens")
def test_no_token_count_compiles_anew(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches a kernel that is specialised on the token count, or on a size or stride that follows it."""
    kernel: Kernel = fast.kernel(kernel_op, kernel_backend)
    count = COUNT[kernel_backend]
    for tokens in WARM:
        call = largest(kernel_op, tokens, HIDDEN)
        run(kernel, call, inputs(call, device))
    warm = count()
    assert warm > 0
    grown = {}
    for tokens in LATER:
        call = largest(kernel_op, tokens, HIDDEN)
        before = count()
        run(kernel, call, inputs(call, device))
        if count() != before:
            grown[tokens] = count() - before
    assert not grown, f"compiled anew for these token counts: {grown}"


@pytest.mark.ops_with("tokens")
def test_a_compiled_model_is_not_compiled_again(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches a fake that fixes the token count, so that torch.compile makes a graph for each."""
    torch._dynamo.reset()
    graphs = 0

    def counting(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return module

    compiled = torch.compile(torch_ops.op(kernel_op, kernel_backend), fullgraph=True, dynamic=True, backend=counting)
    for tokens in (5, 33, 64, 129):
        call = largest(kernel_op, tokens, HIDDEN)
        positional, named = arguments(call, inputs(call, device))
        compiled(*positional, **named)
    assert graphs == 1
