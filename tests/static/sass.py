"""Reads machine code as `nvdisasm -c` prints it: opcodes, and what becomes of each approximate seed.

NVIDIA's float units know no division and no root. A correctly rounded one starts from an approximate reciprocal
(`MUFU.RCP`, `MUFU.RSQ`) and refines it; an approximate one multiplies by the seed and is done. Which of the two a seed
belongs to shows in the first instruction that reads it, on every path:

- IEEE division and reciprocal: `FFMA e, seed, -d, 1`, the seed's error (or `FFMA e, seed, d, -1`), where d or the 1
  may stand in another register;
- IEEE square root: `FMUL.FTZ`, twice, whose products go on to the refinement; ordinary code holds no `.FTZ` here;
- the slow path of a division makes its NaN by `MUFU.RSQ r, -QNAN`: no seed at all;
- a division of integers takes the reciprocal of a divisor that it converted, rounded up (`I2F.U32.RP`), and adds to the
  reciprocal's bits as to an integer: its quotient is corrected later, and no float comes of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);")
LABEL = re.compile(r"^\s*(?P<label>[.$\w]+):\s*$")
TARGET = re.compile(r"`\((?P<label>[.$\w]+)\)")
REGISTER = re.compile(r"(?<![\w.])R(\d+)(?![\w])")
SEEDS = ("MUFU.RCP", "MUFU.RSQ")
MOVES = ("MOV", "IMAD.MOV")
# Where a path ends; a slow path that is called computes its result anew, in the register of the seed.
ENDS = ("EXIT", "RET", "CALL")
ONE = re.compile(r"[-+]?1(?:\.0*)?")
CONVERTED = re.compile(r"U?I2F\.(?:\w+\.)*RP")
INTEGER_SUMS = ("IADD", "IADD3", "VIADD")

TO_BF16 = ("F2F.BF16.F32", "F2FP.BF16.F32.PACK_AB", "F2FP.BF16.PACK_AB")
FOREIGN = re.compile(r"D(?:ADD|MUL|FMA|MNMX|SETP)\b|H(?:ADD|MUL|FMA)2|F2FP?\b")
FLOAT_ATOMIC = re.compile(r"(?:ATOM|RED)[A-Z]*\.(?:\w+\.)*B?F(?:16|32|64)")
LIBERTY = re.compile(r"F(?:ADD|MUL|FMA|MNMX)[23]?\.(?:\w+\.)*(?:FTZ|RZ|RM|RP)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its predicate, opcode with modifiers, operands as they are printed, and labels before it."""

    opcode: str
    operands: tuple[str, ...]
    guard: str = ""
    labels: tuple[str, ...] = ()

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
    found: list[Instruction] = []
    labels: list[str] = []
    for line in disassembly.splitlines():
        if label := LABEL.match(line):
            labels.append(label["label"])
        elif match := LINE.search(line):
            operands = tuple(part.strip() for part in match["operands"].split(",") if part.strip())
            found.append(Instruction(match["opcode"], operands, match["guard"] or "", tuple(labels)))
            labels = []
    return found


def opcodes(code: Sequence[Instruction]) -> Counter[str]:
    """How often each opcode stands in the code, modifiers included, but for half floats that merely hold a constant."""
    return Counter(instruction.opcode for instruction in code if not _holds_constant(instruction))


def _holds_constant(instruction: Instruction) -> bool:
    """Whether it is `HFMA2 r, -RZ, RZ, a, b`, by which an assembler writes a constant's two halves."""
    zeros = tuple(_unsigned(operand) for operand in instruction.operands[1:3])
    return instruction.opcode in ("HFMA2", "HFMA2.MMA") and zeros == ("RZ", "RZ")


def arithmetic(code: Sequence[Instruction]) -> Counter[str]:
    """How often each fp32 operation that can be fused, or is the fusion of two, stands in the code."""
    stems = ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2", "FHFMA", "FHMUL", "FHADD")
    return Counter(one.opcode for one in code if one.opcode.partition(".")[0] in stems)


