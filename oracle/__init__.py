"""The reference: mHC in plain PyTorch, slow and readable, every rounding written down."""

from __future__ import annotations

from oracle.arithmetic import CONTRACT_1, Arithmetic
from oracle.boundary import post_pre, post_pre_delayed, pre, pre_delayed
from oracle.coefficients import coefficients, fn_broadcast, mixes, project, sinkhorn
from oracle.collapse import collapse
from oracle.config import MhcConfig
from oracle.head import head
from oracle.norm import collapse_norm, norm
from oracle.streams import draft_tail, expand, post, stream_mean

__all__ = [
    "CONTRACT_1",
    "Arithmetic",
    "MhcConfig",
    "coefficients",
    "collapse",
    "collapse_norm",
    "draft_tail",
    "expand",
    "fn_broadcast",
    "head",
    "mixes",
    "norm",
    "post",
    "post_pre",
    "post_pre_delayed",
    "pre",
    "pre_delayed",
    "project",
    "sinkhorn",
    "stream_mean",
]
