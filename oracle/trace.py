"""Compare a schedule's run with the plain one, state by state, and say what a wrong state looks like.

Only the first difference matters: everything after it follows from it. So findings come in the plain schedule's order,
and the first is explained: other rows, another rank's, another state, pad rows, a factor of tp, unwritten memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oracle.arith import bits, round_bf16, widen
from oracle.compare import POISON
from oracle.model import Trace
from oracle.ranks import some_ranks
from oracle.sp import SpLayout

# The outputs of these are masked or padded with +0, and a pad row that is not may enter a later reduction.
ZERO_PADDED = (" attention output", " ffn output")
LAST_OF_TARGET = "final streams"
AUX_STATE = "aux state "
LISTED = 5
ANY_NAN = -1  # the pattern for which every NaN but poison is taken


@dataclass
class RankTrace:
    """What one rank of one stage showed: by name, the rows it held and whether these were its shard."""

    states: dict[str, tuple[Tensor, bool]] = field(default_factory=dict)
    aux: list[Tensor] = field(default_factory=list)
    again: list[str] = field(default_factory=list)

    def observe(self, name: str, value: Tensor, sharded: bool) -> None:
        """Record one value as it is now; aux states in the order in which they come, any other name once.

        A copy is kept, so that a schedule may go on to use the value's memory for something else.
        """
        shown = value.clone()
        if name.startswith(AUX_STATE):
            self.aux.append(shown)
            return
        if name in self.states:
            self.again.append(name)
        self.states[name] = (shown, sharded)


@dataclass(frozen=True)
class Finding:
    """One state that some ranks of a stage got wrong, in the same way; no stage or ranks where it is nobody's alone."""

    state: str
    problem: str
    stage: int | None = None
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = [] if self.stage is None else [f"stage {self.stage}"]
        place += [some_ranks(self.ranks)] if self.ranks else []
        return f"{self.state} ({', '.join(place)}): {self.problem}" if place else f"{self.state}: {self.problem}"


def differences(
    plain: Trace, stages: Sequence[Sequence[RankTrace]], layout: SpLayout, *, ended: bool = True
) -> list[Finding]:
    """Return where a run differs from the plain one, in the plain one's order; empty when every bit is right.

    stages[s][r] is what rank r of stage s showed. A sharded state's pad rows are free, except where they must be +0.
    With `ended` False the run stopped half-way, and states that it does not have are not missed.
    """
    found: list[Finding] = []
    for name, expected in plain.states.items():
        found += _merged(_state(plain, name, expected, stages, layout, ended))
        if name == LAST_OF_TARGET and (ended or any(trace.aux for trace in stages[-1])):
            found += _merged(_aux(plain, stages[-1], layout))
    return found + _merged(_unknown(plain, stages))


def report(title: str, findings: Sequence[Finding]) -> str:
    """Return the findings as text, the cause first."""
    if not findings:
        return f"{title}: every state has the bits of the plain schedule"
    count = f"{len(findings)} findings, of which the first is the cause" if len(findings) > 1 else "1 finding"
    lines = [f"{title}: {count}", *(f"  {finding}" for finding in findings[:LISTED])]
    return "\n".join(lines + ([f"  and {len(findings) - LISTED} more"] if len(findings) > LISTED else []))


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Join what several ranks of a stage have in common."""
    ranks: dict[tuple[str, str, int | None], tuple[int, ...]] = {}
    for finding in findings:
        key = (finding.state, finding.problem, finding.stage)
        ranks[key] = ranks.get(key, ()) + finding.ranks
    return [Finding(*key, who) for key, who in ranks.items()]


def _state(
    plain: Trace, name: str, expected: Tensor, stages: Sequence[Sequence[RankTrace]], layout: SpLayout, ended: bool
) -> Iterable[Finding]:
    owners = [s for s, ranks in enumerate(stages) if any(name in rank.states for rank in ranks)]
    if len(owners) != 1:
        if owners or ended:
            yield Finding(name, f"computed by stages {owners}, expected one" if owners else "never computed")
        return
    for rank, trace in enumerate(stages[owners[0]]):
        if name not in trace.states:
            problem = "never computed on this rank" if ended else None
        else:
            problem = _problem(plain, name, expected, *trace.states[name], layout, rank, len(stages[owners[0]]))
        if problem:
            yield Finding(name, problem, owners[0], (rank,))


def _unknown(plain: Trace, stages: Sequence[Sequence[RankTrace]]) -> Iterable[Finding]:
    for number, ranks in enumerate(stages):
        for rank, trace in enumerate(ranks):
            yield from (Finding(n, "computed twice", number, (rank,)) for n in trace.again)
            unknown = (n for n in trace.states if n not in plain.states)
            yield from (Finding(n, "no state of the plain schedule", number, (rank,)) for n in unknown)


def _problem(
    plain: Trace, name: str, expected: Tensor, got: Tensor, sharded: bool, layout: SpLayout, rank: int, tp: int
) -> str | None:
    if not sharded:
        return explained(plain, name, got, expected, Held(layout, tp))
    shape = (layout.rows_per_rank, *expected.shape[1:])
    if got.shape != shape or got.dtype != expected.dtype:
        return _form(got, shape, expected.dtype, layout)
    held = Held(layout, tp, rank)
    problem = explained(plain, name, got[: held.valid], expected[held.first : held.first + held.valid], held)
    if problem is None and name.endswith(ZERO_PADDED) and bool(bits(got[held.valid :]).any()):
        return "pad rows hold values, expected +0: they would enter a reduction"
    return problem


@dataclass(frozen=True)
class Held:
    """Which rows of the whole a tensor holds: rank's valid ones, or all when `rank` is None."""

    layout: SpLayout
    tp: int
    rank: int | None = None

    @property
    def first(self) -> int:
        return 0 if self.rank is None else min(self.layout.first_row(self.rank), self.layout.tokens)

    @property
    def valid(self) -> int:
        return self.layout.tokens if self.rank is None else self.layout.valid_rows(self.rank)