def unrefined(code: Sequence[Instruction]) -> list[str]:
    """For each approximate seed that no IEEE division or root refines: which it is, and what reads it first."""
    found = []
    places = {label: index for index, instruction in enumerate(code) for label in instruction.labels}
    for index, instruction in enumerate(code):
        if instruction.opcode.startswith(SEEDS) and "QNAN" not in "".join(instruction.operands):
            readers = _first_readers(code, places, index)
            if _divides_integers(code, index, readers):
                continue
            wrong = [reader.opcode for reader in readers if not _refines(instruction, reader)]
            if wrong or not readers:
                found.append(f"{instruction.opcode} first read by {wrong[0] if wrong else 'nothing'}")
    return found


def _divides_integers(code: Sequence[Instruction], index: int, readers: Sequence[Instruction]) -> bool:
    """Whether a seed is the reciprocal of a divisor converted from an integer, and is read as an integer only."""
    divisor = _unsigned(code[index].operands[-1])
    writers = (one for one in reversed(code[:index]) if one.operands and one.operands[0] == divisor)
    writer = next(writers, None)
    as_integer = all(reader.opcode.partition(".")[0] in INTEGER_SUMS for reader in readers)
    return writer is not None and CONVERTED.fullmatch(writer.opcode) is not None and bool(readers) and as_integer


def _first_readers(code: Sequence[Instruction], places: Mapping[str, int], start: int) -> list[Instruction]:
    """On each path from an instruction on, the first one that computes with its result, which moves hand on."""
    readers: dict[int, Instruction] = {}
    waiting = [(next_, frozenset({code[start].target})) for next_ in _next(code, places, start)]
    seen = set(waiting)
    while waiting:
        index, holders = waiting.pop()
        instruction = code[index]
        if instruction.sources & holders:
            if not instruction.opcode.startswith(MOVES):
                readers[index] = instruction
                continue
            holders |= {instruction.target}
        elif instruction.target in holders and not instruction.guard:
            holders -= {instruction.target}
        new = {(next_, holders) for next_ in _next(code, places, index) if holders} - seen
        seen |= new
        waiting += new
    return [readers[index] for index in sorted(readers)]


def _next(code: Sequence[Instruction], places: Mapping[str, int], index: int) -> list[int]:
    """Where control may go from an instruction."""
    instruction = code[index]
    stem = instruction.opcode.partition(".")[0]
    following = [index + 1] if index + 1 < len(code) else []
    if stem in ENDS and not instruction.guard:
        return []
    if stem != "BRA":
        return following
    target = TARGET.search(instruction.operands[-1])
    taken = [places[target["label"]]] if target and target["label"] in places else []
    unconditional = not instruction.guard and len(instruction.operands) == 1
    return taken if unconditional else [*following, *taken]


def _refines(seed: Instruction, reader: Instruction) -> bool:
    """Whether a seed's reader is the first step of IEEE division (seed times divisor, less 1) or of IEEE root."""
    if seed.opcode.startswith("MUFU.RCP"):
        factors = {_unsigned(operand) for operand in reader.operands[1:3]}
        of_divisor = _unsigned(seed.operands[-1]) in factors
        return reader.opcode.startswith("FFMA") and (of_divisor or ONE.fullmatch(reader.operands[-1]) is not None)
    return reader.opcode.startswith("FMUL.FTZ")


def _unsigned(operand: str) -> str:
    return operand.lstrip("-").removesuffix(".reuse").strip("|")


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


def foreign(found: Mapping[str, int]) -> dict[str, int]:
    """The opcodes that no fp32 sequence is made of: fp64 and fp16 arithmetic, and all but one rounding to bf16."""
    return {opcode: number for opcode, number in found.items() if FOREIGN.match(opcode) and opcode not in TO_BF16}


def unordered(found: Mapping[str, int]) -> dict[str, int]:
    """The atomic opcodes that add floats, in the order in which threads come."""
    return {opcode: number for opcode, number in found.items() if FLOAT_ATOMIC.match(opcode)}


def liberties(found: Mapping[str, int]) -> dict[str, int]:
    """The fp32 opcodes that flush subnormals or do not round to nearest; steps of IEEE divisions and roots do."""
    return {opcode: number for opcode, number in found.items() if LIBERTY.match(opcode)}


def wide_loads(found: Mapping[str, int]) -> int:
    """How many global loads move 16 bytes or more."""
    loads = [opcode for opcode in found if opcode.split(".")[0] in ("LDG", "LDGSTS")]
    return sum(found[opcode] for opcode in loads if {"128", "256"} & set(opcode.split(".")))
