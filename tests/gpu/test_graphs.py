"""CUDA graphs, streams and repeats: a kernel as serving engines run it.

The matrix: every op and backend at H = 5120. Capture happens once; a replay reads whatever the inputs hold then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fast
from cases.ops import OPS
from oracle.arith import bits
from tests.gpu.full_size import Call, Outputs, Tensors, inputs, largest, picked, require_same, run

HIDDEN = 5120
PADDED = 48
REPEATS = 100


def captured(kernel: Callable[..., Any], call: Call, tensors: Tensors) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """A graph of one call, and the outputs that each replay of it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(kernel, call, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(kernel, call, tensors)
    return graph, outputs


def overwrite(tensors: Tensors, others: Tensors) -> None:
    """Put other values where a captured graph reads."""
    for name, tensor in tensors.items():
        tensor.copy_(others[name])


@pytest.mark.parametrize("tokens", [1, 33])
def test_replay_is_eager(kernel_op: str, kernel_backend: str, tokens: int, device: str) -> None:
    """Catches scratch that a replay does not write again, a value baked in at capture, a launch that capture missed."""
    kernel = fast.kernel(kernel_op, kernel_backend)
    call = largest(kernel_op, tokens, HIDDEN)
    tensors = inputs(call, device)
    graph, outputs = captured(kernel, call, tensors)
    for seed in (1, 2, 1):
        overwrite(tensors, inputs(call, device, seed))
        for output in outputs:
            bits(output).fill_(-1)
        graph.replay()
        require_same(call, outputs, run(kernel, call, tensors), f"replay with inputs {seed}")


@pytest.mark.ops_with("tokens")
def test_no_tokens_in_a_graph(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches an empty launch, which CUDA refuses, and an output of no rows that is missing or misshapen."""
    kernel = fast.kernel(kernel_op, kernel_backend)
    call = largest(kernel_op, 0, HIDDEN)
    tensors = inputs(call, device)
    total = torch.zeros(1, device=device)
    run(kernel, call, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(kernel, call, tensors)
        total += 1
    graph.replay()
    torch.cuda.synchronize()
    assert [output.shape for output in outputs] == [output.shape for output in run(kernel, call, tensors)]
    assert total.item() == 1


@pytest.mark.ops_with("tokens")
@pytest.mark.parametrize("valid", [0, 1, 33])
def test_pad_rows_of_a_graph(kernel_op: str, kernel_backend: str, valid: int, device: str) -> None:
    """Catches rows that depend on pad rows: a graph for 48 tokens runs fewer, and the rest holds anything, NaN too."""
    per_token = {argument.name for argument in OPS[kernel_op].arguments if argument.per_token}
    kernel = fast.kernel(kernel_op, kernel_backend)
    call = largest(kernel_op, PADDED, HIDDEN)
    tensors = inputs(call, device)
    graph, outputs = captured(kernel, call, tensors)
    graph.replay()
    before = tuple(output.clone() for output in picked(call, outputs, range(valid)))
    for name in per_token & tensors.keys():
        tensors[name][valid:] = float("nan")
    graph.replay()
    require_same(call, picked(call, outputs, range(valid)), before, f"{valid} of {PADDED} rows valid")


def test_a_side_stream(kernel_op: str, kernel_backend: str, device: str) -> None:
    """Catches a launch on another stream than the current one: it would read inputs that are not there yet."""
    kernel = fast.kernel(kernel_op, kernel_backend)
    call = largest(kernel_op, 33, HIDDEN)
    tensors = inputs(call, device)
    expected = run(kernel, call, tensors)
    late = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        overwrite(late, tensors)
        actual = run(kernel, call, late)
    side.synchronize()
    require_same(call, actual, expected, "on a side stream")


@pytest.mark.parametrize("tokens", [1, 193])
def test_a_hundred_runs_give_one_result(kernel_op: str, kernel_backend: str, tokens: int, device: str) -> None:
    """Catches a race, a missing barrier, a read of what was not written: a result that changes from run to run."""
    kernel = fast.kernel(kernel_op, kernel_backend)
    call = largest(kernel_op, tokens, HIDDEN)
    tensors = inputs(call, device)
    first = run(kernel, call, tensors)
    changed = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(REPEATS):
        for one, again in zip(first, run(kernel, call, tensors), strict=True):
            changed += (bits(one) != bits(again)).sum()
    assert changed.item() == 0, f"{changed.item()} values changed in {REPEATS} runs"
