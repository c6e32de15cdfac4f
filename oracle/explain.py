"""Guess which evaluation sequence made a kernel's wrong bits, by trying the known ones.

A kernel that follows another sequence than contract 1 is not random: it contracts to fma, sums from the other end,
truncates a store, or leaves out a rounding. Each such suspect is run on a few wrong rows, and one that gives their
exact bits is checked on all others. Nothing is fitted: a suspect is named only when every bit agrees, and two faults
at once are considered only when no single one agrees.

Bits may agree by chance: where a reciprocal root is one unit off, each order of the sum under the root that moves it
by that unit gives the same bits. So agreement counts only for as much as it excludes, in bits, against `ENOUGH`: a
value d ULP from contract 1 that a suspect hits is one of 2 d + 1 values as near. Values count each where the suspect
departs in a stage that makes each of them by itself; where all values of a token may hang on one number, a token
counts once, for its smallest d. A suspect that would change tokens which follow contract 1 is right only of a kernel
that picks its sequence by the token: what it takes to say which tokens is deducted. Suspects that agree equally well
and have no stage in common prove one another to be chance, and none is named.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

import oracle
from oracle.arith import bits, constant, from_bits, round_bf16, ulp_distance, widen
from oracle.arithmetic import CONTRACT_1, FIELDS, Arithmetic, candidates, combine
from oracle.collapse import unrounded_collapse
from oracle.reduce import index_sum, weighted_sum
from oracle.streams import unrounded_post
from oracle.tally import is_nan

SAMPLE = 4  # wrong rows on which every suspect is tried
NAMED = 4  # suspects that are told
ENOUGH = 12.0  # bits of evidence: chance agrees once in 4096, and some dozens of suspects are tried
FARTHEST = 1 << 20  # ULP beyond which a distance adds no evidence
CHECKED = 1 << 22  # values of the output on which a suspect is confirmed
CHECKED_DOTS = 64  # rows, where every value is a sum over the hidden size

Tensors = Mapping[str, Tensor]
Rounding = Callable[[Tensor], Tensor]

OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "project": ("sums", "squares"),
    "coefficients": ("pre_mix", "post_mix", "comb_mix"),
    "pre": ("post_mix", "comb_mix", "layer_input"),
    "pre_delayed": ("post_mix", "comb_mix", "layer_input", "next_pre_mix"),
    "post_pre": ("residual", "post_mix", "comb_mix", "layer_input"),
    "post_pre_delayed": ("residual", "post_mix", "comb_mix", "layer_input", "next_pre_mix", "aux"),
}
_WEIGHTS = ("fn", "hc_scale", "hc_base", "norm_weight")
_COEFFICIENTS = ("pre_mix", "post_mix", "comb_mix")
_BY_VALUE = frozenset({"collapse", "mean", "post", "store", "between"})  # stages that make each value by itself


@dataclass(frozen=True)
class _Suspect:
    """One sequence by name; ``run`` gives the output under suspicion from the op's tensors.

    ``stages`` are where it departs from contract 1: fields of its record, its store, an input or a constant.
    """

    name: str
    stages: frozenset[str]
    run: Callable[[Tensors], Tensor]


@dataclass(frozen=True)
class _Match:
    """A suspect that explains every wrong row, and all the rows that it gets right."""

    suspect: _Suspect
    right: Tensor


@dataclass(frozen=True)
class _Scene:
    """A failed call: its inputs, the wrong output, and the numbers it was called with."""

    op: str
    output: str
    tensors: Tensors
    actual: Tensor
    params: Mapping[str, object]

    @property
    def whole(self) -> tuple[str, ...]:
        """Inputs that all rows share; the weights, unless they are what the op maps row by row."""
        return () if self.op == "fn_broadcast" else _WEIGHTS

    @property
    def has_all_rows(self) -> bool:
        """Whether the output has one row for each row of the inputs, so that a row can be looked at alone."""
        counts = {len(tensor) for name, tensor in self.tensors.items() if name not in self.whole}
        return self.actual.dim() > 0 and counts == {len(self.actual)}

    def call(self, tensors: Tensors, arithmetic: Arithmetic) -> Tensor:
        """The oracle's output under another sequence."""
        sequence = {"arithmetic": arithmetic} if FIELDS[self.op] else {}
        result = getattr(oracle, self.op)(**tensors, **self.params, **sequence)
        outputs: tuple[Tensor, ...] = (result,) if isinstance(result, Tensor) else result
        return outputs[OUTPUTS.get(self.op, (self.output,)).index(self.output)]

    def at(self, rows: Tensor) -> _Scene:
        """The same call for some rows only."""
        tensors = {name: t if name in self.whole else t[rows] for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, actual=self.actual[rows])


