"""Faults that any op can have: in how it stores, loads, addresses and rounds, whatever it computes.

Each constructor takes an op's name and returns a function with that op's signature: the oracle with the fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import oracle
from cases.ops import OPS
from oracle.arith import bits, from_bits, round_bf16
from oracle.arithmetic import Arithmetic
from oracle.reduce import add_product, index_sum
from tests.implementations import of_oracle

Function = Callable[..., Any]
VECTOR = 8


def under(op: str, **rules: Any) -> Function:
    """The op under another `Arithmetic`."""
    record = Arithmetic("mutant", **rules)

    def mutant(*tensors: Tensor, **options: Any) -> Any:
        return getattr(oracle, op)(*tensors, arithmetic=record, **options)

    return mutant


def patched(op: str, **replacements: Function) -> Function:
    """The op with functions of the oracle replaced by name, wherever the oracle imports them."""

    def mutant(*tensors: Tensor, **options: Any) -> Any:
        with replaced(replacements):
            return getattr(oracle, op)(*tensors, **options)

    return mutant


@contextmanager
def replaced(replacements: Mapping[str, object]) -> Iterator[None]:
    """Functions or constants of the oracle replaced by name, wherever the oracle imports them, until the block ends."""
    modules = [module for name, module in sys.modules.items() if name.startswith("oracle.")]
    places = [(module, name) for module in modules for name in replacements if hasattr(module, name)]
    before = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, replacements[name])
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)


def on_inputs(op: str, change: Callable[[str, Tensor], Tensor]) -> Function:
    """The op on changed inputs; ``change`` gets each tensor argument with its name."""
    names = [argument.name for argument in OPS[op].required]

    def mutant(*tensors: Tensor, **options: Any) -> Any:
        positional = [change(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
        keywords = {k: change(k, v) if isinstance(v, Tensor) else v for k, v in options.items()}
        return getattr(oracle, op)(*positional, **keywords)

    return mutant


def on_outputs(op: str, change: Callable[[Tensor], Tensor]) -> Function:
    """The op with each output changed."""

    def mutant(*tensors: Tensor, **options: Any) -> Any:
        outputs = _outputs(op, tensors, options)
        changed = tuple(change(output) for output in outputs)
        return changed[0] if len(changed) == 1 else changed

    return mutant


def _outputs(op: str, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
    result = getattr(oracle, op)(*tensors, **options)
    return (result,) if isinstance(result, Tensor) else result


def truncated(values: Tensor) -> Tensor:
    """Drops the low 16 bits, as the bf16 cast of Triton's interpreter does."""
    cut = from_bits((bits(values) >> 16).to(torch.int16))
    return torch.where(values.isnan(), torch.full_like(cut, torch.nan), cut)


def up_from_half(values: Tensor) -> Tensor:
    """Adds half a unit and drops the low bits: only exact ties above an even value come out wrong."""
    cut = from_bits(((bits(values) + 0x8000) >> 16).to(torch.int16))
    return torch.where(values.isnan(), torch.full_like(cut, torch.nan), cut)


def truncating_store(op: str) -> Function:
    """Stores BF16 without rounding."""
    return patched(op, round_bf16=truncated)


def round_half_up(op: str) -> Function:
    """Rounds ties away from zero."""
    return patched(op, round_bf16=up_from_half)


def zeros_skipped(op: str) -> Function:
    """Takes no step where a weight or a value is 0, as a sparse product does."""
    return patched(op, add_product=product_of_some)


def product_of_some(total: Tensor, weight: Tensor, value: Tensor, *, fused: bool) -> Tensor:
    """Leaves the total where the weight or the value is 0."""
    return torch.where((weight == 0) | (value == 0), total, add_product(total, weight, value, fused=fused))


def flush(values: Tensor) -> Tensor:
    """Subnormal values as zero of their sign."""
    tiny = torch.finfo(values.dtype).smallest_normal
    return torch.where(values.abs() < tiny, values * 0, values)


def subnormal_flushed(op: str) -> Function:
    """Runs in flush-to-zero mode: subnormal inputs, products, sums and results become zero of their sign."""

    def product(total: Tensor, weight: Tensor, value: Tensor, *, fused: bool) -> Tensor:
        return flush(add_product(total, flush(weight), flush(value), fused=fused))

    inner = patched(
        op,
        add_product=product,
        round_bf16=lambda values: flush(round_bf16(flush(values))),
        index_sum=_flushed_sum,
    )

    def mutant(*tensors: Tensor, **options: Any) -> Any:
        result = inner(*(flush(tensor) for tensor in tensors), **options)
        return flush(result) if isinstance(result, Tensor) else tuple(flush(output) for output in result)

    return mutant


def _flushed_sum(terms: Any, order: Any = "ascending") -> Tensor:
    return flush(index_sum([flush(term) for term in terms], order))


def nan_lost(op: str) -> Function:
    """Stores through a max, which drops NaN."""
    return on_outputs(op, lambda output: torch.where(output.isnan(), torch.zeros_like(output), output))


