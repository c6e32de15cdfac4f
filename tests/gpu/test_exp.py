"""exp and sigmoid on every float where exp is neither 0 nor Inf: what a CPU can only do on a stride."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oracle import arith
from tests.oracle.exp_bound import all_floats, prove

EVERY_FLOAT = 2_240_000_000
ORACLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"exp": arith.exp, "sigmoid": arith.sigmoid}


def test_exp_is_within_one_ulp_on_every_float(device: str) -> None:
    """Catches a polynomial or a range reduction with one bad float among thousands of millions."""
    tried, worst = prove(1, device)
    assert tried > EVERY_FLOAT
    assert worst <= 1


@pytest.mark.parametrize("name", ORACLE)
def test_compiled_functions_have_the_oracles_bits_on_every_float(name: str, device: str) -> None:
    """Catches what a compiler does to one branch or constant, wherever in the range it shows."""
    pytest.importorskip("triton")
    from fast.triton_kernels.launch import launch
    from tests.test_triton_numerics import BLOCK, apply_jit

    tried = differing = 0
    for make in all_floats(1, device):
        values = make()
        out = torch.empty_like(values)
        launch(apply_jit, (-(-out.numel() // BLOCK),), *[values] * 3, out, out.numel(), NAME=name, BLOCK=BLOCK)
        tried += values.numel()
        differing += int((out.view(torch.int32) != ORACLE[name](values).view(torch.int32)).sum())
    assert tried > EVERY_FLOAT
    assert differing == 0
