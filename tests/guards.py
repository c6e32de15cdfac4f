"""Tensors between guard bands: memory in which a stray read of an input, or a stray write anywhere, shows."""

from __future__ import annotations

import math

import torch

from cases.layouts import pad_value, relayout
from cases.schema import Layout, PadFill
from oracle.arith import bits
from oracle.compare import POISON

BAND = 256
"""Elements of the narrowest band: what is aligned without bands must be aligned between them."""


class Guarded:
    """A tensor in the midst of a buffer of its own; bands, and gaps between elements, hold one bit pattern.

    A band is at least as wide as a row, so that a kernel that counts rows wrongly still meets it. The layout `far` has
    no bands: its buffer is larger than the memory that it may touch.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        *,
        layout: Layout = "contiguous",
        fill: PadFill | None = None,
    ) -> None:
        """Make room for ``shape``; bands hold the number that `pad_value` has for ``fill``, or poison without one."""
        self._pattern = POISON[dtype] if fill is None else _pattern(pad_value(fill, dtype), dtype)
        self._banded = layout != "far"
        self._buffer, offset, strides = _room(shape, dtype, device, layout)
        if self._banded:
            bits(self._buffer).fill_(self._pattern)
        self._place = (shape, strides, offset)
        self._bytes = self._buffer.untyped_storage().nbytes()
        self._address = self._buffer.data_ptr()
        self.inner = self._view(self._buffer)
        """The tensor that a kernel is given."""
        self._written: torch.Tensor | None = None

    @classmethod
    def holding(cls, values: torch.Tensor, device: str, layout: Layout, fill: PadFill) -> Guarded:
        """A tensor with these values in the layout, on the device."""
        made = cls(tuple(values.shape), values.dtype, device, layout=layout, fill=fill)
        made.write(values)
        return made

    def write(self, values: torch.Tensor) -> None:
        """Overwrite the values where they lie."""
        self._view(self._buffer).copy_(values)
        self._written = values

    @property
    def value(self) -> torch.Tensor:
        """What lies in the place that was handed out, whatever has become of the tensor; poison if that is gone."""
        if self._gone:
            lost = torch.empty(self._place[0], dtype=self._buffer.dtype, device=self._buffer.device)
            bits(lost).fill_(POISON[lost.dtype])
            return lost
        return self._view(self._buffer)

    @property
    def changed(self) -> bool:
        """Whether the values are no longer those that were written."""
        return self._written is not None and not torch.equal(bits(self.value.cpu()), bits(self._written.cpu()))

    @property
    def broken(self) -> bool:
        """Whether anything in the buffer but the values has changed."""
        if not self._banded or self._gone:
            return False
        outside = bits(self._buffer).clone()
        self._view(outside).fill_(self._pattern)
        return bool((outside != self._pattern).any())

    def is_at(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the one that was handed out: the same place, shape, strides and dtype."""
        shape, strides, offset = self._place
        address = self._address + offset * self._buffer.element_size()
        same_place = tensor.data_ptr() == address or not tensor.numel()
        steps = [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        wanted = [s for s, size in zip(strides, shape, strict=True) if size > 1]
        same_form = tuple(tensor.shape) == shape and tensor.dtype == self._buffer.dtype
        return same_place and same_form and (steps == wanted or not tensor.numel())

    @property
    def _gone(self) -> bool:
        return self._buffer.untyped_storage().nbytes() < self._bytes

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.as_strided(*self._place)


def _room(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, layout: Layout
) -> tuple[torch.Tensor, int, tuple[int, ...]]:
    """A buffer, and where in it and with which strides the tensor lies."""
    if layout == "far":
        far = relayout(torch.empty(shape, dtype=dtype, device=device), layout)
        elements = far.untyped_storage().nbytes() // far.element_size()
        return far.as_strided((elements,), (1,), 0), int(far.storage_offset()), far.stride()
    alike = relayout(torch.empty(shape, dtype=dtype, device="meta"), layout)
    row = max(alike.stride(0), math.prod(shape[1:])) if shape else 1
    band = -(-max(row, BAND) // BAND) * BAND
    offset = band + int(alike.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(shape, alike.stride(), strict=True)) if alike.numel() else -1
    return torch.empty(offset + last + 1 + band, dtype=dtype, device=device), offset, alike.stride()


def _pattern(number: float, dtype: torch.dtype) -> int:
    return int(bits(torch.tensor([number], dtype=dtype))[0])


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the addresses from the first to the last element of two tensors meet; never where one is empty."""
    if not (one.numel() and other.numel()) or one.device != other.device:
        return False
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
