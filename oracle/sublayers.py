"""Stand-ins for a decoder's sublayers and weights: integer work on bit patterns, exact in any order.

A real attention or MoE layer has sums whose order is its own affair. The stream model is about schedules, so its
sublayers hash bf16 patterns to small integers: any order, device and split over ranks gives the same bits, and one
changed bit, row, token id or row count changes the output. Attention mixes all rows of its input (not causally, so
that a pad row that gets in shows in every row); the FFN and Engram are per token and depend on the token's id. Partial
sums that are zero are -0, so that a sum over ranks that does not start from +0 shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.arith import bits, constant, round_bf16, widen

HEADS = 8
EXPERTS = 4

_EMBED, _ENGRAM, _ATTENTION, _CONTEXT, _FFN = range(5)
_WORD = (1 << 32) - 1
# Beside this an fp32 sum keeps halves only, so the eighths of the other ranks round, each order in its own way.
_LARGE = 2.0**22


def scramble(values: Tensor) -> Tensor:
    """Return a well mixed integer in [0, 2^31) for each int64 value; the same on every device."""
    mixed = (values & _WORD) * 0x2C1B3C6D
    mixed = ((mixed ^ (mixed >> 15)) & _WORD) * 0x297A2D39
    return ((mixed ^ (mixed >> 13)) & _WORD) >> 1


def salt(*parts: int) -> int:
    """Return one integer for a tuple of small ones, so that each layer, head and expert hashes differently."""
    mixed = 17
    for part in parts:
        mixed = (mixed * 0x01000193 + part + 1) & 0x7FFFFFFF
    return mixed


def patterns(values: Tensor) -> Tensor:
    """Return the bf16 patterns of `values` as int64 in 0..65535."""
    return bits(values.contiguous()).to(torch.int64) & 0xFFFF


@dataclass(frozen=True)
class StandIns:
    """The sublayers of one model of hidden size `hidden_size`.

    With `order_sensitive` the partial sums of attention nearly cancel between the first and the last rank, so that
    adding four or more ranks in another order, or in bf16, gives other bits.
    """

    hidden_size: int
    order_sensitive: bool = False

    def embed(self, ids: Tensor) -> Tensor:
        """Return bf16 [T, H], eighths in -2..2, for int64 token ids [T]."""
        column = torch.arange(self.hidden_size, device=ids.device)
        return _eighths(scramble(ids[:, None] * 977 + column + salt(_EMBED)) % 33 - 16)

    def engram(self, layer: int, residual: Tensor, ids: Tensor) -> Tensor:
        """Return residual [T, n, H] plus a memory of each token's id, rounded once; every stream gets its own."""
        place = torch.arange(residual.shape[1] * residual.shape[2], device=ids.device)
        memory = scramble(ids[:, None] * 7919 + place + salt(_ENGRAM, layer)) % 31 - 15
        return round_bf16(widen(residual) + widen(_eighths(memory)).view(residual.shape))

    def attention(self, layer: int, x: Tensor, rank: int, ranks: int, context: Tensor | None = None) -> Tensor:
        """Return the partial sum bf16 [T, H] of a rank's heads; `x` and `context` hold all T tokens."""
        heads = _salts(x.device, _ATTENTION, layer, rank, ranks)
        keys = scramble(patterns(x)[:, None] + heads[:, None]) % 17
        mixed = 3 * keys.cumsum(0) + keys.sum(0) + 5 * x.shape[0] + keys.roll(1, -1)
        if context is not None:
            mixed = mixed + scramble(patterns(context) + salt(_CONTEXT, layer))[:, None]
        partial = _negative_zeros(_eighths((scramble(mixed) % 15 - 7).sum(1)))
        return self._cancelling(partial, rank, ranks) if self.order_sensitive else partial

    def ffn(self, layer: int, x: Tensor, ids: Tensor, padding: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the partial sum bf16 [t, H] of a rank's experts for the rows at hand; +0 where `padding` is set.

        ids: int64 [t], which choose a token's expert. padding: bool [t].
        """
        heads = _salts(x.device, _FFN, layer, rank, ranks)
        expert = scramble(ids) % EXPERTS
        keys = scramble(patterns(x)[:, None] + heads[:, None] + 101 * expert[:, None, None]) % 17
        routed = scramble(3 * keys + keys.roll(1, -1) + 59 * expert[:, None, None]) % 15 - 7
        return _negative_zeros(_eighths(routed.sum(1))).masked_fill(padding[:, None], 0)

    def _cancelling(self, partial: Tensor, rank: int, ranks: int) -> Tensor:
        sign = (rank == 0) - (rank == ranks - 1)
        return round_bf16(widen(partial) + constant(sign * _LARGE, partial))


def _salts(device: torch.device, kind: int, layer: int, rank: int, ranks: int) -> Tensor:
    """The salts of a rank's heads, int64 [heads]; the heads of all ranks together are the same for any split."""
    own = range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    return torch.tensor([salt(kind, layer, head) for head in own], dtype=torch.int64, device=device)


def _eighths(values: Tensor) -> Tensor:
    """Return integers of at most 8 bits as bf16 eighths, exactly."""
    return (values.to(torch.float32) * 0.125).to(torch.bfloat16)


def _negative_zeros(values: Tensor) -> Tensor:
    """Return the values with every zero negative."""
    return values.masked_fill(values == 0, -0.0)


@dataclass(frozen=True)
class Boundary:
    """Parameters of one mHC boundary: fn fp32 [M, n*H], hc_scale [3], hc_base [M], norm_weight bf16 [H]."""

    fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor
    norm_weight: Tensor


@dataclass(frozen=True)
class Head:
    """Parameters of V4's learned head: fn fp32 [n, n*H], hc_scale [1], hc_base [n]."""

    fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor


@dataclass(frozen=True)
class Stack:
    """Parameters of a stack of layers and of its end; `head` is used by V4 only."""

    attention: tuple[Boundary, ...]
    ffn: tuple[Boundary, ...]
    head: Head
    norm_weight: Tensor


@dataclass(frozen=True)
class Weights:
    """All parameters: two stacks and what joins them.

    lm_head: fp32 [V, H]. main_proj: fp32 [H, H * aux states], main_norm: bf16 [H]. confidence: fp32 [1, 2 * H].
    """

    target: Stack
    draft: Stack
    lm_head: Tensor
    main_proj: Tensor
    main_norm: Tensor
    confidence: Tensor


def make_weights(
    *, layers: int, draft_layers: int, hc_mult: int, hidden_size: int, vocabulary: int, aux: int, device: str = "cpu"
) -> Weights:
    """Return the parameters of a model: the same numbers on every machine, no random generator involved."""
    source = _Numbers(hidden_size, hc_mult, device)
    return Weights(
        target=source.stack(1, layers),
        draft=source.stack(2, draft_layers),
        lm_head=source.grid(3, (vocabulary, hidden_size)),
        main_proj=source.grid(4, (hidden_size, hidden_size * aux)),
        main_norm=source.norm(5),
        confidence=source.grid(6, (1, 2 * hidden_size)),
    )


@dataclass(frozen=True)
class _Numbers:
    """Numbers made from their place, so that a test never depends on a generator's version.

    Divided by 97 they have full fp32 mantissas: with short ones every sum of layer 0 would be exact in any order, and
    an entry that sums in the wrong one would pass.
    """

    hidden_size: int
    hc_mult: int
    device: str

    def grid(self, seed: int, shape: tuple[int, ...]) -> Tensor:
        """fp32 multiples of 1 / 97 in -16 / 97..16 / 97, divided on the CPU and then moved."""
        count = 1
        for size in shape:
            count *= size
        numerators = (scramble(torch.arange(count) + salt(seed)) % 33 - 16).to(torch.float32)
        return (numerators / 97).view(shape).to(self.device)

    def norm(self, seed: int) -> Tensor:
        return (1 + self.grid(seed, (self.hidden_size,)).cpu()).to(torch.bfloat16).to(self.device)

    def boundary(self, seed: int) -> Boundary:
        mixes, width = self.hc_mult * (self.hc_mult + 2), self.hc_mult * self.hidden_size
        return Boundary(
            fn=self.grid(salt(seed, 1), (mixes, width)),
            hc_scale=torch.tensor([0.5, 0.25, 1.0], device=self.device),
            hc_base=self.grid(salt(seed, 2), (mixes,)),
            norm_weight=self.norm(salt(seed, 3)),
        )

    def stack(self, seed: int, layers: int) -> Stack:
        n = self.hc_mult
        head = Head(
            fn=self.grid(salt(seed, 4), (n, n * self.hidden_size)),
            hc_scale=torch.tensor([0.5], device=self.device),
            hc_base=self.grid(salt(seed, 5), (n,)),
        )
        return Stack(
            attention=tuple(self.boundary(salt(seed, 6, layer)) for layer in range(layers)),
            ffn=tuple(self.boundary(salt(seed, 7, layer)) for layer in range(layers)),
            head=head,
            norm_weight=self.norm(salt(seed, 8)),
        )
