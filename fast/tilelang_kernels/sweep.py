"""One pass over the streams of every token: post, collapse, mean, and the partial sums of the projection.

This is what makes a V4.1 boundary one pass: the pre-mix that collapses is carried, so nothing waits for the
projection. A block takes a tile of tokens and one segment of 512 columns. It reads each input once, writes each
output once, keeps the bf16 streams in shared memory, and projects them from there. What it leaves for `finish` is a
table of segment sums, `partials` [T, segments, 2 + M]: the squares of what is projected, the squares of the layer
input, then one dot product for each row of fn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from fast.tilelang_kernels.build import Wide, fixed, run, vector_of
from fast.tilelang_kernels.numerics import (
    BLOCKS,
    F32,
    LANES,
    PAIRS,
    SEGMENT,
    Numerics,
    add_weighted,
    clear,
    each,
    move,
    round_to,
)
from fast.tilelang_kernels.streams import map_stream

SQUARES, LAYER_SQUARES, SUMS = 0, 1, 2
NOTHING, FIRST, CARRIED = 0, 1, 2

# Up to so many tokens a launch is short of blocks, so each takes one token; beyond, fn is read once for several.
FEW_TOKENS = 32
MOST_ROWS = 6
# Shared memory of one block on the smallest of the supported GPUs.
SHARED_BYTES = 99 * 1024


@dataclass(frozen=True)
class Tile:
    """What one block takes: tokens, and rows of fn as warps times rows a warp; no result depends on it."""

    tokens: int
    warps: int
    rows: int

    @property
    def step(self) -> int:
        """Rows of fn that the block takes at once."""
        return self.warps * self.rows

    def shared_bytes(self, n: int) -> int:
        """Shared memory of the block for n streams: their bf16 columns, the layer input's, and fp32 lane sums."""
        return self.tokens * ((n + 1) * SEGMENT * 2 + (SUMS + self.step) * (PAIRS + 1) * 4)


@dataclass(frozen=True)
class Post:
    """A post within a sweep: x [T, H] and the mixes map the residual, and `mapped` [T, n, H] takes the result."""

    x: Tensor
    post_mix: Tensor
    comb_mix: Tensor
    mapped: Tensor


@dataclass(frozen=True)
class Layer:
    """A layer input [T, H] written within a sweep: the collapse by pre_mix [T, n], or without it a copy of stream 0.

    `squared` asks for the sums of its squares, which a norm takes.
    """

    layer_input: Tensor
    pre_mix: Tensor | None
    squared: bool


@dataclass(frozen=True)
class Sweep:
    """What one sweep does with residual [T, n, H] (mapped, if there is a `post`).

    fn [M, n * H] projects the streams, or fn [M, H] the rows of `entry` [T, H]; `layer` takes a layer input, `aux`
    [T, H] the stream mean.
    """

    residual: Tensor
    fn: Tensor
    entry: Tensor | None = None
    post: Post | None = None
    layer: Layer | None = None
    aux: Tensor | None = None

    def options(self) -> list[int]:
        """Return which parts there are, as the kernel's numbers: collapse, post, mean, enter, square."""
        collapse = NOTHING if self.layer is None else FIRST if self.layer.pre_mix is None else CARRIED
        squared = self.layer is not None and self.layer.squared
        return [collapse, *map(int, (self.post is not None, self.aux is not None, self.entry is not None, squared))]

    def tensors(self, partials: Tensor) -> dict[str, Tensor]:
        """Return every tensor argument, with a harmless one of the right kind in the place of each that is absent."""
        tokens, n, _ = self.residual.shape
        row, matrix = self.residual[:, 0], partials.as_strided((tokens, n, n), (0, 0, 0))
        post = self.post or Post(row, matrix[..., 0], matrix, self.residual)
        layer = self.layer or Layer(row, None, squared=False)
        return {
            "residual": self.residual,
            "x": post.x,
            "post_mix": post.post_mix,
            "comb_mix": post.comb_mix,
            "pre_mix": matrix[..., 0] if layer.pre_mix is None else layer.pre_mix,
            "entry": row if self.entry is None else self.entry,
            "fn": self.fn,
            "mapped": post.mapped,
            "layer_input": layer.layer_input,
            "aux": row if self.aux is None else self.aux,
            "partials": partials,
        }


