"""See whether a wrong result holds the right values in the wrong places: shifted, permuted or transposed.

An indexing fault often leaves whole rows intact. Naming the move (row t holds row t + 1; the last two axes
are swapped) tells more than any list of wrong values. A finding is a hint: values that occur in many places
prove nothing, so a move is named only where at least `EVIDENCE` different values agree.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oracle.arith import bits

EVIDENCE = 3
LARGEST = 1 << 22  # values; above this a search would take longer than the kernel
CANDIDATES = 8


class Move(enum.Enum):
    """How the values moved."""

    ROWS = enum.auto()  # wrong row t holds the expected row t + by
    RANKS = enum.auto()  # the same, by a whole number of ranks
    STREAMS = enum.auto()  # stream i holds the expected stream order[i]
    COLUMNS = enum.auto()  # wrong column h holds the expected column h + by
    TRANSPOSED = enum.auto()  # the last two axes are swapped


@dataclass(frozen=True)
class Rearrangement:
    """A move that explains every mismatch: ``by`` rows, ranks or columns, or the ``order`` of the streams."""

    move: Move
    by: int = 0
    order: tuple[int, ...] = ()


def find_rearrangement(
    *, actual: torch.Tensor, expected: torch.Tensor, rows_per_rank: int | None = None
) -> Rearrangement | None:
    """The move that explains every mismatching row, column or stream, or None.

    Both tensors have one shape and dtype (bf16 or f32), dim 0 being token rows; [T, n, H] and [T, n, n] have
    streams in dim 1. ``rows_per_rank`` lets a shift of rows be read as one of ranks. Tensors above `LARGEST`
    values are not searched.
    """
    if actual.numel() == 0 or actual.numel() > LARGEST:
        return None
    ours, theirs = _canonical(actual), _canonical(expected.to(actual.device))
    wrong = ours[ours != theirs]
    if torch.unique(wrong).numel() < EVIDENCE:
        return None
    return next(_moves(ours, theirs, rows_per_rank), None)


def _canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with one pattern for every NaN."""
    return torch.where(torch.isnan(tensor), -1, bits(tensor.contiguous()))


def _moves(ours: torch.Tensor, theirs: torch.Tensor, rows_per_rank: int | None) -> Iterator[Rearrangement]:
    if ours.dim() >= 2 and ours.shape[-1] == ours.shape[-2] and torch.equal(ours, theirs.transpose(-1, -2)):
        yield Rearrangement(Move.TRANSPOSED)
    if ours.dim() == 3:
        order = _order(ours.transpose(0, 1), theirs.transpose(0, 1))
        if order:
            yield Rearrangement(Move.STREAMS, order=order)
    by = _shift(ours, theirs)
    if by and rows_per_rank and by % rows_per_rank == 0:
        yield Rearrangement(Move.RANKS, by=by // rows_per_rank)
    elif by:
        yield Rearrangement(Move.ROWS, by=by)
    if ours.dim() >= 2:
        by = _shift(ours.movedim(-1, 0), theirs.movedim(-1, 0))
        if by:
            yield Rearrangement(Move.COLUMNS, by=by)


def _order(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[int, ...]:
    """For each slice of ours the slice of theirs that it equals, the same place first; () if one has none."""
    order: list[int] = []
    for place, mine in enumerate(ours):
        others = itertools.chain([place], range(len(theirs)))
        source = next((other for other in others if torch.equal(mine, theirs[other])), None)
        if source is None:
            return ()
        order.append(source)
    return tuple(order)


def _shift(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How far all wrong slices of dim 0 moved, 0 if no one distance fits; those from outside are ignored."""
    wrong = (~_slices_equal(ours, theirs)).nonzero().flatten()
    middle = wrong[len(wrong) // 2]
    same = _slices_equal(theirs, ours[middle].expand_as(theirs)).nonzero().flatten() - middle
    near = sorted(same.tolist(), key=abs)[:CANDIDATES]
    return next((by for by in near if by and _moved(ours, theirs, wrong, by)), 0)


def _moved(ours: torch.Tensor, theirs: torch.Tensor, wrong: torch.Tensor, by: int) -> bool:
    inside = wrong[(wrong + by >= 0) & (wrong + by < len(theirs))]
    enough = 2 * len(inside) > len(wrong) and torch.unique(ours[inside]).numel() >= EVIDENCE
    return enough and torch.equal(ours[inside], theirs[inside + by])


def _slices_equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left == right).reshape(len(left), -1).all(dim=1)
