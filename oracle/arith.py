"""IEEE fp32 arithmetic whose every rounding is known: bit views, bf16 rounding, exact fma, sqrt, exp,
sigmoid.

Only what PyTorch rounds correctly is taken from PyTorch: + - * / on fp32, and everything on fp64 whose
error is repaired or proven harmless here. Its fp32 sqrt on the CPU is not correctly rounded, and it has no
fma and no exp whose bits are the same on two machines.
"""

from __future__ import annotations

import torch
from torch import Tensor

BF16_NAN = 0x7FC0
_INT_OF = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}
_FLOAT_OF = {torch.int32: torch.float32, torch.int16: torch.bfloat16, torch.int64: torch.float64}
NAN_DISTANCE = 1 << 33

# A float64 whose low 29 bits are exactly this lies halfway between two fp32 neighbours.
_LOW_BITS, _HALFWAY = 0x1FFFFFFF, 0x10000000
_SMALLEST_NORMAL = 2.0**-126

MAGIC = float.fromhex("0x1.8p23")
MAGIC_BITS = 0x4B400000
LOG2_E = float.fromhex("0x1.715476p0")
LN2_HIGH = float.fromhex("0x1.62e430p-1")
LN2_LOW = float.fromhex("-0x1.05c610p-29")
EXP_LOWEST, EXP_HIGHEST = -104.0, 89.0
# exp(r) on |r| <= ln2/2, highest power first; the last two are exactly 1.
EXP_POLYNOMIAL = tuple(
    float.fromhex(text)
    for text in (
        "0x1.6a23d0p-10",
        "0x1.123a20p-7",
        "0x1.5558f2p-5",
        "0x1.555492p-3",
        "0x1.fffffcp-2",
        "0x1p0",
        "0x1p0",
    )
)


def bits(values: Tensor) -> Tensor:
    """Return the bit pattern of a float tensor as a signed integer view of the same width and shape."""
    if values.dtype not in _INT_OF:
        raise TypeError(f"bits: values must be a floating tensor of 16, 32 or 64 bits, got {values.dtype}")
    return values.view(_INT_OF[values.dtype])


def from_bits(patterns: Tensor) -> Tensor:
    """Return a view of the patterns as floats: int16 makes bf16, int32 fp32, int64 fp64."""
    if patterns.dtype not in _FLOAT_OF:
        raise TypeError(f"from_bits: patterns must be int16, int32 or int64, got {patterns.dtype}")
    return patterns.view(_FLOAT_OF[patterns.dtype])


def constant(value: float, like: Tensor) -> Tensor:
    """Return `value`, rounded once to fp32, as a zero-dimensional tensor on the device of `like`.

    Dividing a CUDA tensor by a Python number multiplies by a rounded reciprocal; dividing by this does not.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


def packed(values: Tensor) -> Tensor:
    """Return a copy with the strides of a fresh contiguous tensor, also where a dimension is 0 or 1."""
    return values.clone(memory_format=torch.contiguous_format)


def widen(values: Tensor) -> Tensor:
    """Return bf16 `values` as fp32, exactly (the pattern moves up 16 bits, so NaN payloads survive)."""
    if values.dtype != torch.bfloat16:
        raise TypeError(f"widen: values must be bfloat16, got {values.dtype}")
    return from_bits(bits(values).to(torch.int32) << 16)


def round_bf16(values: Tensor) -> Tensor:
    """Return fp32 `values` rounded once to bf16, to nearest even; every NaN becomes 0x7FC0.

    Done on the pattern: half an ulp less one is added, plus the bit that becomes the last, and 16 bits are
    dropped. Overflow carries into the exponent and gives Inf by itself.
    """
    if values.dtype != torch.float32:
        raise TypeError(f"round_bf16: values must be float32, got {values.dtype}")
    pattern = bits(values)
    rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    return from_bits(rounded.to(torch.int16).masked_fill(values.isnan(), BF16_NAN))


def ordered(values: Tensor) -> Tensor:
    """Return int64 keys that rise with the value: neighbours differ by one, -0 (key -1) lies just below +0
    (key 0).

    NaN patterns lie outside the infinities, on the side of their sign bit.
    """
    pattern = bits(values)
    lowest = torch.iinfo(pattern.dtype).min
    wide = pattern.to(torch.int64)
    return torch.where(wide >= 0, wide, lowest - wide - 1)


def ulp_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return how many representable steps lie between two fp32 or two bf16 tensors, as int64.

    +0 and -0 are one step apart. Two NaNs are 0 apart, a NaN and a number `NAN_DISTANCE`, which no numbers
    reach.
    """
    if first.dtype != second.dtype:
        raise TypeError(f"ulp_distance: dtypes must be equal, got {first.dtype} and {second.dtype}")
    distance = (ordered(first) - ordered(second)).abs()
    one_nan = first.isnan() ^ second.isnan()
    both_nan = first.isnan() & second.isnan()
    return distance.masked_fill(one_nan, NAN_DISTANCE).masked_fill(both_nan, 0)


