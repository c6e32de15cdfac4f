"""The streams of every token: copied out of one row, averaged into one, and mapped by a sublayer's post step."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from torch import Tensor

from fast.arguments import BF16, F32, Arguments, Output
from fast.tilelang_kernels import MAX_STREAMS
from fast.tilelang_kernels.build import Argument, Wide, arguments, fixed, run, vector_of
from fast.tilelang_kernels.numerics import Numerics, add_weighted, clear, move, round_to

F = T.float32
THREADS = 128


def expand(hidden: Tensor, hc_mult: int, *, out: Tensor | None = None) -> Tensor:
    """Return residual [T, n, H] bf16, n = hc_mult copies of every row of hidden [T, H] bf16, bit for bit.

    Any strides; n is 1 to 8. TypeError or ValueError for arguments that do not fit.
    """
    given = arguments("expand")
    given.tensor("hidden", hidden, BF16, "T H")
    n = given.integer("hc_mult", hc_mult, 1, MAX_STREAMS)
    given.size("n", n)
    (residual,) = given.outputs([Output("residual", BF16, "T n H")], out)
    if given["T"]:
        v = vector_of(hidden, residual)
        key = (*fixed(hidden, n, given["H"]), v)
        run(make_expand, key, [Wide(hidden, v), Wide(residual, v)], [given["T"], n, given["H"]])
    return residual


def stream_mean(residual: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return aux [T, H] bf16, the mean over the n streams of residual [T, n, H] bf16.

    Any strides; n is 1 to 8. The sum starts at +0, runs in stream order, and is divided by n once, as contract 1 says.
    TypeError or ValueError for arguments that do not fit.
    """
    given = arguments("stream_mean")
    given.tensor("residual", residual, BF16, "T n H")
    n = given.integer("streams of residual", residual.shape[1], 1, MAX_STREAMS)
    (aux,) = given.outputs([Output("aux", BF16, "T H")], out)
    if given["T"]:
        v = vector_of(residual, aux)
        key = (*fixed(residual, n, given["H"]), v)
        run(make_stream_mean, key, [Wide(residual, v), Wide(aux, v)], [given["T"], n, given["H"]])
    return aux


def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the new residual [T, n, H] bf16: stream k is post_mix[k] * x plus, over i, comb_mix[i, k] * residual[i].

    x [T, H] and residual [T, n, H] bf16, post_mix [T, n] and comb_mix [T, n, n] fp32 (input stream, output stream),
    any strides; n is 1 to 8. TypeError or ValueError for arguments that do not fit. Terms are added in stream order
    and each step is rounded, as contract 1 says.
    """
    given = arguments("post")
    check_post(given, x, residual, post_mix, comb_mix)
    (new,) = given.outputs([Output("residual", BF16, "T n H")], out)
    if given["T"]:
        v = vector_of(x, residual, new)
        key = (*fixed(residual, given["n"], given["H"]), v)
        tensors: list[Argument] = [Wide(x, v), Wide(residual, v), post_mix, comb_mix, Wide(new, v)]
        run(make_post, key, tensors, [given["T"], given["n"], given["H"]])
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
    check_post(given, x, residual, post_mix, comb_mix)
    given.tensor("pre_mix", pre_mix, F32, "T n")
    (layer_input,) = given.outputs([Output("layer_input", BF16, "T H")], out)
    if given["T"]:
        v = vector_of(x, residual, layer_input)
        key = (*fixed(residual, given["n"], given["H"]), v)
        tensors: list[Argument] = [Wide(x, v), Wide(residual, v), post_mix, comb_mix, pre_mix, Wide(layer_input, v)]
        run(make_draft_tail, key, tensors, [given["T"], given["n"], given["H"]])
    return layer_input


def check_post(given: Arguments, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> None:
    """Check the four tensors that every post takes."""
    given.tensor("residual", residual, BF16, "T n H")
    given.integer("streams of residual", residual.shape[1], 1, MAX_STREAMS)
    given.tensor("x", x, BF16, "T H")
    given.tensor("post_mix", post_mix, F32, "T n")
    given.tensor("comb_mix", comb_mix, F32, "T n n")


def make_expand(o: Numerics, fixed_n: int | None, fixed_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread copies `v` neighbouring columns of one token to every stream."""

    @T.prim_func
    def expand(
        hidden_p: T.ptr(o.bf16), out_p: T.ptr(o.bf16), tokens: T.int32, n: T.int32, size: T.int32,
        ht: T.int64, hh: T.int64, ot: T.int64, on: T.int64, oh: T.int64,
    ):  # fmt: skip
        n, size = o.choice(fixed_n, n), o.choice(fixed_size, size)
        hidden = o.tensor(hidden_p, o.bf16, (tokens, size), (ht, hh), v)
        out = o.tensor(out_p, o.bf16, (tokens, n, size), (ot, on, oh), v)
        with o.kernel(tokens, T.ceildiv(size, THREADS * v), threads=THREADS) as (t, block):
            for thread in o.threads(THREADS):
                h = (block * THREADS + thread) * v
                if h < size:
                    row = T.alloc_local((v,), o.bf16)
                    move(o, v, hidden, (t, h), row, (0,))
                    for k in o.loop(n):
                        move(o, v, row, (0,), out, (t, k, h))

    return expand


