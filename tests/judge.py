"""Judges one implementation on one case: shards, pad fills, guard bands, bits.

Everything a kernel can get wrong on a rank is tried here, in the same way for cases, laws, planted wrong kernels and
a user's own function: the per-token inputs are sharded and their pad rows filled, every rank's call gets inputs between
bands of NaN and outputs that hold poison between guard bands, its inputs are compared with what they were, and what it
wrote is gathered and compared with the oracle bit by bit, pad rows included (a rank cannot tell its pad rows from
tokens).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

import oracle
from cases.build import Inputs, build, pad_value
from cases.digest import digest
from cases.ops import Op
from cases.schema import Case, Layout, Order, PadFill
from fast.registry import Unsupported
from oracle.arith import bits
from oracle.compare import POISON, Comparison, compare
from oracle.sp import SpLayout, all_gather, shard, trim
from tests.guards import Guarded, overlap
from tests.implementations import REFUSALS, Implementation, Outputs, of_oracle, refuses_layout

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Schedule:
    """One way to run a case: the pad fill (None where nothing is padded) and the order of op and gather."""

    layout: SpLayout
    fill: PadFill | None
    order: Order

    def __str__(self) -> str:
        fill = f", pad fill {self.fill}" if self.fill else ""
        return f"tp {self.layout.tp}, {self.order}{fill}"


@dataclass(frozen=True)
class Failure:
    """One thing that is wrong: a comparison that is not exact, or a broken rule in words."""

    schedule: Schedule
    output: str
    comparison: Comparison | None = None
    violation: str | None = None
    tensors: Tensors | None = None
    actual: torch.Tensor | None = None


@dataclass(frozen=True)
class Pipeline:
    """The SP steps around a kernel, replaceable so that planted wrong ones can be judged too."""

    shard: Callable[..., list[torch.Tensor]] = shard
    all_gather: Callable[..., torch.Tensor] = all_gather
    trim: Callable[[torch.Tensor, SpLayout], torch.Tensor] = trim


def judge(
    case: Case, implementation: Implementation, tp: int, *, device: str = "cpu", pipeline: Pipeline | None = None
) -> list[Failure]:
    """Run a case on ``tp`` simulated ranks under every pad fill and order; return what failed, empty when exact.

    Raises what the implementation raises, unless that may be a refusal and wrong bits have been seen before it. An
    `oracle.compare.Comparison` inside a failure holds the mismatches.
    """
    failures: list[Failure] = []
    inputs = built(case)
    for schedule in schedules(case, tp):
        try:
            failures += _run(case, implementation, schedule, inputs, device, pipeline or Pipeline())
        except REFUSALS:
            if failures:
                return failures
            raise
    return failures


def skip_reason(case: Case, implementation: Implementation, error: Exception) -> str:
    """Why a case is skipped for what a kernel raised in it; empty where that is an error.

    Any kernel may be `Unsupported` for what it was not written for. A user's may also refuse a layout, in these words
    and by other errors, but only where an input has one.
    """
    if implementation.request and refuses_layout(error):
        laid_out = any(case.made_by(argument.name).layout != "contiguous" for argument in case.arguments)
        return "refuses strides: " + str(error).split("\n", 1)[0] if laid_out else ""
    return str(error) if isinstance(error, Unsupported) else ""


def schedules(case: Case, tp: int) -> Iterator[Schedule]:
    """Every (pad fill, order) under which a case runs at this tp."""
    layout = SpLayout(case.tokens, tp)
    for order in case.orders:
        for fill in case.fills(tp) or (None,):
            yield Schedule(layout, fill, order)


def parameters(case_params: Mapping[str, object]) -> dict[str, object]:
    """A case's plain parameters as an op takes them: the config table becomes an `oracle.MhcConfig`."""
    params = dict(case_params)
    if "config" in params:
        params["config"] = oracle.MhcConfig(**cast(dict[str, Any], params["config"]))
    return params


def digests(case: Case, device: str = "cpu") -> dict[str, str]:
    """The digests of the oracle's outputs, computed on a device, by output name: what `python -m cases bless` has."""
    outputs = _reference(case, None, case.tokens, device)
    return {spec.name: digest(output) for spec, output in zip(case.spec.outputs, outputs, strict=True)}


REPLAYED: dict[str, Inputs] = {}
"""Inputs, by case name, that came from a file and are not made from the case's recipes."""


def built(case: Case) -> Inputs:
    """A case's inputs, made once for its trials, or those of a replay."""
    return REPLAYED.get(case.name) or _build_from(case.model_dump_json(by_alias=True))


@functools.lru_cache(maxsize=2)
def _build_from(document: str) -> Inputs:
    return build(Case.model_validate_json(document))


def _reference(case: Case, fill: PadFill | None, rows: int, device: str) -> Outputs:
    """The oracle's outputs for the whole batch of ``rows`` rows, those past T filled with the pad fill.

    On a GPU the oracle runs there too, for speed; that it gives the CPU's bits is what its digests are for.
    """
    return _reference_from(case.model_dump_json(by_alias=True), fill, rows, device)


