"""Triton kernels, one file an idea, under the names of the op table; this file imports no Triton."""

from __future__ import annotations

from fast.arguments import MAX_STREAMS

MODULES = {
    "expand": "streams",
    "collapse": "collapse",
    "stream_mean": "streams",
    "post": "streams",
    "draft_tail": "streams",
    "project": "coefficients",
    "mixes": "coefficients",
    "sinkhorn": "coefficients",
    "coefficients": "coefficients",
    "fn_broadcast": "coefficients",
    "norm": "norm",
    "collapse_norm": "norm",
    "head": "head",
    "pre": "boundary",
    "pre_delayed": "boundary",
    "post_pre": "boundary",
    "post_pre_delayed": "boundary",
}


def refusal(op: str, hc_mult: int | None, hidden_size: int | None) -> str:  # noqa: ARG001
    """Why `op` refuses these sizes; empty when it takes them. Any hidden size will do."""
    if hc_mult is not None and hc_mult > MAX_STREAMS:
        return f"{op}: hc_mult must be 1 to {MAX_STREAMS} (streams are unrolled in registers), got {hc_mult}"
    return ""
