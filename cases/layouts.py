"""Ways in which the same values can lie in memory, and what fills the pad rows of a shard."""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, get_args

import torch

from cases.schema import Layout, PadFill

if TYPE_CHECKING:
    from collections.abc import Callable

GAP = 5
"""Elements between two rows of `gapped`: odd, so that rows start at addresses that no vector load may assume."""

FAR = 1 << 31
"""The element offset that `far` makes its last token pass."""

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FILLS: dict[str, float] = {"zero": 0.0, "nan": math.nan, "inf": math.inf, "huge": 1e30}


def pad_value(fill: PadFill, dtype: torch.dtype) -> float:
    """The number that fills a pad row: 0, NaN, Inf or 1e30, rounded to `dtype` when stored.

    Raises ValueError for an unknown fill, and TypeError when the dtype cannot hold all four.
    """
    if fill not in _FILLS:
        raise ValueError(f"pad_value: expected fill to be one of {', '.join(_FILLS)}, got {fill!r}")
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"pad_value: expected dtype bfloat16 or float32, got {dtype}")
    return _FILLS[fill]


def relayout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same values, bit for bit and on the same device, in a new buffer of the wanted layout.

    contiguous: packed. columns: every second column of a buffer twice as wide. transposed: the two last axes
    swapped in storage. gapped: a gap after each row. offset: packed, from an odd element of its storage. far: a
    token stride under which the last token lies past 2^31 elements, in memory that is never touched elsewhere.
    What lies between the elements is NaN (except in `far`), so that a kernel that reads it shows.
    Raises ValueError for an unknown layout, or when the tensor has too few axes for it.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"relayout: expected layout to be one of {', '.join(get_args(Layout))}, got {layout!r}")
    needed = 2 if layout in ("transposed", "far") else 1
    if tensor.ndim < needed:
        raise ValueError(f"relayout: expected {needed} axes or more for {layout!r}, got {list(tensor.shape)}")
    place = _PLACES[layout](tensor)
    place.copy_(tensor)
    return place


def _poisoned(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=tensor.dtype, device=tensor.device)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    return _poisoned(tensor, (*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return _poisoned(tensor, tuple(tensor.transpose(-1, -2).shape)).transpose(-1, -2)


def _gapped(tensor: torch.Tensor) -> torch.Tensor:
    return _poisoned(tensor, (*tensor.shape[:-1], tensor.shape[-1] + GAP))[..., : tensor.shape[-1]]


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    return _poisoned(tensor, (tensor.numel() + 1,))[1:].view(tensor.shape)


def _far(tensor: torch.Tensor) -> torch.Tensor:
    """Half of the buffer lies before token 0, so that an offset wrapped to 32 bits still lands inside it."""
    row = math.prod(tensor.shape[1:])
    steps = max(tensor.shape[0] - 1, 1)
    stride = max(-(-FAR // steps), row)
    storage = _untouched(FAR + steps * stride + row, tensor)
    inner = torch.empty(tensor.shape[1:], device="meta").stride()
    return storage.as_strided(tensor.shape, (stride, *inner), FAR)


def _untouched(elements: int, like: torch.Tensor) -> torch.Tensor:
    """A large buffer that takes memory only where it is touched; on a GPU it takes all of it."""
    if like.device.type != "cpu":
        return torch.empty(elements, dtype=like.dtype, device=like.device)
    size = elements * like.element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(pages, dtype=like.dtype)


_PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": _contiguous,
    "columns": _columns,
    "transposed": _transposed,
    "gapped": _gapped,
    "offset": _offset,
    "far": _far,
}
