"""The rows that one rank holds, and the collectives that move rows between ranks.

Whether a rank holds all T tokens or its shard is a flag that is set once and carried. It is never read off a shape: one
row can be the whole batch of T = 1 or the padded shard of any T <= tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """The ranks that share a pipeline stage; every rank must make the same calls in the same order.

    `all_gather` concatenates along dim 0 in rank order. The reductions add in rank order 0..size-1 in fp32 from +0 and
    round once; `reduce_scatter` takes [size * rows, ...] and returns this rank's rows.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, tensor: Tensor) -> Tensor: ...
    def all_reduce(self, tensor: Tensor) -> Tensor: ...
    def reduce_scatter(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Parallel:
    """How a model is spread: `tp` ranks a stage, `pp` stages, `dp` replicas, and whether tokens are sharded.

    Raises ValueError when sequence parallelism is asked for without its preconditions, which are upstream's: one
    stage, several ranks, expert parallelism, and a mega-MoE backend or several replicas. Without the first, a stage
    would hand on shards that the next one takes for whole tensors; without the others the FFN would need rows that its
    rank does not hold.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    mega_moe: bool = False
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)):
            if value < 1:
                raise ValueError(f"Parallel: {name} must be at least 1, got {value}")
        if self.sequence_parallel and (missing := self.missing()):
            raise ValueError(f"Parallel: sequence_parallel needs {', '.join(missing)}")

    def missing(self) -> list[str]:
        """What keeps the tokens of this set-up from being sharded, in words; empty when nothing does."""
        met = {
            f"pp = 1 (got {self.pp})": self.pp == 1,
            f"tp > 1 (got {self.tp})": self.tp > 1,
            "expert_parallel (got False)": self.expert_parallel,
            f"mega_moe or dp > 1 (got mega_moe False and dp {self.dp})": self.mega_moe or self.dp > 1,
        }
        return [condition for condition, holds in met.items() if not holds]


@dataclass(frozen=True)
class Rows:
    """One rank's share of a step of `tokens` tokens: its shard when `sharded`, else all of them.

    A shard is ceil(T / tp) rows, the padding at the end of the whole, so that tail ranks may hold padding only.
    """

    tokens: int
    group: Group
    sharded: bool

    @property
    def per_rank(self) -> int:
        """Rows that this rank holds, pad rows included."""
        return -(-self.tokens // self.group.size) if self.sharded else self.tokens

    def own(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's rows of a full tensor [T, ...]; pad rows hold `fill`."""
        if not self.sharded:
            return tensor
        first = self.group.rank * self.per_rank
        return self.padded(tensor, fill)[first : first + self.per_rank].contiguous()

    def padding(self, padding: Tensor) -> Tensor:
        """Return this rank's rows of the padding mask; the rows that sharding added are padding too."""
        return self.own(padding, fill=True)

    def padded(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """Return [tp * per_rank, ...]: the full tensor with pad rows at its end."""
        missing = self.group.size * self.per_rank - self.tokens
        if missing == 0:
            return tensor
        rows = torch.full((missing, *tensor.shape[1:]), fill, dtype=tensor.dtype, device=tensor.device)
        return torch.cat([tensor, rows])

    def full(self, tensor: Tensor) -> Tensor:
        """Return all T rows of a tensor of which this rank holds its own: gathered, pad rows trimmed."""
        return self.group.all_gather(tensor)[: self.tokens] if self.sharded else tensor

    def added(self, partial: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks of full partial sums [T, ...]; pad rows are +0."""
        if self.sharded:
            return self.group.reduce_scatter(self.padded(partial))
        # A sum starts from +0, also a sum of one part: -0 would otherwise stay with one rank and vanish with two.
        return self.group.all_reduce(partial) if self.group.size > 1 else partial + 0
