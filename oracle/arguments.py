"""Argument checks of the oracle: one sentence that names op, argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_STREAMS = 8


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(op: str, name: str, value: object, dtype: torch.dtype, axes: Sequence[str]) -> Tensor:
    """Return `value` if it is a tensor of `dtype` with one dimension for each name in `axes`.

    Raises TypeError for another type or dtype, ValueError for another rank.
    """
    wanted = f"{_name(dtype)} [{', '.join(axes)}]"
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a {wanted} tensor, got {type(value).__name__}")
    came = f"{_name(value.dtype)} {list(value.shape)}"
    if value.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {wanted}, got {came}")
    if value.dim() != len(axes):
        raise ValueError(f"{op}: {name} must be {wanted}, got {came}")
    return value


def sized(op: str, name: str, value: object, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return `value` if it is a tensor of `dtype` and exactly `shape`; TypeError or ValueError otherwise."""
    checked = tensor(op, name, value, dtype, [str(size) for size in shape])
    if checked.shape != torch.Size(shape):
        wanted = f"{_name(dtype)} {list(shape)}"
        raise ValueError(f"{op}: {name} must be {wanted}, got {_name(dtype)} {list(checked.shape)}")
    return checked


def residual(op: str, value: object, name: str = "residual") -> tuple[int, int, int]:
    """Return (T, n, H) of a bf16 [T, n, H] residual, n in 1..8, H >= 1; TypeError or ValueError otherwise."""
    tokens, streams, hidden = tensor(op, name, value, torch.bfloat16, ("T", "n", "H")).shape
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"{op}: {name} must have 1 to {MAX_STREAMS} streams, got {streams}")
    positive(op, name, hidden)
    return tokens, streams, hidden


def rows(op: str, name: str, value: object) -> tuple[int, int]:
    """Return (T, H) of a bf16 [T, H] tensor with H >= 1; TypeError or ValueError otherwise."""
    tokens, hidden = tensor(op, name, value, torch.bfloat16, ("T", "H")).shape
    positive(op, name, hidden)
    return tokens, hidden


def positive(op: str, name: str, hidden: int) -> None:
    """Raise ValueError if the hidden size of `name` is 0: a sum over it would say nothing."""
    if hidden < 1:
        raise ValueError(f"{op}: {name} must have a hidden size of at least 1, got {hidden}")


def count(op: str, name: str, value: object, lowest: int = 1, highest: int | None = None) -> int:
    """Return `value` if it is an int from `lowest` to `highest`; TypeError or ValueError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < lowest or (highest is not None and value > highest):
        wanted = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
        raise ValueError(f"{op}: {name} must be {wanted}, got {value}")
    return value


def real(op: str, name: str, value: object) -> float:
    """Return `value` if it is a finite number that is not negative; TypeError or ValueError otherwise."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{op}: {name} must be finite and not negative, got {value}")
    return float(value)


def same_device(op: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors given lie on one device."""
    places = {name: value.device for name, value in tensors.items() if value is not None}
    first_name, first = next(iter(places.items()))
    for name, place in places.items():
        if place != first:
            raise ValueError(f"{op}: {name} must be on {first} like {first_name}, got {place}")
