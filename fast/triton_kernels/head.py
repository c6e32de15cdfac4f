"""The learned collapse that ends a V4 model and its draft."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast.arguments import BF16, F32, Output
from fast.registry import Config
from fast.triton_kernels.coefficients import logits_of, pre_of, reciprocal_rms, run_project, token_block
from fast.triton_kernels.collapse import run_collapse
from fast.triton_kernels.launch import arguments, blocks, launch, power_of_two
from fast.triton_kernels.numerics import block, wide
from fast.triton_kernels.reduce import segment_sum


@triton.jit(do_not_specialize=["tokens"])
def gate_kernel(
    partial, hc_scale, hc_base, pre_mix, tokens, numel, rms_eps, pre_eps, base_o,
    SEGMENTS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = block(0, BLOCK_T)
    i = tl.arange(0, WIDTH)
    inside = (i < N)[None, :]
    mask = (t < tokens)[:, None] & inside
    step = wide(tokens) * (N + 1)
    squares = segment_sum(partial + wide(tokens) * N + t, step, SEGMENTS, t < tokens)
    r = reciprocal_rms(squares, numel, rms_eps)
    sums = segment_sum(partial + (wide(i) * tokens)[None, :] + t[:, None], step, SEGMENTS, mask)
    logits = logits_of(sums * r[:, None], hc_scale, hc_base, base_o, i[None, :], inside)
    tl.store(pre_mix + (t * N)[:, None] + i[None, :], pre_of(logits, pre_eps), mask=mask)


def head(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: Config,
    out: Tensor | None = None,
) -> Tensor:
    """Return hidden: the collapse of the streams by gates projected from them, sigmoid(mix * scale + base) + eps.

    residual [T, n, H] bf16, fn [n, n*H] f32, hc_scale [1] f32, hc_base [n] f32, hidden [T, H] bf16; any strides, `out`
    too. Raises TypeError or ValueError for wrong arguments. Source: V4's hc_head, with the scaled values kept in fp32.
    """
    call = arguments("head")
    call.tensor("residual", residual, BF16, "T n H")
    constants = call.config(config)
    n = constants.hc_mult
    call.size("n*H", n * residual.shape[2])
    call.tensor("fn", fn, F32, "n n*H")
    call.tensor("hc_scale", hc_scale, F32, "1")
    call.tensor("hc_base", hc_base, F32, "n")
    (hidden,) = call.outputs([Output("hidden", BF16, "T H")], out)
    tokens = residual.shape[0]
    partial = run_project(residual, fn)
    pre_mix = torch.empty((tokens, n), dtype=F32, device=residual.device)
    size = token_block(tokens, n)
    launch(
        gate_kernel, (blocks(tokens, size),), partial, hc_scale, hc_base, pre_mix, tokens,
        float(fn.shape[1]), constants.rms_eps, constants.hc_pre_eps, *hc_base.stride(),
        SEGMENTS=partial.shape[0], N=n, WIDTH=power_of_two(n), BLOCK_T=size, warps=1,
    )  # fmt: skip
    run_collapse(residual, pre_mix, hidden)
    return hidden
