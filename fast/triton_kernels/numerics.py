"""The arithmetic of every Triton kernel: the one file that hides what the interpreter gets wrong.

Triton's interpreter truncates fp32 to bf16, misreads bf16 subnormals and, before 3.9, rounds `tl.fma` twice. So
interpreted code moves bf16 as 16-bit patterns and rounds by integers; compiled code uses the native conversions.
Products and sums are written with plain operators: every launch goes through `launch`, which forbids fusion, and
the PTX then holds `mul.rn.f32` and `add.rn.f32`, which no assembler contracts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def _interpreter_fma_is_exact() -> bool:
    from triton._C import libtriton

    return hasattr(getattr(libtriton, "interpreter", None), "fma_fp32")


EXACT_FMA = tl.constexpr(not INTERPRETED.value or _interpreter_fma_is_exact())

# The constants of the suite's exp; every one is an fp32 number. The sequence is that of contract 1.
MAGIC = tl.constexpr(float.fromhex("0x1.8p23"))
MAGIC_BITS = tl.constexpr(0x4B400000)
LOG2_E = tl.constexpr(float.fromhex("0x1.715476p0"))
MINUS_LN2_HIGH = tl.constexpr(-float.fromhex("0x1.62e430p-1"))
MINUS_LN2_LOW = tl.constexpr(float.fromhex("0x1.05c610p-29"))
EXP_LOWEST = tl.constexpr(-104.0)
EXP_HIGHEST = tl.constexpr(89.0)
EXP_C6 = tl.constexpr(float.fromhex("0x1.6a23d0p-10"))
EXP_C5 = tl.constexpr(float.fromhex("0x1.123a20p-7"))
EXP_C4 = tl.constexpr(float.fromhex("0x1.5558f2p-5"))
EXP_C3 = tl.constexpr(float.fromhex("0x1.555492p-3"))
EXP_C2 = tl.constexpr(float.fromhex("0x1.fffffcp-2"))


def device(function: Callable[..., Any]) -> Any:
    """Make `function` callable from kernels: jitted when compiling, the plain function when interpreting.

    A jitted helper costs the interpreter 0.4 ms a call, because it patches the language again each time; a plain
    one runs under the patches of its kernel. It must take and return tensors, tuples and constants only.
    """
    return function if INTERPRETED.value else triton.jit(function)


@device
def wide(value):
    """A stride or index as int64, so that no offset wraps (and so that the interpreter skips its overflow checks)."""
    return tl.cast(value, tl.int64)


@device
def block(axis: tl.constexpr, size: tl.constexpr):
    """The int64 indices of this program's block of `size` along a grid axis."""
    return wide(tl.program_id(axis)) * size + tl.arange(0, size)


@device
def append(items, item):
    """The tuple `items` with `item` at its end; tuples of tiles are how kernels hold one tile for each stream."""
    return items + (item,)  # noqa: RUF005 - the kernel language has no unpacking in a tuple


@device
def load_bf16(pointer, mask):
    """The bf16 numbers at `pointer` as fp32, exactly; +0 where masked off."""
    if INTERPRETED:
        pattern = tl.load(_pattern_pointer(pointer), mask=mask, other=0)
        return (pattern.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@device
def store_bf16(pointer, value, mask):
    """Round fp32 once to bf16, to nearest even with NaN kept, and store it."""
    if INTERPRETED:
        tl.store(_pattern_pointer(pointer), _bf16_pattern(value).to(tl.uint16), mask=mask)
    else:
        tl.store(pointer, value.to(tl.bfloat16), mask=mask)


@device
def round_bf16(value):
    """fp32 rounded once to bf16, as fp32: what a store and a load would give."""
    if INTERPRETED:
        return (_bf16_pattern(value) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.bfloat16).to(tl.float32)


@device
def _pattern_pointer(pointer):
    return pointer.to(tl.pointer_type(tl.uint16), bitcast=True)


@device
def _bf16_pattern(value):
    bits = value.to(tl.uint32, bitcast=True)
    half = tl.add((bits >> 16) & 1, 0x7FFF, sanitize_overflow=False)
    rounded = tl.add(bits, half, sanitize_overflow=False) >> 16
    return tl.where(value == value, rounded, 0x7FC0)


@device
def fma(a, b, c):
    """a * b + c with a single fp32 rounding."""
    if EXACT_FMA:
        return tl.fma(a, b, c)
    return fma_to_odd(a, b, c)


@device
def fma_to_odd(a, b, c):
    """The product is exact in fp64 and the sum is rounded to odd there, so that the last rounding is the only one."""
    product = _double(a) * _double(b)
    addend = _double(c)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.to(tl.int64, bitcast=True)
    step = tl.where((error > 0) == (total > 0), 1, -1)
    inexact_and_even = (error != 0) & (error == error) & ((bits & 1) == 0)
    odd = tl.where(inexact_and_even, bits + step, bits)
    return odd.to(tl.float64, bitcast=True).to(tl.float32)


@device
def _double(value):
    return tl.cast(value, tl.float64)


@device
def div(a, b):
    """a / b, correctly rounded."""
    return tl.div_rn(a, b)


@device
def sqrt(value):
    """The square root, correctly rounded."""
    return tl.sqrt_rn(value)


@device
def exp(value):
    """The suite's own exponential: contract 1's sequence of fma, multiply, subtract and bit operations."""
    x = tl.where(value > EXP_HIGHEST, EXP_HIGHEST, value)
    x = tl.where(x < EXP_LOWEST, EXP_LOWEST, x)
    shifted = fma(x, LOG2_E, MAGIC)
    k = tl.sub(shifted.to(tl.int32, bitcast=True), MAGIC_BITS, sanitize_overflow=False)
    m = shifted - MAGIC
    r = fma(m, MINUS_LN2_HIGH, x)
    r = fma(m, MINUS_LN2_LOW, r)
    p = fma(r, EXP_C6, EXP_C5)
    p = fma(p, r, EXP_C4)
    p = fma(p, r, EXP_C3)
    p = fma(p, r, EXP_C2)
    p = fma(p, r, 1.0)
    p = fma(p, r, 1.0)
    half = k >> 1
    rest = tl.sub(k, half, sanitize_overflow=False)
    return p * _power_of_two(half) * _power_of_two(rest)


@device
def _power_of_two(exponent):
    return (tl.add(exponent, 127, sanitize_overflow=False) << 23).to(tl.float32, bitcast=True)


@device
def sigmoid(value):
    """1 / (1 + exp(-value)), each step rounded."""
    return tl.div_rn(1.0, exp(-value) + 1.0)
