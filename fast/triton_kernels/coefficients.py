"""From streams to mixing coefficients: projection, RMS scaling, gates and Sinkhorn."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fast.arguments import BF16, F32, MAX_STREAMS, Constants, Output
from fast.registry import Config
from fast.triton_kernels.launch import Tile, arguments, blocks, launch, power_of_two
from fast.triton_kernels.numerics import INTERPRETED, block, device, div, exp, load_bf16, sigmoid, sqrt, wide
from fast.triton_kernels.reduce import (
    STEPS,
    Segments,
    add_products,
    add_squares,
    index_max,
    index_sum,
    lane_columns,
    store_squares,
    store_sums,
    zero_squares,
    zero_sums,
)

# Outputs of one launch of the projection: its accumulators stay in registers.
LAUNCH_OUTPUTS = MAX_STREAMS * (MAX_STREAMS + 2)
# Matrix entries of one compiled program, two a thread of its one warp; tokens of an interpreted one.
COMPILED_ENTRIES = 64
INTERPRETED_TOKENS = 4096


@triton.jit(do_not_specialize=["tokens", "rows", "squares_row"])
def project_kernel(
    x, fn, partial, tokens, columns, segments, rows, squares_row, x_t, x_n, x_h, fn_o, fn_k,
    N: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    segment = wide(tl.program_id(1)) * BLOCK_S
    sums = zero_sums(M, GROUP, BLOCK_T, BLOCK_S)
    squares = zero_squares(BLOCK_T, BLOCK_S)
    for step in range(STEPS):
        h = lane_columns(segment, step, BLOCK_S)
        inside = h < columns
        mask = (t < tokens)[:, None] & inside[None, :]
        for j in tl.static_range(N):
            f = load_bf16(x + (t * x_t)[:, None] + (h * x_h)[None, :] + wide(x_n) * j, mask)
            squares = add_squares(squares, f, inside, WHOLE)
            sums = add_products(sums, f, fn + (h + wide(columns) * j) * fn_k, fn_o, inside, M, GROUP, WHOLE)
    store_sums(partial, sums, t, segment, tokens, segments, rows, M, GROUP, BLOCK_T, BLOCK_S)
    if squares_row >= 0:
        store_squares(partial, squares, squares_row, t, segment, tokens, segments, rows, BLOCK_T, BLOCK_S)


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(
    partial, sums, squares, tokens, outputs, sums_t, sums_o, squares_t,
    SEGMENTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    o = block(1, BLOCK_H)
    mask = (t < tokens)[:, None] & (o <= outputs)[None, :]
    total = tl.full([BLOCK_T, BLOCK_H], 0.0, tl.float32)
    for s in range(SEGMENTS):
        row = wide(s) * (outputs + 1) + o
        total = total + tl.load(partial + (row * tokens)[None, :] + t[:, None], mask=mask, other=0.0)
    tl.store(sums + (t * sums_t)[:, None] + (o * sums_o)[None, :], total, mask=mask & (o < outputs)[None, :])
    tl.store(squares + (t * squares_t)[:, None] + (o * 0)[None, :], total, mask=mask & (o == outputs)[None, :])


@device
def reciprocal_rms(squares, numel, eps):
    """1 / sqrt(squares / numel + eps), each step rounded."""
    return div(1.0, sqrt(div(squares, tl.cast(numel, tl.float32)) + tl.cast(eps, tl.float32)))


@triton.jit(do_not_specialize=["tokens"])
def mixes_kernel(
    sums, squares, mixes, tokens, outputs, numel, rms_eps, sums_t, sums_o, squares_t, mixes_t, mixes_o,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    o = block(1, BLOCK_H)
    mask = (t < tokens)[:, None] & (o < outputs)[None, :]
    r = reciprocal_rms(tl.load(squares + t * squares_t, mask=t < tokens, other=0.0), numel, rms_eps)
    total = tl.load(sums + (t * sums_t)[:, None] + (o * sums_o)[None, :], mask=mask, other=0.0)
    tl.store(mixes + (t * mixes_t)[:, None] + (o * mixes_o)[None, :], total * r[:, None], mask=mask)


@device
def sinkhorn_of(logits, iters: tl.constexpr, eps, n: tl.constexpr, block_t: tl.constexpr, width: tl.constexpr):
    """The mixing matrix of each token from logits [tokens, width, width], of which n * n are real.

    Padded entries are computed like any other and read by none: sums and maxima take the first n entries only.
    """
    small = tl.cast(eps, tl.float32)
    powers = exp(logits - index_max(logits, n, block_t, width)[:, :, None])
    comb = div(powers, index_sum(powers, n, block_t, width)[:, :, None]) + small
    comb = divide_columns(comb, small, n, block_t, width)
    for _ in range(1, iters):
        comb = div(comb, (index_sum(comb, n, block_t, width) + small)[:, :, None])
        comb = divide_columns(comb, small, n, block_t, width)
    return comb


@device
def divide_columns(comb, eps, n: tl.constexpr, block_t: tl.constexpr, width: tl.constexpr):
    """Every entry over (the sum of its column + eps)."""
    totals = index_sum(tl.permute(comb, 0, 2, 1), n, block_t, width) + eps
    return div(comb, totals[:, None, :])


@triton.jit(do_not_specialize=["tokens"])
def sinkhorn_kernel(
    logits, comb_mix, tokens, eps, logits_t, logits_i, logits_k, comb_t, comb_i, comb_k,
    ITERS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)[:, None, None]
    i = tl.arange(0, WIDTH)[None, :, None]
    k = tl.arange(0, WIDTH)[None, None, :]
    mask = (t < tokens) & (i < N) & (k < N)
    tile = tl.load(logits + t * logits_t + wide(i) * logits_i + wide(k) * logits_k, mask=mask, other=0.0)
    comb = sinkhorn_of(tile, ITERS, eps, N, BLOCK_T, WIDTH)
    tl.store(comb_mix + t * comb_t + wide(i) * comb_i + wide(k) * comb_k, comb, mask=mask)


@device
def logits_of(mixes, hc_scale, hc_base, base_o, o, inside):
    """z = mix * scale + base, two roundings; o are the outputs of `mixes`."""
    return mixes * tl.load(hc_scale) + tl.load(hc_base + wide(o) * base_o, mask=inside, other=0.0)


@device
def pre_of(logits, eps):
    """The pre-mix of each stream: sigmoid(z) + eps."""
    return sigmoid(logits) + tl.cast(eps, tl.float32)


@device
def post_mix_of(logits, factor):
    """The post-mix of each stream: factor * sigmoid(z)."""
    return sigmoid(logits) * tl.cast(factor, tl.float32)


@device
def store_coefficients(
    pre, post, comb, hc_scale, hc_base, scale_o, base_o, pre_mix, post_mix, comb_mix, pre_n, post_n, comb_i, comb_k,
    there, iters: tl.constexpr, pre_eps, sinkhorn_eps, post_mult,
    n: tl.constexpr, block_t: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Turn mixes into coefficients and store them at the pointers of each token.

    pre and post are tiles [tokens, width], comb [tokens, width, width]; `there` says which tokens exist.
    """
    i = tl.arange(0, width)
    k = tl.arange(0, width)
    inside = (i < n)[None, :]
    mask = there[:, None] & inside
    gates = pre_of(logits_of(pre, hc_scale, hc_base, base_o, i[None, :], inside), pre_eps)
    tl.store(pre_mix[:, None] + (wide(i) * pre_n)[None, :], gates, mask=mask)
    logits = logits_of(post, hc_scale + wide(scale_o), hc_base, base_o, (i + n)[None, :], inside)
    tl.store(post_mix[:, None] + (wide(i) * post_n)[None, :], post_mix_of(logits, post_mult), mask=mask)
    inside = (i < n)[None, :, None] & (k < n)[None, None, :]
    logits = logits_of(comb, hc_scale + wide(scale_o) * 2, hc_base, base_o, comb_outputs(i, k, n), inside)
    matrix = sinkhorn_of(logits, iters, sinkhorn_eps, n, block_t, width)
    pointer = comb_mix[:, None, None] + (wide(i) * comb_i)[None, :, None] + (wide(k) * comb_k)[None, None, :]
    tl.store(pointer, matrix, mask=there[:, None, None] & inside)