def explain(
    op: str, tensors: Tensors, actual: Tensor, *, output: str, params: Mapping[str, object] | None = None
) -> list[str]:
    """Sentences about the known sequences that give exactly the bits of ``actual``, best first; often none.

    ``tensors`` are the op's tensor arguments by name and ``params`` its plain ones, as the failing call had them;
    ``actual`` is what it returned as ``output``. Tokens are independent in every op, so the sequences are tried on
    a few rows that differ from contract 1. Raises ValueError for an unknown op or output.
    """
    if output not in OUTPUTS.get(op, (output,)):
        raise ValueError(f"explain: output must be one of {', '.join(OUTPUTS[op])} for {op}, got {output!r}")
    records = [record for record in candidates(op).values() if record is not CONTRACT_1]
    scene = _Scene(op, output, tensors, actual, params or {})
    if not scene.has_all_rows:
        return []
    scene = _within_budget(scene)
    wrong = _wrong_rows(scene)
    if wrong is None or not wrong.any() or _says_nothing(scene.actual[wrong]):
        return []
    sentences = _told(_found(scene, wrong, records), scene, wrong)
    seen, rows = len(scene.actual), len(actual)
    return [f"{sentence} (first {seen} of {rows} rows tried)" for sentence in sentences] if seen < rows else sentences


def _says_nothing(actual: Tensor) -> bool:
    """Whether the wrong rows are zero throughout: what was never read or computed, many sequences give by chance."""
    return bool((actual == 0).all())


def _within_budget(scene: _Scene) -> _Scene:
    """The first rows of a call that is too large to repeat many times."""
    rows = CHECKED_DOTS if "dot" in FIELDS[scene.op] else CHECKED // max(scene.actual[:1].numel(), 1) + 1
    return scene.at(torch.arange(rows, device=scene.actual.device)) if len(scene.actual) > rows else scene


def _wrong_rows(scene: _Scene) -> Tensor | None:
    """Which rows differ from contract 1; None where the output is not comparable at all."""
    expected = scene.call(scene.tensors, CONTRACT_1)
    if expected.shape != scene.actual.shape or expected.dtype != scene.actual.dtype or not expected.numel():
        return None
    return ~_rows_equal(scene.actual, expected)


def _rows_equal(actual: Tensor, other: Tensor) -> Tensor:
    same = (bits(actual) == bits(other)) | (is_nan(actual) & is_nan(other))
    return same.reshape(len(same), -1).all(dim=1)


def _found(scene: _Scene, wrong: Tensor, records: list[Arithmetic]) -> list[_Match]:
    """The suspects that explain the wrong rows, those that explain all rows alone where there are some."""
    sample = scene.at(wrong.nonzero().flatten()[:SAMPLE])
    by_value, by_token = _evidence(scene.at(wrong))
    for suspects in (_single_faults(scene, records), _double_faults(scene, records)):
        likely = [suspect for suspect in suspects if _right_rows(suspect, sample).all()]
        matches = [_Match(suspect, _right_rows(suspect, scene)) for suspect in likely]
        matches = [match for match in matches if match.right[wrong].all()]
        if matches:
            best = [match for match in matches if match.right.all()] or matches
            proven = [
                match
                for match in best
                if (by_value if _counts_values(scene, match.suspect) else by_token) - _choice(match, wrong) >= ENOUGH
            ]
            return proven if frozenset.intersection(*(match.suspect.stages for match in best)) else []
    return []


def _choice(match: _Match, wrong: Tensor) -> float:
    """Bits that say in which of the tokens that a suspect would change it was followed."""
    followed, others = int(wrong.sum()), int((~match.right).sum())
    return math.log2(math.comb(followed + others, followed))


def _evidence(wrong: _Scene) -> tuple[float, float]:
    """Bits that speak for whatever gives these rows, where each value counts, and where each token counts once.

    Infinity and NaN speak for nothing: one of them anywhere in a sum makes them, whatever the order.
    """
    expected = wrong.call(wrong.tensors, CONTRACT_1)
    apart = ulp_distance(wrong.actual, expected)
    apart = apart.masked_fill(~(wrong.actual.isfinite() & expected.isfinite()), 0)
    apart = apart.clamp(max=FARTHEST).reshape(len(expected), -1).double()
    smallest = apart.masked_fill(apart == 0, math.inf).amin(dim=1)
    smallest = smallest.masked_fill(smallest == math.inf, 0)
    return float(torch.log2(2 * apart + 1).sum()), float(torch.log2(2 * smallest + 1).sum())


