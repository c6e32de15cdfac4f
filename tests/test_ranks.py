"""Ranks: simulated ones find every disagreement without a hang, and real processes compute the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fast.rows import Rows
from oracle.arith import bits
from oracle.processes import Place, Whereabouts, connect
from oracle.ranks import Call, RankError, SimulatedGroup, check_agreement, simulate
from oracle.sp import CollectiveLog, SpLayout, padding_mask, reduce_scatter
from oracle.trace import same
from tests.rank_process import Plan, answer_path, digest
from tests.stream_model import Combination, RowMemo, execute, verdict

ROOT = Path(__file__).parent.parent
PATIENCE = 240


def rows(rank: int, count: int = 2) -> Tensor:
    return torch.full((count, 3), float(rank + 1), dtype=torch.bfloat16)


def test_simulated_collectives_move_the_right_rows() -> None:
    """Catches ranks in another order, a scatter of the wrong part, and a tensor that a fast rank overwrites early."""

    def body(group: SimulatedGroup) -> list[Tensor]:
        shown = []
        for turn in range(3):
            shown.append(group.all_gather(rows(group.rank + turn)))
            shown.append(group.all_reduce(rows(group.rank + turn)))
            whole = torch.arange(8).view(8, 1).to(torch.float32) * (group.rank + turn)
            shown.append(group.reduce_scatter(whole))
        return shown

    for rank, shown in enumerate(simulate(4, body).results):
        for turn in range(3):
            gathered, reduced, scattered = shown[3 * turn : 3 * turn + 3]
            assert same(gathered, torch.cat([rows(r + turn) for r in range(4)]))
            assert same(reduced, torch.full((2, 3), 10.0 + 4 * turn, dtype=torch.bfloat16))
            assert scattered.flatten().tolist() == [(6 + 4 * turn) * h for h in (2 * rank, 2 * rank + 1)]


def test_reductions_add_as_the_layout_model_does() -> None:
    """Catches two rules for one sum: cancelling partials at four ranks tell every order and precision apart."""
    partials = [torch.tensor([[value, 1.0]]).to(torch.bfloat16) for value in (2.0**25, 1.0, 1.0, -(2.0**25))]
    layout = SpLayout(4, 4)
    whole = [partial.expand(4, 2).contiguous() for partial in partials]
    ours = simulate(4, lambda group: group.reduce_scatter(whole[group.rank])).results
    assert all(same(got, expected) for got, expected in zip(ours, reduce_scatter(whole, layout), strict=True))
    assert ours[0].tolist() == [[0.0, 4.0]]
    assert len(padding_mask(layout)) == 4


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_sum_of_negative_zeros_is_positive_for_any_tp(tp: int, sharded: bool) -> None:
    """Catches a sum that starts with the first rank's part, and one rank that takes its part for the sum: -0 stays."""
    part = torch.full((3, 2), -0.0, dtype=torch.bfloat16)
    assert bits(part).all()
    for total in simulate(tp, lambda group: Rows(3, group, sharded).added(part)).results:
        assert not bits(total).any()


def test_the_log_says_what_each_rank_issued() -> None:
    """Catches bytes counted for this rank's own rows, or for a whole tensor where a part is received."""

    def body(group: SimulatedGroup) -> None:
        group.all_gather(rows(group.rank))
        group.reduce_scatter(torch.zeros(8, 3))

    log = simulate(4, body).log
    assert isinstance(log, CollectiveLog)
    assert log.uniform
    assert [(call.kind, call.shape, call.received_bytes) for call in log.per_rank[2]] == [
        ("all_gather", (2, 3), 3 * 2 * 3 * 2),
        ("reduce_scatter", (8, 3), 3 * 2 * 3 * 4),
    ]


def only_some(group: SimulatedGroup) -> None:
    if group.rank != 2:
        group.all_gather(rows(group.rank))


def other_shapes(group: SimulatedGroup) -> None:
    group.all_gather(rows(group.rank, 2 if group.rank else 1))


def other_dtypes(group: SimulatedGroup) -> None:
    group.all_gather(rows(group.rank).to(torch.float32 if group.rank == 3 else torch.bfloat16))


