"""Every kernel at the widths of released models and up to 8192 tokens, against the oracle on the same device.

The matrix: every op and backend; H = 4096, 5120 and 7168, since tiles, vectors and segments divide each differently; 33
tokens, past the first tile of many, and 8192, the most that a step holds. Backends are judged on the same inputs by the
same oracle, so they agree with each other too.
"""

from __future__ import annotations

import pytest

import fast
from cases.ops import OPS
from tests.gpu.full_size import (
    Guarded,
    inputs,
    largest,
    per_token_sample,
    picked,
    reference,
    require_same,
    rows,
    run,
    shapes,
    to,
)
from tests.plugin import Session

HIDDEN = (4096, 5120, 7168)
ROWS = 512


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_oracle_gives_the_same_bits_on_both_devices(hidden: int, session: Session, device: str) -> None:
    """Catches a device whose fp32 operations, or PyTorch kernels for them, round otherwise: no verdict would count."""
    for op in session.ops:
        call = largest(op, 9, hidden)
        tensors = inputs(call, device)
        there = reference(call, tensors)
        here = reference(call, to("cpu", tensors))
        require_same(call, tuple(output.cpu() for output in there), here, "on the GPU and on the CPU")


@pytest.mark.parametrize("hidden", HIDDEN)
def test_all_bits_at_released_widths(kernel_op: str, kernel_backend: str, hidden: int, device: str) -> None:
    """Catches another order of additions, a contraction, a tail or vector path of its own, an unwritten output."""
    kernel = fast.kernel(kernel_op, kernel_backend)
    for tokens in (1, 33):
        call = largest(kernel_op, tokens, hidden)
        tensors = inputs(call, device)
        expected = reference(call, tensors)
        guarded = Guarded([(output.shape, output.dtype) for output in expected], device)
        require_same(call, run(kernel, call, tensors, out=guarded.argument), expected, f"T = {tokens}")
        guarded.require_intact()


def test_all_bits_of_8192_tokens(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches what shows in long grids only: a wrapped index, a token tile that is masked wrongly at its end."""
    call = largest(kernel_op, 8192, 7168)
    tensors = inputs(call, device)
    guarded = Guarded(shapes(call), device)
    actual = run(fast.kernel(kernel_op, kernel_backend), call, tensors, out=guarded.argument)
    guarded.require_intact()
    if not any(argument.per_token for argument in OPS[kernel_op].arguments):
        require_same(call, actual, reference(call, tensors), "whole")
        return
    for start in range(0, call.tokens, ROWS):
        chosen = range(start, start + ROWS)
        expected = reference(largest(kernel_op, ROWS, 7168), rows(call, tensors, chosen))
        require_same(call, picked(call, actual, chosen), expected, f"tokens {start} to {start + ROWS - 1}")


def test_a_sample_of_8192_tokens_against_the_cpu(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches a kernel and a GPU oracle that are wrong together."""
    call = largest(kernel_op, 8192, 7168)
    tensors = inputs(call, device)
    actual = run(fast.kernel(kernel_op, kernel_backend), call, tensors)
    chosen = per_token_sample(call.tokens)[::4]
    few = to("cpu", rows(call, tensors, chosen))
    expected = reference(largest(kernel_op, len(chosen), 7168), few)
    require_same(call, tuple(o.cpu() for o in picked(call, actual, chosen)), expected, "against the CPU")
