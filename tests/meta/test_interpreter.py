"""A user's plain Triton kernel is not blamed for the BF16 faults of Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from oracle.arith import bits, round_bf16, widen
from tests import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def test_conversions_are_the_oracles_on_every_bf16_neighbourhood() -> None:
    """Every BF16 pattern with low halves at, beside and far from the tie: truncation fails half of them."""
    high = np.left_shift(np.arange(1 << 16, dtype=np.uint32)[:, None], np.uint32(16))
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    patterns = np.bitwise_or(high, low).reshape(-1)
    values = torch.from_numpy(patterns.view(np.float32))
    expected = bits(round_bf16(values)).numpy().view(np.uint16)
    assert np.array_equal(interpreter.rounded(patterns), expected)
    truncated = np.right_shift(patterns, np.uint32(16)).astype(np.uint16)
    assert (truncated != expected).mean() > 0.4
    short = np.arange(1 << 16, dtype=np.uint16)
    widened = bits(widen(torch.from_numpy(short.view(np.int16)).view(torch.bfloat16))).numpy().view(np.uint32)
    assert np.array_equal(interpreter.widened(short), widened)


@pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here: there is no interpreter to repair")
def test_a_plain_kernel_is_exact_once_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel loads, adds in FP32 and stores as anybody would; without the repair its bits are wrong."""
    pytest.importorskip("triton")
    from triton.runtime import interpreter as inner

    from tests.meta.plain_kernel import scaled

    # A test before this one may have judged a user's function, and so repaired this process already.
    faulty = getattr(inner._convert_float, "repairs", inner._convert_float)
    monkeypatch.setattr(inner, "_convert_float", faulty)
    values = torch.cat([torch.arange(1, 128, 2, dtype=torch.int16).view(torch.bfloat16), torch.randn(64).bfloat16()])
    expected = round_bf16(widen(values) * 1.01)
    before = scaled(values)
    interpreter.repair()
    assert torch.equal(bits(scaled(values)), bits(expected))
    assert not torch.equal(bits(before), bits(expected))