def other_kinds(group: SimulatedGroup) -> None:
    (group.all_reduce if group.rank == 1 else group.all_gather)(rows(group.rank))


def another_order(group: SimulatedGroup) -> None:
    calls = [group.all_gather, group.all_reduce]
    for call in reversed(calls) if group.rank == 1 else calls:
        call(rows(group.rank))


def ends_early(group: SimulatedGroup) -> None:
    for _ in range(3 if group.rank == 0 else 2):
        group.all_reduce(rows(group.rank))


DISAGREEMENTS: list[tuple[Callable[[SimulatedGroup], None], str]] = [
    (only_some, "collective 0: ranks disagree: ranks 0, 1, 3: all_gather [2, 3] bfloat16; rank 2: nothing more"),
    (other_shapes, "rank 0: all_gather [1, 3] bfloat16; ranks 1, 2, 3: all_gather [2, 3] bfloat16"),
    (other_dtypes, "ranks 0, 1, 2: all_gather [2, 3] bfloat16; rank 3: all_gather [2, 3] float32"),
    (other_kinds, "ranks 0, 2, 3: all_gather [2, 3] bfloat16; rank 1: all_reduce [2, 3] bfloat16"),
    (another_order, "collective 0: ranks disagree: ranks 0, 2, 3: all_gather"),
    (ends_early, "collective 2: ranks disagree: rank 0: all_reduce [2, 3] bfloat16; ranks 1, 2, 3: nothing more"),
]


