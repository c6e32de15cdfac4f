"""The learned collapse that ends a V4 model and its draft."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle import arguments
from oracle.arithmetic import CONTRACT_1, Arithmetic
from oracle.coefficients import gate, mixes, project
from oracle.collapse import collapse
from oracle.config import MhcConfig


@torch.no_grad()
def head(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: MhcConfig,
    arithmetic: Arithmetic = CONTRACT_1,
) -> Tensor:
    """Return the collapsed hidden states, bf16 [T, H]: collapse(residual, pre) with gates of its own.

    residual: bf16 [T, n, H]. fn: fp32 [n, n*H]. hc_scale: fp32 [1]. hc_base: fp32 [n]. pre = sigmoid(mix *
    scale + base) + hc_pre_eps, with mix from `project` and `mixes` over n*H values; nothing is rounded to
    bf16 before the collapse. Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    Source: DeepSeek's reference keeps the scaled values in fp32; upstream's Triton head rounds them, which
    is another function.
    """
    _, streams, hidden = check_streams("head", residual, config)
    arguments.sized("head", "fn", fn, torch.float32, (streams, streams * hidden))
    arguments.sized("head", "hc_scale", hc_scale, torch.float32, (1,))
    arguments.sized("head", "hc_base", hc_base, torch.float32, (streams,))
    arguments.same_device("head", residual=residual, fn=fn, hc_scale=hc_scale, hc_base=hc_base)
    sums, squares = project(residual, fn, arithmetic=arithmetic)
    mix = mixes(sums, squares, numel=streams * hidden, rms_eps=config.rms_eps)
    return collapse(residual, gate(mix, hc_scale, hc_base, config, arithmetic), arithmetic=arithmetic)


def check_streams(op: str, residual: Tensor, config: MhcConfig) -> tuple[int, int, int]:
    """Return (T, n, H) of a residual with as many streams as `config` says; TypeError or ValueError otherwise."""
    tokens, streams, hidden = arguments.residual(op, residual)
    if streams != config.hc_mult:
        raise ValueError(f"{op}: residual must have hc_mult = {config.hc_mult} streams, got {streams}")
    return tokens, streams, hidden