@triton.jit(do_not_specialize=["tokens"])
def coefficients_kernel(
    mixes, hc_scale, hc_base, pre_mix, post_mix, comb_mix, tokens, pre_eps, sinkhorn_eps, post_mult,
    mixes_t, mixes_o, scale_o, base_o, pre_t, pre_n, post_t, post_n, comb_t, comb_i, comb_k,
    ITERS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    there = t < tokens
    i = tl.arange(0, WIDTH)
    k = tl.arange(0, WIDTH)
    mask = there[:, None] & (i < N)[None, :]
    row = mixes + t * mixes_t
    pre = tl.load(row[:, None] + (wide(i) * mixes_o)[None, :], mask=mask, other=0.0)
    post = tl.load(row[:, None] + (wide(i + N) * mixes_o)[None, :], mask=mask, other=0.0)
    mask = there[:, None, None] & (i < N)[None, :, None] & (k < N)[None, None, :]
    comb = tl.load(row[:, None, None] + wide(comb_outputs(i, k, N)) * mixes_o, mask=mask, other=0.0)
    store_coefficients(
        pre, post, comb, hc_scale, hc_base, scale_o, base_o, pre_mix + t * pre_t, post_mix + t * post_t,
        comb_mix + t * comb_t, pre_n, post_n, comb_i, comb_k, there, ITERS, pre_eps, sinkhorn_eps, post_mult,
        N, BLOCK_T, WIDTH,
    )  # fmt: skip


@device
def comb_outputs(i, k, n: tl.constexpr):
    """Which output of the projection is the logit of input stream i and output stream k: [1, i, k]."""
    return (i * n + 2 * n)[None, :, None] + k[None, None, :]


@triton.jit
def broadcast_kernel(
    fn, out, outputs, columns, fn_o, fn_k, out_o, out_h,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    o = block(0, BLOCK_T)
    h = block(1, BLOCK_H)
    mask = (o < outputs)[:, None] & (h < columns)[None, :]
    pointer = fn + (o * fn_o)[:, None] + (h * fn_k)[None, :]
    total = tl.full([BLOCK_T, BLOCK_H], 0.0, tl.float32)
    for j in tl.static_range(N):
        total = total + tl.load(pointer + wide(columns) * fn_k * j, mask=mask, other=0.0)
    tl.store(out + (o * out_o)[:, None] + (h * out_h)[None, :], total, mask=mask)


def token_block(tokens: int, n: int) -> int:
    """Tokens of one program of a kernel that holds a matrix of coefficients a token: in one warp when compiled."""
    if INTERPRETED.value:
        return min(power_of_two(tokens), INTERPRETED_TOKENS)
    return max(1, COMPILED_ENTRIES // power_of_two(n) ** 2)


def project(x: Tensor, fn: Tensor, *, out: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return sums (the dot products of the streams with each row of fn) and squares (their sum of squares).

    x [T, n, H] or [T, H] bf16, fn [M, n*H] (or [M, H]) f32, sums [T, M] f32, squares [T] f32; any strides, `out`
    too. Raises TypeError or ValueError for wrong arguments. Source: numerical contract 1, project.
    """
    call = arguments("project")
    call.tensor("x", x, BF16, "T H" if isinstance(x, Tensor) and x.dim() == 2 else "T n H")
    streams = x.unsqueeze(1) if x.dim() == 2 else x
    call.size("n*H", streams.shape[1] * streams.shape[2])
    call.tensor("fn", fn, F32, "M n*H")
    sums, squares = call.outputs([Output("sums", F32, "T M"), Output("squares", F32, "T")], out)
    partial = run_project(streams, fn)
    tokens, outputs = sums.shape
    tile = Tile.over(tokens, outputs + 1)
    launch(
        sum_kernel, tile.grid(tokens, outputs + 1), partial, sums, squares, tokens, outputs,
        *sums.stride(), *squares.stride(), SEGMENTS=partial.shape[0], warps=tile.warps, **tile.constants,
    )  # fmt: skip
    return sums, squares


def run_project(streams: Tensor, fn: Tensor) -> Tensor:
    """Launch the projection of checked streams [T, n, H]; return the segment sums [S, M + 1, T], squares last."""
    tokens, n, columns = streams.shape
    outputs = fn.shape[0]
    shape = Segments.over(tokens, columns, min(outputs, LAUNCH_OUTPUTS))
    partial = shape.partial(tokens, outputs + 1, streams.device)
    for first in range(0, outputs, LAUNCH_OUTPUTS):
        part = fn[first : first + LAUNCH_OUTPUTS]
        launch(
            project_kernel, shape.grid(tokens), streams, part, partial[:, first:], tokens, columns, shape.total,
            outputs + 1, -1 if first else outputs, *streams.stride(), *fn.stride(),
            N=n, M=part.shape[0], GROUP=min(shape.group, power_of_two(part.shape[0])), warps=shape.warps,
            **shape.constants,
        )  # fmt: skip
    return partial


def mixes(sums: Tensor, squares: Tensor, *, numel: int, rms_eps: float, out: Tensor | None = None) -> Tensor:
    """Return mixes: sums times 1 / sqrt(squares / numel + rms_eps), each step rounded.

    sums [T, M] f32, squares [T] f32, mixes [T, M] f32; any strides, `out` too. numel counts the squared values.
    Raises TypeError or ValueError for wrong arguments. Source: numerical contract 1, mixes.
    """
    call = arguments("mixes")
    call.tensor("sums", sums, F32, "T M")
    call.tensor("squares", squares, F32, "T")
    count, eps = float(call.integer("numel", numel)), call.number("rms_eps", rms_eps)
    (scaled,) = call.outputs([Output("mixes", F32, "T M")], out)
    tokens, outputs = sums.shape
    tile = Tile.over(tokens, outputs)
    launch(
        mixes_kernel, tile.grid(tokens, outputs), sums, squares, scaled, tokens, outputs, count, eps,
        *sums.stride(), *squares.stride(), *scaled.stride(), warps=tile.warps, **tile.constants,
    )  # fmt: skip
    return scaled


def sinkhorn(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float, out: Tensor | None = None) -> Tensor:
    """Return comb_mix: the softmax of each row, then rounds of column and row division.

    logits [T, n, n] f32, comb_mix [T, n, n] f32 by [input stream, output stream]; any strides, `out` too.
    sinkhorn_iters is at least 1. Raises TypeError or ValueError for wrong arguments.
    Source: numerical contract 1, comb.
    """
    call = arguments("sinkhorn")
    call.tensor("logits", logits, F32, "T n n")
    iters = call.integer("sinkhorn_iters", sinkhorn_iters)
    eps = call.number("sinkhorn_eps", sinkhorn_eps)
    (comb_mix,) = call.outputs([Output("comb_mix", F32, "T n n")], out)
    tokens, n, _ = logits.shape
    size = token_block(tokens, n)
    launch(
        sinkhorn_kernel, (blocks(tokens, size),), logits, comb_mix, tokens, eps,
        *logits.stride(), *comb_mix.stride(), ITERS=iters, N=n, WIDTH=power_of_two(n), BLOCK_T=size, warps=1,
    )  # fmt: skip
    return comb_mix


COEFFICIENTS = (Output("pre_mix", F32, "T n"), Output("post_mix", F32, "T n"), Output("comb_mix", F32, "T n n"))


def coefficients(
    mixes: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: Config,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre_mix, post_mix and comb_mix: with z = mix * scale + base, two gates and Sinkhorn.

    mixes [T, M] f32 with M = n(n + 2), hc_scale [3] f32, hc_base [M] f32; pre_mix and post_mix [T, n] f32, comb_mix
    [T, n, n] f32; any strides, `out` too. Raises TypeError or ValueError for wrong arguments.
    Source: numerical contract 1, coefficients and comb.
    """
    call = arguments("coefficients")
    constants = call.config(config)
    n = constants.hc_mult
    call.size("M", n * (n + 2))
    call.tensor("mixes", mixes, F32, "T M")
    call.tensor("hc_scale", hc_scale, F32, "3")
    call.tensor("hc_base", hc_base, F32, "M")
    pre_mix, post_mix, comb_mix = call.outputs(COEFFICIENTS, out)
    tokens = mixes.shape[0]
    size = token_block(tokens, n)
    launch(
        coefficients_kernel, (blocks(tokens, size),), mixes, hc_scale, hc_base, pre_mix, post_mix, comb_mix, tokens,
        *plain(constants), *mixes.stride(), *hc_scale.stride(), *hc_base.stride(),
        *pre_mix.stride(), *post_mix.stride(), *comb_mix.stride(),
        ITERS=constants.sinkhorn_iters, N=n, WIDTH=power_of_two(n), BLOCK_T=size, warps=1,
    )  # fmt: skip
    return pre_mix, post_mix, comb_mix


def plain(constants: Constants) -> tuple[float, float, float]:
    """The numbers that gates and Sinkhorn take, in their kernels' order."""
    return constants.hc_pre_eps, constants.hc_sinkhorn_eps, constants.post_mult


def fn_broadcast(fn: Tensor, hc_mult: int, *, out: Tensor | None = None) -> Tensor:
    """Return fn_broadcast: the parts of fn for each stream, added in index order from +0.

    fn [M, n*H] f32, fn_broadcast [M, H] f32; any strides. `out` is refreshed in place, so that its address stays what
    a captured graph knows. Raises TypeError or ValueError for wrong arguments.
    Source: upstream's broadcast of the first layer's projection.
    """
    call = arguments("fn_broadcast")
    n = call.integer("hc_mult", hc_mult, 1, MAX_STREAMS)
    call.tensor("fn", fn, F32, "M n*H")
    if fn.shape[1] % n:
        raise ValueError(f"fn_broadcast: fn must have a multiple of hc_mult = {n} columns, got {fn.shape[1]}")
    call.size("H", fn.shape[1] // n)
    (total,) = call.outputs([Output("fn_broadcast", F32, "M H")], out)
    outputs, columns = total.shape
    tile = Tile.over(outputs, columns)
    launch(
        broadcast_kernel, tile.grid(outputs, columns), fn, total, outputs, columns, *fn.stride(), *total.stride(),
        N=n, warps=tile.warps, **tile.constants,
    )  # fmt: skip
    return total
