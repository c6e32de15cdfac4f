"""From streams to mixing coefficients: projection, RMS scaling, gates and Sinkhorn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from torch import Tensor

from fast.arguments import BF16, F32, Constants, Output
from fast.registry import Config
from fast.tilelang_kernels import MAX_STREAMS
from fast.tilelang_kernels.build import Wide, arguments, fixed, run, vector_of
from fast.tilelang_kernels.numerics import Numerics, clear, each, exp, move, sigmoid
from fast.tilelang_kernels.sweep import SQUARES, SUMS, Sweep, sweep

F = T.float32
THREADS = 128

COEFFICIENTS = (Output("pre_mix", F32, "T n"), Output("post_mix", F32, "T n"), Output("comb_mix", F32, "T n n"))


def project(x: Tensor, fn: Tensor, *, out: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return sums [T, M] fp32, the dot products of the streams with each row of fn, and squares [T] fp32.

    x [T, n, H] or [T, H] bf16, fn [M, n*H] (or [M, H]) fp32, any M of at least 1, any strides. The order is pinned:
    64 lanes, segments of 512 columns. TypeError or ValueError for arguments that do not fit. Source: contract 1.
    """
    given = arguments("project")
    given.tensor("x", x, BF16, "T H" if isinstance(x, Tensor) and x.dim() == 2 else "T n H")
    streams = x.unsqueeze(1) if x.dim() == 2 else x
    given.integer("streams of x", streams.shape[1], 1, MAX_STREAMS)
    given.size("n*H", streams.shape[1] * streams.shape[2])
    given.tensor("fn", fn, F32, "M n*H")
    sums, squares = given.outputs([Output("sums", F32, "T M"), Output("squares", F32, "T")], out)
    if given["T"]:
        partials = sweep(Sweep(streams, fn))
        run(make_fold, (), [partials, sums, squares], [given["T"], given["M"], partials.shape[1]])
    return sums, squares


def mixes(sums: Tensor, squares: Tensor, *, numel: int, rms_eps: float, out: Tensor | None = None) -> Tensor:
    """Return mixes [T, M] fp32: sums times 1 / sqrt(squares / numel + rms_eps), each step rounded.

    sums [T, M] and squares [T] fp32, any strides; numel counts the squared values. TypeError or ValueError for
    arguments that do not fit. Source: contract 1.
    """
    given = arguments("mixes")
    given.tensor("sums", sums, F32, "T M")
    given.tensor("squares", squares, F32, "T")
    count, eps = float(given.integer("numel", numel)), given.number("rms_eps", rms_eps)
    (scaled,) = given.outputs([Output("mixes", F32, "T M")], out)
    if given["T"]:
        run(make_mixes, (), [sums, squares, scaled], [given["T"], given["M"], count, eps])
    return scaled


def sinkhorn(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float, out: Tensor | None = None) -> Tensor:
    """Return comb_mix [T, n, n] fp32: the softmax of each row of logits, then rounds of column and row division.

    logits [T, n, n] fp32 by [input stream, output stream], any strides; n is 1 to 8, sinkhorn_iters at least 1.
    TypeError or ValueError for arguments that do not fit. Source: contract 1, comb.
    """
    given = arguments("sinkhorn")
    given.tensor("logits", logits, F32, "T n n")
    n = given.integer("streams of logits", logits.shape[1], 1, MAX_STREAMS)
    iters, eps = given.integer("sinkhorn_iters", sinkhorn_iters), given.number("sinkhorn_eps", sinkhorn_eps)
    (comb_mix,) = given.outputs([Output("comb_mix", F32, "T n n")], out)
    if given["T"]:
        key = (*fixed(logits, n), tokens_a_block(logits, n))
        run(make_sinkhorn, key, [logits, comb_mix], [given["T"], n, iters, eps])
    return comb_mix


