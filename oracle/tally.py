"""Count mismatches by kind, distance and place while they stream by, chunk after chunk in row-major order."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import torch

from oracle.arith import NAN_DISTANCE, bits, ulp_distance
from oracle.sp import SpLayout
from oracle.verdict import Block, Comparison, Element, Kind, Tally

WORST = 5
COLUMN_BLOCK = 64


@dataclass(frozen=True)
class Format:
    """The bit fields of a dtype: all but the sign, and infinity."""

    width: int
    magnitude: int
    infinity: int


FORMATS = {
    torch.bfloat16: Format(16, 0x7FFF, 0x7F80),
    torch.float32: Format(32, 0x7FFFFFFF, 0x7F800000),
}
_POWERS = [1 << power for power in range(34)]


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """The bits without the sign; read as integers because a flush-to-zero mode would change float tests."""
    return bits(tensor) & FORMATS[tensor.dtype].magnitude


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Where a bf16 or f32 tensor is NaN, by its bits."""
    return magnitude(tensor) > FORMATS[tensor.dtype].infinity


def holds(tensor: torch.Tensor, pattern: int) -> torch.Tensor:
    """Where a bf16 or f32 tensor has exactly this unsigned bit pattern."""
    width = FORMATS[tensor.dtype].width
    signed = pattern - (1 << width) if pattern >> (width - 1) else pattern
    return bits(tensor) == signed


def _unsigned(tensor: torch.Tensor) -> list[int]:
    mask = (1 << FORMATS[tensor.dtype].width) - 1
    return [pattern & mask for pattern in bits(tensor).tolist()]


@dataclass(frozen=True)
class Wrong:
    """The mismatching values of one chunk, in order of their flat index."""

    flat: torch.Tensor
    actual: torch.Tensor
    expected: torch.Tensor
    kind: torch.Tensor
    distance: torch.Tensor


def classify(flat: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, poison: int | None) -> Wrong:
    """The kind and the distance of each mismatching pair."""
    infinity = FORMATS[actual.dtype].infinity
    ours, theirs = magnitude(actual), magnitude(expected)
    nan = (ours > infinity) | (theirs > infinity)
    distance = ulp_distance(actual, expected).masked_fill(nan, NAN_DISTANCE)
    kind = torch.full_like(flat, int(Kind.MORE))
    kind[distance == 1] = int(Kind.ONE_ULP)
    kind[(ours == 0) & (theirs == 0)] = int(Kind.SIGN_OF_ZERO)
    kind[(ours == infinity) | (theirs == infinity)] = int(Kind.INF)
    kind[nan] = int(Kind.NAN)
    if poison is not None:
        kind[holds(actual, poison)] = int(Kind.UNWRITTEN)
    return Wrong(flat, actual, expected, kind, distance)


@dataclass(frozen=True)
class _Places:
    """Where flat indices of an output lie: row (token), stream, column, rank, padding."""

    shape: tuple[int, ...]
    layout: SpLayout | None

    @property
    def row_size(self) -> int:
        size = 1
        for extent in self.shape[1:]:
            size *= extent
        return size

    @property
    def column_width(self) -> int:
        return COLUMN_BLOCK if self.shape[-1] > COLUMN_BLOCK else 1

    @property
    def pad_total(self) -> int:
        pad = max(self.shape[0] - self.layout.tokens, 0) if self.layout is not None and self.shape else 0
        return pad * self.row_size

    @property
    def rank_totals(self) -> list[int]:
        """Values of this tensor, trimmed or not, that each rank holds."""
        if self.layout is None:
            return []
        edges = [min(rank * self.layout.rows_per_rank, self.shape[0]) for rank in range(self.layout.tp + 1)]
        return [(last - first) * self.row_size for first, last in itertools.pairwise(edges)]

    def index(self, flat: int) -> tuple[int, ...]:
        index: list[int] = []
        for extent in reversed(self.shape):
            flat, position = divmod(flat, extent)
            index.append(position)
        return tuple(reversed(index))


@dataclass(frozen=True)
class _Found:
    """One mismatch on its way to becoming an Element."""

    flat: int
    actual_bits: int
    expected_bits: int
    actual: float
    expected: float
    kind: Kind
    distance: int

    @property
    def badness(self) -> tuple[int, int]:
        return (-self.distance, self.flat)

    def at(self, places: _Places) -> Element:
        index = places.index(self.flat)
        layout = places.layout
        rank, local_row = layout.owner(index[0]) if layout is not None else (None, None)
        return Element(
            index=index,
            rank=rank,
            local_row=local_row,
            pad=layout is not None and index[0] >= layout.tokens,
            kind=self.kind,
            expected_bits=self.expected_bits,
            actual_bits=self.actual_bits,
            expected=self.expected,
            actual=self.actual,
            ulp=None if self.distance == NAN_DISTANCE else self.distance,
        )


def _pick(wrong: Wrong, where: torch.Tensor) -> list[_Found]:
    columns = zip(
        wrong.flat[where].tolist(),
        _unsigned(wrong.actual[where]),
        _unsigned(wrong.expected[where]),
        wrong.actual[where].tolist(),
        wrong.expected[where].tolist(),
        [Kind(kind) for kind in wrong.kind[where].tolist()],
        wrong.distance[where].tolist(),
        strict=True,
    )
    return [_Found(*column) for column in columns]


def _largest(values: torch.Tensor, above: int = -1) -> torch.Tensor:
    """Positions of the five largest values above a bound; equal ones in order of position."""
    where = (values > above).nonzero().flatten()
    return where[torch.sort(values[where], descending=True, stable=True).indices[:WORST]]


