"""The streams of every token: copied out of one row, averaged into one, and mapped by a sublayer's post step."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from torch import Tensor

from fast.arguments import BF16, F32, Output
from fast.tilelang_kernels.build import Wide, arguments, fixed, run, vector_of
from fast.tilelang_kernels.numerics import Numerics

F = T.float32
THREADS = 128


def expand(hidden: Tensor, hc_mult: int, *, out: Tensor | None = None) -> Tensor:
    """Return residual [T, n, H] bf16, n = hc_mult copies of every row of hidden [T, H] bf16, bit for bit.

    Any strides; n is 1 to 8. TypeError or ValueError for arguments that do not fit.
    """
    given = arguments("expand")
    given.tensor("hidden", hidden, BF16, "T H")
    given.size("n", given.integer("hc_mult", hc_mult))
    (residual,) = given.outputs([Output("residual", BF16, "T n H")], out)
    if given["T"]:
        v = vector_of(hidden, residual)
        key = (given["n"], fixed(hidden, given["H"]), v)
        run(make_expand, key, [Wide(hidden, v), Wide(residual, v)], [given["T"], given["H"]])
    return residual


def stream_mean(residual: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return aux [T, H] bf16, the mean over the n streams of residual [T, n, H] bf16.

    Any strides; n is 1 to 8. The sum starts at +0, runs in stream order, and is divided by n once, as contract 1 says.
    TypeError or ValueError for arguments that do not fit.
    """
    given = arguments("stream_mean")
    given.tensor("residual", residual, BF16, "T n H")
    (aux,) = given.outputs([Output("aux", BF16, "T H")], out)
    if given["T"]:
        v = vector_of(residual, aux)
        key = (given["n"], fixed(residual, given["H"]), v)
        run(make_stream_mean, key, [Wide(residual, v), Wide(aux, v)], [given["T"], given["H"]])
    return aux


def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the new residual [T, n, H] bf16: stream k is post_mix[k] * x plus, over i, comb_mix[i, k] * residual[i].

    x [T, H] and residual [T, n, H] bf16, post_mix [T, n] and comb_mix [T, n, n] fp32 (input stream, output stream),
    any strides; n is 1 to 8. TypeError or ValueError for arguments that do not fit. Terms are added in stream order
    and each step is rounded, as contract 1 says.
    """
    given = arguments("post")
    given.tensor("x", x, BF16, "T H")
    given.tensor("residual", residual, BF16, "T n H")
    given.tensor("post_mix", post_mix, F32, "T n")
    given.tensor("comb_mix", comb_mix, F32, "T n n")
    (new,) = given.outputs([Output("residual", BF16, "T n H")], out)
    if given["T"]:
        v = vector_of(x, residual, new)
        key = (given["n"], fixed(residual, given["H"]), v)
        tensors = [Wide(x, v), Wide(residual, v), post_mix, comb_mix, Wide(new, v)]
        run(make_post, key, tensors, [given["T"], given["H"]])
    return new


def draft_tail(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    pre_mix: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_input [T, H] bf16, the collapse by pre_mix of what `post` gives, without storing the streams.

    Arguments of `post`, and pre_mix [T, n] fp32; any strides; n is 1 to 8. The bf16 rounding of every posted stream
    stays. TypeError or ValueError for arguments that do not fit.
    """
    given = arguments("draft_tail")
    given.tensor("x", x, BF16, "T H")
    given.tensor("residual", residual, BF16, "T n H")
    given.tensor("post_mix", post_mix, F32, "T n")
    given.tensor("comb_mix", comb_mix, F32, "T n n")
    given.tensor("pre_mix", pre_mix, F32, "T n")
    (layer_input,) = given.outputs([Output("layer_input", BF16, "T H")], out)
    if given["T"]:
        v = vector_of(x, residual, layer_input)
        key = (given["n"], fixed(residual, given["H"]), v)
        tensors = [Wide(x, v), Wide(residual, v), post_mix, comb_mix, pre_mix, Wide(layer_input, v)]
        run(make_draft_tail, key, tensors, [given["T"], given["H"]])
    return layer_input