def make_stream_mean(o: Numerics, fixed_n: int | None, fixed_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread averages `v` neighbouring columns of one token."""

    @T.prim_func
    def stream_mean(
        residual_p: T.ptr(o.bf16), out_p: T.ptr(o.bf16), tokens: T.int32, n: T.int32, size: T.int32,
        rt: T.int64, rn: T.int64, rh: T.int64, ot: T.int64, oh: T.int64,
    ):  # fmt: skip
        n, size = o.choice(fixed_n, n), o.choice(fixed_size, size)
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        out = o.tensor(out_p, o.bf16, (tokens, size), (ot, oh), v)
        with o.kernel(tokens, T.ceildiv(size, THREADS * v), threads=THREADS) as (t, block):
            for thread in o.threads(THREADS):
                h = (block * THREADS + thread) * v
                if h < size:
                    streams = T.alloc_local((o.most(n), v), o.bf16)
                    mean = T.alloc_local((v,), o.bf16)
                    total = T.alloc_local((v,), F)
                    for i in o.loop(n):
                        move(o, v, residual, (t, i, h), streams, (i, 0))
                    clear(o, v, total)
                    for i in o.loop(n):
                        for e in T.unroll(v):
                            total[e] = o.add(total[e], o.widen(streams[i, e]))
                    for e in T.unroll(v):
                        total[e] = o.share(total[e], n)
                    round_to(o, v, total, mean)
                    move(o, v, mean, (0,), out, (t, h))

    return stream_mean


@T.macro
def map_stream(o, n, v, gates, comb, t, k, row, streams, mapped):
    """Put into `mapped` (v) what `post` makes of stream k of token t, from `row` (v) of x and `streams` (n, v)."""
    gate = T.alloc_var(F)
    weight = T.alloc_var(F)
    exact = T.alloc_local((v,), F)
    stream = T.alloc_local((v,), o.bf16)
    gate = gates[t, k]
    for e in T.unroll(v):
        exact[e] = o.mul(gate, o.widen(row[e]))
    for i in o.loop(n):
        weight = comb[t, i, k]
        move(o, v, streams, (i, 0), stream, (0,))
        add_weighted(o, v, weight, stream, exact)
    round_to(o, v, exact, mapped)


def make_post(o: Numerics, fixed_n: int | None, fixed_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread maps `v` neighbouring columns of one token, all streams of them."""

    @T.prim_func
    def post(
        x_p: T.ptr(o.bf16), residual_p: T.ptr(o.bf16), gates_p: T.ptr(F), comb_p: T.ptr(F), out_p: T.ptr(o.bf16),
        tokens: T.int32, n: T.int32, size: T.int32, xt: T.int64, xh: T.int64, rt: T.int64, rn: T.int64, rh: T.int64,
        gt: T.int64, gn: T.int64, ct: T.int64, ci: T.int64, ck: T.int64, ot: T.int64, on: T.int64, oh: T.int64,
    ):  # fmt: skip
        n, size = o.choice(fixed_n, n), o.choice(fixed_size, size)
        x = o.tensor(x_p, o.bf16, (tokens, size), (xt, xh), v)
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        gates = o.tensor(gates_p, F, (tokens, n), (gt, gn))
        comb = o.tensor(comb_p, F, (tokens, n, n), (ct, ci, ck))
        out = o.tensor(out_p, o.bf16, (tokens, n, size), (ot, on, oh), v)
        with o.kernel(tokens, T.ceildiv(size, THREADS * v), threads=THREADS) as (t, block):
            for thread in o.threads(THREADS):
                h = (block * THREADS + thread) * v
                if h < size:
                    row = T.alloc_local((v,), o.bf16)
                    streams = T.alloc_local((o.most(n), v), o.bf16)
                    mapped = T.alloc_local((v,), o.bf16)
                    move(o, v, x, (t, h), row, (0,))
                    for i in o.loop(n):
                        move(o, v, residual, (t, i, h), streams, (i, 0))
                    for k in o.loop(n):
                        map_stream(o, n, v, gates, comb, t, k, row, streams, mapped)
                        move(o, v, mapped, (0,), out, (t, k, h))

    return post


def make_draft_tail(o: Numerics, fixed_n: int | None, fixed_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread maps and sums `v` neighbouring columns of one token; no stream leaves it."""

    @T.prim_func
    def draft_tail(
        x_p: T.ptr(o.bf16), residual_p: T.ptr(o.bf16), gates_p: T.ptr(F), comb_p: T.ptr(F), pre_p: T.ptr(F),
        out_p: T.ptr(o.bf16), tokens: T.int32, n: T.int32, size: T.int32,
        xt: T.int64, xh: T.int64, rt: T.int64, rn: T.int64, rh: T.int64, gt: T.int64, gn: T.int64,
        ct: T.int64, ci: T.int64, ck: T.int64, pt: T.int64, pn: T.int64, ot: T.int64, oh: T.int64,
    ):  # fmt: skip
        n, size = o.choice(fixed_n, n), o.choice(fixed_size, size)
        x = o.tensor(x_p, o.bf16, (tokens, size), (xt, xh), v)
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        gates = o.tensor(gates_p, F, (tokens, n), (gt, gn))
        comb = o.tensor(comb_p, F, (tokens, n, n), (ct, ci, ck))
        pre = o.tensor(pre_p, F, (tokens, n), (pt, pn))
        out = o.tensor(out_p, o.bf16, (tokens, size), (ot, oh), v)
        with o.kernel(tokens, T.ceildiv(size, THREADS * v), threads=THREADS) as (t, block):
            for thread in o.threads(THREADS):
                h = (block * THREADS + thread) * v
                if h < size:
                    _map_and_collapse(o, n, v, x, residual, gates, comb, pre, out, t, h)

    return draft_tail


@T.macro
def _map_and_collapse(o, n, v, x, residual, gates, comb, pre, out, t, h):
    """Write `v` columns of the collapse of what `post` makes of token t; the rounding between them stays."""
    row = T.alloc_local((v,), o.bf16)
    streams = T.alloc_local((o.most(n), v), o.bf16)
    mapped = T.alloc_local((v,), o.bf16)
    total = T.alloc_local((v,), F)
    factor = T.alloc_var(F)
    move(o, v, x, (t, h), row, (0,))
    for i in o.loop(n):
        move(o, v, residual, (t, i, h), streams, (i, 0))
    clear(o, v, total)
    for k in o.loop(n):
        map_stream(o, n, v, gates, comb, t, k, row, streams, mapped)
        factor = pre[t, k]
        add_weighted(o, v, factor, mapped, total)
    round_to(o, v, total, mapped)
    move(o, v, mapped, (0,), out, (t, h))
