"""Public reports of sharding and speculative-decoding bugs, each as the smallest run that would have shown it.

Bugs that a wrong schedule can show are also planted, in `tests/mutants/schedules.py`, under the same reports.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import oracle
from fast.rows import Rows
from fast.stages import Stage, stages
from oracle.model import poisoned
from oracle.ranks import SimulatedGroup, simulate
from oracle.sp import SpLayout, all_gather, shard, trim
from oracle.sublayers import make_weights
from oracle.trace import same
from tests.mutants.schedules import CapturesOneLayerEarly
from tests.stream_model import Combination, RowMemo, Schedule, batch_for, execute, plain_of, verdict
from tests.toy_model import Toy, run_toy

VERSIONS = ("v4", "v4.1")


@pytest.fixture(scope="module")
def memo() -> RowMemo:
    return RowMemo()


def on_ranks(tokens: int, tp: int, body: Callable[[Rows], Tensor]) -> list[Tensor]:
    """What `body` returns on each rank of a sharded step."""
    return simulate(tp, lambda group: body(Rows(tokens, group, True))).results


def numbered(tokens: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of which row t holds t mod 251 + 1 everywhere, exact in bf16."""
    rows = torch.arange(tokens) % 251 + 1
    return rows.view(-1, *[1] * len(shape)).expand(tokens, *shape).to(dtype)


@pytest.mark.parametrize(("tokens", "tp"), [(1, 2), (1, 4), (1, 8), (2, 2)])
def test_a_shard_is_known_by_its_flag(tokens: int, tp: int) -> None:
    """vllm-project/vllm pull 50691: at T = 1 a shard has as many rows as the whole, so no shape can tell them apart."""
    whole = numbered(tokens, 4, 64)
    assert all(same(got, whole) for got in on_ranks(tokens, tp, lambda rows: rows.full(rows.own(whole))))
    unsharded = simulate(tp, lambda group: Rows(tokens, group, False).full(whole))
    assert all(not calls for calls in unsharded.log.per_rank)
    with pytest.raises(TypeError, match="sharded"):
        Rows(tokens, SimulatedGroup(0, tp, lambda *_: []))  # type: ignore[call-arg]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_every_length_from_none_to_past_two_rounds(tp: int) -> None:
    """pytorch/torchtitan issues 3622 and 1306: fewer tokens than ranks, and lengths that tp does not divide."""
    for tokens in (*range(2 * tp + 2), 8193):
        whole, layout = numbered(tokens, 16), SpLayout(tokens, tp)
        held = on_ranks(tokens, tp, lambda rows, whole=whole: rows.own(whole))  # type: ignore[misc]
        assert [len(rows) for rows in held] == [-(-tokens // tp)] * tp
        for rank, rows in enumerate(held):
            assert not bits_of(rows[layout.valid_rows(rank) :]).any()
        assert same(trim(torch.cat(held), layout), whole)
        assert all(same(rows, ours) for rows, ours in zip(held, shard(whole, layout), strict=True))


def bits_of(tensor: Tensor) -> Tensor:
    return oracle.arith.bits(tensor.contiguous())


@pytest.mark.parametrize(("tokens", "tp"), [(56700, 8), (9, 8)])
def test_no_token_is_lost_to_floor_division(tokens: int, tp: int) -> None:
    """ByteDance-Seed/VeOmni pull 1139: 56700 tokens on 8 ranks lost 4 of them."""
    ids = torch.arange(tokens) + 1
    held = torch.cat(on_ranks(tokens, tp, lambda rows: rows.own(ids)))
    assert torch.equal(held[held > 0], ids)


@pytest.mark.parametrize("shape", [(), (8,), (4, 8)])
def test_only_the_token_axis_is_padded(shape: tuple[int, ...]) -> None:
    """vllm-project/vllm pull 46789: ids [T], hidden [T, H] and streams [T, n, H] shard alike."""
    whole = numbered(5, *shape)
    for rank, rows in enumerate(on_ranks(5, 4, lambda rows: rows.own(whole))):
        assert rows.shape == (2, *shape)
        assert same(rows, shard(whole, SpLayout(5, 4))[rank])


def test_ids_lie_with_the_states_they_belong_to() -> None:
    """local-inference-lab/vllm pull 623: states sharded and ids not, so that hash routing saw other rows' ids."""
    ids = torch.arange(5)

    def aligned(rows: Rows) -> Tensor:
        hidden = rows.own((ids + 1)[:, None].expand(5, 8).to(torch.bfloat16), fill=1)
        return rows.own(ids) + 1 - hidden[:, 0].to(torch.int64)

    assert all(not difference.any() for difference in on_ranks(5, 4, aligned))


class Filled(Rows):
    """Rows whose added padding holds something else than zero in every floating tensor."""

    value = 0.0

    def own(self, tensor: Tensor, fill: float = 0) -> Tensor:
        return super().own(tensor, self.value if tensor.is_floating_point() else fill)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -0.0])
