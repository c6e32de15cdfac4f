"""The contract as prose and the contract as code name the same constants."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import oracle
from cases.ops import OPS as OPS_TABLE
from oracle import arith, reduce

PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()


def row(name: str) -> str:
    """The value cell of one line of the page's tables."""
    found = re.search(rf"^\| {re.escape(name)} \| (.+) \|$", PAGE, re.MULTILINE)
    assert found, name
    return found[1]


def hexadecimals(cell: str) -> tuple[float, ...]:
    """The hexadecimal floats of a cell, in order."""
    return tuple(float.fromhex(text) for text in re.findall(r"`(-?0x[0-9a-f.]+p-?\d+)`", cell))


def test_exp_has_the_constants_of_the_page() -> None:
    """Catches a kernel author led to other bits by a page that the code has left behind."""
    assert hexadecimals(row("EXP_POLYNOMIAL")) == arith.EXP_POLYNOMIAL
    assert hexadecimals(row("LOG2_E")) == (arith.LOG2_E,)
    assert hexadecimals(row("LN2_HIGH, LN2_LOW")) == (arith.LN2_HIGH, arith.LN2_LOW)
    assert hexadecimals(row("MAGIC, MAGIC_BITS")) == (arith.MAGIC,)
    assert f"0x{arith.MAGIC_BITS:X}" in row("MAGIC, MAGIC_BITS")
    assert row("EXP_HIGHEST, EXP_LOWEST") == f"{arith.EXP_HIGHEST:.0f}, {arith.EXP_LOWEST:.0f}"


def test_sums_have_the_constants_of_the_page() -> None:
    """Catches a changed LANES or SEGMENT that readers are not told about."""
    assert f"LANES = {reduce.LANES} and SEGMENT = {reduce.SEGMENT}" in PAGE


OPS = [name for name in oracle.__all__ if name[0].islower()]


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_on_the_page(op: str) -> None:
    """Catches an op whose bits nobody wrote down."""
    assert f"`{op}`" in PAGE.partition("## Arithmetic")[2]


@pytest.mark.parametrize("op", OPS)
def test_every_call_is_on_the_page(op: str) -> None:
    """Catches a reader's own function called with arguments in another order or by another name."""
    own = {"arithmetic", "out"}
    parameters = [p for p in inspect.signature(getattr(oracle, op)).parameters.values() if p.name not in own]
    first = next((p.name for p in parameters if p.kind is p.KEYWORD_ONLY), None)
    shown = ", ".join(f"*, {p.name}" if p.name == first else p.name for p in parameters)
    outputs = ", ".join(output.name for output in OPS_TABLE[op].outputs)
    assert re.sub(r" \[[^]]+\] (BF16|FP32)", "", row(f"`{op}({shown})`")) == outputs
