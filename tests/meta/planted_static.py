"""Triton kernels whose machine code is wrong on purpose, as launches that the static lane must find.

Imported only by processes that compile: `python -m tests.static --kernels tests.meta.planted_static`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tests.static.launches import Call, TritonLaunch

BLOCK = 1024


@triton.jit
def collapse_kernel(x, y, out, BLOCK: tl.constexpr):
    h = tl.arange(0, BLOCK)
    a, b = tl.load(x + h), tl.load(y + h)
    tl.store(out + h, a * b + a)


@triton.jit
def mixes_kernel(x, y, out, BLOCK: tl.constexpr):
    h = tl.arange(0, BLOCK)
    tl.store(out + h, tl.load(x + h) / tl.load(y + h))


@triton.jit
def sinkhorn_kernel(x, y, out, BLOCK: tl.constexpr):
    h = tl.arange(0, BLOCK)
    tl.store(out + h, tl.exp(tl.load(x + h)) + tl.load(y + h))


@triton.jit
def gate_kernel(x, y, out, BLOCK: tl.constexpr):
    h = tl.arange(0, BLOCK)
    tl.store(out + h, tl.rsqrt(tl.load(x + h)) * tl.load(y + h))


@triton.jit
def project_kernel(x, y, out, BLOCK: tl.constexpr):
    h = tl.arange(0, BLOCK)
    a, b = tl.load(x + h), tl.load(y + h)
    tl.store(out + h, tl.fma(a, b, a) + a * b)


@triton.jit
def unheard_of(x, y, out, BLOCK: tl.constexpr):
    h = tl.arange(0, BLOCK)
    tl.store(out + h, tl.load(x + h) + tl.load(y + h))


def launch(kernel: Any, case: str, op: str, warps: int = 4, block: int = BLOCK, **options: Any) -> TritonLaunch:
    """A launch of a planted kernel; `case` says what is wrong with it."""
    pointers = dict.fromkeys(("x", "y", "out"), "*fp32")
    call = Call(op, 1, BLOCK, 1, (case,))
    return TritonLaunch(
        kernel, {**pointers, "BLOCK": "constexpr"}, {"BLOCK": block}, tuple(pointers), warps, call, options
    )


def launches() -> list[TritonLaunch]:
    """Right kernels first, then one for each thing that must be found."""
    return [
        launch(collapse_kernel, "unfused", "collapse"),
        launch(project_kernel, "unfused", "project"),
        launch(collapse_kernel, "fused", "collapse", enable_fp_fusion=True),
        launch(project_kernel, "fused", "project", enable_fp_fusion=True),
        launch(mixes_kernel, "divided", "mixes"),
        launch(sinkhorn_kernel, "exponential", "sinkhorn"),
        launch(gate_kernel, "root", "head"),
        launch(collapse_kernel, "spilled", "collapse", warps=1, block=16 * BLOCK, maxnreg=32),
        launch(unheard_of, "unheard", "expand"),
    ]
