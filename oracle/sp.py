"""Sequence parallelism (SP) over simulated ranks: who holds which token, and what every collective moves.

A tensor of T tokens is padded at its end to a multiple of ``tp`` and cut into equal chunks, one a rank; tail ranks
may hold padding only. The layout is a value that callers pass on. It is never guessed from a tensor's shape: one
row can be the full batch of T = 1 or the padded shard of any T <= tp, and both guesses have been shipped as bugs.

Source of the rules: vLLM's sp_shard, sp_padding_mask, sp_all_gather and sp_reduce_scatter (pad at the end,
ceil(T / tp) rows a rank, trim after the gather) and contract version 1 for the order in which a reduction adds
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class SpLayout:
    """How T tokens lie on ``tp`` ranks.

    ``tokens`` is T (>= 0), ``tp`` the number of ranks (>= 1). Raises TypeError for a non-integer and ValueError
    for a negative T or a tp below 1.
    """

    tokens: int
    tp: int

    def __post_init__(self) -> None:
        _check_count("tokens", self.tokens, least=0)
        _check_count("tp", self.tp, least=1)

    @property
    def rows_per_rank(self) -> int:
        """Rows that every rank holds, pad rows included: ceil(T / tp)."""
        return -(-self.tokens // self.tp)

    @property
    def padded_tokens(self) -> int:
        """Rows of all ranks together: ``tp * rows_per_rank``."""
        return self.tp * self.rows_per_rank

    @property
    def pad_rows(self) -> int:
        """Pad rows of all ranks together, always the last ones."""
        return self.padded_tokens - self.tokens

    def first_row(self, rank: int) -> int:
        """Global index of the first row that ``rank`` holds."""
        return self._checked(rank) * self.rows_per_rank

    def valid_rows(self, rank: int) -> int:
        """How many of the rank's rows are tokens; 0 for a rank of padding only."""
        return min(max(self.tokens - self.first_row(rank), 0), self.rows_per_rank)

    def pad_rows_of(self, rank: int) -> int:
        """How many of the rank's rows are padding; they follow the valid ones."""
        return self.rows_per_rank - self.valid_rows(rank)

    def global_row(self, rank: int, local_row: int) -> int:
        """Global index of a rank's local row; indices from T on are padding.

        Raises IndexError when the rank has no such row.
        """
        if not 0 <= local_row < self.rows_per_rank:
            raise IndexError(f"local_row must be in 0..{self.rows_per_rank - 1} for {self}, got {local_row}")
        return self.first_row(rank) + local_row

    def owner(self, row: int) -> tuple[int, int]:
        """The (rank, local row) that holds a global row, pad rows included.

        Raises IndexError when the layout has no such row.
        """
        if not 0 <= row < self.padded_tokens:
            raise IndexError(f"row must be in 0..{self.padded_tokens - 1} for {self}, got {row}")
        return divmod(row, self.rows_per_rank)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.tp:
            raise IndexError(f"rank must be in 0..{self.tp - 1}, got {rank}")
        return rank