def coefficients(
    mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, *, config: Config, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre_mix [T, n], post_mix [T, n] and comb_mix [T, n, n], fp32, from z = mix * scale + base.

    mixes [T, M] with M = n(n + 2), hc_scale [3] and hc_base [M] fp32, any strides; n = config.hc_mult is 1 to 8.
    TypeError or ValueError for arguments that do not fit. Source: contract 1, coefficients and comb.
    """
    given = arguments("coefficients")
    constants = given.config(config)
    n = given.integer("config.hc_mult", constants.hc_mult, 1, MAX_STREAMS)
    given.size("M", n * (n + 2))
    given.tensor("mixes", mixes, F32, "T M")
    given.tensor("hc_scale", hc_scale, F32, "3")
    given.tensor("hc_base", hc_base, F32, "M")
    outputs = given.outputs(COEFFICIENTS, out)
    if given["T"]:
        tensors = [mixes, hc_scale, hc_base, *outputs]
        key = (*fixed(mixes, n), tokens_a_block(mixes, n))
        run(make_coefficients, key, tensors, [given["T"], n, *plain(constants)])
    return outputs[0], outputs[1], outputs[2]


def plain(constants: Constants) -> tuple[int, float, float, float]:
    """Return the numbers that gates and Sinkhorn take, in their kernels' order."""
    return constants.sinkhorn_iters, constants.hc_pre_eps, constants.hc_sinkhorn_eps, constants.post_mult


def fn_broadcast(fn: Tensor, hc_mult: int, *, out: Tensor | None = None) -> Tensor:
    """Return fn_broadcast [M, H] fp32: the parts of fn [M, n*H] fp32 for each stream, added in index order from +0.

    Any strides. `out` is refreshed in place, so that its address stays what a captured graph knows. TypeError or
    ValueError for arguments that do not fit. Source: upstream's broadcast of the first layer's projection.
    """
    given = arguments("fn_broadcast")
    n = given.integer("hc_mult", hc_mult, 1, MAX_STREAMS)
    given.tensor("fn", fn, F32, "M n*H")
    if fn.shape[1] % n:
        raise ValueError(f"fn_broadcast: fn must have a multiple of hc_mult = {n} columns, got {fn.shape[1]}")
    given.size("H", fn.shape[1] // n)
    (total,) = given.outputs([Output("fn_broadcast", F32, "M H")], out)
    parts = fn.unflatten(1, (n, given["H"]))
    v = vector_of(parts, total)
    key = (*fixed(fn, n, given["H"]), v)
    run(make_fn_broadcast, key, [Wide(parts, v), Wide(total, v)], [given["M"], n, given["H"]])
    return total


def tokens_a_block(tensor: Tensor, n: int) -> int:
    """Return how many tokens' matrices one block holds; no result depends on it."""
    return max(1, 64 // n) if tensor.is_cuda else 3


def make_fold(o: Numerics) -> Any:
    """Trace the kernel that sums the segments of a projection: one thread a sum."""

    @T.prim_func
    def fold(
        partials_p: T.ptr(F), sums_p: T.ptr(F), squares_p: T.ptr(F), tokens: T.int32, rows: T.int32, segments: T.int32,
        pt: T.int64, ps: T.int64, pr: T.int64, st: T.int64, sr: T.int64, qt: T.int64,
    ):  # fmt: skip
        partials = o.tensor(partials_p, F, (tokens, segments, SUMS + rows), (pt, ps, pr))
        sums = o.tensor(sums_p, F, (tokens, rows), (st, sr))
        squares = o.tensor(squares_p, F, (tokens,), (qt,))
        with o.kernel(tokens, T.ceildiv(SUMS + rows, THREADS), threads=THREADS) as (t, block):
            for thread in o.threads(THREADS):
                slot = block * THREADS + thread
                if slot == SQUARES:
                    squares[t] = segment_sum(o, partials, t, slot, segments)
                if slot >= SUMS and slot < SUMS + rows:
                    sums[t, slot - SUMS] = segment_sum(o, partials, t, slot, segments)

    return fold


@T.macro
def segment_sum(o, partials, t, slot, segments):
    """Return the sum over segments of one slot of `partials`, ascending, from +0."""
    total = T.alloc_var(F)
    total = o.constant(0.0)
    for segment in T.serial(segments):
        total = o.add(total, partials[t, segment, slot])
    return total


def make_mixes(o: Numerics) -> Any:
    """Trace the kernel: one thread a mix."""

    @T.prim_func
    def mixes(
        sums_p: T.ptr(F), squares_p: T.ptr(F), out_p: T.ptr(F), tokens: T.int32, rows: T.int32,
        numel: T.float32, eps: T.float32, st: T.int64, sr: T.int64, qt: T.int64, ot: T.int64, om: T.int64,
    ):  # fmt: skip
        sums = o.tensor(sums_p, F, (tokens, rows), (st, sr))
        squares = o.tensor(squares_p, F, (tokens,), (qt,))
        out = o.tensor(out_p, F, (tokens, rows), (ot, om))
        with o.kernel(tokens, T.ceildiv(rows, THREADS), threads=THREADS) as (t, block):
            for thread in o.threads(THREADS):
                m = block * THREADS + thread
                if m < rows:
                    out[t, m] = o.mul(sums[t, m], o.reciprocal_rms(squares[t], numel, eps))

    return mixes


def make_sinkhorn(o: Numerics, fixed_n: int | None, many: int) -> Any:
    """Trace the kernel: a block of `many` tokens, one thread a row or column."""

    @T.prim_func
    def sinkhorn(
        logits_p: T.ptr(F), out_p: T.ptr(F), tokens: T.int32, n: T.int32, iters: T.int32, sinkhorn_eps: T.float32,
        lt: T.int64, li: T.int64, lk: T.int64, ot: T.int64, oi: T.int64, ok: T.int64,
    ):  # fmt: skip
        n = o.choice(fixed_n, n)
        logits = o.tensor(logits_p, F, (tokens, n, n), (lt, li, lk))
        out = o.tensor(out_p, F, (tokens, n, n), (ot, oi, ok))
        with o.kernel(T.ceildiv(tokens, many), threads=THREADS) as place:
            matrix = o.shared((many, o.most(n), o.most(n)), F)
            g = Gates(o, n, many, THREADS, tokens, place * many, iters, None, sinkhorn_eps, None)
            each(o, THREADS, many * g.most * g.most, _load_logit, g, logits, matrix)
            _balance(g, matrix)
            each(o, THREADS, many * g.most * g.most, _give_entry, g, matrix, out)

    return sinkhorn


def make_coefficients(o: Numerics, fixed_n: int | None, many: int) -> Any:
    """Trace the kernel: a block of `many` tokens, one thread a gate or logit, then one a row or column."""

    @T.prim_func
    def coefficients(
        mixes_p: T.ptr(F), scale_p: T.ptr(F), base_p: T.ptr(F), pre_p: T.ptr(F), post_p: T.ptr(F), comb_p: T.ptr(F),
        tokens: T.int32, n: T.int32, iters: T.int32, pre_eps: T.float32, sinkhorn_eps: T.float32, post_mult: T.float32,
        xt: T.int64, xm: T.int64, ss: T.int64, bm: T.int64, pt: T.int64, pn: T.int64,
        qt: T.int64, qn: T.int64, ct: T.int64, ci: T.int64, ck: T.int64,
    ):  # fmt: skip
        n = o.choice(fixed_n, n)
        mixes = o.tensor(mixes_p, F, (tokens, n * (n + 2)), (xt, xm))
        scale = o.tensor(scale_p, F, (3,), (ss,))
        base = o.tensor(base_p, F, (n * (n + 2),), (bm,))
        pre = o.tensor(pre_p, F, (tokens, n), (pt, pn))
        post = o.tensor(post_p, F, (tokens, n), (qt, qn))
        comb = o.tensor(comb_p, F, (tokens, n, n), (ct, ci, ck))
        with o.kernel(T.ceildiv(tokens, many), threads=THREADS) as place:
            g = Gates(o, n, many, THREADS, tokens, place * many, iters, pre_eps, sinkhorn_eps, post_mult)
            mix = o.shared((many, g.most_rows), F)
            each(o, THREADS, many * g.most_rows, _load_mix, g, mixes, mix)
            give_coefficients(g, mix, scale, base, pre, post, comb)

    return coefficients


@dataclass(frozen=True)
class Gates:
    """One block's share of the coefficients while its kernel is traced: `many` tokens from `first` on.

    Items are counted as if every token had the most streams, and those that it has not are passed over: TileLang takes
    minutes over a division by a number that it does not know.
    """

    o: Numerics
    n: Any
    many: int
    threads: int
    tokens: Any
    first: Any
    iters: Any
    pre_eps: Any
    sinkhorn_eps: Any
    post_mult: Any

    @property
    def most(self) -> int:
        """How many streams a token can have."""
        return self.o.most(self.n)

    @property
    def rows(self) -> Any:
        """How many mixes a token has."""
        return self.n * (self.n + 2)

    @property
    def most_rows(self) -> int:
        """How many mixes a token can have."""
        return self.most * (self.most + 2)


@T.macro
def _load_logit(g, logits, matrix, item):
    """Bring one logit of one token into shared memory."""
    i = item // (g.most * g.most)
    j = item // g.most % g.most
    k = item % g.most
    if g.first + i < g.tokens and j < g.n and k < g.n:
        matrix[i, j, k] = logits[g.first + i, j, k]


@T.macro
def _give_entry(g, matrix, comb, item):
    """Write one entry of one token's matrix."""
    i = item // (g.most * g.most)
    j = item // g.most % g.most
    k = item % g.most
    if g.first + i < g.tokens and j < g.n and k < g.n:
        comb[g.first + i, j, k] = matrix[i, j, k]


@T.macro
def _load_mix(g, mixes, mix, item):
    """Bring one mix of one token into shared memory."""
    i = item // g.most_rows
    m = item % g.most_rows
    if g.first + i < g.tokens and m < g.rows:
        mix[i, m] = mixes[g.first + i, m]


@T.macro
def give_coefficients(g, mix, scale, base, pre, post, comb):
    """Write what the mixes of a block's tokens, in shared `mix`, become: two gates and a mixing matrix each."""
    matrix = g.o.shared((g.many, g.most, g.most), F)
    each(g.o, g.threads, g.many * 2 * g.most, _give_gate, g, mix, scale, base, pre, post)
    each(g.o, g.threads, g.many * g.most * g.most, _make_logit, g, mix, scale, base, matrix)
    _balance(g, matrix)
    each(g.o, g.threads, g.many * g.most * g.most, _give_entry, g, matrix, comb)


@T.macro
def _give_gate(g, mix, scale, base, pre, post, item):
    """Write one pre gate, sigmoid(z) + eps, or post gate, factor * sigmoid(z), of one token."""
    o = g.o
    i = item // (2 * g.most)
    half = item // g.most % 2
    j = item % g.most
    m = half * g.n + j
    if g.first + i < g.tokens and j < g.n:
        opening = T.alloc_var(F)
        opening = sigmoid(o, o.logit(mix[i, m], scale[half], base[m]))
        if half == 0:
            pre[g.first + i, j] = o.add(opening, g.pre_eps)
        else:
            post[g.first + i, j] = o.mul(g.post_mult, opening)


@T.macro
def _make_logit(g, mix, scale, base, matrix, item):
    """Put one logit of one token's matrix in its place."""
    i = item // (g.most * g.most)
    j = item // g.most % g.most
    k = item % g.most
    m = (2 + j) * g.n + k
    if g.first + i < g.tokens and j < g.n and k < g.n:
        matrix[i, j, k] = g.o.logit(mix[i, m], scale[2], base[m])


@T.macro
def _balance(g, matrix):
    """Turn the logits of a block's tokens in shared `matrix` into mixing matrices, in place."""
    each(g.o, g.threads, g.many * g.most, _softmax_row, g, matrix)
    each(g.o, g.threads, g.many * g.most, _divide_column, g, matrix)
    for _ in T.serial(g.iters - 1):
        each(g.o, g.threads, g.many * g.most, _divide_row, g, matrix)
        each(g.o, g.threads, g.many * g.most, _divide_column, g, matrix)


@T.macro
def _softmax_row(g, matrix, item):
    """Replace one row by its softmax, no eps in that denominator, plus eps."""
    o = g.o
    i = item // g.most
    j = item % g.most
    if g.first + i < g.tokens and j < g.n:
        top = T.alloc_var(F)
        below = T.alloc_var(F)
        powers = T.alloc_local((g.most,), F)
        top = matrix[i, j, 0]
        for k in o.loop(g.n):
            top = T.if_then_else(matrix[i, j, k] > top, matrix[i, j, k], top)
        below = o.constant(0.0)
        for k in o.loop(g.n):
            powers[k] = exp(o, o.sub(matrix[i, j, k], top))
            below = o.add(below, powers[k])
        for k in o.loop(g.n):
            matrix[i, j, k] = o.add(o.div(powers[k], below), g.sinkhorn_eps)


@T.macro
def _divide_row(g, matrix, item):
    """Divide one row by its sum plus eps."""
    o = g.o
    i = item // g.most
    j = item % g.most
    if g.first + i < g.tokens and j < g.n:
        below = T.alloc_var(F)
        below = o.constant(0.0)
        for k in o.loop(g.n):
            below = o.add(below, matrix[i, j, k])
        below = o.add(below, g.sinkhorn_eps)
        for k in o.loop(g.n):
            matrix[i, j, k] = o.div(matrix[i, j, k], below)


@T.macro
def _divide_column(g, matrix, item):
    """Divide one column by its sum plus eps."""
    o = g.o
    i = item // g.most
    k = item % g.most
    if g.first + i < g.tokens and k < g.n:
        below = T.alloc_var(F)
        below = o.constant(0.0)
        for j in o.loop(g.n):
            below = o.add(below, matrix[i, j, k])
        below = o.add(below, g.sinkhorn_eps)
        for j in o.loop(g.n):
            matrix[i, j, k] = o.div(matrix[i, j, k], below)


def make_fn_broadcast(o: Numerics, fixed_n: int | None, fixed_size: int | None, v: int) -> Any:
    """Trace the kernel: one thread adds the streams' parts of `v` neighbouring columns of one row."""

    @T.prim_func
    def fn_broadcast(
        fn_p: T.ptr(F), out_p: T.ptr(F), rows: T.int32, n: T.int32, size: T.int32,
        fm: T.int64, fn: T.int64, fh: T.int64, om: T.int64, oh: T.int64,
    ):  # fmt: skip
        n, size = o.choice(fixed_n, n), o.choice(fixed_size, size)
        parts = o.tensor(fn_p, F, (rows, n, size), (fm, fn, fh), v)
        out = o.tensor(out_p, F, (rows, size), (om, oh), v)
        with o.kernel(rows, T.ceildiv(size, THREADS * v), threads=THREADS) as (row, block):
            for thread in o.threads(THREADS):
                h = (block * THREADS + thread) * v
                if h < size:
                    part = T.alloc_local((v,), F)
                    total = T.alloc_local((v,), F)
                    clear(o, v, total)
                    for j in o.loop(n):
                        move(o, v, parts, (row, j, h), part, (0,))
                        for e in T.unroll(v):
                            total[e] = o.add(total[e], part[e])
                    move(o, v, total, (0,), out, (row, h))

    return fn_broadcast
