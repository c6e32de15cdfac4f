"""Collapse: the weighted sum over the streams of every token."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from torch import Tensor

from fast.arguments import BF16, F32, Output
from fast.tilelang_kernels.build import Wide, arguments, fixed, run, vector_of
from fast.tilelang_kernels.numerics import Numerics

F = T.float32
THREADS = 128


def collapse(residual: Tensor, pre_mix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return layer_input [T, H] bf16: for each h the sum over streams i of pre_mix[i] * residual[i, h].

    residual [T, n, H] bf16, pre_mix [T, n] fp32, any strides; n is 1 to 8. TypeError or ValueError for arguments
    that do not fit. The sum starts at +0 and runs in stream order, as contract 1 says.
    """
    given = arguments("collapse")
    given.tensor("residual", residual, BF16, "T n H")
    given.tensor("pre_mix", pre_mix, F32, "T n")
    (layer_input,) = given.outputs([Output("layer_input", BF16, "T H")], out)
    if given["T"]:
        v = vector_of(residual, layer_input)
        run(
            make_collapse,
            (given["n"], fixed(residual, given["H"]), v),
            [Wide(residual, v), pre_mix, Wide(layer_input, v)],
            [given["T"], given["H"]],
        )
    return layer_input


def make_collapse(o: Numerics, n: int, hidden: int | None, v: int) -> Any:
    """Trace the kernel: one thread sums `v` neighbouring columns of one token."""
    columns = THREADS * v

    @T.prim_func
    def collapse(
        residual_p: T.ptr(o.bf16),
        pre_p: T.ptr(F),
        out_p: T.ptr(o.bf16),
        tokens: T.int32,
        width: T.int32,
        rt: T.int64,
        rn: T.int64,
        rh: T.int64,
        pt: T.int64,
        pn: T.int64,
        ot: T.int64,
        oh: T.int64,
    ):
        size = width if hidden is None else hidden
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        pre = o.tensor(pre_p, F, (tokens, n), (pt, pn))
        out = o.tensor(out_p, o.bf16, (tokens, size), (ot, oh), v)
        with o.kernel(tokens, T.ceildiv(size, columns), threads=THREADS) as (t, block):
            for thread in T.Parallel(THREADS):
                h = block * columns + thread * v
                if h < size:
                    weights = T.alloc_local((n,), F)
                    streams = T.alloc_local((n, v), o.bf16)
                    total = T.alloc_local((v,), o.bf16)
                    for i in T.unroll(n):
                        weights[i] = pre[t, i]
                        for e in o.vector(v):
                            streams[i, e] = residual[t, i, h + e]
                    for e in T.unroll(v):
                        total[e] = o.round(o.weighted(o.row(weights, n), o.widened(streams, n, e)))
                    for e in o.vector(v):
                        out[t, h + e] = total[e]

    return collapse
