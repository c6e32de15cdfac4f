"""The ops as `torch.ops.mhc.*`: what a compiler is told of each op is what the op does, on any device.

The matrix: every op, because each has a schema and a fake of its own; every backend, because results may be laid
out otherwise there. Sizes are small: the bits are judged elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.ops import OPS
from fast import torch_ops
from oracle.arith import bits
from tests.inputs import inputs
from tests.static.launches import CHOSEN, Call

TOKENS, HIDDEN, STREAMS = 3, 16, 2
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def arguments(call: Call, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Positional and keyword arguments of a call."""
    made = inputs(call, device)
    optional = {argument.name for argument in OPS[call.op].arguments if argument.optional}
    positional = [tensor for name, tensor in made.items() if name not in optional]
    named: dict[str, Any] = {name: tensor for name, tensor in made.items() if name in optional}
    return positional, named | call.parameters()


def calls(op: str, tokens: int = TOKENS) -> list[Call]:
    """Every way in which an op is called, small."""
    return [Call(op, tokens, HIDDEN, STREAMS, options) for options in CHOSEN.get(op, ((),))]


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """One output or several, as a tuple."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def same(one: Any, other: Any) -> bool:
    """Whether two results agree in bits, shapes, dtypes and strides."""
    pairs = list(zip(as_tuple(one), as_tuple(other), strict=True))
    return all(a.stride() == b.stride() and a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in pairs)


def test_every_op_is_registered() -> None:
    """Catches an op that was added to the table and cannot be called from a compiled model."""
    assert set(torch_ops.SCHEMAS) == set(OPS)
    for name, op in OPS.items():
        schema = getattr(torch.ops.mhc, name).default._schema
        assert len(schema.returns) == len(op.outputs)
        assert {argument.name for argument in schema.arguments} >= {argument.name for argument in op.arguments}


def test_an_unknown_op_is_refused() -> None:
    """Catches an AttributeError from deep inside torch where a sentence would do."""
    with pytest.raises(ValueError, match="unknown op 'collaps'"):
        torch_ops.op("collaps", "triton")


@pytest.mark.parametrize("tokens", [0, TOKENS])
def test_fakes_are_as_the_results(kernel_op: str, kernel_backend: str, tokens: int, device: str) -> None:
    """Catches a fake of another shape, dtype or stride, which a compiled model would build on, and other bits."""
    import fast

    for call in calls(kernel_op, tokens):
        positional, named = arguments(call, device)
        real = as_tuple(torch_ops.op(kernel_op, kernel_backend)(*positional, **named))
        with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
            faked = [mode.from_tensor(tensor) for tensor in positional]
            others = {
                name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                for name, value in named.items()
            }
            fakes = as_tuple(torch_ops.op(kernel_op, kernel_backend)(*faked, **others))
        told = [(fake.shape, fake.dtype, fake.stride(), fake.device.type) for fake in fakes]
        assert told == [(one.shape, one.dtype, one.stride(), one.device.type) for one in real], call.name
        assert same(real, fast.kernel(kernel_op, kernel_backend)(*positional, **named)), call.name


def test_opcheck(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches an op that writes its inputs, returns a view of one, or whose fake fails on symbolic sizes."""
    (*_, call) = calls(kernel_op)
    positional, named = arguments(call, device)
    config = named.pop("config", None)
    constants = {} if config is None else {name: getattr(config, name) for name in torch_ops._CONSTANTS}
    overload = getattr(torch.ops.mhc, kernel_op).default
    found = torch.library.opcheck(
        overload, tuple(positional), {**named, **constants, "backend": kernel_backend}, test_utils=OPCHECKS
    )
    assert set(found.values()) == {"SUCCESS"}


def test_compiled_models_keep_the_bits(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches an op that breaks the graph of a compiled model, or that is compiled into something else."""
    function = torch_ops.op(kernel_op, kernel_backend)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (*_, call) = calls(kernel_op)
    positional, named = arguments(call, device)
    assert same(compiled(*positional, **named), function(*positional, **named))