def sqrt(values: Tensor) -> Tensor:
    """Return the correctly rounded fp32 square root: -0 gives -0, negatives and NaN give NaN.

    A square root of a 24-bit number is never nearer than 2^-50 (relative) to the middle of two 24-bit
    numbers, so rounding the fp64 root a second time is harmless.
    """
    return values.double().sqrt().float()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c with a single fp32 rounding; arguments are fp32 and broadcast.

    The product of two fp32 numbers is exact in fp64, so only the sum rounds there. Rounding that sum again
    to fp32 is wrong in two places alone: halfway between two fp32 numbers, and below the normal range,
    where the halves lie at other bits. Those elements are done again with the fp64 sum rounded to odd,
    which never double-rounds.
    """
    wide = torch.addcmul(c.double(), a.double(), b.double())
    result = wide.float()
    halfway = (bits(wide) & _LOW_BITS) == _HALFWAY
    tiny = result.abs() <= _SMALLEST_NORMAL
    if bool(halfway.any()) or bool(tiny.any()):
        doubtful = ((halfway | tiny) & (wide != 0)).nonzero(as_tuple=True)
        chosen = [operand.expand(wide.shape)[doubtful].double() for operand in (a, b, c)]
        result[doubtful] = _sum_to_odd(chosen[0] * chosen[1], chosen[2]).float()
    return result


def _sum_to_odd(p: Tensor, c: Tensor) -> Tensor:
    """Return p + c in fp64; an inexact sum takes whichever neighbour of the true value has an odd pattern."""
    total = p + c
    back = total - p
    error = (p - (total - back)) + (c - back)
    even_and_inexact = (error != 0) & ((bits(total) & 1) == 0) & total.isfinite()
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return from_bits(bits(total) + torch.where(even_and_inexact, step, 0))


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as fp32 for int32 exponents in -126..127."""
    return from_bits((exponent + 127) << 23)


def exp(values: Tensor) -> Tensor:
    """Return the suite's own fp32 exponential, within 1 ULP of the correctly rounded one on every float.

    The sequence, which each kernel language repeats (constants are this module's, all exact fp32 numbers):

    1.  x = EXP_HIGHEST if x > EXP_HIGHEST; x = EXP_LOWEST if x < EXP_LOWEST     (compare and select; NaN
    stays)
    2.  t = fma(x, LOG2_E, MAGIC)               the low bits of t now hold rint(x / ln 2)
    3.  k = int bits of t - MAGIC_BITS          an int32, in -150..128
    4.  m = t - MAGIC                           the same integer as fp32
    5.  r = fma(m, -LN2_HIGH, x)                exact
    6.  r = fma(m, -LN2_LOW, r)                 |r| <= ln 2 / 2, a little more at most
    7.  p = EXP_POLYNOMIAL[0]; then for each further coefficient c: p = fma(p, r, c)     six fma
    8.  k1 = k >> 1 (arithmetic); k2 = k - k1
    9.  p = p * 2^k1, exact; p = p * 2^k2, the one rounding of a subnormal result
        where 2^j is the float with the pattern (j + 127) << 23

    Results leave the normal range gradually: subnormals are right, below -103.97 comes +0, above 88.72284
    +Inf. exp(-Inf) = +0, exp(+Inf) = +Inf, exp(+-0) = 1, exp(NaN) = NaN (step 3 is then meaningless and
    harmless: a NaN times anything is NaN).
    """
    one = constant(1.0, values)
    x = torch.where(values > EXP_HIGHEST, one * EXP_HIGHEST, values)
    x = torch.where(x < EXP_LOWEST, one * EXP_LOWEST, x)
    shifted = fma(x, one * LOG2_E, one * MAGIC)
    k = bits(shifted) - MAGIC_BITS
    m = shifted - MAGIC
    r = fma(m, one * -LN2_HIGH, x)
    r = fma(m, one * -LN2_LOW, r)
    p = one * EXP_POLYNOMIAL[0]
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = fma(p, r, one * coefficient)
    half = k >> 1
    return p * power_of_two(half) * power_of_two(k - half)


def sigmoid(values: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-z)) for fp32 z, each of the three steps rounded; -Inf gives 0, NaN gives NaN."""
    one = constant(1.0, values)
    return one / (one + exp(-values))
