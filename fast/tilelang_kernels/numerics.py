"""The contract's arithmetic for each of TileLang's two targets, and where the targets differ in launch and memory.

A kernel body is traced once per target with a `Numerics` at hand. What it computes is the same expression on both;
only the leaves differ: IEEE intrinsics on CUDA, inline C functions of the same meaning on the CPU ("c").
Plain operators on floats are never used: TileLang's simplifier rewrites them ((x + C) - C becomes x, 0 + x loses the
sign of zero), and it sees through none of these leaves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import tilelang.language as T

LANES = 64
SEGMENT = 512
BLOCKS = SEGMENT // LANES

F32 = T.float32

MAGIC = float.fromhex("0x1.8p23")
MAGIC_BITS = 0x4B400000
LOG2_E = float.fromhex("0x1.715476p0")
LN2_HIGH = float.fromhex("0x1.62e430p-1")
LN2_LOW = float.fromhex("-0x1.05c610p-29")
EXP_LOWEST, EXP_HIGHEST = -104.0, 89.0
EXP_POLYNOMIAL = tuple(
    map(
        float.fromhex,
        ("0x1.6c16c2p-10", "0x1.111112p-7", "0x1.555556p-5", "0x1.555556p-3", "0x1p-1", "0x1p0", "0x1p0"),
    )
)

# TileLang's C backend declares each extern function as `extern "C"` itself, so `static` would clash with it.
C_ARITHMETIC = """
extern "C" {
inline int32_t hc_bits(float a) { int32_t i; __builtin_memcpy(&i, &a, 4); return i; }
inline float hc_float(int32_t i) { float a; __builtin_memcpy(&a, &i, 4); return a; }
inline float hc_add(float a, float b) { return a + b; }
inline float hc_sub(float a, float b) { return a - b; }
inline float hc_mul(float a, float b) { return a * b; }
inline float hc_div(float a, float b) { return a / b; }
inline float hc_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float hc_sqrt(float a) { return __builtin_sqrtf(a); }
inline float hc_widen(uint16_t a) { return hc_float((int32_t)((uint32_t)a << 16)); }
inline uint16_t hc_round(float a) {
  uint32_t i = (uint32_t)hc_bits(a);
  if ((i & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (uint16_t)((i + 0x7fffu + ((i >> 16) & 1u)) >> 16);
}
}
"""


class Numerics:
    """Leaves and short sequences of contract arithmetic for one target; values are TileLang expressions.

    `cuda` picks the target. Every method is called while a kernel is traced.
    """

    def __init__(self, cuda: bool) -> None:
        """Take the leaves of CUDA, or those of the C target."""
        self.cuda = cuda
        self.bf16 = T.bfloat16 if cuda else T.uint16

    def kernel(self, *grid: Any, threads: int) -> Any:
        """Open a launch over `grid`; on the CPU its blocks, and the threads of each, run one after the other."""
        return T.Kernel(*grid, threads=threads) if self.cuda else T.Kernel(*grid, threads=threads, prelude=C_ARITHMETIC)

    def tensor(self, pointer: Any, dtype: Any, shape: Sequence[Any], strides: Sequence[Any], vector: int = 1) -> Any:
        """Return the tensor at a kernel's pointer argument; with `vector`, outer strides are counted in vectors.

        The C target's wrapper cannot take a size that is both a number and an extent, so extents there are not
        the bare number; nothing reads them, since every access goes by the strides.
        """
        extents = [size if self.cuda or isinstance(size, int) else size + 1 for size in shape]
        steps = [stride * vector for stride in strides[:-1]] + [1 if vector > 1 else strides[-1]]
        return T.make_tensor(pointer, extents, dtype, strides=steps)

    def shared(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a block's shared memory: dynamic on CUDA, where it may pass 48 KB, a plain array in C."""
        return T.alloc_shared(shape, dtype, scope="shared.dyn" if self.cuda else "shared")

    def vector(self, count: int) -> Any:
        """Return the loop that moves `count` neighbours at a time; C has no vectors."""
        return T.vectorized(count) if self.cuda else T.serial(count)

    def row(self, buffer: Any, count: int, *after: Any) -> list[Any]:
        """Return buffer[0, *after] to buffer[count - 1, *after], for use in one expression."""
        return [buffer[(i, *after)] for i in range(count)]

    def widened(self, buffer: Any, count: int, *after: Any) -> list[Any]:
        """Return the same of a bf16 buffer, as fp32."""
        return [self.widen(value) for value in self.row(buffer, count, *after)]

    def add(self, a: Any, b: Any) -> Any:
        """Return a + b, rounded."""
        return T.ieee_add(a, b) if self.cuda else T.call_extern(F32, "hc_add", a, b)

    def sub(self, a: Any, b: Any) -> Any:
        """Return a - b, rounded."""
        return T.ieee_sub(a, b) if self.cuda else T.call_extern(F32, "hc_sub", a, b)

    def mul(self, a: Any, b: Any) -> Any:
        """Return a * b, rounded."""
        return T.ieee_mul(a, b) if self.cuda else T.call_extern(F32, "hc_mul", a, b)

    def div(self, a: Any, b: Any) -> Any:
        """Return a / b, correctly rounded."""
        return T.ieee_fdiv(a, b) if self.cuda else T.call_extern(F32, "hc_div", a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c with one rounding."""
        return T.ieee_fmaf(a, b, c) if self.cuda else T.call_extern(F32, "hc_fma", a, b, c)

    def sqrt(self, a: Any) -> Any:
        """Return the correctly rounded square root."""
        return T.ieee_fsqrt(a) if self.cuda else T.call_extern(F32, "hc_sqrt", a)

    def bits(self, a: Any) -> Any:
        """Return the pattern of an fp32 value as int32."""
        return T.reinterpret(a, "int32") if self.cuda else T.call_extern("int32", "hc_bits", a)

    def from_bits(self, i: Any) -> Any:
        """Return the fp32 value of an int32 pattern."""
        return T.reinterpret(i, "float32") if self.cuda else T.call_extern(F32, "hc_float", i)

    def widen(self, a: Any) -> Any:
        """Return a bf16 value as fp32, exactly."""
        return T.cast(a, F32) if self.cuda else T.call_extern(F32, "hc_widen", a)

    def round(self, a: Any) -> Any:
        """Return an fp32 value rounded once to bf16, to nearest even."""
        return T.cast(a, T.bfloat16) if self.cuda else T.call_extern("uint16", "hc_round", a)

    def constant(self, value: float) -> Any:
        """Return `value`, which must be an fp32 number; by pattern in C, where literals are printed to 7 digits."""
        pattern = struct.unpack("<i", struct.pack("<f", value))[0]
        return T.float32(value) if self.cuda else T.call_extern(F32, "hc_float", T.int32(pattern))

    def select(self, condition: Any, a: Any, b: Any) -> Any:
        """Return a where `condition` holds, else b."""
        return T.if_then_else(condition, a, b)

    def total(self, values: Iterable[Any]) -> Any:
        """Return the sum of `values` in the order given, from +0."""
        result = self.constant(0.0)
        for value in values:
            result = self.add(result, value)
        return result

    def weighted(self, weights: Sequence[Any], values: Sequence[Any]) -> Any:
        """Return the sum of weight * value in the order given, from +0; products and sums are rounded apart."""
        return self.total(self.mul(w, v) for w, v in zip(weights, values, strict=True))

    def mean(self, values: Sequence[Any]) -> Any:
        """Return the sum of `values` in the order given, from +0, divided once by how many they are.

        Dividing by a power of two and multiplying by its reciprocal round alike; the latter is one instruction.
        """
        count, total = len(values), self.total(values)
        if count & (count - 1) == 0:
            return self.mul(total, self.constant(1.0 / count))
        return self.div(total, self.constant(float(count)))

    def posted(self, gate: Any, x: Any, weights: Sequence[Any], values: Sequence[Any]) -> Any:
        """Return gate * x with each weight * value added in the order given, each step rounded."""
        result = self.mul(gate, x)
        for weight, value in zip(weights, values, strict=True):
            result = self.add(result, self.mul(weight, value))
        return result
