"""Reads machine code as `nvdisasm -c` prints it: opcodes, and what becomes of each approximate seed.

NVIDIA's float units know no division and no root. A correctly rounded one starts from an approximate reciprocal
(`MUFU.RCP`, `MUFU.RSQ`) and refines it; an approximate one multiplies by the seed and is done. Which of the two a seed
belongs to shows in the first instruction that reads it:

- IEEE division and reciprocal: `FFMA e, seed, -d, 1`, the seed's error (or `FFMA e, seed, d, -1`);
- IEEE square root: `FMUL.FTZ`, twice, whose products go on to the refinement; ordinary code holds no `.FTZ` here;
- the slow path of a division makes its NaN by `MUFU.RSQ r, -QNAN`: no seed at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);")
REGISTER = re.compile(r"(?<![\w.])R(\d+)(?![\w])")
SEEDS = ("MUFU.RCP", "MUFU.RSQ")
MOVES = ("MOV", "IMAD.MOV")
ONE = re.compile(r"[-+]?1(?:\.0*)?")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode with modifiers, and its operands as they are printed."""

    opcode: str
    operands: tuple[str, ...]

    @property
    def target(self) -> str:
        """The register that it writes, "" where it writes none."""
        found = REGISTER.fullmatch(self.operands[0]) if self.operands else None
        return found.group() if found else ""

    @property
    def sources(self) -> frozenset[str]:
        """The registers that it reads, as far as its text tells."""
        read = self.operands[1:] if self.target else self.operands
        return frozenset(found.group() for operand in read for found in REGISTER.finditer(operand))


def instructions(disassembly: str) -> list[Instruction]:
    """Every instruction of a disassembly, in the order of its addresses."""
    return [
        Instruction(found["opcode"], tuple(part.strip() for part in found["operands"].split(",") if part.strip()))
        for found in LINE.finditer(disassembly)
    ]


def opcodes(code: Sequence[Instruction]) -> Counter[str]:
    """How often each opcode stands in the code, modifiers included."""
    return Counter(instruction.opcode for instruction in code)


def arithmetic(code: Sequence[Instruction]) -> Counter[str]:
    """How often each fp32 operation that can be fused, or is the fusion of two, stands in the code."""
    stems = ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2")
    return Counter(one.opcode for one in code if one.opcode.partition(".")[0] in stems)


def unrefined(code: Sequence[Instruction]) -> list[str]:
    """For each approximate seed that no IEEE division or root refines: which it is, and what reads it first."""
    found = []
    for index, instruction in enumerate(code):
        if instruction.opcode.startswith(SEEDS) and "QNAN" not in "".join(instruction.operands):
            reader = _first_reader(code[index + 1 :], instruction.target)
            if reader is None or not _refines(instruction, reader):
                found.append(f"{instruction.opcode} first read by {reader.opcode if reader else 'nothing'}")
    return found


def _first_reader(rest: Sequence[Instruction], register: str) -> Instruction | None:
    """The first instruction that computes with a register's value, through plain moves; None if it is overwritten."""
    holders = {register}
    for instruction in rest:
        if instruction.sources & holders:
            if not instruction.opcode.startswith(MOVES):
                return instruction
            holders.add(instruction.target)
        elif instruction.target in holders:
            holders.discard(instruction.target)
            if not holders:
                return None
    return None


def _refines(seed: Instruction, reader: Instruction) -> bool:
    if seed.opcode.startswith("MUFU.RCP"):
        return reader.opcode.startswith("FFMA") and ONE.fullmatch(reader.operands[-1]) is not None
    return reader.opcode.startswith("FMUL.FTZ")


def count(found: Mapping[str, int], *stems: str) -> int:
    """How many instructions have one of these opcodes, whatever their modifiers; a packed pair counts as two."""
    total = 0
    for opcode, number in found.items():
        stem = opcode.partition(".")[0]
        if stem in stems:
            total += number
        elif stem.endswith("2") and stem[:-1] in stems:
            total += 2 * number
    return total


def wide_loads(found: Mapping[str, int]) -> int:
    """How many global loads move 16 bytes or more."""
    loads = [opcode for opcode in found if opcode.split(".")[0] in ("LDG", "LDGSTS")]
    return sum(found[opcode] for opcode in loads if {"128", "256"} & set(opcode.split(".")))
