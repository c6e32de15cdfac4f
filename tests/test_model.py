"""The fused schedule has the plain one's bits, however a model is spread over ranks and stages.

`tests/test_schedule_mutants.py` shows what the comparison used here catches. Cases of public reports are marked with
the report; where a report is about one mechanism, the mechanism is tested by itself with numbers one can do by head.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

import fast
import oracle
from fast.model import Boundaries, Engine, Kernels, run_stage
from fast.rows import Parallel
from fast.stages import AuxStates, MtpBuffer, Stage, stages, wanted_states
from oracle.model import Batch, poisoned
from oracle.ranks import SimulatedGroup, simulate
from oracle.trace import same
from tests.stream_model import (
    Combination,
    Outcome,
    OwnRank,
    RowMemo,
    batch_for,
    execute,
    judge_own,
    of_oracle,
    plain_of,
    verdict,
    weights_for,
)
from tests.toy_model import TOY_KERNELS, Toy, ToySublayers

VERSIONS = ("v4", "v4.1")
TOKENS = (0, 1, 3, 7, 8, 9, 17)
TPS, PPS = (1, 2, 4, 8), (1, 2, 3)
LAYERS, ENGRAM = 4, (1,)
# By the layer that the streams enter: borders are 2 (pp 2) and 1, 2 (pp 3), and layer 1 has an Engram.
AUX_SETS = {
    "none": (),
    "first": (1,),
    "last": (4,),
    "adjacent": (2, 3),
    "all": (1, 2, 3, 4),
    "across a border": (2, 4),
    "at an Engram layer and a stage start": (1, 3),
    "in another order": (4, 1, 2),
}


def grid(version: str, aux: str) -> list[Combination]:
    """The combinations of one version and aux set: every (pp, tp) twice, the rest so that all pairs come up."""
    after = 1 if version == "v4" else 0
    ids = tuple(entering - after for entering in AUX_SETS[aux])
    if aux == "first" and version == "v4.1":
        ids = (0,)
    found = []
    for number, (pp, tp, turn) in enumerate(product(PPS, TPS, range(2))):
        row, of_v41 = list(AUX_SETS).index(aux), VERSIONS.index(version)
        place = number + 3 * row + 5 * of_v41
        tokens = TOKENS[place % len(TOKENS)]
        found.append(
            Combination(
                version=version,
                layers=LAYERS,
                aux_ids=ids,
                engram=ENGRAM,
                pp=pp,
                tp=tp,
                sharded=pp == 1 and tp > 1 and place % 11 > 0,
                tokens=tokens,
                buffer=turn == 0 if aux == "none" else (number + row) % 2 == 0,
                tail="gather_first" if (number + of_v41) % 2 else "collapse_first",
                draft_layers=1,
                padded_slots=2 if (number + 2 * row + of_v41) % 3 == 0 and tokens > 2 else 0,
            )
        )
    return found


GRID = {(version, aux): grid(version, aux) for version in VERSIONS for aux in AUX_SETS}
ALL = [c for part in GRID.values() for c in part]


def seams(version: str) -> list[Combination]:
    """Engram where a model or a stage begins or ends and in all layers, with a state taken there, and a whole draft."""
    last = 3 if version == "v4" else 4
    own = Combination(version, engram=(0,), aux_ids=(0, last), tokens=3)
    return [
        replace(own, hidden_size=16),
        replace(own, engram=(0, 3), tp=4, sharded=True, tokens=9),
        replace(own, engram=(3,), aux_ids=(last - 1, 0), tp=2, sharded=True, tail="gather_first"),
        replace(own, engram=(1, 2), aux_ids=(last - 3, last - 2), pp=2),
        replace(own, engram=(2,), aux_ids=(last, last - 2), pp=2, tp=2, buffer=True),
        replace(own, engram=(0, 1, 2, 3), aux_ids=(2, 0, 3, 1), pp=3, tokens=8, padded_slots=1),
        replace(own, engram=(0, 1, 2, 3), aux_ids=(), buffer=True, tp=8, sharded=True, tokens=9),
        replace(own, engram=(), aux_ids=(last,), pp=3, borders=(2, 3), tokens=1),
    ]


def filled_buffers(version: str) -> list[Combination]:
    """A buffer that the draft reads, under sequence parallelism, for every T."""
    return [
        Combination(
            version,
            engram=ENGRAM,
            tp=TPS[1 + place % 3],
            sharded=True,
            tokens=tokens,
            buffer=True,
            tail="gather_first" if place % 2 else "collapse_first",
        )
        for place, tokens in enumerate(TOKENS)
    ]


MORE = {(version, "at seams"): seams(version) for version in VERSIONS}
MORE |= {(version, "with a filled buffer"): filled_buffers(version) for version in VERSIONS}
PARTS = GRID | MORE


@pytest.fixture(scope="session")
def memo() -> RowMemo:
    return RowMemo()


@pytest.mark.parametrize(("version", "aux"), PARTS, ids=[f"{version}, {aux}" for version, aux in PARTS])
def test_plain_and_fused_have_the_same_bits(version: str, aux: str, memo: RowMemo) -> None:
    """Catches whatever changes a bit of any shared state, on any rank of any stage."""
    wrong = [text for c in PARTS[version, aux] if (text := verdict(c, execute(c, memo)))]
    assert not wrong, "\n".join(wrong)


DIMENSIONS: dict[str, Callable[[Combination], object]] = {
    "version": lambda c: c.version,
    "aux": lambda c: next(aux for (_, aux), part in GRID.items() if c in part),
    "pp": lambda c: c.pp,
    "tp": lambda c: c.tp,
    "tokens": lambda c: c.tokens,
    "buffer": lambda c: c.buffer,
    "tail": lambda c: c.tail,
    "sharded": lambda c: c.sharded,
    "slots": lambda c: c.padded_slots > 0,
}
# Tokens are sharded over several ranks of one stage only, and two slots without a request leave no token of two.
IMPOSSIBLE = {
    ("pp", 2, "sharded", True),
    ("pp", 3, "sharded", True),
    ("tp", 1, "sharded", True),
    ("tokens", 0, "slots", True),
    ("tokens", 1, "slots", True),
}


def test_the_grid_covers_what_it_says() -> None:
    """Catches a grid that lost a dimension: every pair of values of any two dimensions comes up where it is legal."""
    assert len(set(ALL)) == len(ALL) >= 300
    missing = set()
    for (one, of_one), (other, of_other) in combinations(DIMENSIONS.items(), 2):
        seen = {(of_one(c), of_other(c)) for c in ALL}
        possible = product({value for value, _ in seen}, {value for _, value in seen})
        missing |= {(one, first, other, second) for first, second in possible if (first, second) not in seen}
    assert missing == IMPOSSIBLE
    seen_sharded = {(c.version, c.tp, c.tokens) for c in ALL if c.sharded}
    assert seen_sharded == set(product(VERSIONS, TPS[1:], TOKENS))
    assert {(c.version, c.tp, c.tail) for c in ALL if c.sharded} == set(
        product(VERSIONS, TPS[1:], ("collapse_first", "gather_first"))
    )
    assert {(c.aux_ids == (), c.buffer, c.pp, c.tp) for c in ALL} == set(
        product((False, True), (False, True), PPS, TPS)
    )
    assert {(c.sharded, c.tail, c.padded_slots > 0, c.buffer) for c in ALL} == set(
        product((False, True), ("collapse_first", "gather_first"), (False, True), (False, True))
    )
    assert {c.tokens for c in ALL} == set(TOKENS)
    assert {c.tp for c in ALL} == set(TPS)


SAMPLE = [
    Combination("v4", aux_ids=(0, 3), tp=2, sharded=True, tokens=3, engram=ENGRAM),
    Combination("v4.1", aux_ids=(2, 4), pp=2, tp=2, tokens=7, engram=(2,), buffer=True),
    Combination("v4.1", tp=4, sharded=True, tokens=9, buffer=True),
    Combination("v4", aux_ids=(1, 2), pp=3, tokens=1, hc_mult=2),
    Combination("v4.1", aux_ids=(0, 3), tp=2, sharded=True, tokens=5, hc_mult=2, sinkhorn_iters=20, hidden_size=65),
]


@pytest.mark.parametrize("c", SAMPLE, ids=str)
def test_the_memo_is_no_part_of_the_verdict(c: Combination) -> None:
    """Catches a memo that hides a difference: the same with every op computed on every rank."""
    assert verdict(c, execute(c)) == ""


@pytest.mark.parametrize(("version", "tp", "sharded"), list(product(VERSIONS, (4, 8), (False, True))))
def test_ranks_are_added_in_rank_order(version: str, tp: int, sharded: bool, memo: RowMemo) -> None:
    """Catches a reduction in another order or precision: here the partial sums nearly cancel."""
    c = Combination(version, tp=tp, sharded=sharded, tokens=9, order_sensitive=True, aux_ids=(1, 3))
    assert verdict(c, execute(c, memo)) == ""
    assert not same(plain_of(c).states["logits"], plain_of(replace(c, tp=1)).states["logits"])


def run_on(backend: str, c: Combination, device: str) -> Outcome:
    """Run a combination with a backend's kernels, or skip with the reason why it cannot."""
    state = fast.probe(device)[backend]
    if not state.available:
        pytest.skip(f"{backend}: {state.reason}")

    def kernels(op: str) -> Callable[..., Any]:
        reason = fast.refusal(op, backend, hc_mult=c.hc_mult, hidden_size=c.hidden_size)
        if reason:
            pytest.skip(f"{backend}: {reason}")
        return fast.kernel(op, backend)

    return execute(c, kernels, device=device)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_fused_schedule_on_a_backend(backend: str, version: str, device: str) -> None:
    """Catches a kernel that is right by itself and wrong in a schedule: padding, carried mixes, captures, seams.

    One test a version, as a first run compiles some twenty kernels, which all of its combinations then use.
    """
    one = Combination(version, layers=2, aux_ids=(0, 1), draft_layers=1, tokens=3)
    spread = [
        one,
        replace(one, tp=2, sharded=True, tokens=1, tail="gather_first"),
        replace(one, pp=2, tokens=2, engram=(1,)),
        replace(one, aux_ids=(), buffer=True, tokens=0),
    ]
    wrong = [text for c in spread if (text := verdict(c, run_on(backend, c, device)))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plain_schedule_follows_the_rules(version: str) -> None:
    """Catches a wrong plain page, which no comparison with it can find: its values are joined again from its states.

    Aux states by each version's rule and before an injection, the pre-mix that a collapse takes, the end of the model.
    """
    c = Combination(version, layers=3, aux_ids=(2, 1), engram=(1,), draft_layers=1)
    states, aux = plain_of(c).states, plain_of(c).aux
    entering = [states[f"layer {layer} entry streams"] for layer in range(3)] + [states["final streams"]]
    after = 1 if version == "v4" else 0
    assert all(same(aux[place], oracle.stream_mean(entering[layer + after])) for place, layer in enumerate((2, 1)))
    assert same(entering[0], oracle.expand(c.sublayers.embed(batch_for(c).ids), c.hc_mult))
    x, mixes = states["layer 1 ffn output"], [states[f"layer 1 ffn {mix}"] for mix in ("post_mix", "comb_mix")]
    assert same(entering[2], oracle.post(x, states["layer 1 ffn streams"], *mixes))
    assert not same(states["layer 1 injected streams"], entering[1])
    assert same(states["draft joined aux"], torch.cat(aux, 1))


def test_the_plain_schedule_carries_the_pre_mix() -> None:
    """Catches a V4.1 page that collapses with a sublayer's own pre-mix, or ends with the attention's."""
    c = Combination("v4.1", layers=3, aux_ids=(2, 1), engram=(1,), draft_layers=1)
    states, target = plain_of(c).states, weights_for(c).target
    steps = [
        ("layer 2 attention", "layer 2 entry streams", "layer 1 ffn", target.attention[2]),
        ("layer 2 ffn", "layer 2 ffn streams", "layer 2 attention", target.ffn[2]),
    ]
    for place, streams, before, w in steps:
        collapsed = oracle.collapse(states[streams], states[f"{before} next_pre_mix"])
        assert same(states[f"{place} input"], oracle.norm(collapsed, w.norm_weight, norm_eps=c.model.config.norm_eps))
    final = oracle.collapse(states["final streams"], states["layer 2 ffn next_pre_mix"])
    assert same(states["final hidden"], final)


def counting(kernels: Kernels, calls: Counter[str]) -> Kernels:
    """The same kernels, with every look-up counted; the schedule looks a kernel up once a call."""

    def counted(op: str) -> Callable[..., Any]:
        calls[op] += 1
        kernel: Callable[..., Any] = kernels(op)
        return kernel

    return counted


@pytest.mark.parametrize(("version", "pp"), list(product(VERSIONS, PPS)))
def test_aux_states_cost_no_post(version: str, pp: int, memo: RowMemo) -> None:
    """Catches a schedule that is exact and slow: a post by itself for each aux state, as before the capture.

    One remains for each stage's last layer and one for an Engram injection inside a stage; V4's draft has one more, as
    its head reads mapped streams.
    """
    c = Combination(version, pp=pp, engram=(3,), aux_ids=(0, 1, 2, 3), draft_layers=1)
    calls: Counter[str] = Counter()
    assert verdict(c, execute(c, counting(memo, calls))) == ""
    starts = {stage.start for stage in stages(c.model, pp)}
    assert calls["post"] == pp + (3 not in starts) + (version == "v4")
    fused = calls["post_pre"] + calls["post_pre_delayed"]
    assert fused == 2 * c.layers - pp - (3 not in starts) + 1


def collectives(c: Combination, kernels: Kernels) -> list[tuple[str, tuple[int, ...], str]]:
    """What rank 0 issues in the only stage of a combination, in order."""
    outcome = execute(c, kernels)
    assert verdict(c, outcome) == ""
    (log,) = outcome.logs
    return [(call.kind, call.shape, call.dtype.removeprefix("torch.")) for call in log.per_rank[0]]


@pytest.mark.parametrize("tp", TPS[1:])
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_rank_issues_these_collectives(tokens: int, tp: int, memo: RowMemo) -> None:
    """Catches a collective under a condition on rows: T < tp and T = 0 issue the same list with fewer rows.

    deepseek-ai/DeepEP issue 604, vllm-project/vllm pull 56956: a collective that only some ranks issue, or issue in
    another order. That all ranks' lists are equal is part of every verdict.
    """
    c = Combination("v4.1", layers=2, tp=tp, sharded=True, tokens=tokens, aux_ids=(1, 2), draft_layers=2)
    rows, width = c.layout.rows_per_rank, c.hidden_size
    gather = ("all_gather", (rows, width), "bfloat16")
    layer = [gather, ("reduce_scatter", (tp * rows, width), "bfloat16")]
    target, aux, end = 2 * layer, 2 * [gather], [gather]
    assert collectives(c, memo) == target + aux + end + 2 * layer + end


@pytest.mark.parametrize("hc_mult", [2, 4])
def test_collapse_before_gather_moves_a_share_of_the_bytes(hc_mult: int, memo: RowMemo) -> None:
    """Catches a tail that gathers streams although it says that it collapses first (claim A of the suite).

    Collapsed first, a tail is one collective of H values a token; gathered first it is two, of n * H and n.
    """
    c = Combination("v4.1", layers=1, tp=4, sharded=True, tokens=9, aux_ids=(1,), draft_layers=1, hc_mult=hc_mult)
    first = collectives(c, memo)
    last = collectives(replace(c, tail="gather_first"), memo)
    rows = c.layout.rows_per_rank
    tail = [("all_gather", (rows, hc_mult, 8), "bfloat16"), ("all_gather", (rows, hc_mult), "float32")]
    assert first[-1] == ("all_gather", (rows, 8), "bfloat16")
    assert last[-2:] == tail
    assert len(last) == len(first) + 2


def test_a_full_buffer_needs_whole_streams(memo: RowMemo) -> None:
    """Catches a buffer that holds one rank's rows: filled, the streams and the pre-mix are gathered first."""
    c = Combination("v4.1", layers=1, tp=4, sharded=True, tokens=9, buffer=True)
    assert ("all_gather", (3, 4, 8), "bfloat16") in collectives(c, memo)
    skipped = replace(c, aux_ids=(0,))
    assert ("all_gather", (3, 4, 8), "bfloat16") not in collectives(skipped, memo)


DOCUMENT = Path(__file__).parent.parent / "docs" / "schedules.md"


def documented() -> str:
    """The model of one's own that the document shows."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "judge_own(" in block]
    return str(code)


# What is written instead of what, and what the report then says first.
OWN_FAULTS = {
    "aux one layer early": (
        "wanted = k + 1 in c.aux_ids",
        "wanted = k in c.aux_ids",
        "aux states (rank 0): are [one that is torch.bfloat16 [0, 8], expected torch.bfloat16 [9, 8], state 1]",
    ),
    "pre-mix not carried": (
        "streams, post, comb, x, pre, _ =",
        "streams, post, comb, x, _, _ =",
        "layer 1 ffn output (stage 0, rank 0): differs in",
    ),
    "no last post": (
        "streams = oracle.post(y, streams, post, comb)",
        "pass",
        "final streams (stage 0, rank 0): holds layer 3 ffn streams instead",
    ),
    "logits forgotten": ('show("logits",', '("logits",', "logits (stage 0, rank 0): never shown"),
    "aux forgotten": (
        'show(f"aux state {place}", aux[entering])',
        "pass",
        "aux states (stage 0, rank 0): never shown",
    ),
    "a weight scaled": (
        "w, batch, run =",
        "rank.weights.lm_head.mul_(2); w, batch, run =",
        "weights.lm_head: was written over: weights are inputs",
    ),
    "a mistake": (
        "aux[layers] =",
        "aux[layers / 0] =",
        "schedule: ZeroDivisionError: division by zero raised by rank 0 of 1",
    ),
}


def test_a_model_of_ones_own_is_judged_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a document that no longer runs."""
    exec(documented(), {})
    assert capsys.readouterr().out == "exact\n"


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_a_fault_in_a_model_of_ones_own_is_named(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a verdict on foreign code that cannot fail."""
    right, wrong, text = OWN_FAULTS[fault]
    assert documented().count(right) == 1
    exec(documented().replace(right, wrong), {})
    assert capsys.readouterr().out.split("\n")[1].strip().startswith(text)


def test_a_model_of_ones_own_shows_its_results_on_every_rank() -> None:
    """Catches a verdict on nothing: a rank that shows nothing, a buffer that is not shown, stages that are not run."""
    c = Combination("v4", tp=2, buffer=True)

    def quiet(rank: OwnRank) -> None:
        if rank.group.rank == 0:
            rank.show("logits", plain_of(c).states["logits"], False)

    assert judge_own(c, quiet).split("\n")[1:] == [
        "  mtp buffer (stage 0, ranks 0, 1): never shown",
        "  logits (stage 0, rank 1): never shown",
    ]
    with pytest.raises(ValueError, match="judge_own: runs one stage, got pp = 2"):
        judge_own(replace(c, pp=2), quiet)


@pytest.mark.parametrize("sharded", [False, True])
def test_sharded_tokens_are_refused_where_they_cannot_be(sharded: bool) -> None:
    """Catches a way around the preconditions: an engine that shards by itself, a group of another size."""
    toy = Toy("v4.1", 2)

    def body(group: SimulatedGroup) -> None:
        parallel = Parallel(2, 1, 1, sharded, sharded, sharded)
        engine = Engine(toy, toy.weights, ToySublayers(), TOY_KERNELS.__getitem__, group, parallel)
        ids = torch.zeros(3, dtype=torch.int64)
        run_stage(engine, stages(toy, 2)[0], Batch(ids, ids, ids > 0))

    if sharded:
        with pytest.raises(ValueError, match=r"sequence_parallel needs pp = 1, got a stage of layers 0\.\.0 of 2"):
            simulate(2, body)
    else:
        simulate(2, body)
    with pytest.raises(ValueError, match=r"parallel\.tp is 2, but the group has 4 ranks"):
        simulate(4, body)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"version": "V4"}, "version must be 'v4' or 'v4.1', got 'V4'"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"draft_layers": 0}, "draft_layers must be at least 1, got 0"),
    ],
)
def test_a_model_that_is_none_is_refused(given: dict[str, Any], text: str) -> None:
    """Catches a misspelt version, which was judged by the rules of V4.1."""
    with pytest.raises(ValueError, match=text):
        verdict(replace(Combination(), **given), Outcome())
    with pytest.raises(ValueError, match="version must be"):
        Boundaries("V4", Combination().model.config, of_oracle)


def test_a_buffer_of_too_few_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="mtp_rows must be at least the tokens, got 20 rows for 21"):
        plain_of(Combination(tokens=21, buffer=True))


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"pp": 2}, "pp = 1 (got 2)"),
        ({"tp": 1}, "tp > 1 (got 1)"),
        ({"expert_parallel": False}, "expert_parallel (got False)"),
        ({"mega_moe": False}, "mega_moe or dp > 1 (got mega_moe False and dp 1)"),
    ],
)
def test_tokens_are_sharded_only_where_upstream_allows_it(given: dict[str, Any], missing: str) -> None:
    """Catches sequence parallelism without a precondition; with pp > 1 vllm-project/vllm pull 24021 shows why."""
    allowed: dict[str, Any] = {"tp": 4, "pp": 1, "expert_parallel": True, "mega_moe": True, "sequence_parallel": True}
    Parallel(**allowed)
    Parallel(**(allowed | {"mega_moe": False, "dp": 2}))
    with pytest.raises(ValueError, match="sequence_parallel needs") as caught:
        Parallel(**(allowed | given))
    assert missing in str(caught.value)
    Parallel(**(allowed | given | {"sequence_parallel": False}))


@pytest.mark.parametrize("name", ["tp", "pp", "dp"])
def test_there_is_at_least_one_of_each(name: str) -> None:
    none: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Parallel(**none)


@pytest.mark.parametrize(
    ("version", "ids"), [("v4", (4,)), ("v4", (-1,)), ("v4", (1, 1)), ("v4.1", (5,)), ("v4.1", (-1,)), ("v4.1", (2, 2))]
)
def test_ids_that_name_no_state_are_refused(version: str, ids: tuple[int, ...]) -> None:
    """Catches an id that silently captures nothing (vllm-project/vllm pull 46788), in the schedule and its oracle."""
    right = Combination(version, aux_ids=(0, 3)).model
    wrong = Toy(version, 4, ids)
    with pytest.raises(ValueError, match=r"must be different layers in 0\.\."):
        wanted_states(wrong)
    with pytest.raises(ValueError, match=r"must be different layers in 0\.\."):
        replace(right, aux_ids=ids)


@pytest.mark.parametrize("borders", [(2,), (0, 2), (2, 2), (3, 1), (2, 4)])
def test_stages_are_never_empty(borders: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"pp = 3 needs 2 rising borders in 1\.\.3"):
        stages(Toy("v4", 4), 3, borders)


@pytest.mark.parametrize("cuts", list(combinations(range(1, 6), 2)))
def test_each_state_is_owned_once(cuts: tuple[int, int]) -> None:
    """Catches states at a border that two stages own, or none, for every way to cut six layers in three."""
    parts = stages(Toy("v4.1", 6, tuple(range(7))), 3, cuts)
    assert [sum(stage.owns(entering) for stage in parts) for entering in range(7)] == [1] * 7
    for before, after in pairwise(parts):
        assert before.downstream() == after.upstream()


def test_a_stage_refuses_a_state_that_is_not_its_own() -> None:
    """Catches guards that let a duplicate or a gap through."""
    states = AuxStates(Stage(2, 4, 6, (2, 3, 4)))
    mean = torch.zeros(1, 1, dtype=torch.bfloat16)
    for entering in (2, 5):
        with pytest.raises(ValueError, match=f"must not capture the aux state entering layer {entering}"):
            states.write(entering, mean)
    states.write(4, mean)
    with pytest.raises(ValueError, match="entering layer 4 was captured twice"):
        states.write(4, mean)
    with pytest.raises(ValueError, match=r"entering layers \[3\] were never captured"):
        states.collect()


def test_the_buffer_keeps_its_address_and_its_other_rows() -> None:
    """Catches a buffer that is made anew, filled past T, or read in a step that skipped it."""
    tensor = poisoned((5, 8))
    buffer, streams = MtpBuffer(tensor), torch.ones(3, 2, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not filled in this step"):
        buffer.read(2)
    buffer.fill(streams)
    assert same(buffer.read(2), streams)
    assert buffer.tensor.data_ptr() == tensor.data_ptr()
    assert same(tensor[3:], poisoned((2, 8)))
    buffer.fill(2 * streams[:1])
    assert same(buffer.read(2), 2 * streams[:1])
    assert same(tensor[1:3], torch.ones(2, 8, dtype=torch.bfloat16))
    buffer.skip()
    with pytest.raises(ValueError, match="not filled in this step"):
        buffer.read(2)
    with pytest.raises(ValueError, match="MTP buffer has 5 rows, got 6 tokens"):
        buffer.fill(torch.ones(6, 2, 4, dtype=torch.bfloat16))
