"""The sequence-parallel layout and its collectives.

Wrong code that these catch: floor division that loses the remainder, padding at the front, a layout guessed from a
shape, a gather that forgets the trim or does it for the caller, ids that do not travel with their states, a reduction
whose order depends on the owner, and bytes counted wrongly.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from oracle import sp
from oracle.sp import CollectiveLog, SpLayout

GRID = [(tokens, tp) for tp in (1, 2, 4, 8) for tokens in range(2 * tp + 2)]


def token_ids(tokens: int, *trailing: int) -> torch.Tensor:
    """Every value names its token: a row that moves, is lost or is doubled shows."""
    ids = torch.arange(1, tokens + 1, dtype=torch.float32)
    return ids.reshape(-1, *(1 for _ in trailing)).expand(tokens, *trailing).contiguous()


@pytest.mark.parametrize(("tokens", "tp"), GRID)
def test_layout_follows_the_closed_formula(tokens: int, tp: int) -> None:
    layout = SpLayout(tokens, tp)
    chunk = -((-tokens) // tp)
    assert layout.rows_per_rank == chunk
    assert layout.padded_tokens == chunk * tp
    assert layout.pad_rows == (-tokens) % tp
    assert [layout.valid_rows(r) for r in range(tp)] == [
        len(range(tokens)[r * chunk : (r + 1) * chunk]) for r in range(tp)
    ]
    assert sum(layout.valid_rows(r) + layout.pad_rows_of(r) for r in range(tp)) == layout.padded_tokens


def test_nine_tokens_on_eight_ranks_worked_by_hand() -> None:
    """chunk 2: ranks 0-3 full, rank 4 one token and one pad row, ranks 5-7 padding only."""
    layout = SpLayout(9, 8)
    assert [layout.valid_rows(rank) for rank in range(8)] == [2, 2, 2, 2, 1, 0, 0, 0]
    assert layout.global_row(4, 0) == 8
    assert layout.owner(9) == (4, 1)


@pytest.mark.parametrize(("tokens", "tp"), GRID)
def test_gather_of_shards_is_the_tensor(tokens: int, tp: int) -> None:
    layout = SpLayout(tokens, tp)
    for full in (token_ids(tokens), token_ids(tokens, 3), token_ids(tokens, 4, 3)):
        shards = sp.shard(full, layout, float("nan"))
        assert [tuple(s.shape) for s in shards] == [(layout.rows_per_rank, *full.shape[1:])] * tp
        assert torch.equal(sp.trim(sp.all_gather(shards, layout), layout), full)


@pytest.mark.parametrize(("tokens", "tp"), [(56700, 8), (9, 8), (8193, 2), (8193, 4), (8193, 8)])
def test_every_token_is_held_exactly_once(tokens: int, tp: int) -> None:
    """split(T // tp) loses four of 56,700 tokens on 8 ranks; here each id comes out once."""
    layout = SpLayout(tokens, tp)
    shards = sp.shard(token_ids(tokens), layout, -1.0)
    held = torch.cat([s[: layout.valid_rows(rank)] for rank, s in enumerate(shards)])
    assert torch.equal(held, token_ids(tokens))
    padded = [rank for rank in range(tp) if layout.pad_rows_of(rank)]
    assert padded == list(range(tp - len(padded), tp))


@pytest.mark.parametrize(("tokens", "tp"), GRID)
def test_masks_ids_and_states_stay_together(tokens: int, tp: int) -> None:
    layout = SpLayout(tokens, tp)
    ids, states = sp.shard(torch.arange(tokens), layout), sp.shard(token_ids(tokens, 2), layout)
    for rank, mask in enumerate(sp.padding_mask(layout)):
        assert mask.tolist() == [layout.global_row(rank, row) >= tokens for row in range(layout.rows_per_rank)]
        assert torch.equal(ids[rank][~mask].float() + 1, states[rank][~mask][:, 0])
        assert not states[rank][mask].any()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e30])
def test_pad_rows_hold_the_fill(value: float) -> None:
    padded = sp.pad(token_ids(5, 2), SpLayout(5, 4), value)
    assert torch.equal(padded[5:].nan_to_num(7.0), torch.full((3, 2), value).nan_to_num(7.0))


