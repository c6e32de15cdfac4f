"""The reference: mHC in plain PyTorch, slow and readable, every rounding written down."""

from __future__ import annotations

from oracle.arithmetic import CONTRACT_1, Arithmetic
from oracle.collapse import collapse
from oracle.config import MhcConfig
from oracle.streams import draft_tail, expand, post, stream_mean

__all__ = [
    "CONTRACT_1",
    "Arithmetic",
    "MhcConfig",
    "collapse",
    "draft_tail",
    "expand",
    "post",
    "stream_mean",
]