class _Rows:
    """The token rows with most mismatches. They arrive ascending, so only the last one seen can still grow."""

    def __init__(self) -> None:
        self.affected = 0
        self.last: int | None = None
        self._open: tuple[int, int] | None = None
        self._top: list[tuple[int, int]] = []

    def add(self, rows: torch.Tensor) -> None:
        keys, counts = torch.unique_consecutive(rows, return_counts=True)
        if self._open is not None and self._open[0] == int(keys[0]):
            counts[0] += self._open[1]
            self._open = None
        self._close()
        self._keep(keys[:-1], counts[:-1])
        self._open = (int(keys[-1]), int(counts[-1]))
        self.last = self._open[0]

    def finish(self, row_size: int) -> tuple[Tally, ...]:
        self._close()
        return tuple(Tally(row, wrong, row_size) for row, wrong in self._top)

    def _close(self) -> None:
        if self._open is not None:
            row, wrong = self._open
            self._keep(torch.tensor([row]), torch.tensor([wrong]))
            self._open = None

    def _keep(self, keys: torch.Tensor, counts: torch.Tensor) -> None:
        self.affected += keys.numel()
        best = _largest(counts)
        found = zip(keys[best].tolist(), counts[best].tolist(), strict=True)
        self._top = sorted([*self._top, *found], key=lambda item: (-item[1], item[0]))[:WORST]


class Counts:
    """Running counts over the chunks of one comparison."""

    def __init__(self, shape: torch.Size, layout: SpLayout | None) -> None:
        self.places = _Places(tuple(shape), layout)
        self.total = shape.numel()
        self.mismatching = self.pad_mismatching = self.nearer_zero = 0
        self.kinds: Counter[int] = Counter()
        self.powers: Counter[int] = Counter()
        self.ranks: Counter[int] = Counter()
        self.streams: Counter[int] = Counter()
        self.columns: Counter[int] = Counter()
        self.rows = _Rows()
        self.first: _Found | None = None
        self.worst: list[_Found] = []

    def add(self, wrong: Wrong) -> None:
        self.mismatching += wrong.flat.numel()
        self._add_values(wrong)
        self._add_places(wrong.flat)
        if self.first is None:
            self.first = _pick(wrong, torch.zeros_like(wrong.flat[:1]))[0]
        # An equal distance later on never enters, so most chunks have nothing to sort once five are known.
        bound = self.worst[-1].distance if len(self.worst) == WORST else -1
        worst = [*self.worst, *_pick(wrong, _largest(wrong.distance, bound))]
        self.worst = sorted(worst, key=lambda found: found.badness)[:WORST]

    def _add_values(self, wrong: Wrong) -> None:
        self.kinds.update(_count(wrong.kind))
        numbers = wrong.distance[wrong.distance != NAN_DISTANCE]
        limits = torch.tensor(_POWERS, device=numbers.device)
        self.powers.update(_count(torch.bucketize(numbers, limits, right=True) - 1))
        nearer = (magnitude(wrong.actual) < magnitude(wrong.expected)) & (wrong.distance != NAN_DISTANCE)
        self.nearer_zero += int(nearer.sum())

    def _add_places(self, flat: torch.Tensor) -> None:
        places, shape = self.places, self.places.shape
        rows = flat // places.row_size
        self.rows.add(rows)
        if places.layout is not None:
            self.pad_mismatching += int((rows >= places.layout.tokens).sum())
            self.ranks.update(_count(rows // places.layout.rows_per_rank))
        if len(shape) > 1:
            self.columns.update(_count(flat % shape[-1] // places.column_width))
        if len(shape) == 3:
            self.streams.update(_count(flat // shape[2] % shape[1]))

    def fill(self, verdict: Comparison) -> Comparison:
        """The verdict with every count in it."""
        first = None if self.first is None else self.first.at(self.places)
        return replace(
            verdict,
            total=self.total,
            mismatching=self.mismatching,
            kinds={kind: self.kinds[kind] for kind in Kind if self.kinds[kind]},
            pad_total=self.places.pad_total,
            pad_mismatching=self.pad_mismatching,
            nearer_zero=self.nearer_zero,
            first=first,
            worst=tuple(found.at(self.places) for found in self.worst),
            histogram=tuple(Block(1 << p, 2 << p, self.powers[p]) for p in sorted(self.powers)),
            ranks=self._rank_tallies(),
            streams=self._stream_tallies(),
            columns=self._column_blocks(),
            rows=self.rows.finish(self.places.row_size),
            rows_affected=self.rows.affected,
            last_row=self.rows.last,
        )

    def _rank_tallies(self) -> tuple[Tally, ...]:
        return tuple(Tally(rank, self.ranks[rank], total) for rank, total in enumerate(self.places.rank_totals))

    def _stream_tallies(self) -> tuple[Tally, ...]:
        shape = self.places.shape
        if len(shape) != 3:
            return ()
        return tuple(Tally(s, self.streams[s], self.total // shape[1]) for s in range(shape[1]))

    def _column_blocks(self) -> tuple[Block, ...]:
        shape = self.places.shape
        if len(shape) < 2:
            return ()
        width, extent = self.places.column_width, shape[-1]
        starts = range(0, extent, width)
        return tuple(Block(s, min(s + width, extent), self.columns[s // width]) for s in starts)


def _count(keys: torch.Tensor) -> dict[int, int]:
    """How often each of a range of small integers occurs."""
    return {key: count for key, count in enumerate(torch.bincount(keys).tolist()) if count}
