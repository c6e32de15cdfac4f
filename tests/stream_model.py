"""Runs the fused schedule on simulated ranks and judges it against the plain one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

import oracle
from fast.model import Draft, Engine, Kernels, Observe, Step, Tail, Target, run_stage
from fast.rows import Parallel, Rows
from fast.stages import MtpBuffer, Stage, slot, stages
from oracle.model import Batch, Model, Trace, decode, poisoned
from oracle.ranks import SimulatedGroup, simulate
from oracle.sp import CollectiveLog, SpLayout
from oracle.sublayers import StandIns, Weights, make_weights
from oracle.trace import Finding, RankTrace, differences, report, same

VOCABULARY = 32


def of_oracle(op: str) -> Callable[..., Any]:
    """The oracle's function of an op, as a kernel look-up."""
    function: Callable[..., Any] = getattr(oracle, op)
    return function


WHOLE = ("fn", "hc_scale", "hc_base", "norm_weight")


class RowMemo:
    """The oracle's ops with every token's result kept, so that a grid costs its schedules and not its arithmetic.

    Ops are per token, so a row that was computed in one batch or on one rank serves all others. A run without the memo
    checks that this changes no verdict.
    """

    def __init__(self) -> None:
        self.pools: dict[object, _Pool] = {}

    def __call__(self, op: str) -> Callable[..., Any]:
        return partial(self.call, op)

    def call(self, op: str, *args: Any, **keywords: Any) -> Any:
        """Call an op; only rows that no call with the same weights and numbers has had are computed."""
        bound = _signature(op).bind(*args, **keywords).arguments
        rows = {k: v for k, v in bound.items() if isinstance(v, Tensor) and k not in WHOLE}
        rest = {k: v for k, v in bound.items() if k not in rows}
        if not rows:
            return of_oracle(op)(**rest)
        key = (
            op,
            *((k, v.shape[1:]) for k, v in rows.items()),
            *((k, _bytes(v) if isinstance(v, Tensor) else v) for k, v in rest.items()),
        )
        pool = self.pools.setdefault(key, _Pool(partial(of_oracle(op), **rest)))
        outputs = pool.rows(rows)
        return outputs if pool.several else outputs[0]


class _Pool:
    """Results of one op with fixed weights, a row a token."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.places: dict[bytes, int] = {}
        self.outputs: tuple[Tensor, ...] = ()
        self.several = False

    def rows(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        keys = [b"".join(parts) for parts in zip(*map(_rows_of, inputs.values()), strict=True)]
        missing = {key: row for row, key in enumerate(keys) if key not in self.places}
        if missing or not self.outputs:
            self._compute({name: tensor[list(missing.values())] for name, tensor in inputs.items()})
            self.places |= {key: len(self.places) + i for i, key in enumerate(missing)}
        index = torch.tensor([self.places[key] for key in keys], dtype=torch.int64)
        return tuple(output[index] if output.shape[0] == len(self.places) else output for output in self.outputs)

    def _compute(self, inputs: dict[str, Tensor]) -> None:
        result = self.function(**inputs)
        self.several = isinstance(result, tuple)
        new = result if isinstance(result, tuple) else (result,)
        self.outputs = tuple(torch.cat(pair) for pair in zip(self.outputs, new, strict=True)) if self.outputs else new


@cache
def _signature(op: str) -> inspect.Signature:
    return inspect.signature(of_oracle(op))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _rows_of(tensor: Tensor) -> list[bytes]:
    whole = _bytes(tensor)
    step = len(whole) // max(tensor.shape[0], 1)
    return [whole[i * step : (i + 1) * step] for i in range(tensor.shape[0])]


@dataclass(frozen=True)
class Combination:
    """One way to run one model: the model, the ranks, the tokens, the order of the tail."""

    version: str = "v4.1"
    layers: int = 4
    aux_ids: tuple[int, ...] = ()
    engram: tuple[int, ...] = ()
    pp: int = 1
    tp: int = 1
    sharded: bool = False
    tokens: int = 9
    buffer: bool = False
    tail: Tail = "collapse_first"
    hc_mult: int = 4
    hidden_size: int = 8
    sinkhorn_iters: int = 2
    draft_layers: int = 3
    order_sensitive: bool = False
    padded_slots: int = 0
    borders: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sp = " sharded" if self.sharded else ""
        buffer = " with buffer" if self.buffer else ""
        return (
            f"{self.version} aux {self.aux_ids} engram {self.engram} pp{self.pp} tp{self.tp}{sp} T={self.tokens}"
            f"{buffer} {self.tail}"
        )

    @property
    def model(self) -> Model:
        base = oracle.MhcConfig.v4() if self.version == "v4" else oracle.MhcConfig.v41()
        return Model(
            version=cast(Any, self.version),
            layers=self.layers,
            hidden_size=self.hidden_size,
            config=replace(base, hc_mult=self.hc_mult, sinkhorn_iters=self.sinkhorn_iters),
            aux_ids=self.aux_ids,
            engram=self.engram,
            mtp_rows=20 if self.buffer else 0,
            draft_layers=self.draft_layers,
        )

    @property
    def parallel(self) -> Parallel:
        return Parallel(self.tp, self.pp, 1, self.sharded, self.sharded, self.sharded)

    @property
    def layout(self) -> SpLayout:
        return SpLayout(self.tokens, self.tp if self.sharded else 1)

    @property
    def sublayers(self) -> StandIns:
        return StandIns(self.hidden_size, self.order_sensitive)


@cache
def weights_of(layers: int, draft_layers: int, hc_mult: int, hidden_size: int, aux: int, device: str) -> Weights:
    return make_weights(
        layers=layers,
        draft_layers=draft_layers,
        hc_mult=hc_mult,
        hidden_size=hidden_size,
        vocabulary=VOCABULARY,
        aux=aux,
        device=device,
    )


def weights_for(c: Combination, device: str = "cpu") -> Weights:
    return weights_of(c.layers, c.draft_layers, c.hc_mult, c.hidden_size, len(c.aux_ids), device)


def batch_for(c: Combination, device: str = "cpu") -> Batch:
    """Tokens with different ids, so that a misplaced id shows; the last `padded_slots` have no request."""
    place = torch.arange(c.tokens, device=device)
    return Batch((place * 11 + 3) % VOCABULARY, (place * 5 + 7) % VOCABULARY, place >= c.tokens - c.padded_slots)


@cache
def plain(c: Combination) -> Trace:
    """The plain run of a combination's model; ranks matter to it only where the order of their sums does."""
    return decode(c.model, weights_for(c), c.sublayers, batch_for(c), ranks=c.tp if c.order_sensitive else 1)


