"""Argument checks and outputs of every kernel, whatever its language.

A kernel names its arguments and their sizes once, in an `Arguments`; the first tensor with a size
binds it, later ones must agree. Each refusal is one sentence: op, argument, expected, got.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fast.registry import Config

BF16 = torch.bfloat16
F32 = torch.float32

MAX_STREAMS = 8
MAY_BE_EMPTY = frozenset({"T"})
AT_MOST = {"n": MAX_STREAMS}


@dataclass(frozen=True)
class Output:
    """An output's name, dtype and size names, in the order in which its op returns it."""

    name: str
    dtype: torch.dtype
    shape: str


class Arguments:
    """The tensors and numbers of one call, checked as they are named.

    `sizes` maps each size name ("T", "n", "H", ...) to its value; every size but T must be at least 1, n at most 8.
    """

    def __init__(self, op: str, device_type: str | None = None, because: str = "") -> None:
        """Begin a call of `op`; with `device_type`, tensors must live there, and `because` says why."""
        self.op = op
        self.sizes: dict[str, int] = {}
        self._device: torch.device | None = None
        self._device_type = device_type
        self._because = because
        self._named: list[tuple[str, Tensor]] = []

    @property
    def device(self) -> torch.device:
        """The device of the tensors, which is that of the first one named."""
        if self._device is None:
            raise ValueError(f"{self.op}: no tensor names a device")
        return self._device

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def size(self, name: str, value: int) -> None:
        """Bind a size that follows from others, so that later tensors must have it."""
        self.sizes[name] = value

    def tensor(self, name: str, value: Tensor, dtype: torch.dtype, shape: str) -> Tensor:
        """Check one tensor against its dtype, its size names ("T n H") and the device; return it.

        Raises TypeError for a wrong kind or dtype and ValueError for a wrong shape or device.
        """
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"{self.op}: {name} must be a tensor [{_listed(shape)}], got {kind}")
        if value.dtype != dtype:
            raise TypeError(f"{self.op}: {name} must be {_dtype(dtype)}, got {_dtype(value.dtype)}")
        self._check_device(name, value)
        self._bind(name, value, shape.split())
        self._named.append((name, value))
        return value

    def integer(self, name: str, value: int, minimum: int = 1, maximum: int | None = None) -> int:
        """Check a whole number against its bounds; return it."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{self.op}: {name} must be an int, got {type(value).__name__}")
        if value < minimum or (maximum is not None and value > maximum):
            expected = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
            raise ValueError(f"{self.op}: {name} must be {expected}, got {value}")
        return value

    def number(self, name: str, value: float) -> float:
        """Check that a real number is finite and not negative; return it as a float."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"{self.op}: {name} must be a number, got {type(value).__name__}")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{self.op}: {name} must be finite and not negative, got {value}")
        return float(value)

    def config(self, config: Config) -> Constants:
        """Check the model's constants and unpack them to plain numbers; hc_mult must be n."""
        try:
            constants = Constants(
                hc_mult=self.integer("config.hc_mult", config.hc_mult, 1, MAX_STREAMS),
                sinkhorn_iters=self.integer("config.sinkhorn_iters", config.sinkhorn_iters),
                **{name: self.number(f"config.{name}", getattr(config, name)) for name in _REALS},
            )
        except AttributeError as error:
            raise TypeError(f"{self.op}: config must have every constant, got {error}") from error
        if self.sizes.setdefault("n", constants.hc_mult) != constants.hc_mult:
            raise ValueError(f"{self.op}: config.hc_mult must be n = {self['n']}, got {constants.hc_mult}")
        return constants

    def outputs(
        self, wanted: Sequence[Output], out: Tensor | Sequence[Tensor] | None, *, contiguous: bool = False
    ) -> tuple[Tensor, ...]:
        """The tensors to write: new contiguous ones, or those of `out` after they are checked.

        `out` is a tensor where one output is wanted and a sequence in output order where several are.
        Any strides are taken unless `contiguous`. Refused: a wrong count, dtype, shape or device, an
        output that holds one address twice, and one that plainly shares memory with another tensor.
        """
        shapes = [tuple(self._value(size) for size in output.shape.split()) for output in wanted]
        if out is None:
            return tuple(
                torch.empty(shape, dtype=output.dtype, device=self.device)
                for output, shape in zip(wanted, shapes, strict=True)
            )
        given = (out,) if isinstance(out, Tensor) else tuple(out)
        if len(given) != len(wanted):
            names = ", ".join(output.name for output in wanted)
            raise ValueError(f"{self.op}: out must be {len(wanted)} tensors ({names}), got {len(given)}")
        taken = list(self._named)
        for output, shape, tensor in zip(wanted, shapes, given, strict=True):
            self._check_out(output, shape, tensor, contiguous)
            self._check_memory(output, tensor, taken)
            taken.append((f"out ({output.name})", tensor))
        return given

    def _value(self, size: str) -> int:
        return int(size) if size.isdigit() else self.sizes[size]

    def _check_device(self, name: str, value: Tensor) -> None:
        if self._device is None:
            if self._device_type not in (None, value.device.type):
                raise ValueError(
                    f"{self.op}: {name} must be on {self._device_type} ({self._because}), got {value.device}"
                )
            self._device = value.device
        elif value.device != self._device:
            first = self._named[0][0]
            raise ValueError(f"{self.op}: {name} must be on {self._device} like {first}, got {value.device}")

    def _bind(self, name: str, value: Tensor, shape: list[str]) -> None:
        listed, got_shape = ", ".join(shape), list(value.shape)
        if value.dim() != len(shape):
            raise ValueError(f"{self.op}: {name} must be [{listed}], got {got_shape}")
        for size, got in zip(shape, value.shape, strict=True):
            expected = int(size) if size.isdigit() else self.sizes.setdefault(size, got)
            if got != expected:
                raise ValueError(f"{self.op}: {name} must be [{listed}] with {size} = {expected}, got {got_shape}")
            if got < 1 and size not in MAY_BE_EMPTY:
                raise ValueError(f"{self.op}: {name} must have {size} of at least 1, got {got_shape}")
            if got > AT_MOST.get(size, got):
                raise ValueError(f"{self.op}: {name} must have {size} of at most {AT_MOST[size]}, got {got_shape}")

    def _check_out(self, output: Output, shape: tuple[int, ...], tensor: Tensor, contiguous: bool) -> None:
        where = f"{self.op}: out ({output.name})"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != output.dtype:
            raise TypeError(f"{where} must be {_dtype(output.dtype)}, got {_dtype(tensor.dtype)}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where} must be [{_listed(output.shape)}] = {list(shape)}, got {list(tensor.shape)}")
        if tensor.device != self.device:
            raise ValueError(f"{where} must be on {self.device}, got {tensor.device}")
        if contiguous and not tensor.is_contiguous():
            raise ValueError(f"{where} must be contiguous, got strides {list(tensor.stride())}")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{where} must hold each element once, got strides {list(tensor.stride())}")

    def _check_memory(self, output: Output, tensor: Tensor, taken: Sequence[tuple[str, Tensor]]) -> None:
        for name, value in taken:
            if _share_memory(tensor, value):
                where = f"{self.op}: out ({output.name})"
                raise ValueError(f"{where} must have memory of its own, got that of {name}")


@dataclass(frozen=True)
class Constants:
    """The constants of one model as plain numbers."""

    hc_mult: int
    sinkhorn_iters: int
    rms_eps: float
    norm_eps: float
    hc_pre_eps: float
    hc_sinkhorn_eps: float
    post_mult: float


_REALS = ("rms_eps", "norm_eps", "hc_pre_eps", "hc_sinkhorn_eps", "post_mult")


def _listed(shape: str) -> str:
    return shape.replace(" ", ", ")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors without gaps meet in memory; with gaps it is too hard to tell, and not told."""
    if one.numel() == 0 or other.numel() == 0 or one.device != other.device:
        return False
    if not (_dense(one) and _dense(other)):
        return one.data_ptr() == other.data_ptr()
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _dense(tensor: Tensor) -> bool:
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return span == tensor.numel()


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()
