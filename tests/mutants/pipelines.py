"""Wrong sequence-parallel steps around right kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oracle.sp import SpLayout, all_gather, pad, shard
from tests.judge import Pipeline


def _rank_off_by_one(tensor: torch.Tensor, layout: SpLayout, value: float = 0.0) -> list[torch.Tensor]:
    """Every rank gets its neighbour's rows."""
    shards = shard(tensor, layout, value)
    return shards[1:] + shards[:1]


def _token_dropped(tensor: torch.Tensor, layout: SpLayout, value: float = 0.0) -> list[torch.Tensor]:
    """Floor division: the last T mod tp tokens are held by no rank, and padding takes their rows."""
    chunk = layout.tokens // layout.tp
    filler = torch.full((layout.rows_per_rank - chunk, *tensor.shape[1:]), value, dtype=tensor.dtype)
    return [torch.cat([tensor[rank * chunk : (rank + 1) * chunk], filler]) for rank in range(layout.tp)]


def _side_input_unsharded(tensor: torch.Tensor, layout: SpLayout, value: float = 0.0) -> list[torch.Tensor]:
    """Shards the streams, but hands every rank the first rows of the coefficients."""
    if tensor.dtype == torch.bfloat16:
        return shard(tensor, layout, value)
    return [pad(tensor, layout, value)[: layout.rows_per_rank]] * layout.tp


def _layout_guessed(shards: Sequence[torch.Tensor], layout: SpLayout) -> torch.Tensor:
    """Takes a tensor with as many rows as there are tokens for the whole batch, and gathers nothing."""
    return shards[0] if shards[0].shape[0] == layout.tokens else all_gather(shards, layout)


def _scaled_by_ranks(shards: Sequence[torch.Tensor], layout: SpLayout) -> torch.Tensor:
    """Sums what is already whole on each rank: a factor of tp, which a later norm would hide."""
    return all_gather(shards, layout) * layout.tp


def _untrimmed(gathered: torch.Tensor, layout: SpLayout) -> torch.Tensor:  # noqa: ARG001 - that is the fault
    """Hands the pad rows on as if they were tokens."""
    return gathered


PIPELINES = {
    "rank-off-by-one": Pipeline(shard=_rank_off_by_one),
    "token-dropped": Pipeline(shard=_token_dropped),
    "side-input-unsharded": Pipeline(shard=_side_input_unsharded),
    "layout-guessed": Pipeline(all_gather=_layout_guessed),
    "scaled-by-ranks": Pipeline(all_gather=_scaled_by_ranks),
    "trim-forgotten": Pipeline(trim=_untrimmed),
}
