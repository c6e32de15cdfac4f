"""RMSNorm of the collapsed hidden states, alone or with the collapse.

Two launches: the first leaves the sums of squares of every segment, the second adds them up and scales. So both spread
over tokens and columns, and no program waits for another.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from fast.arguments import BF16, F32, Output
from fast.triton_kernels.coefficients import reciprocal_rms
from fast.triton_kernels.collapse import load_streams, load_weights, weighted_sum
from fast.triton_kernels.launch import Tile, arguments, launch
from fast.triton_kernels.numerics import block, device, load_bf16, round_bf16, store_bf16, wide
from fast.triton_kernels.reduce import (
    STEPS,
    Segments,
    add_squares,
    lane_columns,
    segment_sum,
    store_squares,
    zero_squares,
)

SquaresOf = Literal["unrounded", "rounded"]


@triton.jit(do_not_specialize=["tokens"])
def squares_kernel(
    hidden, partial, tokens, columns, segments, hidden_t, hidden_h,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    segment = wide(tl.program_id(1)) * BLOCK_S
    squares = zero_squares(BLOCK_T, BLOCK_S)
    for step in range(STEPS):
        h = lane_columns(segment, step, BLOCK_S)
        inside = h < columns
        mask = (t < tokens)[:, None] & inside[None, :]
        f = load_bf16(hidden + (t * hidden_t)[:, None] + (h * hidden_h)[None, :], mask)
        squares = add_squares(squares, f, inside, WHOLE)
    store_squares(partial, squares, 0, t, segment, tokens, segments, 1, BLOCK_T, BLOCK_S)


@triton.jit(do_not_specialize=["tokens"])
def collapse_squares_kernel(
    residual, pre_mix, out, partial, tokens, columns, segments,
    residual_t, residual_n, residual_h, pre_t, pre_n, out_t, out_h,
    N: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    segment = wide(tl.program_id(1)) * BLOCK_S
    weights = load_weights(pre_mix + t * pre_t, pre_n, t < tokens, N)
    squares = zero_squares(BLOCK_T, BLOCK_S)
    for step in range(STEPS):
        h = lane_columns(segment, step, BLOCK_S)
        inside = h < columns
        mask = (t < tokens)[:, None] & inside[None, :]
        rows = load_streams(residual + (t * residual_t)[:, None] + (h * residual_h)[None, :], residual_n, mask, N)
        total = weighted_sum(rows, weights, N)
        store_bf16(out + (t * out_t)[:, None] + (h * out_h)[None, :], total, mask)
        if ROUNDED:
            total = round_bf16(total)
        squares = add_squares(squares, total, inside, WHOLE)
    store_squares(partial, squares, 0, t, segment, tokens, segments, 1, BLOCK_T, BLOCK_S)


@device
def store_normed(
    hidden, norm_weight, squares, out, t, h, tokens, columns, segments: tl.constexpr, step, eps,
    hidden_t, hidden_h, weight_h, out_t, out_h,
):  # fmt: skip
    """bf16((y * r) * weight) for a tile of tokens and columns; squares are the pointers to each token's first segment.

    `out` may be `hidden`: each element is read and written by one thread.
    """
    inside = t < tokens
    mask = inside[:, None] & (h < columns)[None, :]
    r = reciprocal_rms(segment_sum(squares, step, segments, inside), columns, eps)
    y = load_bf16(hidden + (t * hidden_t)[:, None] + (h * hidden_h)[None, :], mask)
    weight = load_bf16(norm_weight + h * weight_h, h < columns)
    store_bf16(out + (t * out_t)[:, None] + (h * out_h)[None, :], (y * r[:, None]) * weight[None, :], mask)


@triton.jit(do_not_specialize=["tokens"])
def scale_kernel(
    hidden, norm_weight, partial, out, tokens, columns, eps, hidden_t, hidden_h, weight_h, out_t, out_h,
    SEGMENTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    store_normed(
        hidden, norm_weight, partial + t, out, t, block(1, BLOCK_H), tokens, columns, SEGMENTS, tokens, eps,
        hidden_t, hidden_h, weight_h, out_t, out_h,
    )  # fmt: skip


def norm(hidden: Tensor, norm_weight: Tensor, *, norm_eps: float, out: Tensor | None = None) -> Tensor:
    """Return normed: bf16((y * r) * norm_weight) with r = 1 / sqrt(sum of squares / H + norm_eps).

    hidden [T, H] bf16, norm_weight [H] bf16, normed [T, H] bf16; any strides, `out` too.
    Raises TypeError or ValueError for wrong arguments. Source: numerical contract 1, RMSNorm of a bf16 row.
    """
    call = arguments("norm")
    call.tensor("hidden", hidden, BF16, "T H")
    call.tensor("norm_weight", norm_weight, BF16, "H")
    eps = call.number("norm_eps", norm_eps)
    (normed,) = call.outputs([Output("normed", BF16, "T H")], out)
    tokens, columns = hidden.shape
    shape = Segments.over(tokens, columns, 0)
    partial = shape.partial(tokens, 1, hidden.device)
    launch(
        squares_kernel, shape.grid(tokens), hidden, partial, tokens, columns, shape.total, *hidden.stride(),
        warps=shape.warps, **shape.constants,
    )  # fmt: skip
    run_scale(hidden, norm_weight, partial, normed, eps)
    return normed


def collapse_norm(
    residual: Tensor,
    pre_mix: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    squares_of: SquaresOf,
    out: Tensor | None = None,
) -> Tensor:
    """Return layer_input: the norm of the bf16 collapse, its squares those of the "unrounded" or "rounded" collapse.

    residual [T, n, H] bf16, pre_mix [T, n] f32, norm_weight [H] bf16, layer_input [T, H] bf16; any strides, `out` too.
    Raises TypeError or ValueError for wrong arguments. Source: numerical contract 1; V4 squares the unrounded
    collapse, V4.1 the rounded one.
    """
    call = arguments("collapse_norm")
    call.tensor("residual", residual, BF16, "T n H")
    call.tensor("pre_mix", pre_mix, F32, "T n")
    call.tensor("norm_weight", norm_weight, BF16, "H")
    eps = call.number("norm_eps", norm_eps)
    if squares_of not in ("unrounded", "rounded"):
        raise ValueError(f"collapse_norm: squares_of must be 'unrounded' or 'rounded', got {squares_of!r}")
    (layer_input,) = call.outputs([Output("layer_input", BF16, "T H")], out)
    run_collapse_norm(residual, pre_mix, norm_weight, layer_input, eps, rounded=squares_of == "rounded")
    return layer_input


def run_collapse_norm(
    residual: Tensor, pre_mix: Tensor, norm_weight: Tensor, layer_input: Tensor, eps: float, *, rounded: bool
) -> None:
    """Launch the collapse and norm of tensors that are already checked."""
    tokens, n, columns = residual.shape
    shape = Segments.over(tokens, columns, 0)
    partial = shape.partial(tokens, 1, residual.device)
    launch(
        collapse_squares_kernel, shape.grid(tokens), residual, pre_mix, layer_input, partial, tokens, columns,
        shape.total, *residual.stride(), *pre_mix.stride(), *layer_input.stride(),
        N=n, ROUNDED=rounded, warps=shape.warps, **shape.constants,
    )  # fmt: skip
    run_scale(layer_input, norm_weight, partial, layer_input, eps)


def run_scale(hidden: Tensor, norm_weight: Tensor, partial: Tensor, normed: Tensor, eps: float) -> None:
    """Launch the second half of a norm; partial [S, 1, T] are the segment sums of the squares."""
    tokens, columns = hidden.shape
    tile = Tile.over(tokens, columns)
    launch(
        scale_kernel, tile.grid(tokens, columns), hidden, norm_weight, partial, normed, tokens, columns, eps,
        *hidden.stride(), *norm_weight.stride(), *normed.stride(),
        SEGMENTS=partial.shape[0], warps=tile.warps, **tile.constants,
    )  # fmt: skip
