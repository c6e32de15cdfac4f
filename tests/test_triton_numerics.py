"""The arithmetic under every Triton kernel against the oracle's, on inputs that tell right from nearly right.

Interpreted where kernels run on the CPU, compiled with `--device cuda`: the same tests, so that a kernel's bits
never depend on which of the two ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle import arith, reduce
from tests.oracle import exact, test_fma
from tests.plugin import Session

pytest.importorskip("triton")

import triton
import triton.language as tl

from fast.triton_kernels import numerics
from fast.triton_kernels.launch import launch
from fast.triton_kernels.numerics import (
    div,
    exp,
    fma,
    fma_to_odd,
    load_bf16,
    round_bf16,
    sigmoid,
    sqrt,
    store_bf16,
)
from fast.triton_kernels.reduce import lane_tree, parts

COUNT = 1 << 18
BLOCK = 1 << 16


def apply_kernel(a, b, c, out, count, NAME: tl.constexpr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    x = tl.load(a + i, mask=mask, other=1.0)
    y = tl.load(b + i, mask=mask, other=1.0)
    z = tl.load(c + i, mask=mask, other=1.0)
    if NAME == "fma":
        value = fma(x, y, z)
    elif NAME == "fma_to_odd":
        value = fma_to_odd(x, y, z)
    elif NAME == "multiply and add":
        value = x * y + z
    elif NAME == "div":
        value = div(x, y)
    elif NAME == "sqrt":
        value = sqrt(x)
    elif NAME == "exp":
        value = exp(x)
    elif NAME == "sigmoid":
        value = sigmoid(x)
    else:
        value = round_bf16(x)
    tl.store(out + i, value, mask=mask)


def widen_kernel(a, out, count, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, load_bf16(a + i, i < count), mask=i < count)


def narrow_kernel(a, out, count, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    store_bf16(out + i, tl.load(a + i, mask=i < count, other=0.0), i < count)


def tree_kernel(a, out, ROWS: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row, lane = tl.arange(0, ROWS), tl.arange(0, 64)
    tree = lane_tree(tl.load(a + row[:, None] * 64 + lane[None, :]), ROWS, 1)
    tl.store(out + row, tl.reshape(tree, [ROWS]))


def parts_kernel(a, out, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    columns = parts(tl.load(a + row[:, None] * WIDTH + column[None, :]), WIDTH, ROWS, WIDTH)
    for k in tl.static_range(WIDTH):
        tl.store(out + k * ROWS + row, columns[k])


apply_jit, widen_jit, narrow_jit = triton.jit(apply_kernel), triton.jit(widen_kernel), triton.jit(narrow_kernel)
tree_jit, parts_jit = triton.jit(tree_kernel), triton.jit(parts_kernel)


@pytest.fixture(scope="module")
def place(session: Session) -> str:
    """The device of Triton's tensors; skips where Triton cannot run, with the reason."""
    backend = session.probed["triton"]
    if not backend.available:
        pytest.skip(backend.reason)
    return backend.device


