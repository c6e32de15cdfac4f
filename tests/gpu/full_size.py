"""Calls at the size of released models, judged on the device, where the oracle gives the same bits as on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

import oracle
from cases.ops import OPS
from fast import torch_ops
from oracle.arith import bits
from oracle.compare import POISON, compare
from oracle.report import Context, report
from tests.inputs import inputs
from tests.plugin import versions
from tests.static.launches import CHOSEN, Call

Tensors = dict[str, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
GUARD = 1 << 12
GIB = 1 << 30


def largest(op: str, tokens: int, hidden: int, hc_mult: int = 4) -> Call:
    """The call of an op that does the most: with every optional argument that models pass."""
    return Call(op, tokens, hidden, hc_mult, CHOSEN.get(op, ((),))[-1])


def arguments(call: Call, tensors: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Positional and keyword arguments of a call with given tensors."""
    optional = {argument.name for argument in OPS[call.op].arguments if argument.optional}
    positional = [tensor for name, tensor in tensors.items() if name not in optional]
    named: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name in optional}
    return positional, named | call.parameters()


def run(function: Callable[..., Any], call: Call, tensors: Mapping[str, torch.Tensor], **more: Any) -> Outputs:
    """Outputs of a function that has the op's signature."""
    positional, named = arguments(call, tensors)
    result = function(*positional, **named, **more)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def shapes(call: Call) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each output of a call, as its fake tells them."""
    positional, named = arguments(call, call.tensors("meta"))
    result = torch_ops.op(call.op, torch_ops.DEFAULT_BACKEND)(*positional, **named)
    return [(one.shape, one.dtype) for one in ((result,) if isinstance(result, torch.Tensor) else result)]


def reference(call: Call, tensors: Mapping[str, torch.Tensor]) -> Outputs:
    """The oracle's outputs, on the tensors' device."""
    return run(getattr(oracle, call.op), call, tensors)


def rows(call: Call, tensors: Mapping[str, torch.Tensor], chosen: Sequence[int]) -> Tensors:
    """The same arguments for some of the tokens alone."""
    per_token = {argument.name for argument in OPS[call.op].arguments if argument.per_token}
    return {name: tensor[list(chosen)] if name in per_token else tensor for name, tensor in tensors.items()}


def picked(call: Call, outputs: Outputs, chosen: Sequence[int]) -> Outputs:
    """Outputs of some of the tokens alone."""
    return tuple(
        output[list(chosen)] if spec.dims[0] == "T" and output.shape[0] == call.tokens else output
        for spec, output in zip(OPS[call.op].outputs, outputs, strict=True)
    )


def to(device: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors on another device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def require_same(call: Call, actual: Outputs, expected: Outputs, what: str) -> None:
    """Fail with a count for the first output whose bits, shape or dtype differ."""
    for spec, mine, right in zip(OPS[call.op].outputs, actual, expected, strict=True):
        if mine.shape == right.shape and mine.dtype == right.dtype and torch.equal(bits(mine), bits(right)):
            continue
        verdict = compare(actual=mine.contiguous(), expected=right, poison=POISON.get(mine.dtype))
        if not verdict.exact:
            context = Context(
                case=f"{call.name}, H = {call.hidden}", op=call.op, output=spec.name, backend=what, tp=1,
                fill=None, order="op-then-gather", versions=versions(), rerun="",
            )  # fmt: skip
            pytest.fail(report(verdict, context), pytrace=False)


def per_token_sample(tokens: int) -> list[int]:
    """The first, middle and last tokens, and those on both sides of powers of two."""
    edges = {
        0,
        1,
        tokens // 2,
        tokens - 2,
        tokens - 1,
        *(2**i - 1 for i in range(4, 14)),
        *(2**i for i in range(4, 14)),
    }
    return sorted(row for row in edges if 0 <= row < tokens)


class Guarded:
    """Outputs on the device that are full of poison, each between two guard bands of it."""

    def __init__(self, shapes: Sequence[tuple[torch.Size, torch.dtype]], device: str) -> None:
        self._buffers = []
        self.out: list[torch.Tensor] = []
        for shape, dtype in shapes:
            buffer = torch.empty(shape.numel() + 2 * GUARD, dtype=dtype, device=device)
            bits(buffer).fill_(POISON[dtype])
            self._buffers.append(buffer)
            self.out.append(buffer[GUARD : GUARD + shape.numel()].view(shape))

    @property
    def argument(self) -> Any:
        """What a kernel takes as ``out=``."""
        return self.out[0] if len(self.out) == 1 else tuple(self.out)

    def require_intact(self) -> None:
        """Fail when something was written outside an output."""
        for buffer in self._buffers:
            pattern = bits(buffer)
            bands = torch.cat([pattern[:GUARD], pattern[-GUARD:]])
            assert bool((bands == POISON[buffer.dtype]).all()), "wrote outside an output"


__all__ = ["Call", "Guarded", "arguments", "inputs", "largest", "reference", "require_same", "rows", "run"]
