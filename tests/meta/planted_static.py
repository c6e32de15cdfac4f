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


@triton.jit
def broadcast_kernel(x, y, out, count, wide, BLOCK: tl.constexpr):
    row, block = tl.program_id(0) // count, tl.program_id(0) % count
    h = block * BLOCK + tl.arange(0, BLOCK)
    far = (tl.program_id(0).to(tl.int64) * 3) // wide
    tl.store(out + row * 4096 + h, tl.load(x + far * 4096 + h) * tl.load(y + h))


@triton.jit
def mean_kernel(x, y, out, count, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    h = tl.arange(0, BLOCK)
    a, b = tl.load(x + h), tl.load(y + h)
    if FAULT == "approximately divided":
        divisor = (h + count).to(tl.float32)
        inverse = tl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [divisor], tl.float32, True, 1)
        tl.store(out + h, (a + b) * inverse)
    elif FAULT == "in fp64":
        tl.store(out + h, (a.to(tl.float64) * b.to(tl.float64) + a.to(tl.float64)).to(tl.float32))
    elif FAULT == "through fp16":
        tl.store(out + h, (a + b).to(tl.float16).to(tl.float32))
    elif FAULT == "truncated":
        tl.store(out + h, (a + b).to(tl.bfloat16, fp_downcast_rounding="rtz").to(tl.float32))
    else:
        tl.atomic_add(out + h // 4, a + b)


FAULTS = ("approximately divided", "in fp64", "through fp16", "truncated", "by atomics")


def launch(kernel: Any, case: str, op: str, warps: int = 4, block: int = BLOCK, **options: Any) -> TritonLaunch:
    """A launch of a planted kernel; `case` says what is wrong with it."""
    pointers = dict.fromkeys(("x", "y", "out"), "*fp32")
    types = {**pointers, "count": "i32", "wide": "i64", "FAULT": "constexpr", "BLOCK": "constexpr"}
    values = {"FAULT": case, "BLOCK": block}
    names = kernel.arg_names
    return TritonLaunch(
        kernel,
        {name: types[name] for name in names},
        {name: value for name, value in values.items() if name in names},
        tuple(pointers),
        warps,
        Call(op, 1, BLOCK, 1, (case,)),
        options,
    )


def launches() -> list[TritonLaunch]:
    """Two right kernels, one for each thing that must be found, a right one that divides integers, other arithmetic."""
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
        launch(broadcast_kernel, "divided by a count", "fn_broadcast"),
        *(launch(mean_kernel, fault, "mean") for fault in FAULTS),
    ]
