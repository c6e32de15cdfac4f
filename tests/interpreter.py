"""Repairs what Triton's interpreter gets wrong about BF16, so that a user's right kernel is not blamed for it.

Interpreted, a store of FP32 to BF16 drops the low bits and a load misreads subnormals; compiled, both are exact. The
suite's own kernels carry their own conversions. A kernel given by ``--impl`` is written for the compiler, so the
interpreter's two conversions are replaced by right ones before it is imported. BF16 arithmetic without a cast to FP32
stays what the interpreter makes of it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def repair() -> None:
    """Replace the interpreter's conversions between FP32 and BF16; nothing where Triton is missing or compiles."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    inner = interpreter._convert_float
    if hasattr(inner, "repairs"):
        return

    def convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        toward_zero = rounding_mode is not None and str(rounding_mode).endswith("RTZ")
        if (source, target) == (tl.float32, tl.bfloat16) and not toward_zero:
            return rounded(np.ascontiguousarray(values).view(np.uint32))
        if (source, target) == (tl.bfloat16, tl.float32):
            return widened(np.ascontiguousarray(values).view(np.uint16))
        return inner(values, source, target, rounding_mode)

    convert.repairs = inner  # type: ignore[attr-defined]
    interpreter._convert_float = convert


def rounded(patterns: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """BF16 patterns of FP32 patterns, rounded to nearest even; every NaN becomes 0x7FC0."""
    wide = patterns.astype(np.uint64)
    nearest = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    is_nan = (patterns & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, 0x7FC0, nearest).astype(np.uint16)


def widened(patterns: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """FP32 patterns of BF16 patterns, exactly."""
    wide: np.ndarray[Any, np.dtype[np.uint32]] = np.left_shift(patterns.astype(np.uint32), np.uint32(16))
    return wide