@pytest.mark.parametrize(("version", "tokens", "tp"), [("v4", 9, 8), ("v4.1", 5, 4), ("v4.1", 1, 8)])
def test_what_pad_rows_hold_reaches_no_token(version: str, tokens: int, tp: int, value: float) -> None:
    """vllm-project/vllm issue 40047 and alibaba/rtp-llm pull 1251: what lies in pad rows changed tokens' results."""
    poison = type("Poison", (Filled,), {"value": value})
    c = Combination(version, tp=tp, sharded=True, tokens=tokens, aux_ids=(1, 3), engram=(1,), draft_layers=1)
    assert verdict(c, execute(c, schedule=Schedule(rows=poison))) == ""


@pytest.mark.parametrize(("version", "tokens"), list(product(VERSIONS, (1, 3, 8, 9))))
def test_the_draft_starts_from_the_targets_rows(version: str, tokens: int, memo: RowMemo) -> None:
    """vllm-project/vllm pulls 48036, 46995 and 42320: the hand-over to MTP, sharded, and with its post done."""
    c = Combination(version, tp=8, sharded=True, tokens=tokens, buffer=True)
    outcome = execute(c, memo)
    assert verdict(c, outcome) == ""
    held = [trace.states["draft entry streams"][0] for trace in outcome.traces[0]]
    assert same(trim(all_gather(held, c.layout), c.layout), plain_of(c).states["final streams"])


@pytest.mark.parametrize("tp", [2, 8])
def test_slots_without_a_request_are_zero_before_a_reduction(tp: int, memo: RowMemo) -> None:
    """sgl-project/sglang pull 30895: 3 requests in a graph of 8 slots, the other rows entered the reduction."""
    c = Combination("v4.1", tp=tp, tokens=8, padded_slots=5)
    outcome = execute(c, memo)
    assert verdict(c, outcome) == ""
    output = outcome.traces[0][0].states["layer 0 ffn output"][0]
    assert not bits_of(output[3:]).any()
    assert bits_of(output[:3]).any(1).all()


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_factor_of_tp_is_seen_before_any_norm(tp: int) -> None:
    """vllm-project/vllm pull 48763: states were multiplied by tp and the norm behind them hid it.

    A gathered or reduced 1 is exactly 1. And the coefficients cannot show it: streams times 8 leave them alone.
    """
    ones = torch.ones(tp, 8, dtype=torch.bfloat16)
    assert all(same(got, ones) for got in on_ranks(tp, tp, lambda rows: rows.full(rows.own(ones))))
    reduced = on_ranks(tp, tp, lambda rows: rows.added(ones * (rows.group.rank == tp - 1)))
    assert all(same(got, ones[:1]) for got in reduced)
    w = make_weights(layers=1, draft_layers=1, hc_mult=2, hidden_size=8, vocabulary=2, aux=1).target.attention[0]
    streams, config = numbered(3, 2, 8), oracle.MhcConfig(2, rms_eps=1e-20, norm_eps=1e-20)
    small = oracle.pre_delayed(streams, w.fn, w.hc_scale, w.hc_base, config=config, norm_weight=w.norm_weight)
    large = oracle.pre_delayed(8 * streams, w.fn, w.hc_scale, w.hc_base, config=config, norm_weight=w.norm_weight)
    assert all(same(ours, theirs) for ours, theirs in zip(small, large, strict=True))
    x = numbered(3, 8)
    assert same(oracle.post(8 * x, 8 * streams, *small[:2]), 8 * oracle.post(x, streams, *small[:2]))


def test_each_rank_gets_its_own_rows_at_a_stage_border() -> None:
    """vllm-project/vllm pull 24021: a stage sent rank 0's tensors on as if all ranks held the same."""
    toy = Toy("v4.1", 2)
    first, second = stages(toy, 2)
    sent = [step.sent for step, _ in simulate(4, lambda group: run_toy(toy, group, first, tokens=6)).results]
    for rank, tensors in enumerate(sent):
        tensors["hidden_states"] = tensors["hidden_states"] + rank
    traces = simulate(4, lambda group: run_toy(toy, group, second, received=sent[group.rank], tokens=6)[1]).results
    for rank, trace in enumerate(traces):
        assert trace.states["layer 1 entry streams"][0].unique().tolist() == [1 + rank]


