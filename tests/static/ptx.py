"""Reads PTX, the last form in which the roundings of a kernel are written out: `fma.rn`, `mul.rn`, `div.approx`.

An assembler may contract a product and a sum that carry no rounding, and none that do. So PTX whose float arithmetic
all carries `.rn` leaves it nothing to decide.

What is allowed is listed, the rest is refused: whatever opcode next year's compiler has for fewer bits is not here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

OPCODE = re.compile(r"(?<![\w.%$])[a-z]\w*(?:(?:\.|::)\w+)+")
# Any of these among its parts makes an opcode one of floats: a format, a liberty taken with floats, a matrix product.
FLOATS = re.compile(r"b?f16(?:x2)?|tf32|f32(?:x2)?|f64|[a-z]+\d+m\d+(?:x\d)?|ftz|approx|mma|mma_async")
ATOMIC = re.compile(r"(?:atom|red|cp\.reduce)\.")
# A sum of integers, or the largest of them, is the same in whatever order threads come; the winner of a `cas` is not.
ORDERLESS = re.compile(r"(?:atom|red)\.[\w.:]*\b(?:add|inc|dec|and|or|xor|min|max)\.[bsu]\d+")
ALLOWED = (
    # One fp32 operation; an operand that is still bf16 ("fma.rn.f32.bf16") is widened, exactly, before it.
    r"(?:add|sub|mul|fma|div|rcp|sqrt)\.rn\.f32(?:x2|\.bf16)?",
    # bf16 to fp32 is exact, and a result is rounded to bf16 once, to nearest.
    r"cvt\.f32\.bf16",
    r"cvt\.rn\.bf16(?:x2)?\.f32",
    # The number of elements that a mean divides by is an integer argument.
    r"cvt\.rn\.f32\.[su](?:32|64)",
    # What moves a value, changes its sign, compares it or chooses rounds nothing.
    r"(?:mov|ld|st)\.(?:[\w:]+\.)*(?:bf16|f32)",
    r"(?:abs|neg|selp|(?:max|min)(?:\.NaN)?|setp\.\w+(?:\.(?:and|or|xor))?)\.f32",
)
EXACT = re.compile("|".join(ALLOWED))
FMA_CALL = re.compile(r"(?<!declare )(?:float|<(?P<lanes>\d+) x float>) @llvm\.fma\.(?:v\d+)?f32\(")


def arithmetic(ptx: str) -> Counter[str]:
    """How often each opcode of floats and each atomic one stands in the PTX, matrix instructions included."""
    found = (match.group() for match in OPCODE.finditer(ptx))
    return Counter(opcode for opcode in found if ATOMIC.match(opcode) or _of_floats(opcode))


def _of_floats(opcode: str) -> bool:
    return any(FLOATS.fullmatch(part) for part in re.split(r"\.|::", opcode))


def inexact(found: Mapping[str, int]) -> dict[str, int]:
    """The opcodes that are not allowed: approximate, flushing, free to be fused, in another format, truncating."""
    return {opcode: number for opcode, number in found.items() if not (EXACT.fullmatch(opcode) or ATOMIC.match(opcode))}


def unordered(found: Mapping[str, int]) -> dict[str, int]:
    """The atomic opcodes whose result depends on which thread comes first, as a sum of floats does."""
    return {
        opcode: number for opcode, number in found.items() if ATOMIC.match(opcode) and not ORDERLESS.fullmatch(opcode)
    }


def fused(found: Mapping[str, int]) -> int:
    """How many fma there are; a packed pair counts as two."""
    single = found.get("fma.rn.f32", 0) + found.get("fma.rn.f32.bf16", 0)
    return single + 2 * found.get("fma.rn.f32x2", 0)


def requested(llvm: str) -> int:
    """How many fma LLVM's code asks for, lane by lane, before code is generated from it."""
    return sum(int(call["lanes"] or 1) for call in FMA_CALL.finditer(llvm))
