"""The comparison of two runs: what is missing, too much, in the wrong place or form, each in its own words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracle.model import Trace, poisoned
from oracle.sp import SpLayout
from oracle.trace import Finding, RankTrace, differences, report, same


def ramp(rows: int, start: int = 1) -> Tensor:
    return (torch.arange(rows * 2).view(rows, 2) + start).to(torch.bfloat16)


def plain() -> Trace:
    trace = Trace(
        {"first": ramp(3), "final streams": ramp(3, 20), "layer 0 ffn output": ramp(3, 40)}, [ramp(3, 60), ramp(3, 80)]
    )
    trace.lookalikes["a wrong idea"] = ramp(3, 100)
    return trace


def right() -> list[list[RankTrace]]:
    """Two ranks that hold shards of two rows, the last one padding; one stage."""
    ranks = [RankTrace(), RankTrace()]
    for rank, trace in enumerate(ranks):
        for name, value in plain().states.items():
            padded = torch.cat([value, torch.zeros(1, 2, dtype=torch.bfloat16)])
            trace.observe(name, padded[2 * rank : 2 * rank + 2], True)
        for place, state in enumerate(plain().aux):
            trace.observe(f"aux state {place}", state, False)
    return [ranks]


def found(change: Callable[[list[list[RankTrace]]], object], ended: bool = True) -> list[str]:
    stages = right()
    change(stages)
    return [str(finding) for finding in differences(plain(), stages, SpLayout(3, 2), ended=ended)]


def test_a_right_run_has_no_finding() -> None:
    """Pad rows are free but for outputs, which a reduction may read."""
    assert found(lambda stages: stages[0][1].states["first"][0][1].fill_(9)) == []


def test_a_nan_equals_any_nan_but_unwritten_memory() -> None:
    """Catches a right schedule blamed for the sign of a NaN, and poison that passes for a computed NaN."""
    nan, other = torch.tensor([[0x7FC0, 1], [-64, 1]], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(nan.isnan(), other.isnan())
    assert same(nan, other)
    poison = poisoned((2,))
    assert same(poison, poison.clone())
    assert not same(poison, torch.full((2,), float("nan"), dtype=torch.bfloat16))


def nowhere(stages: list[list[RankTrace]]) -> None:
    for trace in stages[0]:
        trace.states.pop("first")


def reversed_aux(stages: list[list[RankTrace]]) -> None:
    for trace in stages[0]:
        trace.aux.reverse()


Change = Callable[[list[list[RankTrace]]], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "pad rows": (
        lambda s: s[0][1].states["layer 0 ffn output"][0][1].fill_(9),
        "layer 0 ffn output (stage 0, rank 1): pad rows hold values, expected +0: they would enter a reduction",
    ),
    "missing": (nowhere, "first: never computed"),
    "missing on a rank": (
        lambda s: s[0][0].states.pop("first"),
        "first (stage 0, rank 0): never computed on this rank",
    ),
    "twice": (lambda s: s[0][1].observe("first", *s[0][1].states["first"]), "first (stage 0, rank 1): computed twice"),
    "by two stages": (lambda s: s.append(right()[0]), "first: computed by stages [0, 1], expected one"),
    "unknown": (lambda s: s[0][0].observe("y", ramp(2), True), "y (stage 0, rank 0): no state of the plain schedule"),
    "whole": (
        lambda s: s[0][0].states.update(first=(ramp(3), True)),
        "first (stage 0, rank 0): is torch.bfloat16 [3, 2], expected torch.bfloat16 [2, 2]",
    ),
    "untrimmed": (
        lambda s: s[0][0].states.update(first=(ramp(4), False)),
        "first (stage 0, rank 0): is torch.bfloat16 [4, 2], expected torch.bfloat16 [3, 2]: pad rows were not trimmed",
    ),
    "dtype": (
        lambda s: s[0][0].states.update(first=(ramp(3).float(), False)),
        "first (stage 0, rank 0): is torch.float32 [3, 2], expected torch.bfloat16 [3, 2]",
    ),
    "another rank's": (
        lambda s: s[0][1].states.update(first=s[0][0].states["first"]),
        "first (stage 0, rank 1): holds the rows of rank 0",
    ),
    "moved rows": (
        lambda s: s[0][0].states.update(first=(plain().states["first"][1:], True)),
        "first (stage 0, rank 0): differs in 4 of 4 values, first at [0, 0]: 3.0, expected 1.0",
    ),
    "another state": (
        lambda s: s[0][1].states.update(first=s[0][1].states["final streams"]),
        "first (stage 0, rank 1): holds final streams instead",
    ),
    "a lookalike": (
        lambda s: s[0][0].states.update(first=(plain().lookalikes["a wrong idea"], False)),
        "first (stage 0, rank 0): holds a wrong idea instead",
    ),
    "scaled": (
        lambda s: s[0][0].states.update(first=(2 * ramp(3), False)),
        "first (stage 0, rank 0): is 2 times what it must be: scaled by tp, which a norm behind it would hide",
    ),
    "poison": (
        lambda s: s[0][0].states.update(first=(poisoned((3, 2)), False)),
        "first (stage 0, rank 0): holds poison in 6 of 6 values: memory that this step did not write was read",
    ),
    "aux order": (reversed_aux, "aux states (ranks 0, 1): are [state 1, state 0]"),
    "aux poison": (
        lambda s: s[0][0].aux.__setitem__(1, poisoned((3, 2))),
        "aux states (rank 0): are [state 0, poison], expected states 0..1 in order",
    ),
    "aux too many": (
        lambda s: s[0][0].aux.append(ramp(3)),
        "aux states (rank 0): are [state 0, state 1, unknown values], expected states 0..1 in order",
    ),
    "aux untrimmed": (
        lambda s: s[0][0].aux.__setitem__(0, torch.cat([plain().aux[0], ramp(1)])),
        "aux states (rank 0): are [one that is torch.bfloat16 [4, 2], expected torch.bfloat16 [3, 2]: pad rows were "
        "not trimmed, state 1]",
    ),
    "aux dtype": (
        lambda s: s[0][0].aux.__setitem__(0, plain().aux[0].float()),
        "aux states (rank 0): are [one that is torch.float32 [3, 2], expected torch.bfloat16 [3, 2], state 1]",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_found_in_its_words(name: str) -> None:
    """Catches a comparison that overlooks the change, and one that calls it something else."""
    change, text = CHANGES[name]
    first, *_ = found(change)
    assert first.startswith(text)


def test_a_value_is_judged_as_it_was_shown() -> None:
    """Catches a trace that keeps no copy: memory that a schedule uses again would be judged by its later contents."""
    trace, value = RankTrace(), ramp(3)
    trace.observe("first", value, False)
    trace.observe("aux state 0", value, False)
    value.fill_(0)
    assert trace.states["first"][0].tolist() == trace.aux[0].tolist() == ramp(3).tolist()


def test_one_bit_and_the_sign_of_zero_are_differences() -> None:
    """Catches a comparison of values: -0 equals +0 there."""

    def negative_zero(stages: list[list[RankTrace]]) -> None:
        stages[0][1].states["layer 0 ffn output"] = (torch.tensor([[44.0, 45.0], [-0.0, 0.0]]).to(torch.bfloat16), True)

    assert found(negative_zero) == [
        "layer 0 ffn output (stage 0, rank 1): pad rows hold values, expected +0: they would enter a reduction"
    ]


def test_a_run_that_stopped_is_judged_by_what_it_showed() -> None:
    """Catches a report that blames an error for what was wrong before it, or misses states that never came to be."""

    def stopped(stages: list[list[RankTrace]]) -> None:
        for trace in stages[0]:
            trace.states = {"first": (2 * trace.states["first"][0], True)}
            trace.aux = []

    assert [line.split(":")[0] for line in found(stopped, ended=False)] == ["first (stage 0, ranks 0, 1)"]


def test_the_report_puts_the_cause_first_and_ends() -> None:
    findings = [Finding(f"state {i}", "wrong", 0, (0,)) for i in range(8)]
    lines = report("a run", findings).split("\n")
    assert lines[0] == "a run: 8 findings, of which the first is the cause"
    assert lines[1] == "  state 0 (stage 0, rank 0): wrong"
    assert lines[-1] == "  and 3 more"
    assert report("a run", findings[:1]).startswith("a run: 1 finding\n")
    assert report("a run", []) == "a run: every state has the bits of the plain schedule"
