"""The contract's arithmetic for each of TileLang's two targets, and where the targets differ in launch and memory.

A kernel body is traced once for a target, with a `Numerics` at hand. What it computes is the same expression on both;
only the leaves differ: IEEE intrinsics on CUDA, inline C functions of the same meaning on the CPU ("c").
Plain operators on floats are never used: TileLang's simplifier rewrites them ((x + C) - C becomes x, 0 + x loses the
sign of zero), and it sees through none of these leaves.

On CUDA the numbers of streams and columns are fixed when a kernel is traced; in C they stay numbers, so that one
compilation serves every shape. `Numerics` hides that too: loops over streams are unrolled where their length is fixed.

Inside a kernel or macro stands no comprehension over a range and no loop over a Python sequence: TileLang before
0.1.15 takes every loop there for one of the kernel's. Methods of `Numerics` are plain Python and have both.

A number that a kernel is called with must reach a macro under its own name, or inside an object: TileLang renames the
kernel's parameter to that of the macro, and two parameters of one name do not compile.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import tilelang.language as T

from fast.tilelang_kernels import MAX_STREAMS

LANES = 64
SEGMENT = 512
BLOCKS = SEGMENT // LANES
PAIRS = LANES // 2

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
        ("0x1.6a23d0p-10", "0x1.123a20p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2", "0x1p0", "0x1p0"),
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
        return T.Kernel(*grid, threads=threads, prelude=None if self.cuda else C_ARITHMETIC)

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

    def threads(self, count: int) -> Any:
        """Return the loop over a block's threads; in C a plain one, over which TileLang spends no thought."""
        return T.Parallel(count) if self.cuda else T.serial(count)

    def vector(self, count: int) -> Any:
        """Return the loop that moves `count` neighbours at a time; C has no vectors."""
        return T.vectorized(count) if self.cuda else T.serial(count)

    def choice(self, fixed: int | None, number: Any) -> Any:
        """Return what a kernel was compiled for, if it was, else the number that it is called with."""
        return number if fixed is None else fixed

    def loop(self, count: Any) -> Any:
        """Return the loop over streams: unrolled where their number is fixed."""
        return T.unroll(count) if isinstance(count, int) else T.serial(count)

    def most(self, n: Any) -> int:
        """Return how many streams there can be."""
        return n if isinstance(n, int) else MAX_STREAMS

    def pick(self, condition: Any, a: Any, b: Any) -> Any:
        """Return a where `condition`, known now or not, holds, else b."""
        if isinstance(condition, bool):
            return a if condition else b
        return T.if_then_else(condition, a, b)

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

    def power_of_two(self, exponent: Any) -> Any:
        """Return 2^exponent for an int32 exponent in -126..127."""
        return self.from_bits((exponent + 127) << 23)

    def share(self, total: Any, count: Any) -> Any:
        """Return total / count, rounded.

        Dividing by a power of two and multiplying by its reciprocal round alike; the latter is one instruction.
        """
        if isinstance(count, int) and count & (count - 1) == 0:
            return self.mul(total, self.constant(1.0 / count))
        return self.div(total, T.cast(count, F32))

    def tree(self, values: Sequence[Any]) -> Any:
        """Return the sum of adjacent pairs, of their adjacent pairs, and so on; a power of two of values."""
        if len(values) == 1:
            return values[0]
        middle = len(values) // 2
        return self.add(self.tree(values[:middle]), self.tree(values[middle:]))

    def tree_along(self, values: Any, count: int, *place: Any) -> Any:
        """Return the sum by the tree of values[place, 0] to values[place, count - 1]."""
        return self.tree([values[(*place, i)] for i in range(count)])

    def reciprocal_rms(self, squares: Any, count: Any, eps: Any) -> Any:
        """Return 1 / sqrt(squares / count + eps), each step rounded."""
        return self.div(self.constant(1.0), self.sqrt(self.add(self.div(squares, count), eps)))

    def logit(self, mix: Any, scale: Any, base: Any) -> Any:
        """Return mix * scale + base, rounded twice."""
        return self.add(self.mul(mix, scale), base)


@T.macro
def exp(o, value):
    """Return the contract's exponential; the steps are the oracle's, and a test compares their bits.

    Every step is stored: TileLang puts the text of a name that is merely bound wherever the name stands, which
    multiplies the work.
    """
    highest = o.constant(EXP_HIGHEST)
    lowest = o.constant(EXP_LOWEST)
    x = T.alloc_var(F32)
    m = T.alloc_var(F32)
    p = T.alloc_var(F32)
    k = T.alloc_var(T.int32)
    x = value
    x = T.if_then_else(x > highest, highest, x)
    x = T.if_then_else(x < lowest, lowest, x)
    m = o.fma(x, o.constant(LOG2_E), o.constant(MAGIC))
    k = o.bits(m) - MAGIC_BITS
    m = o.sub(m, o.constant(MAGIC))
    x = o.fma(m, o.constant(-LN2_HIGH), x)
    x = o.fma(m, o.constant(-LN2_LOW), x)
    p = o.constant(EXP_POLYNOMIAL[0])
    p = o.fma(p, x, o.constant(EXP_POLYNOMIAL[1]))
    p = o.fma(p, x, o.constant(EXP_POLYNOMIAL[2]))
    p = o.fma(p, x, o.constant(EXP_POLYNOMIAL[3]))
    p = o.fma(p, x, o.constant(EXP_POLYNOMIAL[4]))
    p = o.fma(p, x, o.constant(EXP_POLYNOMIAL[5]))
    p = o.fma(p, x, o.constant(EXP_POLYNOMIAL[6]))
    p = o.mul(p, o.power_of_two(k >> 1))
    return o.mul(p, o.power_of_two(k - (k >> 1)))


@T.macro
def sigmoid(o, value):
    """Return 1 / (1 + exp(-value)), each step rounded."""
    one = o.constant(1.0)
    return o.div(one, o.add(one, exp(o, o.mul(o.constant(-1.0), value))))


@T.macro
def move(o, count, source, here, target, there):
    """Copy `count` neighbours along the last dimension, from source[here] on to target[there] on."""
    for e in o.vector(count):
        target[(*there[:-1], there[-1] + e)] = source[(*here[:-1], here[-1] + e)]


@T.macro
def round_to(o, count, source, target):
    """Round `count` fp32 values to bf16; in a loop of its own, so that they are converted two at a time."""
    for e in o.vector(count):
        target[e] = o.round(source[e])


@T.macro
def clear(o, count, target):
    """Set `count` sums to +0."""
    for e in T.unroll(count):
        target[e] = o.constant(0.0)


@T.macro
def add_weighted(o, count, weight, source, sums):
    """Add weight * value to each of `count` sums, for values in bf16; product and sum are rounded apart."""
    for e in T.unroll(count):
        sums[e] = o.add(sums[e], o.mul(weight, o.widen(source[e])))


@T.macro
def each(o, threads, count, body, *given):
    """Call body(*given, item) for item 0 to count - 1, neighbouring threads taking neighbouring items.

    Left to itself TileLang may hand a thread several neighbours, which spoils the order of its memory accesses.
    """
    if o.cuda:
        for turn in T.serial(T.ceildiv(count, threads)):
            for thread in T.Parallel(threads):
                item = turn * threads + thread
                if item < count:
                    body(*given, item)
    else:
        for item in T.serial(count):
            body(*given, item)