def means(toy: Toy, pp: int = 1, borders: tuple[int, ...] | None = None) -> tuple[list[list[float]], list[Stage]]:
    """The aux states of a toy model run in stages, as the values that they hold."""
    received = None
    parts = stages(toy, pp, borders)
    for stage in parts:
        step, _ = simulate(1, lambda group, s=stage, r=received: run_toy(toy, group, s, received=r)).results[0]  # type: ignore[misc]
        poison = {f"aux_hidden_states_{i}": poisoned((3, 4)) for i in range(len(toy.aux_ids))}
        received = poison | step.sent
    return [state.to(torch.float32).unique().tolist() for state in step.aux], parts


def test_ids_count_layers_as_each_version_does() -> None:
    """vllm-project/vllm pulls 43671 and 46788: one layer early, and an id of the last layer that captured nothing.

    Layer i adds i + 1, so the streams entering layer k hold k (k + 1) / 2; both ends are included.
    """
    assert means(Toy("v4.1", 6, (0, 2, 5, 6)))[0] == [[0], [3], [15], [21]]
    assert means(Toy("v4", 6, (0, 2, 4, 5)))[0] == [[1], [6], [15], [21]]
    assert means(Toy("v4.1", 6, (6,)))[0] == means(Toy("v4", 6, (5,)))[0] == [[21]]


@pytest.mark.parametrize("ids", [(0,), (2,), (3,), (4,), (6,), (8,), (0, 2, 3, 4, 6, 8), (8, 2, 6)])
def test_states_at_stage_borders_are_sent_once(ids: tuple[int, ...]) -> None:
    """vllm-project/vllm-ascend pull 16263 and vllm-project/vllm pull 53901: ids on the borders of four stages.

    Slots hold poison until written, so one that nobody wrote, or that was written over, shows.
    """
    toy = Toy("v4.1", 8, ids)
    values, parts = means(toy, 4, (2, 4, 6))
    assert values == [[k * (k + 1) // 2] for k in ids]
    assert sum(stage.owns(entering) for stage in parts for entering in ids) == len(ids)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_aux_state_is_the_mean_over_streams(version: str) -> None:
    """vllm-project/vllm pull 46995: mean over streams, the head's output or the last stream; here 2.5, 3.125 or 4.

    The buffer that an MTP draft would read is left alone.
    """
    toy = Toy(version, 1, (0,), config=oracle.MhcConfig(4), hidden_size=8)
    ramp = torch.arange(1, 5).view(1, 4, 1).expand(3, 4, 8).to(torch.bfloat16)
    kernels = {"expand": lambda *_: ramp.contiguous()}
    step, _ = simulate(1, lambda group: run_toy(toy, group, stages(toy, 1)[0], kernels=kernels)).results[0]
    added = 1 if version == "v4" else 0
    assert step.aux[0].unique().tolist() == [2.5 + added]


def test_joined_states_are_one_row_a_token(memo: RowMemo) -> None:
    """sgl-project/sglang pull 31466: states were captured in one list and the output made of another."""
    c = Combination("v4.1", aux_ids=(3, 1), tokens=7)
    outcome = execute(c, memo)
    assert verdict(c, outcome) == ""
    joined, aux = outcome.traces[0][0].states["draft joined aux"][0], outcome.steps[0][0].aux
    assert joined.shape == (7, 2 * c.hidden_size)
    assert same(joined, torch.cat(aux, 1))


def test_a_wrong_state_does_not_show_in_the_targets_output(memo: RowMemo) -> None:
    """vllm-project/vllm pull 50170: wrong ids left the output right and the acceptance at 1.2 %."""
    c = Combination("v4.1", aux_ids=(1, 3))
    states = execute(c, memo, Schedule(target=CapturesOneLayerEarly)).traces[0][0].states
    assert same(states["logits"][0], plain_of(c).states["logits"])
    assert not same(states["draft logits"][0], plain_of(c).states["draft logits"])


def test_batches_differ_in_every_row() -> None:
    """Ids that repeat soon would hide a row that was taken for another."""
    assert len(batch_for(Combination(tokens=17)).ids.unique()) == 17
