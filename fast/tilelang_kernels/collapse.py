"""Collapse: the weighted sum over the streams of every token."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from torch import Tensor

from fast.arguments import BF16, F32, Output
from fast.tilelang_kernels import MAX_STREAMS
from fast.tilelang_kernels.build import Argument, Wide, arguments, fixed, run, vector_of
from fast.tilelang_kernels.numerics import Numerics, add_weighted, clear, move, round_to

F = T.float32
THREADS = 128


def collapse(residual: Tensor, pre_mix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return layer_input [T, H] bf16: for each h the sum over streams i of pre_mix[i] * residual[i, h].

    residual [T, n, H] bf16, pre_mix [T, n] fp32, any strides, `out` too; n is 1 to 8. TypeError or ValueError for
    arguments that do not fit. The sum starts at +0 and runs in stream order. Source: contract 1, collapse.
    """
    given = arguments("collapse")
    given.tensor("residual", residual, BF16, "T n H")
    n = given.integer("streams of residual", residual.shape[1], 1, MAX_STREAMS)
    given.tensor("pre_mix", pre_mix, F32, "T n")
    (layer_input,) = given.outputs([Output("layer_input", BF16, "T H")], out)
    if given["T"]:
        v = vector_of(residual, layer_input)
        tensors: list[Argument] = [Wide(residual, v), pre_mix, Wide(layer_input, v)]
        run(make_collapse, (*fixed(residual, n, given["H"]), v), tensors, [given["T"], n, given["H"]])
    return layer_input


@T.macro
def collapse_columns(o, n, v, residual, weights, place, out, t, h):
    """Write `v` columns from h on of the collapse of token t by weights[place]."""
    streams = T.alloc_local((o.most(n), v), o.bf16)
    stream = T.alloc_local((v,), o.bf16)
    total = T.alloc_local((v,), F)
    weight = T.alloc_var(F)
    for i in o.loop(n):
        move(o, v, residual, (t, i, h), streams, (i, 0))
    clear(o, v, total)
    for i in o.loop(n):
        weight = weights[place, i]
        move(o, v, streams, (i, 0), stream, (0,))
        add_weighted(o, v, weight, stream, total)
    round_to(o, v, total, stream)
    move(o, v, stream, (0,), out, (t, h))


def make_collapse(o: Numerics, fixed_n: int | None, fixed_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread sums `v` neighbouring columns of one token."""

    @T.prim_func
    def collapse(
        residual_p: T.ptr(o.bf16), pre_p: T.ptr(F), out_p: T.ptr(o.bf16), tokens: T.int32, n: T.int32, size: T.int32,
        rt: T.int64, rn: T.int64, rh: T.int64, pt: T.int64, pn: T.int64, ot: T.int64, oh: T.int64,
    ):  # fmt: skip
        n, size = o.choice(fixed_n, n), o.choice(fixed_size, size)
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        pre = o.tensor(pre_p, F, (tokens, n), (pt, pn))
        out = o.tensor(out_p, o.bf16, (tokens, size), (ot, oh), v)
        with o.kernel(tokens, T.ceildiv(size, THREADS * v), threads=THREADS) as (t, block):
            for thread in o.threads(THREADS):
                h = (block * THREADS + thread) * v
                if h < size:
                    collapse_columns(o, n, v, residual, pre, t, out, t, h)

    return collapse
