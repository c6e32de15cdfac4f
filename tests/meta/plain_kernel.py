"""A Triton kernel written without any care for the interpreter, as a user's would be."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """target = source * 1.01, in FP32."""
    at = tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < count).to(tl.float32)
    tl.store(target + at, value * 1.01, mask=at < count)


def scaled(values: torch.Tensor) -> torch.Tensor:
    """Run the kernel over bf16 [N], N at most 1024."""
    target = torch.empty_like(values)
    scale_kernel[(1,)](values, target, values.numel(), BLOCK=1024)
    return target