def plain_of(c: Combination) -> Trace:
    """The plain run, shared by all combinations that differ only in how the model is spread."""
    tp = c.tp if c.order_sensitive else 1
    return plain(replace(c, pp=1, tp=tp, sharded=False, tail="collapse_first", borders=None))


@dataclass(frozen=True)
class Schedule:
    """The classes that make a schedule; planted bugs replace one."""

    target: type[Target] = Target
    draft: type[Draft] = Draft
    rows: type[Rows] = Rows
    stages: Callable[..., list[Stage]] = stages


@dataclass
class Outcome:
    """What a run showed: traces by stage and rank, collectives by stage, and the error that ended it."""

    traces: list[list[RankTrace]] = field(default_factory=list)
    logs: list[CollectiveLog] = field(default_factory=list)
    steps: list[list[Step]] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    error: Exception | None = None


def execute(
    c: Combination, kernels: Kernels = of_oracle, schedule: Schedule | None = None, device: str = "cpu"
) -> Outcome:
    """Run every stage in turn on simulated ranks; an error of any kind ends the run and is kept.

    The schedule computes with a copy of the weights, which the plain run would otherwise share with a fault.
    """
    outcome, chosen = Outcome(), schedule or Schedule()
    lent = deepcopy(weights_for(c, device))
    received: list[dict[str, Tensor]] | None = None
    try:
        for stage in chosen.stages(c.model, c.pp, c.borders):
            steps = _run_stage(c, stage, lent, received, kernels, chosen, outcome)
            if not stage.last:
                received = [handed_over(step.sent, stage, c, device) for step in steps]
    except Exception as error:
        outcome.error = error
    outcome.touched = changed(lent, weights_for(c, device))
    return outcome


def changed(lent: Weights, kept: Weights) -> list[str]:
    """The names of the weights that a run wrote over."""
    pairs = zip(_named("weights", lent), _named("weights", kept), strict=True)
    return [name for (name, value), (_, before) in pairs if not same(value, before)]