@pytest.mark.parametrize(("body", "text"), DISAGREEMENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_disagreement_is_an_error_that_names_ranks_and_calls(
    body: Callable[[SimulatedGroup], None], text: str
) -> None:
    """Catches a rank-conditional collective, which would hang a real job; here no thread is left behind either."""
    before = threading.active_count()
    with pytest.raises(RankError) as caught:
        simulate(4, body)
    assert text in str(caught.value)
    assert threading.active_count() == before


def test_a_rank_that_raises_is_named() -> None:
    """Catches an error that is lost in a thread, or that leaves the other ranks waiting."""

    def body(group: SimulatedGroup) -> None:
        group.all_gather(rows(group.rank))
        if group.rank == 3:
            raise KeyError("broken")
        group.all_gather(rows(group.rank))

    with pytest.raises(KeyError, match="broken") as caught:
        simulate(4, body)
    assert caught.value.__notes__ == ["raised by rank 3 of 4 before its collective 1"]


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TypeError, "all_gather: expected a tensor of", lambda group: group.all_gather(None)),
        (TypeError, "all_gather: expected a tensor of", lambda group: group.all_gather(torch.zeros(1).double())),
        (
            ValueError,
            "all_gather: expected rows along dim 0 of 1 to 4",
            lambda group: group.all_gather(torch.zeros(())),
        ),
        (ValueError, "got 5 dimensions", lambda group: group.all_gather(torch.zeros(1, 1, 1, 1, 1))),
        (TypeError, "all_reduce: expected bfloat16 or float32", lambda group: group.all_reduce(torch.arange(2))),
        (ValueError, "reduce_scatter: rows must be", lambda group: group.reduce_scatter(torch.zeros(3, 1))),
    ],
)
def test_calls_that_no_group_can_take(error: type[Exception], text: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(error, match=text):
        simulate(2, call)


def test_agreement_is_about_kind_shape_and_dtype() -> None:
    check_agreement([Call("all_gather", (1,), "torch.int64")] * 3, 0)
    check_agreement([], 0)


def answers(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """Run a plan's ranks as processes and return what each wrote; the culprit, if there is one, writes nothing."""
    path = folder / "plan.json"
    plan.write(path)
    # All ranks are on this machine; NVLink multicast needs rights that containers often lack, and saves nothing here.
    env = {"NCCL_NVLS_ENABLE": "0"} | os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.rank_process", str(path)]
    launcher = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = launcher.communicate(timeout=PATIENCE)
    except BaseException:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
        raise
    assert launcher.returncode == 0, errors
    ranks = [rank for rank in range(plan.tp * plan.pp) if rank != plan.culprit]
    return [json.loads(answer_path(path, rank).read_text()) for rank in ranks]


def simulated(c: Combination, kernels: Any) -> list[dict[str, str]]:
    """What each rank of each stage of the simulation shows, stage after stage."""
    outcome = execute(c, kernels)
    assert verdict(c, outcome) == ""
    return [digest(trace) for stage in outcome.traces for trace in stage]


def assert_equal(plan: Plan, shown_by: list[dict[str, Any]]) -> None:
    """Each process showed what its simulated rank shows, in every state of every combination."""
    assert all("states" in answer for answer in shown_by), shown_by
    memo = RowMemo()
    for number, c in enumerate(plan.combinations):
        for rank, expected in enumerate(simulated(c, memo)):
            shown = shown_by[rank]["states"][number]
            wrong = [name for name in expected if shown.get(name) != expected[name]]
            assert not wrong, f"{c}: process {rank} differs from the simulation in {wrong[0]} and {len(wrong)} in all"
            assert shown.keys() == expected.keys()


SMALL = Combination(layers=2, draft_layers=1)


def runs(tp: int) -> tuple[Combination, ...]:
    """Sharded and whole, with and without tokens for every rank, both tails, aux states or the buffer."""
    sharded = replace(SMALL, tp=tp, sharded=True)
    return (
        replace(sharded, tokens=2 * tp + 1, aux_ids=(0, 2), engram=(1,)),
        replace(sharded, tokens=3, buffer=True, version="v4"),
        replace(sharded, tokens=0, aux_ids=(1,), tail="gather_first"),
        replace(sharded, tokens=tp, order_sensitive=True, aux_ids=(2,)),
        replace(SMALL, tp=tp, tokens=5, order_sensitive=True, version="v4", aux_ids=(1,)),
    )


@pytest.mark.parametrize(("tp", "pp"), [(4, 1), (8, 1), (4, 2)], ids=["4 ranks", "8 ranks", "4 ranks in 2 stages"])
def test_real_ranks_equal_the_simulation(tp: int, pp: int, tmp_path: Path) -> None:
    """Catches a simulation that is kinder than a network: gloo between real processes, bit for bit, on every rank."""
    chosen = runs(tp)
    if pp > 1:
        chosen = tuple(replace(SMALL, tp=tp, pp=pp, tokens=t, aux_ids=(2, 1), engram=(1,)) for t in (5, 0))
    plan = Plan(chosen, tp, pp)
    assert_equal(plan, answers(plan, tmp_path))


FAULTS = {
    "absent": "rank 2 did not come within 8 s",
    "dies": "rank 2 went no further than collective 1 (reduce_scatter [8, 8] bfloat16)",
    "skips": "ranks disagree: ranks 0, 1, 3: all_gather [2, 8] bfloat16; rank 2: reduce_scatter [8, 8] bfloat16",
    "sleeps": "rank 2 went no further than collective 1 (reduce_scatter [8, 8] bfloat16)",
    "raises": "(timeout 8 s): rank 2 failed: ValueError: this rank has had enough (",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_rank_is_a_clear_error_in_time(fault: str, tmp_path: Path) -> None:
    """Catches a job that hangs, or that ends without saying who is missing: every other rank names rank 2."""
    c = replace(SMALL, tp=4, sharded=True, tokens=7)
    plan = Plan((c,), 4, timeout=8, fault=fault, culprit=2)
    for answer in answers(plan, tmp_path):
        assert FAULTS[fault] in answer.get("error", ""), answer
        assert answer["seconds"] < 2 * plan.timeout


FAULTS_OF_A_STAGE = {
    "dies": "(timeout 20 s): rank 1 of stage 0 went no further than collective 1 (all_reduce [5, 8] bfloat16) (",
    "raises": "(timeout 20 s): rank 1 of stage 0 failed: ValueError: this rank has had enough (",
}


@pytest.mark.parametrize("fault", FAULTS_OF_A_STAGE)
def test_the_next_stage_names_the_lost_rank_too(fault: str, tmp_path: Path) -> None:
    """Catches ranks that wait for a stage before theirs and blame each other, or wait out a peer that is gone."""
    c = replace(SMALL, layers=4, tp=2, pp=2, tokens=5)
    plan = Plan((c,), 2, 2, timeout=20, fault=fault, culprit=1)
    for answer in answers(plan, tmp_path):
        assert FAULTS_OF_A_STAGE[fault] in answer.get("error", ""), answer
        assert answer["seconds"] < plan.timeout


LOST = "LostRank: rank 0 of stage 0: collective 2"
# What the processes of two stages of two ranks said, who asks, whom it waited for, and whom it must name.
SAID: list[tuple[dict[str, str], int, int | None, str]] = [
    ({"at/0": "2 b", "at/1": "1 a"}, 0, None, "rank 1 of stage 0 went no further than collective 1 (a)"),
    ({"at/0": "2 b"}, 0, None, "rank 1 of stage 0 has made no call"),
    ({"at/0": "2 b", "at/1": "1 a", "failed/0": LOST, "at/2": "0 r"}, 2, 0, "rank 1 of stage 0 went no further"),
    ({"at/0": "1 a", "at/1": "1 a", "at/3": "0 r"}, 3, 1, "rank 1 of stage 0 went no further than collective 1 (a)"),
    ({"at/0": "1 a", "at/1": "1 a", "at/2": "2 x", "at/3": "0 r"}, 3, 1, "rank 1 of stage 0 went no further"),
    ({"at/2": "2 x", "at/3": "2 x", "failed/1": "KeyError: k"}, 2, None, "rank 1 of stage 0 failed: KeyError: k"),
    ({"at/0": "2 b", "at/1": "2 b", "at/2": "1 x", "at/3": "2 x", "failed/0": LOST}, 1, None, "rank 0 of stage 1 went"),
    ({f"at/{process}": "2 b" for process in range(4)}, 0, None, "no process is behind the others"),
]


@pytest.mark.parametrize(("said", "asks", "peer", "named"), SAID)
def test_who_is_missing_follows_from_what_all_said(
    said: dict[str, str], asks: int, peer: int | None, named: str
) -> None:
    """Catches a victim that is blamed: one that gave up waiting, the asker itself, ranks that wait elsewhere."""
    store = HashStore()
    for key, value in said.items():
        store.set(f"ranks/{key}", value)
    place = Place(asks % 2, 2, asks // 2, 2)
    assert Whereabouts(store, place).missing(peer).startswith(named)


def test_places_that_do_not_exist_are_refused() -> None:
    """Catches a rank count that is not the launcher's, which would wait for processes that no one starts."""
    with pytest.raises(ValueError, match=r"rank must be in 0..tp - 1, got 2 with tp = 2"):
        Place(2, 2)
    with pytest.raises(ValueError, match=r"stage must be in 0..pp - 1, got 1 with pp = 1"):
        Place(0, 2, 1, 1)


def test_a_connection_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    """Catches waiting for what cannot come: a stage that does not exist, the peers of a run that is over."""
    with connect(Place(0, 1), tmp_path / "first", timeout=5) as group:
        with pytest.raises(ValueError, match="stage 0 of 1 has no stage after it"):
            group.send({})
        with pytest.raises(ValueError, match="stage 0 of 1 has no stage before it"):
            group.receive()
        with (
            pytest.raises(ValueError, match="rank 0 has used this meeting file before"),
            connect(Place(0, 1), tmp_path / "first"),
        ):
            pass


@pytest.mark.more_than_a_gpu
def test_two_gpus_equal_the_simulation(tmp_path: Path, device: str) -> None:
    """Catches what only NCCL and compiled kernels do; the schedule's code is the one above."""
    if device != "cuda":
        pytest.skip("this run keeps to the CPU")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this process sees {torch.cuda.device_count()} (an xdist worker sees one)")
    plan = Plan(runs(2), 2, device="cuda", backend="triton", timeout=120)
    assert_equal(plan, answers(plan, tmp_path))