def rounded_as_number(values: Tensor) -> Tensor:
    """Rounds FP32 to BF16 by its pattern, whatever that stands for."""
    pattern = bits(values)
    return from_bits(((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).to(torch.int16))


def nan_rounded(op: str) -> Function:
    """Rounds without a look at NaN."""
    return patched(op, round_bf16=rounded_as_number)


def overflow_clamped(op: str) -> Function:
    """Saturates: Inf becomes the largest finite value."""
    return on_outputs(op, lambda o: o.clamp(-torch.finfo(o.dtype).max, torch.finfo(o.dtype).max))


def negative_zero_lost(op: str) -> Function:
    """Adds the result to a cleared accumulator: -0 becomes +0."""
    return on_outputs(op, lambda output: torch.where(output == 0, torch.zeros_like(output), output))


def row_misplaced(op: str) -> Function:
    """Writes each row in its neighbour's place; a row alone has its columns shifted."""
    return on_outputs(op, lambda o: o.roll(1, 0) if o.shape[0] > 1 else o.roll(1, -1))


def row_crosstalk(op: str) -> Function:
    """Indexes the first argument with a token axis by lane: every row reads the row before it there."""
    name = next(argument.name for argument in reversed(OPS[op].required) if argument.per_token)
    return on_inputs(op, lambda n, tensor: tensor.roll(1, 0) if n == name else tensor)


def pad_row_read(op: str) -> Function:
    """Shares one scale over the rows of a block: what the last row holds reaches every other."""
    names = [argument.name for argument in OPS[op].required if argument.per_token]

    def mutant(*tensors: Tensor, **options: Any) -> Any:
        arguments = dict(zip((a.name for a in OPS[op].required), tensors, strict=True))
        outputs = _outputs(op, tensors, options)
        if not arguments[names[0]].shape[0]:
            return outputs[0] if len(outputs) == 1 else outputs
        last = torch.stack([(arguments[name][-1].float() * 0).sum() for name in names]).sum()
        tainted = tuple(output + last.to(output.dtype) if bool(last != 0) else output for output in outputs)
        return tainted[0] if len(tainted) == 1 else tainted

    return mutant


def tail_column_unwritten(op: str) -> Function:
    """Stores all but the last column of every output; takes ``out=``."""

    def mutant(*tensors: Tensor, out: Any, **options: Any) -> Any:
        places = (out,) if isinstance(out, Tensor) else out
        for place, output in zip(places, _outputs(op, tensors, options), strict=True):
            place[..., :-1] = output[..., :-1]
        return out

    return mutant


def strides_ignored(op: str) -> Function:
    """Indexes every argument as packed, from where it starts."""

    def packed(_: str, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return tensor
        flat, start = _storage(tensor), tensor.storage_offset()
        places = (start + torch.arange(tensor.numel())) % flat.numel()
        return flat[places].reshape(tensor.shape)

    return on_inputs(op, packed)


def vector_misaligned(op: str) -> Function:
    """Loads vectors of 8 from the aligned address below a row's start."""

    def aligned(_: str, tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.stride(-1) != 1 or not tensor.numel():
            return tensor
        columns = torch.arange(tensor.shape[-1])
        index = torch.zeros(tensor.shape[:-1], dtype=torch.int64) + tensor.storage_offset()
        for axis in range(tensor.dim() - 1):
            steps = torch.arange(tensor.shape[axis]) * tensor.stride(axis)
            index += steps.reshape(-1, *(1 for _ in range(tensor.dim() - 2 - axis)))
        flat = _storage(tensor)
        return flat[((index // VECTOR * VECTOR).unsqueeze(-1) + columns) % flat.numel()]

    return on_inputs(op, aligned)


def offset_32bit(op: str) -> Function:
    """Computes row * stride in 32 bits: past 2^31 elements it wraps to memory before the tensor."""

    def wrapped(_: str, tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[0] * tensor.stride(0) < 1 << 31:
            return tensor
        offsets = torch.arange(tensor.shape[0], dtype=torch.int64) * tensor.stride(0)
        offsets = (offsets + (1 << 31)) % (1 << 32) - (1 << 31)
        start, inner = tensor.storage_offset(), tensor.stride()[1:]
        rows = [torch.as_strided(tensor, tensor.shape[1:], inner, start + int(offset)) for offset in offsets]
        return torch.stack(rows)

    return on_inputs(op, wrapped)


def hc_mult_fixed(op: str) -> Function:
    """Steps through memory as if there were four streams, whatever hc_mult says."""
    specs = {argument.name: argument for argument in OPS[op].arguments}

    def four(name: str, tensor: Tensor) -> Tensor:
        dims = specs[name].dims
        if "n" not in dims or not tensor.numel():
            return tensor
        n = tensor.shape[dims.index("n")]
        sizes = [4 if dim == "n" else size for dim, size in zip(dims, tensor.shape, strict=True)]
        flat = tensor.contiguous().view(-1)
        read = flat[torch.arange(int(torch.tensor(sizes).prod())) % flat.numel()].reshape(sizes)
        for axis, dim in enumerate(dims):
            read = read.narrow(axis, 0, min(n, 4)) if dim == "n" else read
        return read if n <= 4 else _zero_padded(read, tensor.shape)

    return on_inputs(op, four)


def _zero_padded(tensor: Tensor, shape: torch.Size) -> Tensor:
    full = torch.zeros(shape, dtype=tensor.dtype)
    full[tuple(slice(size) for size in tensor.shape)] = tensor
    return full


def mix_rounded(op: str) -> Function:
    """Casts the coefficients to the activations' dtype before mixing."""
    return on_inputs(op, lambda n, t: t.bfloat16().float() if n.endswith("_mix") else t)


def comb_transposed(op: str) -> Function:
    """Reads comb as [output stream, input stream]."""
    return on_inputs(op, lambda n, t: t.transpose(1, 2) if n == "comb_mix" else t)


def empty_launch(op: str) -> Function:
    """Has no guard for no tokens: the launch of an empty grid fails."""
    implementation = of_oracle(op)

    def mutant(*tensors: Tensor, **options: Any) -> Any:
        if not tensors[0].shape[0]:
            raise RuntimeError("invalid configuration argument")
        return implementation.function(*tensors, **options)

    return mutant


def _storage(tensor: Tensor) -> Tensor:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, (elements,), (1,), 0)