@functools.lru_cache(maxsize=16)
def _reference_from(document: str, fill: PadFill | None, rows: int, device: str) -> Outputs:
    case = Case.model_validate_json(document)
    inputs = built(case)
    tensors = {name: _extend(case.spec, name, tensor, fill, rows) for name, tensor in inputs.tensors.items()}
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    return tuple(output.cpu() for output in of_oracle(case.op)(placed, parameters(inputs.params)))


def _extend(op: Op, name: str, tensor: torch.Tensor, fill: PadFill | None, rows: int) -> torch.Tensor:
    if fill is None or not op.argument(name).per_token:
        return tensor
    value = pad_value(fill, tensor.dtype)
    filler = torch.full((rows - tensor.shape[0], *tensor.shape[1:]), value, dtype=tensor.dtype)
    return torch.cat([tensor, filler])


def _run(
    case: Case, implementation: Implementation, schedule: Schedule, inputs: Inputs, device: str, pipeline: Pipeline
) -> list[Failure]:
    gathers_first = schedule.order == "gather-then-op"
    rank_inputs = _per_rank(case, schedule, inputs, pipeline)
    if gathers_first:
        rank_inputs = [_gathered(case, rank_inputs, schedule.layout, pipeline)]
    calls = [guarded_call(case, implementation, tensors, inputs.params, device) for tensors in rank_inputs]
    failures = [Failure(schedule, "", violation=text) for call in calls for text in call.violations]
    rows = case.tokens if gathers_first else schedule.layout.padded_tokens
    expected = _reference(case, None if gathers_first else schedule.fill, rows, device)
    for index, spec in enumerate(case.spec.outputs):
        shards = [call.outputs[index].cpu() for call in calls]
        joined = _join(shards, schedule, spec.dims[0] == "T", gathers_first, pipeline)
        failures += _judge_output(case, spec.name, joined, expected[index], schedule, rank_inputs)
        if not gathers_first and joined.shape[:1] == (rows,) != (case.tokens,):
            trimmed = pipeline.trim(joined, schedule.layout)
            if trimmed.shape[0] != case.tokens:
                whole = expected[index][: case.tokens]
                failures += _judge_output(case, spec.name, trimmed, whole, schedule, rank_inputs)
    return failures


def _join(
    shards: list[torch.Tensor], schedule: Schedule, per_token: bool, gathers_first: bool, pipeline: Pipeline
) -> torch.Tensor:
    """One tensor of all ranks' outputs; an output without a token axis is the same on every rank."""
    if gathers_first or not per_token or shards[0].shape[:1] != (schedule.layout.rows_per_rank,):
        return shards[0]
    return pipeline.all_gather(shards, schedule.layout)


def _judge_output(
    case: Case,
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    schedule: Schedule,
    rank_inputs: Sequence[Tensors],
) -> list[Failure]:
    layout = schedule.layout if actual.shape[:1] == (schedule.layout.padded_tokens,) else None
    comparison = compare(actual=actual, expected=expected, layout=layout, poison=POISON[expected.dtype])
    if comparison.exact:
        return []
    tensors = {
        key: torch.cat([rank[key] for rank in rank_inputs]) if case.spec.argument(key).per_token else tensor
        for key, tensor in rank_inputs[0].items()
    }
    return [Failure(schedule, name, comparison, tensors=tensors, actual=actual)]


def _per_rank(case: Case, schedule: Schedule, inputs: Inputs, pipeline: Pipeline) -> list[dict[str, torch.Tensor]]:
    """Every rank's inputs: per-token arguments sharded and padded, weights whole, each in the case's layout."""
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(schedule.layout.tp)]
    for name, tensor in inputs.tensors.items():
        if case.spec.argument(name).per_token:
            fill = pad_value(schedule.fill or "zero", tensor.dtype)
            parts = pipeline.shard(tensor, schedule.layout, fill)
        else:
            parts = [tensor] * len(ranks)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part
    return ranks


def _gathered(case: Case, ranks: Sequence[Tensors], layout: SpLayout, pipeline: Pipeline) -> dict[str, torch.Tensor]:
    return {
        name: pipeline.trim(pipeline.all_gather([rank[name] for rank in ranks], layout), layout)
        if case.spec.argument(name).per_token
        else tensor
        for name, tensor in ranks[0].items()
    }


@dataclass(frozen=True)
class Call:
    """What one guarded call gave: the outputs, and the rules it broke in words."""

    outputs: Outputs
    violations: tuple[str, ...]


