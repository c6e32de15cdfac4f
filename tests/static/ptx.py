"""Reads PTX, the last form in which the roundings of a kernel are written out: `fma.rn`, `mul.rn`, `div.approx`.

An assembler may contract a product and a sum that carry no rounding, and none that do. So PTX whose float arithmetic
all carries `.rn` leaves it nothing to decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

ARITHMETIC = (
    "add sub mul fma mad div rcp sqrt rsqrt ex2 lg2 sin cos tanh mma wmma wgmma tcgen05 dp2a dp4a".split()  # noqa: SIM905
)
FLOAT = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "tf32")
OPCODE = re.compile(rf"(?<![\w.%$])(?:{'|'.join(ARITHMETIC)})(?:\.\w+)+")
# An operand that is still bf16 ("fma.rn.f32.bf16") is widened, exactly, before the one fp32 operation.
EXACT = re.compile(r"(?:add|sub|mul|fma|div|rcp|sqrt)\.rn\.f32(?:x2|\.bf16)?")
FMA_CALL = re.compile(r"(?<!declare )(?:float|<(?P<lanes>\d+) x float>) @llvm\.fma\.(?:v\d+)?f32\(")


def arithmetic(ptx: str) -> Counter[str]:
    """How often each float arithmetic opcode stands in the PTX, matrix instructions included."""
    found = (match.group() for match in OPCODE.finditer(ptx))
    return Counter(opcode for opcode in found if set(opcode.split(".")) & {*FLOAT, "mma_async", "mma"})


def inexact(found: Mapping[str, int]) -> dict[str, int]:
    """The opcodes that are not one fp32 operation rounded to nearest: approximate, flushing, narrower, or fusable."""
    return {opcode: number for opcode, number in found.items() if not EXACT.fullmatch(opcode)}


def fused(found: Mapping[str, int]) -> int:
    """How many fma there are; a packed pair counts as two."""
    single = found.get("fma.rn.f32", 0) + found.get("fma.rn.f32.bf16", 0)
    return single + 2 * found.get("fma.rn.f32x2", 0)


def requested(llvm: str) -> int:
    """How many fma LLVM's code asks for, lane by lane, before code is generated from it."""
    return sum(int(call["lanes"] or 1) for call in FMA_CALL.finditer(llvm))
