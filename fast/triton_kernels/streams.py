"""Ops over the residual streams: expand, mean, post, and post with collapse in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fast.arguments import BF16, F32, MAX_STREAMS, Arguments, Output
from fast.triton_kernels.collapse import load_streams, load_weights, weighted_sum
from fast.triton_kernels.launch import Tile, arguments, launch
from fast.triton_kernels.numerics import append, block, device, div, load_bf16, round_bf16, store_bf16, wide


@device
def mean_of(rows, n: tl.constexpr):
    """The mean before its rounding: rows added to +0 in order, divided by n."""
    total = rows[0] + 0.0
    for i in tl.static_range(1, n):
        total = total + rows[i]
    if (n & (n - 1)) == 0:
        # Scaling by a power of two rounds as the division does, and costs one instruction.
        return total * (1.0 / n)
    return div(total, n * 1.0)


@device
def post_of(x, rows, post, comb, n: tl.constexpr):
    """The new streams before their rounding: v = post[k] * x, then v = v + (comb[i][k] * row[i]), i ascending."""
    new = ()
    for k in tl.static_range(n):
        value = post[k] * x
        for i in tl.static_range(n):
            value = value + comb[i * n + k] * rows[i]
        new = append(new, value)
    return new


@device
def load_comb(pointer, step_in, step_out, mask, n: tl.constexpr):
    """The n * n comb coefficients of each token, row-major by input stream, as columns to scale tiles with."""
    comb = ()
    for i in tl.static_range(n):
        comb = comb + load_weights(pointer + wide(step_in) * i, step_out, mask, n)
    return comb


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    hidden, residual, tokens, columns, hidden_t, hidden_h, residual_t, residual_n, residual_h,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    h = block(1, BLOCK_H)
    mask = (t < tokens)[:, None] & (h < columns)[None, :]
    pattern = tl.load(hidden + (t * hidden_t)[:, None] + (h * hidden_h)[None, :], mask=mask)
    pointer = residual + (t * residual_t)[:, None] + (h * residual_h)[None, :]
    for i in tl.static_range(N):
        tl.store(pointer + wide(residual_n) * i, pattern, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def mean_kernel(
    residual, aux, tokens, columns, residual_t, residual_n, residual_h, aux_t, aux_h,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    h = block(1, BLOCK_H)
    mask = (t < tokens)[:, None] & (h < columns)[None, :]
    rows = load_streams(residual + (t * residual_t)[:, None] + (h * residual_h)[None, :], residual_n, mask, N)
    store_bf16(aux + (t * aux_t)[:, None] + (h * aux_h)[None, :], mean_of(rows, N), mask)


@triton.jit(do_not_specialize=["tokens"])
def post_kernel(
    x, residual, post_mix, comb_mix, out, tokens, columns,
    x_t, x_h, residual_t, residual_n, residual_h, post_t, post_n, comb_t, comb_i, comb_k, out_t, out_n, out_h,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    h = block(1, BLOCK_H)
    inside = t < tokens
    mask = inside[:, None] & (h < columns)[None, :]
    post = load_weights(post_mix + t * post_t, post_n, inside, N)
    comb = load_comb(comb_mix + t * comb_t, comb_i, comb_k, inside, N)
    x_tile = load_bf16(x + (t * x_t)[:, None] + (h * x_h)[None, :], mask)
    rows = load_streams(residual + (t * residual_t)[:, None] + (h * residual_h)[None, :], residual_n, mask, N)
    new = post_of(x_tile, rows, post, comb, N)
    pointer = out + (t * out_t)[:, None] + (h * out_h)[None, :]
    for k in tl.static_range(N):
        store_bf16(pointer + wide(out_n) * k, new[k], mask)


@triton.jit(do_not_specialize=["tokens"])
def tail_kernel(
    x, residual, post_mix, comb_mix, pre_mix, out, tokens, columns,
    x_t, x_h, residual_t, residual_n, residual_h, post_t, post_n, comb_t, comb_i, comb_k, pre_t, pre_n, out_t, out_h,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    h = block(1, BLOCK_H)
    inside = t < tokens
    mask = inside[:, None] & (h < columns)[None, :]
    post = load_weights(post_mix + t * post_t, post_n, inside, N)
    comb = load_comb(comb_mix + t * comb_t, comb_i, comb_k, inside, N)
    pre = load_weights(pre_mix + t * pre_t, pre_n, inside, N)
    x_tile = load_bf16(x + (t * x_t)[:, None] + (h * x_h)[None, :], mask)
    rows = load_streams(residual + (t * residual_t)[:, None] + (h * residual_h)[None, :], residual_n, mask, N)
    new = round_streams(post_of(x_tile, rows, post, comb, N), N)
    store_bf16(out + (t * out_t)[:, None] + (h * out_h)[None, :], weighted_sum(new, pre, N), mask)


@device
def round_streams(rows, n: tl.constexpr):
    """Each tile rounded once to bf16 and widened again, as if it had been stored and loaded."""
    rounded = ()
    for i in tl.static_range(n):
        rounded = append(rounded, round_bf16(rows[i]))
    return rounded


def expand(hidden: Tensor, hc_mult: int, *, out: Tensor | None = None) -> Tensor:
    """Return residual: every stream a bit copy of `hidden`.

    hidden [T, H] bf16, residual [T, hc_mult, H] bf16; any strides, `out` too.
    Raises TypeError or ValueError for wrong arguments. Source: upstream's entry of the first layer.
    """
    call = arguments("expand")
    call.tensor("hidden", hidden, BF16, "T H")
    call.size("n", call.integer("hc_mult", hc_mult, 1, MAX_STREAMS))
    (residual,) = call.outputs([Output("residual", BF16, "T n H")], out)
    tokens, columns = hidden.shape
    tile = Tile.over(tokens, columns)
    launch(
        expand_kernel, tile.grid(tokens, columns), hidden, residual, tokens, columns,
        *hidden.stride(), *residual.stride(), N=hc_mult, warps=tile.warps, **tile.constants,
    )  # fmt: skip
    return residual


def stream_mean(residual: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return aux: bf16(sum of the streams / n), rounded once.

    residual [T, n, H] bf16, aux [T, H] bf16; any strides, `out` too.
    Raises TypeError or ValueError for wrong arguments. Source: numerical contract 1, stream_mean.
    """
    call = arguments("stream_mean")
    call.tensor("residual", residual, BF16, "T n H")
    (aux,) = call.outputs([Output("aux", BF16, "T H")], out)
    tokens, n, columns = residual.shape
    tile = Tile.over(tokens, columns)
    launch(
        mean_kernel, tile.grid(tokens, columns), residual, aux, tokens, columns,
        *residual.stride(), *aux.stride(), N=n, warps=tile.warps, **tile.constants,
    )  # fmt: skip
    return aux


