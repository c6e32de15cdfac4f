"""Tensors of more than 2^31 elements, whose offsets do not fit in 32 bits; rows on both sides of each limit are judged.

The matrix: every op that reads or writes streams, on every backend. H = 7168 and n = 4, as in the largest released
model; the token count is the smallest that passes 2^31 elements of streams by a whole tile.
"""

from __future__ import annotations

import pytest

import fast
from cases.ops import OPS
from tests import memory
from tests.gpu.full_size import GIB, inputs, largest, picked, reference, require_same, rows, run, to

HIDDEN, STREAMS = 7168, 4
LIMIT = 1 << 31
TOKENS = LIMIT // (HIDDEN * STREAMS) + 65


def sample() -> list[int]:
    """Tokens around the ends of 2^31 and 2^32 bytes and elements of streams, and the first and last."""
    per_token = HIDDEN * STREAMS
    ends = {0, TOKENS - 1, *(limit // size // per_token for limit in (LIMIT, 2 * LIMIT) for size in (1, 2, 4))}
    return sorted({token + step for token in ends for step in (-1, 0, 1) if 0 <= token + step < TOKENS})


@pytest.mark.more_than_a_gpu
@pytest.mark.ops_with("streams")
def test_offsets_past_32_bits(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches an offset computed in 32 bits: rows past the limit come from, or go to, somewhere else."""
    op = OPS[kernel_op]
    dims = [*(argument.dims for argument in op.arguments), *(output.dims for output in op.outputs)]
    needed = 2 * LIMIT * dims.count(("T", "n", "H")) + 5 * GIB
    with memory.turn(device):
        if (free := memory.free_bytes()) < needed:
            pytest.skip(f"needs {needed / GIB:.0f} GiB of GPU memory, {free / GIB:.0f} are free")
        judge_sample(kernel_op, kernel_backend, device)


def judge_sample(op: str, backend: str, device: str) -> None:
    """Compare the sampled rows with the CPU's; the big tensors end with this call."""
    call = largest(op, TOKENS, HIDDEN, STREAMS)
    tensors = inputs(call, device)
    actual = run(fast.kernel(op, backend), call, tensors)
    chosen = sample()
    few = rows(call, tensors, chosen)
    mine = tuple(output.cpu() for output in picked(call, actual, chosen))
    expected = reference(largest(op, len(chosen), HIDDEN, STREAMS), to("cpu", few))
    require_same(call, mine, expected, "past 2^31 elements")