def applied(name: str, place: str, *arguments: Tensor) -> Tensor:
    """Run one function of numerics over fp32 arguments; missing ones repeat the last."""
    values = [argument.contiguous().to(place) for argument in arguments]
    out = torch.empty_like(values[0])
    padded = (*values, values[-1], values[-1])[:3]
    launch(apply_jit, (-(-out.numel() // BLOCK),), *padded, out, out.numel(), NAME=name, BLOCK=BLOCK)
    return out.cpu()


def moved(kernel: Any, place: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Run a kernel that reads `values` and writes as many of another dtype."""
    out = torch.empty(values.shape, dtype=dtype, device=place)
    launch(kernel, (-(-out.numel() // BLOCK),), values.to(place), out, out.numel(), BLOCK=BLOCK)
    return out.cpu()


def every_bf16() -> Tensor:
    """All 65,536 bf16 patterns."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def around_every_bf16() -> Tensor:
    """For every bf16 pattern the fp32 number itself, its neighbours, and those around the middle to the next."""
    top = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return exact.patterns((top + low).flatten().numpy())


def random_patterns(seed: int) -> Tensor:
    """fp32 numbers of any exponent, NaN, Inf and subnormals with them."""
    return exact.patterns(exact.generator(seed).integers(0, 1 << 32, COUNT))


def test_loads_keep_every_bf16_number(place: str) -> None:
    """Catches a load that misreads subnormals, as the interpreter's own does, or that drops NaN payloads' NaN."""
    assert exact.differing(moved(widen_jit, place, every_bf16(), torch.float32), arith.widen(every_bf16())) == 0


def test_stores_round_to_nearest_even(place: str) -> None:
    """Catches a truncating store, ties away from zero, flushed subnormals, and NaN that rounds to Inf or to -0.

    Every bf16 neighbour, tie and near-tie there is: truncation differs in half of them.
    """
    values = around_every_bf16()
    assert exact.differing(moved(narrow_jit, place, values, torch.bfloat16), arith.round_bf16(values)) == 0
    truncated = arith.from_bits((arith.bits(values) >> 16).to(torch.int16))
    assert exact.differing(truncated, arith.round_bf16(values)) > values.numel() // 3


def test_rounding_in_registers_is_a_store_and_a_load(place: str) -> None:
    """Catches a compiler, or a helper, that drops the rounding between two fused ops."""
    values = around_every_bf16()
    assert exact.differing(applied("round", place, values), arith.widen(arith.round_bf16(values))) == 0


@pytest.mark.parametrize("kind", test_fma.KINDS)
@pytest.mark.parametrize("name", ["fma", "fma_to_odd"])
def test_fma_rounds_once(place: str, name: str, kind: Callable[[np.random.Generator], test_fma.Triples]) -> None:
    """Catches product and sum rounded apart, and double rounding through fp64, on triples made for each.

    Both forms are judged: the one that this machine's kernels use and the one for interpreters without an exact fma.
    """
    if name == "fma_to_odd" and place == "cuda":
        pytest.skip("this form serves interpreters alone; compiled kernels use the hardware's fma")
    a, b, c = kind(exact.generator(7))
    assert exact.differing(applied(name, place, a, b, c), arith.fma(a, b, c)) == 0


def test_products_and_sums_stay_apart(place: str) -> None:
    """Catches a compiler that contracts a * b + c: on cancelling triples the fma gives another value nearly always."""
    a, b, c = test_fma.cancelling(exact.generator(7))
    assert exact.differing(applied("multiply and add", place, a, b, c), a * b + c) == 0
    assert exact.differing(arith.fma(a, b, c), a * b + c) > a.numel() // 2


def test_division_is_correctly_rounded(place: str) -> None:
    """Catches approximate division and a product with the rounded reciprocal; subnormal results and specials too."""
    a, b = random_patterns(1), random_patterns(2)
    wide = exact.fp32(exact.generator(3).normal(size=(2, COUNT)))
    for numerator, denominator in ((a, b), (wide[0], wide[1])):
        quotient = applied("div", place, numerator, denominator)
        assert exact.differing(quotient, numerator / denominator) == 0
    assert exact.differing(wide[0] * (1 / wide[1]), wide[0] / wide[1]) > COUNT // 10


def test_square_root_is_correctly_rounded(place: str) -> None:
    """Catches an approximate root and one taken as x * rsqrt(x)."""
    values = torch.cat([random_patterns(4), random_patterns(5).abs()])
    assert exact.differing(applied("sqrt", place, values), arith.sqrt(values)) == 0


def test_exp_follows_the_oracles_sequence(place: str) -> None:
    """Catches another polynomial, a missing range end, a lost subnormal result, and the machine's own exp.

    Values where exp is neither 0 nor Inf, the ends of that range closely, and any pattern at all.
    """
    random = exact.generator(6)
    inside = exact.fp32(random.uniform(-104.5, 89.5, COUNT))
    ends = torch.cat([exact.fp32(random.uniform(-104, -87, COUNT)), exact.fp32(random.uniform(88.7, 88.8, 1 << 12))])
    values = torch.cat([inside, ends, random_patterns(8)])
    assert exact.differing(applied("exp", place, values), arith.exp(values)) == 0
    assert exact.differing(inside.double().exp().float(), arith.exp(inside)) > COUNT // 100


def test_sigmoid_follows_the_oracles_sequence(place: str) -> None:
    """Catches a sigmoid by another formula: for large negative z it is 1 / (1 + exp(-z)), which overflows to 0."""
    values = torch.cat([exact.fp32(exact.generator(9).normal(size=COUNT, scale=20.0)), random_patterns(10)])
    assert exact.differing(applied("sigmoid", place, values), arith.sigmoid(values)) == 0


def test_exp_has_the_oracles_constants() -> None:
    """Catches a constant that was changed on one side only, where no sampled value shows it."""
    coefficients = [getattr(numerics, f"EXP_C{power}").value for power in range(6, 1, -1)]
    assert (*coefficients, 1.0, 1.0) == arith.EXP_POLYNOMIAL
    assert (numerics.MAGIC.value, numerics.MAGIC_BITS.value) == (arith.MAGIC, arith.MAGIC_BITS)
    assert numerics.LOG2_E.value == arith.LOG2_E
    assert (-numerics.MINUS_LN2_HIGH.value, -numerics.MINUS_LN2_LOW.value) == (arith.LN2_HIGH, arith.LN2_LOW)
    assert (numerics.EXP_LOWEST.value, numerics.EXP_HIGHEST.value) == (arith.EXP_LOWEST, arith.EXP_HIGHEST)


def test_lanes_are_added_by_the_adjacent_pair_tree(place: str) -> None:
    """Catches a serial sum and a distant-pair (shuffle) tree, on lanes whose exponents lie far apart."""
    random = exact.generator(11)
    lanes = exact.fp32(np.ldexp(random.normal(size=(256, 64)), random.integers(-20, 21, (256, 64))))
    out = torch.empty(256, device=place)
    launch(tree_jit, (1,), lanes.to(place), out, ROWS=256)
    assert exact.differing(out.cpu(), reduce.lane_tree(lanes)) == 0
    assert exact.differing(reduce.index_sum(lanes.unbind(1)), reduce.lane_tree(lanes)) > 100


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_parts_are_the_columns_in_order(place: str, width: int) -> None:
    """Catches columns that come out in another order (bit-reversed, as halving leaves them)."""
    tile = torch.arange(16.0 * width).reshape(16, width)
    out = torch.empty(width, 16, device=place)
    launch(parts_jit, (1,), tile.to(place), out, ROWS=16, WIDTH=width)
    assert torch.equal(out.cpu(), tile.T)
