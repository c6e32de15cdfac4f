"""What is wrong with the machine code of a kernel, given what the contract's sequence allows it.

How it is known that roundings are apart:

- a kernel with no fma in its sequence, and no division or root: its code holds no `FFMA` at all;
- a kernel with fma in its sequence (pinned sums, exp) or inside IEEE division and root: its PTX holds as many fma as
  the source asked for, every other float operation there carries `.rn`, which no assembler contracts, and the last
  compiler that could contract gives the same code when it is told that it may; told that it may not, where the launch
  lets it contract.

So a kernel of the first kind is judged by what came out, one of the second by all that was decided on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tests.static import ptx, sass

APPROXIMATE = ("EX2", "LG2", "SIN", "COS", "TANH", "SQRT")
MATRIX = ("HMMA", "DMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")


@dataclass(frozen=True)
class Facts:
    """What was read off one compiled kernel, as plain data that a file can keep.

    `opcodes` and `ptx` count instructions and opcodes of floats; `seeds` is what `sass.unrefined` gave;
    `requested` is the number of fma that the source asked for, None where the compiler does not say; `fusable` tells
    whether the last compiler that could contract has, or would have, had it been allowed.
    """

    opcodes: Mapping[str, int]
    ptx: Mapping[str, int]
    seeds: tuple[str, ...]
    requested: int | None
    fusable: bool

    @classmethod
    def load(cls, raw: Mapping[str, Any]) -> Facts:
        """Make facts of what `dump` gave. Raises KeyError or TypeError for anything else."""
        values = {field.name: raw[field.name] for field in fields(cls)}
        return cls(**{**values, "seeds": tuple(values["seeds"])})

    def dump(self) -> dict[str, Any]:
        """The facts as a JSON file keeps them."""
        return asdict(self)


@dataclass(frozen=True)
class Allowed:
    """What a kernel's sequence gives its code: fma, division, root; and how many 16-byte loads its streams allow."""

    fma: bool = False
    division: bool = False
    root: bool = False
    wide: int = 0

    @property
    def separate(self) -> bool:
        """Whether no instruction of the kernel may be an FFMA."""
        return not (self.fma or self.division or self.root)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its kind for a table's cell, and the sentence that explains it."""

    kind: str
    sentence: str


def findings(facts: Facts, allowed: Allowed) -> list[Finding]:
    """What is wrong with a kernel's code; empty when nothing is."""
    found = [Finding("fused", sentence) for sentence in _fused(facts, allowed)]
    found += [Finding("approximate", sentence) for sentence in _approximate(facts)]
    found += [Finding("unordered", sentence) for sentence in _unordered(facts)]
    found += [Finding("unexpected", sentence) for sentence in _unexpected(facts, allowed)]
    spilled = sass.count(facts.opcodes, "LDL", "STL")
    if spilled:
        found.append(Finding("spill", f"{spilled} accesses to local memory"))
    wide = sass.wide_loads(facts.opcodes)
    if wide < allowed.wide:
        found.append(Finding("narrow", f"{wide} loads of 16 bytes, where its streams allow {allowed.wide}"))
    return found


def _fused(facts: Facts, allowed: Allowed) -> Iterator[str]:
    contracted = sass.count(facts.opcodes, "FFMA", "FHFMA")
    if contracted and allowed.separate:
        yield f"{contracted} FFMA, though all roundings of its sequence are separate"
    written = ptx.fused(facts.ptx)
    expected = facts.requested if allowed.fma else 0
    if expected is not None and written != expected:
        yield f"{written} fma in its PTX, where its sequence has {expected}"
    if facts.fusable:
        yield "it has products and sums that a compiler has fused, or would fuse as soon as it were allowed to"


def _approximate(facts: Facts) -> Iterator[str]:
    for opcode, number in ptx.inexact(facts.ptx).items():
        yield f"{number} {opcode} in its PTX: neither one fp32 operation rounded to nearest, nor exact, nor to bf16"
    for opcode, number in facts.opcodes.items():
        stem, _, rest = opcode.partition(".")
        if (stem == "MUFU" and rest.startswith(APPROXIMATE)) or stem in MATRIX:
            yield f"{number} {opcode}"
    for opcode, number in sass.foreign(facts.opcodes).items():
        yield f"{number} {opcode}, which no fp32 sequence is made of"
    if not any(facts.ptx.get(f"{opcode}.rn.f32") for opcode in ("div", "rcp", "sqrt")):
        for opcode, number in sass.liberties(facts.opcodes).items():
            yield f"{number} {opcode}, though there is no IEEE division or root that it could be a step of"
    for seed, number in Counter(facts.seeds).items():
        yield f"{number} {seed}, unrefined"


def _unordered(facts: Facts) -> Iterator[str]:
    for opcode, number in ptx.unordered(facts.ptx).items():
        yield f"{number} {opcode} in its PTX, whose result depends on which thread comes first"
    for opcode, number in sass.unordered(facts.opcodes).items():
        yield f"{number} {opcode}, whose result depends on which thread comes first"


def _unexpected(facts: Facts, allowed: Allowed) -> Iterator[str]:
    for opcode, granted in (("div", allowed.division), ("rcp", allowed.division), ("sqrt", allowed.root)):
        number = facts.ptx.get(f"{opcode}.rn.f32", 0)
        if number and not granted:
            yield f"{number} {opcode}.rn, though its sequence has none"
