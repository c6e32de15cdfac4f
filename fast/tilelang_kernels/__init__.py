"""TileLang kernels, one file an idea, under the names of the op table; this file imports no TileLang."""

from __future__ import annotations

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

MAX_STREAMS = 8

# A block that norms keeps a row in shared memory, as fp32; 96 KiB is what the smallest of the supported GPUs has.
MAX_NORM_HIDDEN = 22528
NORMS = ("norm", "collapse_norm")


def refusal(op: str, hc_mult: int | None, hidden_size: int | None) -> str:
    """Why `op` refuses these sizes; empty when it takes them.

    A boundary takes any hidden size, but with a norm_weight no more than a norm does.
    """
    if hc_mult is not None and hc_mult > MAX_STREAMS:
        return f"{op}: hc_mult must be 1 to {MAX_STREAMS} (streams are unrolled in registers), got {hc_mult}"
    if op in NORMS and hidden_size is not None and hidden_size > MAX_NORM_HIDDEN:
        return f"{op}: H must be at most {MAX_NORM_HIDDEN} (a block keeps a row in shared memory), got {hidden_size}"
    return ""
