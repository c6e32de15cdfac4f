"""Optimized mHC kernels that reach the bits of the numerical contract.

Importing this package imports no kernel language: Triton and TileLang are loaded by the first
`kernel(op, backend)` that needs them, so a machine without them can still ask what it is missing.
"""

from __future__ import annotations

from fast.backends import Backend, probe
from fast.registry import Config, Kernel, Unsupported, kernel, ops, refusal, supports

__all__ = ["Backend", "Config", "Kernel", "Unsupported", "kernel", "ops", "probe", "refusal", "supports"]
