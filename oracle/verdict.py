"""The verdict on one output as data: what is wrong, how much of it, and where. The words are in `oracle.report`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from oracle.rearrangement import Rearrangement


class Fault(enum.Enum):
    """A property of the whole tensor that is wrong."""

    DTYPE = enum.auto()
    SHAPE = enum.auto()
    LAYOUT = enum.auto()


class Kind(enum.IntEnum):
    """How one value is wrong; the first that applies, in this order."""

    UNWRITTEN = 0  # the actual value still holds the poison pattern
    NAN = 1  # NaN on one side only
    INF = 2  # infinity on one side only, or of the other sign
    SIGN_OF_ZERO = 3
    ONE_ULP = 4
    MORE = 5


@dataclass(frozen=True)
class Form:
    """What a tensor is, apart from its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Element:
    """One mismatching value: where it is, both bit patterns (unsigned) and the distance between them.

    ``rank`` and ``local_row`` are None without a layout; ``ulp`` is None where one side is NaN.
    """

    index: tuple[int, ...]
    rank: int | None
    local_row: int | None
    pad: bool
    kind: Kind
    expected_bits: int
    actual_bits: int
    expected: float = field(compare=False)  # the bits decide: a NaN would make an element differ from itself
    actual: float = field(compare=False)
    ulp: int | None


@dataclass(frozen=True)
class Tally:
    """``wrong`` mismatches of ``total`` values at one rank, row or stream."""

    key: int
    wrong: int
    total: int


@dataclass(frozen=True)
class Block:
    """``wrong`` mismatches in the half-open range [start, stop) of columns or of ULP distances."""

    start: int
    stop: int
    wrong: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict on one output.

    With a DTYPE or SHAPE fault no value was read, and all counts are 0. ``kinds`` and ``histogram`` hold
    non-zero counts only; ``histogram`` has log2 buckets and leaves NaN out. ``ranks`` has every rank of the
    layout, ``streams`` every index of axis 1 of a 3-D tensor, ``columns`` every block of the last axis of a 2-D
    or 3-D one (64 wide, or 1 wide when the axis is no longer than 64). ``rows`` are the five token rows with most
    mismatches, of ``rows_affected`` rows up to ``last_row``. ``nearer_zero`` counts the mismatches whose actual
    magnitude is the smaller one.
    """

    expected: Form
    actual: Form
    faults: tuple[Fault, ...] = ()
    total: int = 0
    mismatching: int = 0
    kinds: Mapping[Kind, int] = field(default_factory=dict)
    pad_total: int = 0
    pad_mismatching: int = 0
    nearer_zero: int = 0
    first: Element | None = None
    worst: tuple[Element, ...] = ()
    histogram: tuple[Block, ...] = ()
    ranks: tuple[Tally, ...] = ()
    streams: tuple[Tally, ...] = ()
    columns: tuple[Block, ...] = ()
    rows: tuple[Tally, ...] = ()
    rows_affected: int = 0
    last_row: int | None = None
    rearrangement: Rearrangement | None = None

    @property
    def exact(self) -> bool:
        """Whether dtype, shape, contiguity and every bit are right."""
        return not self.faults and self.mismatching == 0

    @property
    def valid_mismatching(self) -> int:
        """Mismatches outside the pad rows."""
        return self.mismatching - self.pad_mismatching