def _counts_values(scene: _Scene, suspect: _Suspect) -> bool:
    """Whether a suspect's hits on single values are hits of their own: no number of the token lies between."""
    if scene.op == "project" or (scene.op == "coefficients" and scene.output != "comb_mix"):
        return True
    alone = _BY_VALUE - {"post"} if scene.op == "post_pre" and scene.output == "layer_input" else _BY_VALUE
    normed = scene.output == "layer_input" and scene.tensors.get("norm_weight") is not None
    return scene.output in ("layer_input", "residual", "aux") and suspect.stages <= alone and not normed


def _right_rows(suspect: _Suspect, scene: _Scene) -> Tensor:
    return _rows_equal(scene.actual, suspect.run(scene.tensors))


def _told(found: Sequence[_Match], scene: _Scene, wrong: Tensor) -> list[str]:
    """The sentences; all matches are right in every row, or else none is."""
    where = f" in the {int(wrong.sum())} of {len(wrong)} {_row_word(scene)}s that differ, the others follow contract 1"
    sentences = [
        f"'{match.suspect.name}' gives exactly these bits{'' if match.right.all() else where}" for match in found
    ]
    more = len(sentences) - NAMED
    return sentences[:NAMED] + ([f"and so do {more} more"] if more > 0 else [])


def _row_word(scene: _Scene) -> str:
    return "row" if scene.op == "fn_broadcast" else "token"


def _single_faults(scene: _Scene, records: list[Arithmetic]) -> Iterator[_Suspect]:
    yield from (_of_record(scene, record) for record in records)
    yield from _misread(scene)
    yield from _other_constants(scene)
    yield from _misrounded(scene, CONTRACT_1)


def _double_faults(scene: _Scene, records: list[Arithmetic]) -> Iterator[_Suspect]:
    """Another sequence with a fault of its own, or two ops of one kernel that each follow another sequence."""
    for record in records:
        yield from _misrounded(scene, record)
    if "dot" not in FIELDS[scene.op]:  # one projection costs more than all other suspects together
        for one, other in itertools.combinations(records, 2):
            if not _departures(one) & _departures(other):
                yield _of_record(scene, combine(f"{one.name} with {other.name}", one, other))


def _departures(record: Arithmetic) -> frozenset[str]:
    """The fields in which a record is not contract 1."""
    names = {part.name for part in fields(Arithmetic)} - {"name"}
    return frozenset(name for name in names if getattr(record, name) != getattr(CONTRACT_1, name))


def _stages(scene: _Scene, record: Arithmetic) -> frozenset[str]:
    return _departures(record) & frozenset(FIELDS[scene.op])


def _of_record(scene: _Scene, record: Arithmetic) -> _Suspect:
    return _Suspect(record.name, _stages(scene, record), lambda tensors: scene.call(tensors, record))


def _misread(scene: _Scene) -> Iterator[_Suspect]:
    """Contract 1 on inputs that were read wrongly."""
    if "comb_mix" in scene.tensors:
        yield _Suspect(
            "comb_mix read as [output stream, input stream]",
            frozenset({"comb_mix"}),
            lambda tensors: scene.call({**tensors, "comb_mix": tensors["comb_mix"].mT}, CONTRACT_1),
        )
    for name in _COEFFICIENTS:
        if name in scene.tensors:
            yield _Suspect(f"{name} rounded to bf16 before use", frozenset({name}), _rounding_input(scene, name))


def _other_constants(scene: _Scene) -> Iterator[_Suspect]:
    """Contract 1 with one number other than it was called with: a round more or less, an epsilon left out or fixed."""
    config = scene.params.get("config")
    given = vars(config) if isinstance(config, oracle.MhcConfig) else scene.params
    for name, others in _CONSTANTS.items():
        other: Any
        for other in others(given[name]) if name in given else ():
            changed = (
                {"config": replace(config, **{name: other})} if isinstance(config, oracle.MhcConfig) else {name: other}
            )
            wrong = replace(scene, params={**scene.params, **changed})
            yield _Suspect(f"{name} = {other:g} in place of {given[name]:g}", frozenset({name}), _calling(wrong))


