"""Collapse: the streams of a token weighted by its pre-mix."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fast.arguments import BF16, F32, Output
from fast.triton_kernels.launch import Tile, arguments, launch
from fast.triton_kernels.numerics import append, block, device, load_bf16, store_bf16, wide


@device
def weighted_sum(rows, weights, n: tl.constexpr):
    """The collapse before its rounding: a = +0, then a = a + (weight * row), each rounded, streams ascending."""
    total = weights[0] * rows[0] + 0.0
    for i in tl.static_range(1, n):
        total = total + weights[i] * rows[i]
    return total


@device
def load_streams(pointer, step, mask, n: tl.constexpr):
    """The n stream tiles at `pointer` and each `step` further, as a tuple of fp32 tiles."""
    rows = ()
    for i in tl.static_range(n):
        rows = append(rows, load_bf16(pointer + wide(step) * i, mask))
    return rows


@device
def load_weights(pointer, step, mask, n: tl.constexpr):
    """The n coefficients of each token at `pointer` and each `step` further, as columns to scale tiles with."""
    weights = ()
    for i in tl.static_range(n):
        weights = append(weights, tl.load(pointer + wide(step) * i, mask=mask, other=0.0)[:, None])
    return weights


@triton.jit(do_not_specialize=["tokens"])
def collapse_kernel(
    residual, pre_mix, out, tokens, columns,
    residual_t, residual_n, residual_h, pre_t, pre_n, out_t, out_h,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    h = block(1, BLOCK_H)
    inside = t < tokens
    mask = inside[:, None] & (h < columns)[None, :]
    weights = load_weights(pre_mix + t * pre_t, pre_n, inside, N)
    rows = load_streams(residual + (t * residual_t)[:, None] + (h * residual_h)[None, :], residual_n, mask, N)
    store_bf16(out + (t * out_t)[:, None] + (h * out_h)[None, :], weighted_sum(rows, weights, N), mask)


def collapse(residual: Tensor, pre_mix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return layer_input: bf16(sum over streams of pre_mix[i] * residual[i]), rounded once.

    residual [T, n, H] bf16, pre_mix [T, n] f32, layer_input [T, H] bf16; any strides, `out` too.
    Raises TypeError or ValueError for wrong arguments. Source: numerical contract 1, collapse.
    """
    call = arguments("collapse")
    call.tensor("residual", residual, BF16, "T n H")
    call.tensor("pre_mix", pre_mix, F32, "T n")
    (layer_input,) = call.outputs([Output("layer_input", BF16, "T H")], out)
    run_collapse(residual, pre_mix, layer_input)
    return layer_input


def run_collapse(residual: Tensor, pre_mix: Tensor, layer_input: Tensor) -> None:
    """Launch the collapse of tensors that are already checked."""
    tokens, n, columns = residual.shape
    tile = Tile.over(tokens, columns)
    launch(
        collapse_kernel, tile.grid(tokens, columns), residual, pre_mix, layer_input, tokens, columns,
        *residual.stride(), *pre_mix.stride(), *layer_input.stride(), N=n, warps=tile.warps, **tile.constants,
    )  # fmt: skip
