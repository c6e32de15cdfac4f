"""Compare a result with the expected one, bit for bit, and keep what a reader needs to find the fault.

Verdicts are data only; `oracle.report` turns them into text. The rules are those of contract version 1: +0
and -0 differ, any NaN equals any NaN, dtype, shape and contiguity must match, and an empty result must have the
right empty shape. There is no tolerance. Distances are counted in ULP of the output's own dtype on ordered
integers, so that they do not depend on which side is called expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from oracle.arith import bits
from oracle.rearrangement import find_rearrangement
from oracle.sp import SpLayout
from oracle.tally import FORMATS, Counts, Format, Wrong, classify, holds, is_nan
from oracle.verdict import Comparison, Fault, Form

CHUNK = 1 << 20

# Patterns to fill an output with before a kernel runs: signalling NaNs. Arithmetic only makes quiet ones, so
# an output that still holds the pattern was not written, even where a NaN is expected.
POISON: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 0x7FA5, torch.float32: 0x7FA5A5A5})


def compare(
    *,
    actual: torch.Tensor,
    expected: torch.Tensor,
    layout: SpLayout | None = None,
    poison: int | None = None,
    chunk: int = CHUNK,
) -> Comparison:
    """Compare one output with its expected value, in temporaries of O(``chunk``) elements.

    Both tensors are bf16 or f32, on any devices; ``actual`` must be contiguous, ``expected`` need not. With a
    ``layout`` dim 0 must be its token count or its padded token count (rows from T on are pad rows). ``poison``
    is the unsigned bit pattern that the actual output held before the kernel ran. Raises TypeError for an
    argument that is not a tensor or an expected dtype other than bf16 and f32, ValueError for a dim 0 that is not
    the layout's, a poison that arithmetic can make, or a chunk below 1.
    """
    _check_tensor("actual", actual)
    _check_tensor("expected", expected)
    _check_options(expected, layout, poison, chunk)
    actual, expected = actual.detach(), expected.detach()
    verdict = Comparison(actual=_form(actual), expected=_form(expected), faults=_faults(actual, expected))
    if Fault.DTYPE in verdict.faults or Fault.SHAPE in verdict.faults:
        return verdict
    tally = Counts(expected.shape, layout)
    for wrong in _mismatches(actual, expected, poison, chunk):
        tally.add(wrong)
    verdict = tally.fill(verdict)
    if verdict.mismatching:
        step = layout.rows_per_rank if layout is not None else None
        found = find_rearrangement(actual=actual, expected=expected, rows_per_rank=step)
        verdict = replace(verdict, rearrangement=found)
    return verdict


def _form(tensor: torch.Tensor) -> Form:
    return Form(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _faults(actual: torch.Tensor, expected: torch.Tensor) -> tuple[Fault, ...]:
    wrong = {
        Fault.DTYPE: actual.dtype != expected.dtype,
        Fault.SHAPE: actual.shape != expected.shape,
        Fault.LAYOUT: not actual.is_contiguous(),
    }
    return tuple(fault for fault, present in wrong.items() if present)


def _mismatches(actual: torch.Tensor, expected: torch.Tensor, poison: int | None, chunk: int) -> Iterator[Wrong]:
    total = expected.numel()
    for start in range(0, total, chunk):
        stop = min(start + chunk, total)
        ours = _read(actual, start, stop)
        theirs = _read(expected, start, stop).to(ours.device)
        if not torch.equal(bits(ours), bits(theirs)):
            where = _differ(ours, theirs, poison).nonzero().flatten()
            if where.numel():
                yield classify(where + start, ours[where], theirs[where], poison)


def _read(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) in row-major order, without a copy of the whole tensor."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    flat = torch.arange(start, stop, device=tensor.device)
    return tensor[torch.unravel_index(flat, tensor.shape)]


def _differ(actual: torch.Tensor, expected: torch.Tensor, poison: int | None) -> torch.Tensor:
    """Bits differ and not both are NaN; a poisoned actual value differs from another NaN too."""
    different = bits(actual) != bits(expected)
    wrong = different & ~(is_nan(actual) & is_nan(expected))
    return wrong if poison is None else wrong | (different & holds(actual, poison))


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"compare: {name} must be a tensor, got {type(tensor).__name__}")


def _check_options(expected: torch.Tensor, layout: SpLayout | None, poison: int | None, chunk: int) -> None:
    if expected.dtype not in FORMATS:
        raise TypeError(f"compare: expected must be bfloat16 or float32, got {expected.dtype}")
    if chunk < 1:
        raise ValueError(f"compare: chunk must be at least 1, got {chunk}")
    if poison is not None:
        _check_poison(poison, FORMATS[expected.dtype])
    if layout is not None and expected.numel():
        allowed = sorted({layout.tokens, layout.padded_tokens})
        if expected.dim() == 0 or expected.shape[0] not in allowed:
            rows = " or ".join(str(count) for count in allowed)
            raise ValueError(f"compare: expected must have {rows} rows for {layout}, got {tuple(expected.shape)}")


def _check_poison(poison: int, form: Format) -> None:
    """Only a signalling NaN proves anything: kernels compute numbers and quiet NaNs."""
    payload = form.magnitude - form.infinity
    quiet = (payload + 1) >> 1
    magnitude = poison & form.magnitude
    if poison >> form.width != 0 or magnitude <= form.infinity or magnitude & quiet:
        width = form.width
        raise ValueError(
            f"compare: poison must be a {width}-bit signalling NaN, which no kernel makes, got {poison:#x}"
        )


__all__ = ["CHUNK", "POISON", "Comparison", "Fault", "compare"]