def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the new residual: stream k is bf16(post_mix[k] * x + sum over i of comb_mix[i, k] * residual[i]).

    x [T, H] bf16, residual [T, n, H] bf16, post_mix [T, n] f32, comb_mix [T, n, n] f32 by [input stream,
    output stream]; any strides, `out` too. Raises TypeError or ValueError for wrong arguments.
    Source: numerical contract 1, post.
    """
    call = arguments("post")
    check_post(call, x, residual, post_mix, comb_mix)
    (new,) = call.outputs([Output("residual", BF16, "T n H")], out)
    tokens, n, columns = residual.shape
    tile = Tile.over(tokens, columns)
    launch(
        post_kernel, tile.grid(tokens, columns), x, residual, post_mix, comb_mix, new, tokens, columns,
        *x.stride(), *residual.stride(), *post_mix.stride(), *comb_mix.stride(), *new.stride(),
        N=n, warps=tile.warps, **tile.constants,
    )  # fmt: skip
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
    """Return layer_input: the collapse of the post's bf16 result, in one pass that never stores that result.

    Arguments of `post`, then pre_mix [T, n] f32; layer_input [T, H] bf16; any strides, `out` too.
    Raises TypeError or ValueError for wrong arguments. Source: numerical contract 1, draft_tail.
    """
    call = arguments("draft_tail")
    check_post(call, x, residual, post_mix, comb_mix)
    call.tensor("pre_mix", pre_mix, F32, "T n")
    (layer_input,) = call.outputs([Output("layer_input", BF16, "T H")], out)
    tokens, n, columns = residual.shape
    tile = Tile.over(tokens, columns)
    launch(
        tail_kernel, tile.grid(tokens, columns), x, residual, post_mix, comb_mix, pre_mix, layer_input,
        tokens, columns, *x.stride(), *residual.stride(), *post_mix.stride(), *comb_mix.stride(),
        *pre_mix.stride(), *layer_input.stride(), N=n, warps=tile.warps, **tile.constants,
    )  # fmt: skip
    return layer_input


def check_post(call: Arguments, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> None:
    """Check the four tensors that every post takes."""
    call.tensor("residual", residual, BF16, "T n H")
    call.tensor("x", x, BF16, "T H")
    call.tensor("post_mix", post_mix, F32, "T n")
    call.tensor("comb_mix", comb_mix, F32, "T n n")