def make_expand(o: Numerics, n: int, hidden_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread copies `v` neighbouring columns of one token to every stream."""
    columns = THREADS * v

    @T.prim_func
    def expand(
        hidden_p: T.ptr(o.bf16),
        out_p: T.ptr(o.bf16),
        tokens: T.int32,
        width: T.int32,
        ht: T.int64,
        hh: T.int64,
        ot: T.int64,
        on: T.int64,
        oh: T.int64,
    ):
        size = width if hidden_size is None else hidden_size
        hidden = o.tensor(hidden_p, o.bf16, (tokens, size), (ht, hh), v)
        out = o.tensor(out_p, o.bf16, (tokens, n, size), (ot, on, oh), v)
        with o.kernel(tokens, T.ceildiv(size, columns), threads=THREADS) as (t, block):
            for thread in T.Parallel(THREADS):
                h = block * columns + thread * v
                if h < size:
                    row = T.alloc_local((v,), o.bf16)
                    for e in o.vector(v):
                        row[e] = hidden[t, h + e]
                    for k in T.unroll(n):
                        for e in o.vector(v):
                            out[t, k, h + e] = row[e]

    return expand


def make_stream_mean(o: Numerics, n: int, hidden_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread averages `v` neighbouring columns of one token."""
    columns = THREADS * v

    @T.prim_func
    def stream_mean(
        residual_p: T.ptr(o.bf16),
        out_p: T.ptr(o.bf16),
        tokens: T.int32,
        width: T.int32,
        rt: T.int64,
        rn: T.int64,
        rh: T.int64,
        ot: T.int64,
        oh: T.int64,
    ):
        size = width if hidden_size is None else hidden_size
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        out = o.tensor(out_p, o.bf16, (tokens, size), (ot, oh), v)
        with o.kernel(tokens, T.ceildiv(size, columns), threads=THREADS) as (t, block):
            for thread in T.Parallel(THREADS):
                h = block * columns + thread * v
                if h < size:
                    streams = T.alloc_local((n, v), o.bf16)
                    mean = T.alloc_local((v,), o.bf16)
                    for i in T.unroll(n):
                        for e in o.vector(v):
                            streams[i, e] = residual[t, i, h + e]
                    for e in T.unroll(v):
                        mean[e] = o.round(o.mean(o.widened(streams, n, e)))
                    for e in o.vector(v):
                        out[t, h + e] = mean[e]

    return stream_mean


def make_post(o: Numerics, n: int, hidden_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread maps `v` neighbouring columns of one token, all streams of them."""
    columns = THREADS * v

    @T.prim_func
    def post(
        x_p: T.ptr(o.bf16),
        residual_p: T.ptr(o.bf16),
        gates_p: T.ptr(F),
        comb_p: T.ptr(F),
        out_p: T.ptr(o.bf16),
        tokens: T.int32,
        width: T.int32,
        xt: T.int64,
        xh: T.int64,
        rt: T.int64,
        rn: T.int64,
        rh: T.int64,
        gt: T.int64,
        gn: T.int64,
        ct: T.int64,
        ci: T.int64,
        ck: T.int64,
        ot: T.int64,
        on: T.int64,
        oh: T.int64,
    ):
        size = width if hidden_size is None else hidden_size
        x = o.tensor(x_p, o.bf16, (tokens, size), (xt, xh), v)
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        gates = o.tensor(gates_p, F, (tokens, n), (gt, gn))
        comb = o.tensor(comb_p, F, (tokens, n, n), (ct, ci, ck))
        out = o.tensor(out_p, o.bf16, (tokens, n, size), (ot, on, oh), v)
        with o.kernel(tokens, T.ceildiv(size, columns), threads=THREADS) as (t, block):
            for thread in T.Parallel(THREADS):
                h = block * columns + thread * v
                if h < size:
                    row = T.alloc_local((v,), o.bf16)
                    streams = T.alloc_local((n, v), o.bf16)
                    mapped = T.alloc_local((v,), o.bf16)
                    for e in o.vector(v):
                        row[e] = x[t, h + e]
                    for i in T.unroll(n):
                        for e in o.vector(v):
                            streams[i, e] = residual[t, i, h + e]
                    for k in T.unroll(n):
                        weights = T.alloc_local((n,), F)
                        gate = T.alloc_local((1,), F)
                        gate[0] = gates[t, k]
                        for i in T.unroll(n):
                            weights[i] = comb[t, i, k]
                        for e in T.unroll(v):
                            mapped[e] = o.round(
                                o.posted(gate[0], o.widen(row[e]), o.row(weights, n), o.widened(streams, n, e))
                            )
                        for e in o.vector(v):
                            out[t, k, h + e] = mapped[e]

    return post


def make_draft_tail(o: Numerics, n: int, hidden_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread maps and sums `v` neighbouring columns of one token; no stream leaves registers."""
    columns = THREADS * v

    @T.prim_func
    def draft_tail(
        x_p: T.ptr(o.bf16),
        residual_p: T.ptr(o.bf16),
        gates_p: T.ptr(F),
        comb_p: T.ptr(F),
        pre_p: T.ptr(F),
        out_p: T.ptr(o.bf16),
        tokens: T.int32,
        width: T.int32,
        xt: T.int64,
        xh: T.int64,
        rt: T.int64,
        rn: T.int64,
        rh: T.int64,
        gt: T.int64,
        gn: T.int64,
        ct: T.int64,
        ci: T.int64,
        ck: T.int64,
        pt: T.int64,
        pn: T.int64,
        ot: T.int64,
        oh: T.int64,
    ):
        size = width if hidden_size is None else hidden_size
        x = o.tensor(x_p, o.bf16, (tokens, size), (xt, xh), v)
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        gates = o.tensor(gates_p, F, (tokens, n), (gt, gn))
        comb = o.tensor(comb_p, F, (tokens, n, n), (ct, ci, ck))
        pre = o.tensor(pre_p, F, (tokens, n), (pt, pn))
        out = o.tensor(out_p, o.bf16, (tokens, size), (ot, oh), v)
        with o.kernel(tokens, T.ceildiv(size, columns), threads=THREADS) as (t, block):
            for thread in T.Parallel(THREADS):
                h = block * columns + thread * v
                if h < size:
                    row = T.alloc_local((v,), o.bf16)
                    streams = T.alloc_local((n, v), o.bf16)
                    total = T.alloc_local((v,), F)
                    mapped = T.alloc_local((v,), o.bf16)
                    for e in o.vector(v):
                        row[e] = x[t, h + e]
                    for i in T.unroll(n):
                        for e in o.vector(v):
                            streams[i, e] = residual[t, i, h + e]
                    for e in T.unroll(v):
                        total[e] = o.constant(0.0)
                    for k in T.unroll(n):
                        weights = T.alloc_local((n,), F)
                        scalars = T.alloc_local((2,), F)
                        scalars[0] = gates[t, k]
                        scalars[1] = pre[t, k]
                        for i in T.unroll(n):
                            weights[i] = comb[t, i, k]
                        for e in T.unroll(v):
                            mapped[e] = o.round(
                                o.posted(scalars[0], o.widen(row[e]), o.row(weights, n), o.widened(streams, n, e))
                            )
                            total[e] = o.add(total[e], o.mul(scalars[1], o.widen(mapped[e])))
                    for e in T.unroll(v):
                        mapped[e] = o.round(total[e])
                    for e in o.vector(v):
                        out[t, h + e] = mapped[e]

    return draft_tail
