"""RMSNorm of the collapsed hidden states, in the two variants that the models have; one block a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import tilelang.language as T
from torch import Tensor

from fast.arguments import BF16, F32, Output
from fast.registry import Unsupported
from fast.tilelang_kernels import MAX_NORM_HIDDEN, refusal
from fast.tilelang_kernels.build import Argument, Wide, arguments, fixed, run, vector_of
from fast.tilelang_kernels.numerics import (
    BLOCKS,
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

F = T.float32
SQUARES_OF = ("unrounded", "rounded")


def norm(hidden: Tensor, norm_weight: Tensor, *, norm_eps: float, out: Tensor | None = None) -> Tensor:
    """Return normed [T, H] bf16: bf16((hidden * r) * norm_weight), r = 1 / sqrt(S / H + norm_eps).

    hidden [T, H] and norm_weight [H] bf16, any strides; S is the sum of squares in the projection's pinned order.
    TypeError or ValueError for arguments that do not fit. Source: contract 1.
    """
    given = arguments("norm")
    given.tensor("hidden", hidden, BF16, "T H")
    given.tensor("norm_weight", norm_weight, BF16, "H")
    eps = given.number("norm_eps", norm_eps)
    (normed,) = given.outputs([Output("normed", BF16, "T H")], out)
    if given["T"]:
        _run("norm", hidden.unsqueeze(1), None, norm_weight, normed, eps)
    return normed


def collapse_norm(
    residual: Tensor,
    pre_mix: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    squares_of: Literal["unrounded", "rounded"],
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_input [T, H] bf16, the norm of the collapse of residual [T, n, H] bf16 by pre_mix [T, n] fp32.

    What is scaled is the collapse rounded to bf16; its squares are summed before that rounding ("unrounded", V4) or
    after it ("rounded", V4.1). norm_weight [H] bf16; any strides; n is 1 to 8. TypeError or ValueError for arguments
    that do not fit. Source: contract 1.
    """
    given = arguments("collapse_norm")
    given.tensor("residual", residual, BF16, "T n H")
    given.tensor("pre_mix", pre_mix, F32, "T n")
    given.tensor("norm_weight", norm_weight, BF16, "H")
    eps = given.number("norm_eps", norm_eps)
    if squares_of not in SQUARES_OF:
        raise ValueError(f"collapse_norm: squares_of must be 'unrounded' or 'rounded', got {squares_of!r}")
    (layer_input,) = given.outputs([Output("layer_input", BF16, "T H")], out)
    if given["T"]:
        _run("collapse_norm", residual, pre_mix, norm_weight, layer_input, eps, unrounded=squares_of == "unrounded")
    return layer_input


def _run(
    op: str,
    residual: Tensor,
    pre_mix: Tensor | None,
    norm_weight: Tensor,
    out: Tensor,
    eps: float,
    *,
    unrounded: bool = False,
) -> None:
    tokens, n, hidden = residual.shape
    check_room(op, hidden)
    v = vector_of(residual, norm_weight, out)
    flags = int(pre_mix is not None), int(unrounded)
    instead = norm_weight.new_empty(1, dtype=F32).as_strided((tokens, n), (0, 0))
    tensors: list[Argument] = [
        Wide(residual, v),
        instead if pre_mix is None else pre_mix,
        Wide(norm_weight, v),
        Wide(out, v),
    ]
    numbers = [n, hidden, *flags]
    run(make_norm, (capacity(out, hidden), v, *fixed(out, *numbers)), tensors, [tokens, *numbers, float(hidden), eps])


def check_room(op: str, hidden: int) -> None:
    """Raise Unsupported, in the name of `op`, for a row that a block of some supported GPU could not hold."""
    if reason := refusal("norm", None, hidden):
        raise Unsupported(reason.replace("norm", op, 1))


def capacity(tensor: Tensor, hidden: int) -> int:
    """Return the hidden size that a block has room for: its own on CUDA, 8192 or the next power of two on the CPU."""
    return hidden if tensor.is_cuda else min(MAX_NORM_HIDDEN, max(8192, 1 << (hidden - 1).bit_length()))