def _named(name: str, part: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tree of dataclasses and tuples, by its path."""
    if isinstance(part, Tensor):
        yield name, part
        return
    parts: list[tuple[str, Any]] = (
        [(f"[{i}]", value) for i, value in enumerate(part)] if isinstance(part, tuple) else []
    )
    if is_dataclass(part):
        parts = [(f".{one.name}", getattr(part, one.name)) for one in fields(part)]
    for place, value in parts:
        yield from _named(name + place, value)


def _run_stage(
    c: Combination,
    stage: Stage,
    weights: Weights,
    received: list[dict[str, Tensor]] | None,
    kernels: Kernels,
    schedule: Schedule,
    outcome: Outcome,
) -> list[Step]:
    traces = [RankTrace() for _ in range(c.tp)]
    outcome.traces.append(traces)

    def body(group: SimulatedGroup) -> Step:
        given = None if received is None else received[group.rank]
        return run_rank(c, stage, group, traces[group.rank], kernels, schedule, given, weights)

    run = simulate(c.tp, body)
    outcome.logs.append(run.log)
    outcome.steps.append(run.results)
    return run.results


def run_rank(
    c: Combination,
    stage: Stage,
    group: Any,
    trace: RankTrace,
    kernels: Kernels,
    schedule: Schedule,
    received: dict[str, Tensor] | None,
    weights: Weights,
) -> Step:
    """Run one rank of one stage, where its weights are; what it shows goes to `trace`."""
    device = str(weights.lm_head.device)
    engine = Engine(
        shape=c.model,
        weights=weights,
        sublayers=c.sublayers,
        kernels=kernels,
        group=group,
        parallel=c.parallel,
        tail=c.tail,
        observe=trace.observe,
        rows_type=schedule.rows,
    )
    allocated = poisoned((c.model.mtp_rows, c.hc_mult * c.hidden_size), device)
    buffer = MtpBuffer(allocated) if stage.last and c.buffer else None
    step = run_stage(
        engine,
        stage,
        batch_for(c, device),
        received=received,
        buffer=buffer,
        target_type=schedule.target,
        draft_type=schedule.draft,
    )
    if buffer is not None:
        # The memory that a captured graph knows, whatever tensor the schedule may have put in its place.
        trace.observe("mtp buffer", allocated, False)
    return step


def handed_over(sent: dict[str, Tensor], stage: Stage, c: Combination, device: str) -> dict[str, Tensor]:
    """What the next stage receives: every aux slot it expects, poison where nothing was sent."""
    following = [s for s in stages(c.model, c.pp, c.borders) if s.start == stage.end]
    slots = [slot(i) for i in range(len(following[0].upstream()))]
    poison = {name: poisoned((c.tokens, c.hidden_size), device) for name in slots}
    return poison | sent


def judge(c: Combination, outcome: Outcome) -> list[Finding]:
    """Every difference between a run and the plain one; an error comes last, after what was wrong before it."""
    touched = [Finding(name, "was written over: weights are inputs") for name in outcome.touched]
    if outcome.error is not None:
        return [*touched, *differences(plain_of(c), outcome.traces, c.layout, ended=False), _ended(outcome.error)]
    return [*touched, *differences(plain_of(c), outcome.traces, c.layout), *_collectives(outcome.logs)]


def _ended(error: Exception) -> Finding:
    notes = " ".join(getattr(error, "__notes__", []))
    return Finding("schedule", f"{type(error).__name__}: {error} {notes}".strip())


def _collectives(logs: Sequence[CollectiveLog]) -> list[Finding]:
    return [
        Finding("collectives", "ranks issued different ones", stage)
        for stage, log in enumerate(logs)
        if not log.uniform
    ]


def verdict(c: Combination, outcome: Outcome) -> str:
    """The report of a run; empty when it is exact."""
    findings = judge(c, outcome)
    return report(str(c), findings) if findings else ""


@dataclass(frozen=True)
class OwnRank:
    """What a model of one's own gets on one rank of its only stage.

    show: called as show(name, value, sharded) with a state, under the plain run's name, and whether the value is this
    rank's shard; aux states as "aux state 0", "aux state 1" and so on, in the draft's order.
    """

    combination: Combination
    group: SimulatedGroup
    weights: Weights
    batch: Batch
    sublayers: StandIns
    show: Observe


def judge_own(c: Combination, run: Callable[[OwnRank], object]) -> str:
    """The report on a model that is built of nothing here; empty when what it showed is exact.

    It is compared in the states that it shows. Only results must be there: aux states, a buffer's contents, logits.
    Raises ValueError for a combination of several stages.
    """
    if c.pp != 1:
        raise ValueError(f"judge_own: runs one stage, got pp = {c.pp}")
    ranks, lent = [RankTrace() for _ in range(c.tp)], deepcopy(weights_for(c))

    def body(group: SimulatedGroup) -> None:
        run(OwnRank(c, group, lent, batch_for(c), c.sublayers, ranks[group.rank].observe))

    ended = []
    try:
        simulate(c.tp, body)
    except Exception as error:
        ended = [_ended(error)]
    touched = [Finding(name, "was written over: weights are inputs") for name in changed(lent, weights_for(c))]
    missed = [] if ended else list(_missed(c, ranks))
    findings = [*touched, *differences(plain_of(c), [ranks], c.layout, ended=False), *missed, *ended]
    return report(str(c), findings) if findings else ""


def _missed(c: Combination, ranks: Sequence[RankTrace]) -> Iterator[Finding]:
    """The results that some ranks did not show, without which the rest would prove nothing."""
    for name in ["mtp buffer"] * c.buffer + ["logits"]:
        without = tuple(rank for rank, trace in enumerate(ranks) if name not in trace.states)
        if without:
            yield Finding(name, "never shown", 0, without)
    without = tuple(rank for rank, trace in enumerate(ranks) if c.aux_ids and not trace.aux)
    if without:
        yield Finding("aux states", "never shown", 0, without)
