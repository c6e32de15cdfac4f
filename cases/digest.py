"""The digest of an output: what a case file keeps of the expected bits."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET_NAN = {torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}
_INTEGER = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_CHUNK = 1 << 24


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bits, in hex; equal exactly when two outputs count as equal.

    The hash runs over "dtype:size,size\\n" and the little-endian bytes in row-major order, whatever the strides.
    Every NaN counts as the same quiet NaN; +0 and -0 differ. Takes bfloat16 and float32 on any device; raises
    TypeError for another dtype. Works in chunks, so that a large tensor needs no second copy of itself.
    """
    if tensor.dtype not in QUIET_NAN:
        raise TypeError(f"digest: expected a bfloat16 or float32 tensor, got {tensor.dtype}")
    sizes = ",".join(str(size) for size in tensor.shape)
    total = hashlib.sha256(f"{str(tensor.dtype).removeprefix('torch.')}:{sizes}\n".encode())
    for chunk in _chunks(tensor.detach().contiguous().reshape(-1)):
        total.update(_canonical_bytes(chunk))
    return total.hexdigest()


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK].cpu()


def _canonical_bytes(flat: torch.Tensor) -> bytes:
    bits = torch.where(torch.isnan(flat), QUIET_NAN[flat.dtype], flat.view(_INTEGER[flat.dtype]))
    values = bits.to(_INTEGER[flat.dtype]).numpy()
    return values.tobytes() if sys.byteorder == "little" else values.byteswap().tobytes()