def same(got: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits; a NaN equals any NaN, but poison only itself."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    return torch.equal(_raw(got), _raw(expected))


def _raw(tensor: Tensor) -> Tensor:
    tensor = tensor.cpu()
    if not tensor.is_floating_point():
        return tensor
    patterns = bits(tensor)
    return patterns.masked_fill(tensor.isnan() & (patterns != POISON[tensor.dtype]), ANY_NAN)


def explained(plain: Trace, name: str, got: Tensor, expected: Tensor, held: Held) -> str | None:
    """Return what a wrong state holds instead, in words; None when its bits are right."""
    if same(got, expected):
        return None
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return _form(got, tuple(expected.shape), expected.dtype, held.layout)
    got = got.cpu()
    return (
        _poison(plain, name, got, expected, held)
        or _scaled(got, expected, held.tp)
        or _other_rows(plain, name, got, held)
        or _other_state(plain, name, got, held)
        or _first_difference(got, expected)
    )


def _form(got: Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: SpLayout) -> str:
    text = f"is {got.dtype} {list(got.shape)}, expected {dtype} {list(shape)}"
    untrimmed = layout.pad_rows and shape[0] == layout.tokens and got.shape[0] == layout.padded_tokens
    return text + (": pad rows were not trimmed" if untrimmed else "")


def _poison(plain: Trace, name: str, got: Tensor, expected: Tensor, held: Held) -> str | None:
    if got.dtype != torch.bfloat16:
        return None
    pattern = POISON[torch.bfloat16]
    left, wanted = int((bits(got) == pattern).sum()), int((bits(expected) == pattern).sum())
    if left > wanted:
        return f"holds poison in {left - wanted} of {got.numel()} values: memory that this step did not write was read"
    if left == wanted:
        return None
    what = _other_state(plain, name, got, held) or "holds unknown values"
    return f"was written in {wanted - left} values that this step must leave alone: {what}"


def _scaled(got: Tensor, expected: Tensor, tp: int) -> str | None:
    if got.dtype != torch.bfloat16 or tp == 1 or not same(got, round_bf16(widen(expected.cpu()) * tp)):
        return None
    return f"is {tp} times what it must be: scaled by tp, which a norm behind it would hide"


def _other_rows(plain: Trace, name: str, got: Tensor, held: Held) -> str | None:
    if held.rank is None:
        return None
    for other in range(held.layout.tp):
        first = held.layout.first_row(other)
        if other != held.rank and same(got, plain.states[name][first : first + held.valid]):
            return f"holds the rows of rank {other}"
    return None


def _other_state(plain: Trace, name: str, got: Tensor, held: Held) -> str | None:
    named = {key: value for key, value in plain.states.items() if key != name} | plain.lookalikes
    flat = got[: held.valid].flatten(1) if got.dim() > 1 else got
    for key, value in named.items():
        rows = value[held.first : held.first + held.valid]
        if same(flat, rows.flatten(1) if rows.dim() > 1 else rows):
            return f"holds {key} instead"
    return None


def _first_difference(got: Tensor, expected: Tensor) -> str:
    ours, theirs = _raw(got).reshape(-1), _raw(expected).reshape(-1)
    wrong = (ours != theirs).nonzero().flatten()
    index = tuple(int(i) for i in torch.unravel_index(wrong[0], got.shape))
    value, wanted = got[index].item(), expected.cpu()[index].item()
    return f"differs in {len(wrong)} of {got.numel()} values, first at {list(index)}: {value!r}, expected {wanted!r}"


def _aux(plain: Trace, ranks: Sequence[RankTrace], layout: SpLayout) -> Iterable[Finding]:
    for rank, trace in enumerate(ranks):
        problem = _aux_problem(plain, trace.aux, layout)
        if problem:
            yield Finding("aux states", problem, ranks=(rank,))


def _aux_problem(plain: Trace, got: Sequence[Tensor], layout: SpLayout) -> str | None:
    if len(got) == len(plain.aux) and all(same(g, e) for g, e in zip(got, plain.aux, strict=True)):
        return None
    named: Mapping[str, Tensor] = {f"state {i}": mean for i, mean in enumerate(plain.aux)} | plain.lookalikes
    held = [
        next((name for name, mean in named.items() if same(state, mean)), _what(state, plain, layout)) for state in got
    ]
    return f"are [{', '.join(held)}], expected states 0..{len(plain.aux) - 1} in order"


def _what(state: Tensor, plain: Trace, layout: SpLayout) -> str:
    """Say what an aux state is that is none of the known ones: its form where that is wrong, else its values."""
    wanted = plain.aux[0] if plain.aux else state
    if state.shape != wanted.shape or state.dtype != wanted.dtype:
        return f"one that {_form(state, tuple(wanted.shape), wanted.dtype, layout)}"
    return "poison" if bool((bits(state.cpu()) == POISON[torch.bfloat16]).any()) else "unknown values"