def _calling(scene: _Scene) -> Callable[[Tensors], Tensor]:
    return lambda tensors: scene.call(tensors, CONTRACT_1)


def _other_eps(eps: float) -> tuple[float, ...]:
    return tuple(other for other in (0.0, 1e-6, 1e-20) if other != eps)


def _rounding_input(scene: _Scene, name: str) -> Callable[[Tensors], Tensor]:
    def run(tensors: Tensors) -> Tensor:
        return scene.call({**tensors, name: widen(round_bf16(tensors[name]))}, CONTRACT_1)

    return run


def _misrounded(scene: _Scene, record: Arithmetic) -> Iterator[_Suspect]:
    """A sequence whose bf16 store truncates, or that leaves out the rounding between post and collapse."""
    stages = _stages(scene, record)
    accumulated = _ACCUMULATORS.get((scene.op, scene.output))
    if accumulated is not None:
        yield _Suspect(
            f"{record.name} with a store that truncates", stages | {"store"}, _truncating(accumulated, record)
        )
    if scene.op == "draft_tail":
        for name, between, last in _TAILS:
            yield _Suspect(f"{record.name} {name}", stages | {"between"}, _tail(record, between, last))


def _truncate(values: Tensor) -> Tensor:
    """Fp32 to bf16 by dropping the low half of the pattern."""
    return from_bits((bits(values) >> 16).to(torch.int16))


def _truncating(
    accumulated: Callable[[Tensors, Arithmetic], Tensor], record: Arithmetic
) -> Callable[[Tensors], Tensor]:
    return lambda tensors: _truncate(accumulated(tensors, record))


def _tail(record: Arithmetic, between: Rounding, last: Rounding) -> Callable[[Tensors], Tensor]:
    """`draft_tail` with other roundings after the post and at the end."""

    def run(tensors: Tensors) -> Tensor:
        new = between(_post(tensors, record))
        streams = (new if new.dtype == torch.float32 else widen(new)).unbind(1)
        weights = [weight[:, None] for weight in tensors["pre_mix"].unbind(1)]
        return last(weighted_sum(weights, streams, record.collapse))

    return run


def _post(tensors: Tensors, record: Arithmetic) -> Tensor:
    return unrounded_post(tensors["x"], tensors["residual"], tensors["post_mix"], tensors["comb_mix"], record)


def _collapse(tensors: Tensors, record: Arithmetic) -> Tensor:
    return unrounded_collapse(tensors["residual"], tensors["pre_mix"], record)


def _collapse_of_post(tensors: Tensors, record: Arithmetic) -> Tensor:
    return unrounded_collapse(round_bf16(_post(tensors, record)), tensors["pre_mix"], record)


def _mean(tensors: Tensors, record: Arithmetic) -> Tensor:
    total = index_sum(widen(tensors["residual"]).unbind(1), record.mean.order)
    return total / constant(tensors["residual"].shape[1], total)


_CONSTANTS: Mapping[str, Callable[[Any], tuple[float, ...]]] = {
    "sinkhorn_iters": lambda rounds: tuple(n for n in (rounds - 1, rounds + 1, 20) if n > 0 and n != rounds),
    "sinkhorn_eps": _other_eps,
    "hc_sinkhorn_eps": _other_eps,
    "hc_pre_eps": _other_eps,
    "rms_eps": _other_eps,
    "norm_eps": _other_eps,
    "post_mult": lambda factor: tuple(other for other in (1.0, 2.0) if other != factor),
}
"""The constants of a call, and for each given value those that kernels take in its place."""

_TAILS: tuple[tuple[str, Rounding, Rounding], ...] = (
    ("without the bf16 rounding of the post", lambda values: values, round_bf16),
    ("with a truncated post", _truncate, round_bf16),
    ("with a truncated post and a store that truncates", _truncate, _truncate),
)


# The fp32 value that each bf16 output is rounded from.
_ACCUMULATORS: Mapping[tuple[str, str], Callable[[Tensors, Arithmetic], Tensor]] = {
    ("collapse", "layer_input"): _collapse,
    ("stream_mean", "aux"): _mean,
    ("post", "residual"): _post,
    ("draft_tail", "layer_input"): _collapse_of_post,
    ("post_pre", "residual"): _post,
    ("post_pre_delayed", "residual"): _post,
}