def test_reduction_adds_ranks_in_order_and_rounds_once() -> None:
    """1 + 3 * 2^-9: added in FP32 and rounded once it is 1 + 2^-7; rounded after every rank it stays 1."""
    layout = SpLayout(3, 4)
    small = torch.full((3, 2), 2.0**-9, dtype=torch.bfloat16)
    partials = [torch.ones_like(small), small, small, small]
    reduced = sp.trim(torch.cat(sp.reduce_scatter(partials, layout)), layout)
    assert Fraction(1) + 3 * Fraction(1, 512) > 1 + Fraction(1, 256)
    assert reduced.float().unique().tolist() == [1.0078125]
    stepwise = partials[0]
    for partial in partials[1:]:
        stepwise = stepwise + partial
    assert stepwise.float().unique().tolist() == [1.0]


def test_reduction_of_a_token_does_not_depend_on_its_owner() -> None:
    big, tiny = 2.0**24, 1.0
    for tokens in (1, 33):
        for tp in (2, 4, 8):
            partials = [torch.full((tokens, 1), big if rank == 0 else tiny) for rank in range(tp)]
            reduced = torch.cat(sp.reduce_scatter(partials, SpLayout(tokens, tp)))[:tokens]
            assert reduced.unique().tolist() == [big]


def test_reduction_of_ones_gives_the_sum_and_pad_rows_zero() -> None:
    """A factor of tp too many hides behind any norm; here the sum itself is looked at."""
    layout = SpLayout(3, 2)
    reduced = torch.cat(sp.reduce_scatter([torch.ones(3, 2), torch.zeros(3, 2)], layout))
    assert reduced.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_log_counts_what_a_rank_receives() -> None:
    """DSpark tail, 4 streams: gathering streams and pre-mix is 8H + 16 bytes a row, the collapsed state 2H."""
    layout, hidden = SpLayout(7, 4), 32
    before, after = CollectiveLog(4), CollectiveLog(4)
    streams = torch.zeros(7, 4, hidden, dtype=torch.bfloat16)
    sp.all_gather(sp.shard(streams, layout), layout, before)
    sp.all_gather(sp.shard(torch.zeros(7, 4), layout), layout, before)
    sp.all_gather(sp.shard(streams[:, 0], layout), layout, after)
    assert [len(issued) for issued in before.per_rank] == [2] * 4
    assert [len(issued) for issued in after.per_rank] == [1] * 4
    assert before.received_bytes() == 3 * 2 * (8 * hidden + 16)
    assert after.received_bytes() == 3 * 2 * 2 * hidden
    assert before.uniform
    assert after.uniform


def test_log_shows_a_collective_that_only_some_ranks_issue() -> None:
    layout, log = SpLayout(3, 2), CollectiveLog(2)
    sp.all_gather(sp.shard(token_ids(3, 2), layout), layout, log)
    assert log.uniform
    log.per_rank[1].pop()
    assert not log.uniform


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: SpLayout(-1, 2), ValueError, "tokens must be at least 0, got -1"),
        (lambda: SpLayout(3, 0), ValueError, "tp must be at least 1, got 0"),
        (lambda: SpLayout(3.0, 2), TypeError, "tokens must be an int, got float 3.0"),  # type: ignore[arg-type]
        (lambda: SpLayout(3, True), TypeError, "tp must be an int, got bool True"),
        (lambda: sp.shard(torch.zeros(2, 1), SpLayout(3, 2)), ValueError, "expected 3 rows"),
        (lambda: sp.trim(torch.zeros(3, 1), SpLayout(3, 2)), ValueError, "expected 4 rows"),
        (
            lambda: sp.all_gather([torch.zeros(2, 1)], SpLayout(3, 2)),
            ValueError,
            "expected 2 tensors, one a rank, got 1",
        ),
        (
            lambda: sp.all_gather([torch.zeros(2, 1), torch.zeros(2, 1).double()], SpLayout(3, 2)),
            ValueError,
            "rank 1 passes",
        ),
        (lambda: SpLayout(3, 2).owner(4), IndexError, "row must be in 0..3"),
        (lambda: SpLayout(3, 2).global_row(0, 2), IndexError, "local_row must be in 0..1"),
        (lambda: SpLayout(3, 2).first_row(2), IndexError, "rank must be in 0..1, got 2"),
    ],
)
def test_bad_input_is_named(call: object, error: type[Exception], words: str) -> None:
    assert callable(call)
    with pytest.raises(error, match=words.replace("(", r"\(")):
        call()