def sweep(given: Sweep) -> Tensor:
    """Run one pass and return its partials, fp32 [T, segments, 2 + M]; T is at least 1."""
    tokens, n, hidden = given.residual.shape
    rows = given.fn.shape[0]
    partials = given.residual.new_empty((tokens, -(-hidden // SEGMENT), SUMS + rows), dtype=torch.float32)
    tensors = given.tensors(partials)
    v = vector_of(*(tensor for tensor in tensors.values() if tensor.dtype == torch.bfloat16))
    w = 2 if hidden % 2 == 0 and vector_of(given.fn) > 1 else 1
    width = {torch.bfloat16: v, torch.float32: 1}
    views = [Wide(tensor, w if name == "fn" else width[tensor.dtype]) for name, tensor in tensors.items()]
    numbers = [n, hidden, rows, *given.options()]
    run(make_sweep, (v, w, tile_of(partials, n, rows), *fixed(partials, *numbers)), views, [tokens, *numbers])
    return partials


def tile_of(tensor: Tensor, n: int, rows: int) -> Tile:
    """Return the tile for the device and the tokens of `tensor` [T, ...]: many rows a thread for many tokens."""
    if not tensor.is_cuda:
        return Tile(tokens=2, warps=2, rows=4)
    few = tensor.shape[0] <= FEW_TOKENS
    most_warps = 16 if few else 8
    a_warp = min(MOST_ROWS, -(-rows // (16 if few else 4)))
    warps = min(most_warps, -(-rows // a_warp))
    sizes = (Tile(tokens, warps, a_warp) for tokens in ((1,) if few else (8, 4, 2, 1)))
    return next(tile for tile in sizes if tile.shared_bytes(n) <= SHARED_BYTES)


def make_sweep(o: Numerics, v: int, w: int, tile: Tile, *fixed_numbers: int | None) -> Any:
    """Trace the kernel: `v` bf16 columns a thread while streams pass by, `w` at a time in the projection."""
    threads = tile.warps * PAIRS

    @T.prim_func
    def sweep(
        residual_p: T.ptr(o.bf16), x_p: T.ptr(o.bf16), gates_p: T.ptr(F32), comb_p: T.ptr(F32), pre_p: T.ptr(F32),
        entry_p: T.ptr(o.bf16), fn_p: T.ptr(F32), mapped_p: T.ptr(o.bf16), layer_p: T.ptr(o.bf16),
        aux_p: T.ptr(o.bf16), partials_p: T.ptr(F32), tokens: T.int32, n: T.int32, size: T.int32, rows: T.int32,
        collapse: T.int32, post: T.int32, mean: T.int32, enter: T.int32, square: T.int32,
        rt: T.int64, rn: T.int64, rh: T.int64, xt: T.int64, xh: T.int64, gt: T.int64, gn: T.int64,
        ct: T.int64, ci: T.int64, ck: T.int64, pt: T.int64, pn: T.int64, et: T.int64, eh: T.int64,
        fm: T.int64, fh: T.int64, mt: T.int64, mn: T.int64, mh: T.int64, lt: T.int64, lh: T.int64,
        at: T.int64, ah: T.int64, st: T.int64, ss: T.int64, sr: T.int64,
    ):  # fmt: skip
        called = n, size, rows, collapse, post, mean, enter, square
        chosen = [o.choice(*pair) for pair in zip(fixed_numbers, called, strict=True)]
        n, size, rows = chosen[:3]
        options = chosen[3:]
        lines = o.pick(options[3] != 0, 1, n)
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        x = o.tensor(x_p, o.bf16, (tokens, size), (xt, xh), v)
        gates = o.tensor(gates_p, F32, (tokens, n), (gt, gn))
        comb = o.tensor(comb_p, F32, (tokens, n, n), (ct, ci, ck))
        pre = o.tensor(pre_p, F32, (tokens, n), (pt, pn))
        entry = o.tensor(entry_p, o.bf16, (tokens, size), (et, eh), v)
        fn = o.tensor(fn_p, F32, (rows, lines * size), (fm, fh), w)
        mapped = o.tensor(mapped_p, o.bf16, (tokens, n, size), (mt, mn, mh), v)
        layer = o.tensor(layer_p, o.bf16, (tokens, size), (lt, lh), v)
        aux = o.tensor(aux_p, o.bf16, (tokens, size), (at, ah), v)
        partials = o.tensor(partials_p, F32, (tokens, T.ceildiv(size, SEGMENT), SUMS + rows), (st, ss, sr))
        with o.kernel(T.ceildiv(tokens, tile.tokens), T.ceildiv(size, SEGMENT), threads=threads) as (place, segment):
            staged = o.shared((tile.tokens, o.most(n), SEGMENT), o.bf16)
            collapsed = o.shared((tile.tokens, SEGMENT), o.bf16)
            lanes = o.shared((tile.tokens, SUMS + tile.step, PAIRS + 1), F32)
            s = Part(o, v, w, tile, tokens, place * tile.tokens, segment, n, lines, size, rows, *options)
            inputs = residual, x, gates, comb, pre, entry
            each(o, threads, tile.tokens * (SEGMENT // v), _pass_by, s, inputs, mapped, layer, aux, staged, collapsed)
            for turn in T.serial(T.ceildiv(rows, tile.step)):
                for thread in o.threads(threads):
                    _project(s, turn, thread // PAIRS, thread % PAIRS, fn, staged, collapsed, lanes)
                each(o, threads, tile.tokens * (SUMS + tile.step), _leave, s, turn, lanes, partials)

    return sweep


@dataclass(frozen=True)
class Part:
    """One block's share while its kernel is traced: what is fixed, and expressions for what is not."""

    o: Numerics
    v: int
    w: int
    tile: Tile
    tokens: Any
    first: Any
    segment: Any
    n: Any
    lines: Any
    size: Any
    rows: Any
    collapse: Any
    post: Any
    mean: Any
    enter: Any
    square: Any


@T.macro
def _pass_by(s, inputs, mapped, layer, aux, staged, collapsed, item):
    """Take `v` columns of one token through post, collapse and mean, and leave what is projected in `staged`."""
    o, v = s.o, s.v
    residual, x, gates, comb, pre, entry = inputs
    i = item // (SEGMENT // v)
    c = item % (SEGMENT // v) * v
    t = s.first + i
    h = s.segment * SEGMENT + c
    if t < s.tokens and h < s.size:
        row = T.alloc_local((v,), o.bf16)
        streams = T.alloc_local((o.most(s.n), v), o.bf16)
        one = T.alloc_local((v,), o.bf16)
        total = T.alloc_local((v,), F32)
        sums = T.alloc_local((v,), F32)
        if s.post != 0:
            move(o, v, x, (t, h), row, (0,))
        for j in o.loop(s.n):
            move(o, v, residual, (t, j, h), streams, (j, 0))
        if s.collapse == CARRIED or s.mean != 0:
            clear(o, v, total)
            clear(o, v, sums)
        for k in o.loop(s.n):
            if s.post != 0:
                map_stream(o, s.n, v, gates, comb, t, k, row, streams, one)
                move(o, v, one, (0,), mapped, (t, k, h))
            else:
                move(o, v, streams, (k, 0), one, (0,))
            if s.enter == 0:
                move(o, v, one, (0,), staged, (i, k, c))
            _add(s, pre, t, k, one, total, sums)
            if s.collapse == FIRST and k == 0:
                move(o, v, one, (0,), layer, (t, h))
                move(o, v, one, (0,), collapsed, (i, c))
        if s.collapse == CARRIED:
            round_to(o, v, total, one)
            move(o, v, one, (0,), layer, (t, h))
            move(o, v, one, (0,), collapsed, (i, c))
        if s.mean != 0:
            for e in T.unroll(v):
                sums[e] = o.share(sums[e], s.n)
            round_to(o, v, sums, one)
            move(o, v, one, (0,), aux, (t, h))
        if s.enter != 0:
            move(o, v, entry, (t, h), one, (0,))
            move(o, v, one, (0,), staged, (i, 0, c))


@T.macro
def _add(s, pre, t, k, stream, total, sums):
    """Add one stream to the collapse, `total`, and to the sum of the streams, `sums`."""
    o = s.o
    if s.collapse == CARRIED:
        factor = T.alloc_var(F32)
        factor = pre[t, k]
        add_weighted(o, s.v, factor, stream, total)
    if s.mean != 0:
        for e in T.unroll(s.v):
            sums[e] = o.add(sums[e], o.widen(stream[e]))


@T.macro
def _project(s, turn, warp, lane, fn, staged, collapsed, lanes):
    """Run two neighbouring lanes of a segment through the pinned chains of a warp's rows, and of the squares."""
    o, tile = s.o, s.tile
    dots = T.alloc_local((tile.tokens, tile.rows, 2), F32)
    squares = T.alloc_local((2, tile.tokens, 2), F32)
    for i in T.unroll(tile.tokens):
        for e in T.unroll(2):
            squares[0, i, e] = o.constant(0.0)
            squares[1, i, e] = o.constant(0.0)
            for m in T.unroll(tile.rows):
                dots[i, m, e] = o.constant(0.0)
    for block in T.serial(BLOCKS):
        if s.w == 2:
            _steps(s, turn, warp, block, lane, 0, 2, fn, staged, collapsed, dots, squares)
        else:
            _steps(s, turn, warp, block, lane, 0, 1, fn, staged, collapsed, dots, squares)
            _steps(s, turn, warp, block, lane, 1, 1, fn, staged, collapsed, dots, squares)
    for i in T.unroll(tile.tokens):
        for m in T.unroll(tile.rows):
            lanes[i, SUMS + warp * tile.rows + m, lane] = o.add(dots[i, m, 0], dots[i, m, 1])
        if turn == 0 and warp == tile.warps - 1:
            lanes[i, SQUARES, lane] = o.add(squares[0, i, 0], squares[0, i, 1])
        if s.square != 0 and turn == 0 and warp == 0:
            lanes[i, LAYER_SQUARES, lane] = o.add(squares[1, i, 0], squares[1, i, 1])


@T.macro
def _steps(s, turn, warp, block, lane, first, many, fn, staged, collapsed, dots, squares):
    """Add `many` columns of a block, from lane 2 * lane + first on, to all chains."""
    c = block * LANES + 2 * lane + first
    if s.segment * SEGMENT + c < s.size:
        for j in T.serial(s.lines):
            _step(s, turn, warp, j, c, first, many, fn, staged, dots, squares)
        if s.square != 0 and turn == 0 and warp == 0:
            _square(s, c, first, many, collapsed, squares)


@T.macro
def _step(s, turn, warp, j, c, first, many, fn, staged, dots, squares):
    """Add `many` columns of stream j of every token to the chains of dot products, and in one warp to the squares."""
    o, tile = s.o, s.tile
    pair = T.alloc_local((2,), o.bf16)
    weights = T.alloc_local((2,), F32)
    values = T.alloc_local((tile.tokens, 2), F32)
    for i in T.unroll(tile.tokens):
        move(o, many, staged, (i, j, c), pair, (0,))
        for e in T.unroll(many):
            values[i, e] = o.widen(pair[e])
    for m in T.unroll(tile.rows):
        row = turn * tile.step + warp * tile.rows + m
        if row < s.rows:
            move(o, many, fn, (row, j * s.size + s.segment * SEGMENT + c), weights, (0,))
            for i in T.unroll(tile.tokens):
                for e in T.unroll(many):
                    dots[i, m, first + e] = o.fma(weights[e], values[i, e], dots[i, m, first + e])
    if turn == 0 and warp == tile.warps - 1:
        for i in T.unroll(tile.tokens):
            for e in T.unroll(many):
                squares[0, i, first + e] = o.fma(values[i, e], values[i, e], squares[0, i, first + e])


@T.macro
def _square(s, c, first, many, collapsed, squares):
    """Add `many` columns of every token's layer input to the chains of its squares."""
    o = s.o
    pair = T.alloc_local((2,), o.bf16)
    for i in T.unroll(s.tile.tokens):
        move(o, many, collapsed, (i, c), pair, (0,))
        for e in T.unroll(many):
            squares[1, i, first + e] = o.fma(o.widen(pair[e]), o.widen(pair[e]), squares[1, i, first + e])


@T.macro
def _leave(s, turn, lanes, partials, item):
    """Sum the lanes of one chain of one token and leave the segment's sum in its place."""
    i = item // (SUMS + s.tile.step)
    r = item % (SUMS + s.tile.step)
    slot = turn * s.tile.step + r
    wanted = (r >= SUMS or turn == 0) and (s.square != 0 or r != LAYER_SQUARES)
    if wanted and s.first + i < s.tokens and slot < SUMS + s.rows:
        partials[s.first + i, s.segment, slot] = s.o.tree_along(lanes, PAIRS, i, r)