@dataclass(frozen=True)
class Collective:
    """One collective as one rank sees it.

    ``kind`` is "all_gather" or "reduce_scatter"; ``shape`` and ``dtype`` describe the tensor this rank passes in,
    and ``received_bytes`` counts the payload of the other ranks that ends on this one.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    received_bytes: int


@dataclass
class CollectiveLog:
    """What each rank issued, in order: ``per_rank[r]`` is rank r's list of `Collective`."""

    tp: int
    per_rank: list[list[Collective]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_rank = self.per_rank or [[] for _ in range(self.tp)]

    def record(self, kind: str, shards: Sequence[torch.Tensor], received_rows: int) -> None:
        """Note one collective on every rank; a rank receives ``received_rows`` rows from the others."""
        for issued, shard in zip(self.per_rank, shards, strict=True):
            row_bytes = shard[0].numel() * shard.element_size() if shard.shape[0] else 0
            issued.append(Collective(kind, tuple(shard.shape), str(shard.dtype), received_rows * row_bytes))

    @property
    def uniform(self) -> bool:
        """Whether all ranks issued the same collectives, in the same order, with the same shapes and dtypes.

        Where this is False a real job hangs or mixes data, so no GPU is needed to find such a bug.
        """
        return all(issued == self.per_rank[0] for issued in self.per_rank)

    def received_bytes(self, rank: int = 0) -> int:
        """Bytes that a rank receives from others over all recorded collectives."""
        return sum(collective.received_bytes for collective in self.per_rank[rank])


def pad(tensor: torch.Tensor, layout: SpLayout, value: float = 0.0) -> torch.Tensor:
    """Append the layout's pad rows, filled with ``value``, along the token axis.

    tensor [T, ...] of any dtype -> [padded_tokens, ...]. Raises ValueError when dim 0 is not T.
    """
    _check_rows("pad", tensor, layout.tokens, layout)
    filler = torch.full((layout.pad_rows, *tensor.shape[1:]), value, dtype=tensor.dtype, device=tensor.device)
    return torch.cat([tensor, filler])


def shard(tensor: torch.Tensor, layout: SpLayout, value: float = 0.0) -> list[torch.Tensor]:
    """Cut a full tensor into the ranks' shards, only the token axis padded (upstream pads with zeros).

    tensor [T, ...] -> ``tp`` tensors [rows_per_rank, ...]. Raises ValueError when dim 0 is not T.
    """
    padded = pad(tensor, layout, value)
    rows = layout.rows_per_rank
    return [padded[rank * rows : (rank + 1) * rows] for rank in range(layout.tp)]


def padding_mask(layout: SpLayout) -> list[torch.Tensor]:
    """Each rank's bool mask [rows_per_rank], True where the row is padding."""
    rows = torch.arange(layout.padded_tokens)
    return list((rows >= layout.tokens).reshape(layout.tp, layout.rows_per_rank))


def all_gather(shards: Sequence[torch.Tensor], layout: SpLayout, log: CollectiveLog | None = None) -> torch.Tensor:
    """Concatenate the ranks' shards in rank order, pad rows still inside: `trim` removes them.

    ``tp`` tensors [rows_per_rank, ...] -> [padded_tokens, ...]. Raises ValueError when a shard is missing or its
    rows, trailing shape or dtype differ from the layout or from rank 0.
    """
    _check_shards("all_gather", shards, layout, layout.rows_per_rank)
    if log is not None:
        log.record("all_gather", shards, (layout.tp - 1) * layout.rows_per_rank)
    return torch.cat(list(shards))


def trim(gathered: torch.Tensor, layout: SpLayout) -> torch.Tensor:
    """Drop the pad rows of a gathered tensor: [padded_tokens, ...] -> [T, ...].

    Raises ValueError when dim 0 is not the layout's padded token count.
    """
    _check_rows("trim", gathered, layout.padded_tokens, layout)
    return gathered[: layout.tokens]


def reduce_scatter(
    partials: Sequence[torch.Tensor], layout: SpLayout, log: CollectiveLog | None = None
) -> list[torch.Tensor]:
    """Add the ranks' partial sums and give each rank its shard of the result.

    ``tp`` tensors [T, ...] -> ``tp`` tensors [rows_per_rank, ...] of the same dtype. Ranks are added in the order
    0..tp-1 in FP32 from +0.0, then rounded once, so that the bits of a token do not depend on the rank that owns
    it. Pad rows come out as +0. Raises ValueError when a partial is missing or has other rows, shape or dtype.
    """
    _check_shards("reduce_scatter", partials, layout, layout.tokens)
    padded = [pad(partial, layout) for partial in partials]
    if log is not None:
        log.record("reduce_scatter", padded, (layout.tp - 1) * layout.rows_per_rank)
    total = torch.zeros(padded[0].shape, dtype=torch.float32, device=padded[0].device)
    for partial in padded:
        total = total + partial.to(torch.float32)
    rows = layout.rows_per_rank
    reduced = total.to(partials[0].dtype)
    return [reduced[rank * rows : (rank + 1) * rows] for rank in range(layout.tp)]


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"SpLayout: {name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"SpLayout: {name} must be at least {least}, got {value}")


def _check_rows(call: str, tensor: torch.Tensor, rows: int, layout: SpLayout) -> None:
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise ValueError(f"{call}: expected {rows} rows for {layout}, got shape {tuple(tensor.shape)}")


def _check_shards(call: str, shards: Sequence[torch.Tensor], layout: SpLayout, rows: int) -> None:
    if len(shards) != layout.tp:
        raise ValueError(f"{call}: expected {layout.tp} tensors, one a rank, got {len(shards)}")
    for rank, shard_of_rank in enumerate(shards):
        _check_rows(f"{call}: rank {rank}", shard_of_rank, rows, layout)
        if shard_of_rank.shape != shards[0].shape or shard_of_rank.dtype != shards[0].dtype:
            raise ValueError(
                f"{call}: rank {rank} passes {tuple(shard_of_rank.shape)} {shard_of_rank.dtype}, "
                f"rank 0 {tuple(shards[0].shape)} {shards[0].dtype}"
            )