def threads_for(o: Numerics, room: int) -> int:
    """Return the threads of a block that holds a token: a warp a segment, within reason."""
    return max(128, min(512, PAIRS * -(-room // SEGMENT))) if o.cuda else 128


def make_norm(o: Numerics, room: int, v: int, *fixed_numbers: int | None) -> Any:
    """Trace the kernel: collapse a token into shared memory, sum its squares by segments, scale it."""
    threads = threads_for(o, room)

    @T.prim_func
    def norm(
        residual_p: T.ptr(o.bf16), pre_p: T.ptr(F), weight_p: T.ptr(o.bf16), out_p: T.ptr(o.bf16), tokens: T.int32,
        n: T.int32, size: T.int32, weighing: T.int32, unrounded: T.int32, count: T.float32, norm_eps: T.float32,
        rt: T.int64, rn: T.int64, rh: T.int64, pt: T.int64, pn: T.int64, wh: T.int64, ot: T.int64, oh: T.int64,
    ):  # fmt: skip
        called = n, size, weighing, unrounded
        n, size, weighing, unrounded = [o.choice(*pair) for pair in zip(fixed_numbers, called, strict=True)]
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        pre = o.tensor(pre_p, F, (tokens, n), (pt, pn))
        weight = o.tensor(weight_p, o.bf16, (size,), (wh,), v)
        out = o.tensor(out_p, o.bf16, (tokens, size), (ot, oh), v)
        with o.kernel(tokens, threads=threads) as t:
            row = o.shared((room,), F)
            r = Row(o, n, v, threads, size, room, t)
            each(o, threads, room // v, collapse_into, r, weighing, residual, pre, t, row)
            scale_row(r, unrounded, row, weight, out, count, norm_eps)

    return norm


@dataclass(frozen=True)
class Row:
    """One token's block while its kernel is traced; `room` bounds the hidden size, `size` is it."""

    o: Numerics
    n: Any
    v: int
    threads: int
    size: Any
    room: int
    token: Any


@T.macro
def collapse_into(r, weighing, residual, weights, place, row, item):
    """Put `v` columns into shared `row`: the unrounded collapse by weights[place], or the only stream as it is."""
    o, v = r.o, r.v
    h = item * v
    if h < r.size:
        streams = T.alloc_local((o.most(r.n), v), o.bf16)
        stream = T.alloc_local((v,), o.bf16)
        total = T.alloc_local((v,), F)
        factor = T.alloc_var(F)
        for j in o.loop(r.n):
            move(o, v, residual, (r.token, j, h), streams, (j, 0))
        if weighing != 0:
            clear(o, v, total)
            for j in o.loop(r.n):
                factor = weights[place, j]
                move(o, v, streams, (j, 0), stream, (0,))
                add_weighted(o, v, factor, stream, total)
        else:
            for e in T.unroll(v):
                total[e] = o.widen(streams[0, e])
        move(o, v, total, (0,), row, (h,))


@T.macro
def scale_row(r, unrounded, row, weight, out, count, norm_eps):
    """Write the norm of shared `row`, its squares summed in the pinned order before or after its rounding to bf16."""
    o, segments = r.o, -(-r.room // SEGMENT)
    lanes = o.shared((segments, PAIRS + 1), F)
    sums = o.shared((segments + 1,), F)
    each(r.o, r.threads, segments * PAIRS, sum_squares, r, unrounded, row, lanes)
    each(r.o, r.threads, segments, sum_lanes, o, lanes, sums)
    each(r.o, r.threads, 1, root, r, segments, sums, count, norm_eps)
    each(r.o, r.threads, r.room // r.v, scale_columns, r, row, sums, segments, weight, out)


@T.macro
def sum_squares(r, unrounded, row, lanes, item):
    """Run two neighbouring lanes of a segment through the pinned chain of squares."""
    o = r.o
    segment = item // PAIRS
    pair = item % PAIRS
    squares = T.alloc_local((2,), F)
    value = T.alloc_var(F)
    clear(o, 2, squares)
    for block in T.serial(BLOCKS):
        for e in T.unroll(2):
            h = segment * SEGMENT + block * LANES + 2 * pair + e
            if h < r.size:
                value = row[h]
                if unrounded == 0:
                    value = o.widen(o.round(value))
                squares[e] = o.fma(value, value, squares[e])
    lanes[segment, pair] = o.add(squares[0], squares[1])


@T.macro
def sum_lanes(o, lanes, sums, item):
    """Sum one segment's lanes by the tree."""
    sums[item] = o.tree_along(lanes, PAIRS, item)


@T.macro
def root(r, segments, sums, count, norm_eps, item):
    """Sum the segments that hold columns, and leave the factor that scales the row behind them."""
    o = r.o
    total = T.alloc_var(F)
    total = o.constant(0.0)
    for segment in T.serial(T.ceildiv(r.size, SEGMENT)):
        total = o.add(total, sums[segment])
    sums[segments + item] = o.reciprocal_rms(total, count, norm_eps)


@T.macro
def scale_columns(r, row, sums, place, weight, out, item):
    """Write `v` columns of the norm: (rounded * sums[place]) * weight, rounded."""
    o, v = r.o, r.v
    h = item * v
    if h < r.size:
        exact = T.alloc_local((v,), F)
        rounded = T.alloc_local((v,), o.bf16)
        move(o, v, row, (h,), exact, (0,))
        round_to(o, v, exact, rounded)
        scale(o, v, rounded, sums[place], weight, h)
        move(o, v, rounded, (0,), out, (r.token, h))


@T.macro
def scale(o, v, rounded, factor, weight, h):
    """Replace `v` bf16 values, which stand in columns h on, by (value * factor) * weight, rounded."""
    factors = T.alloc_local((v,), o.bf16)
    normed = T.alloc_local((v,), F)
    move(o, v, weight, (h,), factors, (0,))
    for e in T.unroll(v):
        normed[e] = o.mul(o.mul(o.widen(rounded[e]), factor), o.widen(factors[e]))
    round_to(o, v, normed, rounded)