def guarded_call(
    case: Case,
    implementation: Implementation,
    tensors: Tensors,
    params: Mapping[str, object],
    device: str,
    *,
    bands: PadFill = "nan",
    out_layouts: Sequence[Layout] | None = None,
) -> Call:
    """Call an implementation with laid-out inputs between bands and, where it takes ``out=``, poisoned outputs too.

    ``bands`` names what surrounds the inputs, ``out_layouts`` the layout of each output, packed unless given.
    """
    given = placed(case, tensors, device, bands)
    return call_with(case, implementation, given, params, device, out_layouts=out_layouts)


def placed(case: Case, tensors: Tensors, device: str, bands: PadFill = "nan") -> dict[str, Guarded]:
    """A call's inputs on a device, each in the case's layout and between bands."""
    layouts = {name: case.made_by(name).layout for name in tensors}
    return {name: Guarded.holding(tensor, device, layouts[name], bands) for name, tensor in tensors.items()}


def call_with(
    case: Case,
    implementation: Implementation,
    given: Mapping[str, Guarded],
    params: Mapping[str, object],
    device: str,
    *,
    out_layouts: Sequence[Layout] | None = None,
) -> Call:
    """`guarded_call` with inputs that lie between bands already and may serve several calls."""
    guards: list[Guarded] = []
    if implementation.accepts_out:
        shapes = output_shapes(case, params, _rows(case, given))
        layouts = out_layouts or ["contiguous"] * len(shapes)
        guards = [
            Guarded(shape, dtype, device, layout=kind) for (shape, dtype), kind in zip(shapes, layouts, strict=True)
        ]
    out = tuple(guard.inner for guard in guards) if guards else None
    outputs = implementation({name: one.inner for name, one in given.items()}, parameters(params), out)
    names = [spec.name for spec in case.spec.outputs]
    violations = [f"changed its input {name}" for name, one in given.items() if one.changed]
    violations += [f"wrote outside its input {name}" for name, one in given.items() if one.broken]
    violations += [*_misplaced(names, outputs, device), *_changed_mode()]
    if not guards:
        violations += [*_not_packed(names, outputs), *_shared(names, outputs, given)]
        return Call(outputs, tuple(violations))
    violations += [*_not_in_place(names, outputs, guards)]
    return Call(tuple(guard.value for guard in guards), tuple(violations))


def _rows(case: Case, given: Mapping[str, Guarded]) -> int:
    return next((one.inner.shape[0] for name, one in given.items() if case.spec.argument(name).per_token), 1)


def output_shapes(case: Case, params: Mapping[str, object], rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each output of one rank's call with ``rows`` rows; aux has no rows where it is off."""
    shapes = []
    for spec in case.spec.outputs:
        off = spec.name == "aux" and not params.get("capture_aux", True)
        sizes = case.sizes | {"T": 0 if off else rows}
        shapes.append((tuple(sizes[dim] for dim in spec.dims), getattr(torch, spec.dtype)))
    return shapes


def _misplaced(names: Sequence[str], outputs: Outputs, device: str) -> Iterator[str]:
    """Which outputs lie on another device."""
    for name, output in zip(names, outputs, strict=True):
        if output.device.type != device:
            yield f"returned {name} on {output.device.type}, its inputs are on {device}"


def _not_packed(names: Sequence[str], outputs: Outputs) -> Iterator[str]:
    """Which outputs that the kernel made have gaps; a gather would hide it."""
    for name, output in zip(names, outputs, strict=True):
        if not output.is_contiguous():
            strides = tuple(output.stride())
            yield f"returned {name} with strides {strides} for shape {list(output.shape)}, not contiguous"


def _shared(names: Sequence[str], outputs: Outputs, given: Mapping[str, Guarded]) -> Iterator[str]:
    """Which outputs lie in the memory of an input, or of another output."""
    for index, (name, output) in enumerate(zip(names, outputs, strict=True)):
        for other, one in given.items():
            if overlap(output, one.value):
                yield f"returned {name} in the memory of its input {other}"
        for other, earlier in zip(names[:index], outputs, strict=False):
            if overlap(output, earlier):
                yield f"returned {name} in the memory of its output {other}"


def _not_in_place(names: Sequence[str], outputs: Outputs, guards: Sequence[Guarded]) -> Iterator[str]:
    """What went wrong with tensors given as ``out=``: all that counts is what lies where they were."""
    for name, output, guard in zip(names, outputs, guards, strict=True):
        if guard.broken:
            yield f"wrote outside out ({name})"
        if not guard.is_at(guard.inner):
            yield f"replaced the memory, shape or strides of the out= it was given ({name})"
        elif not guard.is_at(output):
            yield f"returned another tensor than the out= it was given ({name})"


def _changed_mode() -> Iterator[str]:
    """A kernel may switch its thread to flush subnormals; the switch is named and undone, for it would outlive it."""
    half_of_least_normal = torch.tensor([2.0**-126]) * 0.5
    if not int(bits(half_of_least_normal)):
        torch.set_flush_denormal(False)
        yield "left the process flushing subnormals to zero"


__all__ = ["Failure", "Pipeline", "Schedule", "built", "digests", "guarded_call", "judge", "placed", "schedules"]
