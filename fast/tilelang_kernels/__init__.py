"""TileLang kernels, one file an idea, under the names of the op table; this file imports no TileLang."""

from __future__ import annotations

MODULES = {
    "expand": "streams",
    "collapse": "collapse",
    "stream_mean": "streams",
    "post": "streams",
    "draft_tail": "streams",
}

MAX_STREAMS = 8


def refusal(op: str, hc_mult: int | None, hidden_size: int | None) -> str:  # noqa: ARG001
    """Why `op` refuses these sizes; empty when it takes them. Any hidden size will do."""
    if hc_mult is not None and hc_mult > MAX_STREAMS:
        return f"{op}: hc_mult must be 1 to {MAX_STREAMS} (streams are unrolled in registers), got {hc_mult}"
    return ""
