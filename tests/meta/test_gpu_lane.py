"""The judge of the GPU lane, tried on a CPU: it passes what is right and reports what is not."""

from __future__ import annotations

import pytest
import torch

from oracle.arith import bits
from tests.gpu.full_size import Guarded, largest, per_token_sample, reference, require_same, rows, shapes
from tests.gpu.test_offsets import HIDDEN, LIMIT, STREAMS, TOKENS, sample
from tests.inputs import inputs


def test_one_wrong_bit_is_reported() -> None:
    """Catches a judge of full-size outputs that compares nothing, or values instead of bits."""
    call = largest("collapse", 3, 40, 2)
    tensors = inputs(call, "cpu")
    expected = reference(call, tensors)
    require_same(call, expected, expected, "the same")
    (wrong,) = (output.clone() for output in expected)
    bits(wrong)[1, 7] ^= 1
    with pytest.raises(pytest.fail.Exception, match="1 of 120"):
        require_same(call, (wrong,), expected, "one bit off")


def test_a_write_outside_is_seen() -> None:
    """Catches guard bands that nobody looks at."""
    guarded = Guarded([(torch.Size((2, 3)), torch.bfloat16)], "cpu")
    guarded.require_intact()
    guarded._buffers[0][-1] = 0
    with pytest.raises(AssertionError, match="outside"):
        guarded.require_intact()


@pytest.mark.parametrize("op", ["expand", "project", "post_pre_delayed", "fn_broadcast"])
def test_shapes_are_those_of_the_oracle(op: str) -> None:
    """Catches outputs that are made too small for a kernel, which would then be blamed."""
    call = largest(op, 5, 24, 2)
    assert shapes(call) == [(output.shape, output.dtype) for output in reference(call, inputs(call, "cpu"))]


def test_rows_of_inputs_are_inputs_of_rows() -> None:
    """Catches weights that are cut like tokens, and tokens that are not."""
    call = largest("norm", 9, 16)
    few = rows(call, inputs(call, "cpu"), [2, 5])
    assert {name: tuple(tensor.shape) for name, tensor in few.items()} == {"hidden": (2, 16), "norm_weight": (16,)}


def test_samples_stay_inside_and_reach_past_the_limit() -> None:
    """Catches a big-offset test whose rows all lie below 2^31 elements, and sampled rows that do not exist."""
    assert TOKENS * HIDDEN * STREAMS > LIMIT
    assert all(0 <= token < TOKENS for token in sample())
    assert {(token * HIDDEN * STREAMS) // LIMIT for token in sample()} == {0, 1}
    assert per_token_sample(3) == [0, 1, 2]


def test_inputs_have_power() -> None:
    """Catches full-size data on which another order of additions gives the same bits."""
    call = largest("collapse", 4, 512)
    tensors = inputs(call, "cpu")
    (expected,) = reference(call, tensors)
    reverse = {name: tensor.flip(1) for name, tensor in tensors.items()}
    (other,) = reference(call, reverse)
    assert int((bits(other) != bits(expected)).sum()) > 500
