"""The laws: what is true of every correct kernel, whatever its bits are. No reference is used here.

Each law takes a bench (a kernel, and a subject of `tests.subjects` to try it on) and yields one sentence for each
breach. They see what a comparison with a reference on one shape cannot: results that depend on the batch, the shard,
the pad rows, the layout, the memory around the tensors, or an earlier call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cases.layouts import pad_value
from cases.schema import ALL_FILLS, Case, Layout, PadFill
from oracle.arith import bits
from oracle.compare import POISON, compare
from oracle.sp import CollectiveLog, SpLayout, all_gather, shard, trim
from tests.guards import Guarded
from tests.implementations import REFUSALS, Implementation, Outputs, refuses_layout
from tests.judge import Call, Tensors, built, call_with, guarded_call, placed
from tests.subjects import FEW

LAYOUTS: tuple[Layout, ...] = ("columns", "transposed", "gapped", "offset")
FEW_TOKENS = (0, 1, 3, 9, 17)
FEW_ROWS = (0, 1, 8, 15, 16)
BATCHES = (1, 16, 17, 32, 33, 64, 65, 128, 130)
FEW_BATCHES = (1, 17, 33, 65, 130)
REPEATS = {"cpu": 4, "cuda": 100}


@dataclass(frozen=True)
class Bench:
    """A kernel and the subject that it is tried on, on a device."""

    implementation: Implementation
    case: Case
    device: str

    @property
    def tensors(self) -> Tensors:
        """The subject's inputs."""
        return built(self.case).tensors

    @property
    def params(self) -> dict[str, object]:
        """The subject's plain parameters."""
        return built(self.case).params

    def call(self, tensors: Tensors | None = None, **options: Any) -> Call:
        """One guarded call, with the subject's inputs unless others are given."""
        given = self.tensors if tensors is None else tensors
        return guarded_call(self.case, self.implementation, given, self.params, self.device, **options)

    def call_with(self, given: Mapping[str, Guarded]) -> Call:
        """One call with inputs that lie in place already, and may serve several calls."""
        return call_with(self.case, self.implementation, given, self.params, self.device)

    def run(self, tensors: Tensors | None = None, **options: Any) -> Outputs:
        """The outputs of one call, on the CPU and in memory of their own."""
        return _kept(self.call(tensors, **options))

    def rows(self, rows: slice | torch.Tensor) -> dict[str, torch.Tensor]:
        """The subject's inputs for some of its tokens."""
        per_token = {argument.name for argument in self.case.arguments if argument.per_token}
        return {name: tensor[rows] if name in per_token else tensor for name, tensor in self.tensors.items()}

    def first_rows(self) -> list[int]:
        """How many of its tokens a law tries, all of them last: every number on a GPU, where calls are quick."""
        if not any(argument.per_token for argument in self.case.arguments):
            return [1]
        if self.device == "cuda":
            return list(range(self.case.tokens + 1))
        return [tokens for tokens in FEW_TOKENS if tokens <= self.case.tokens]

    @property
    def is_main(self) -> bool:
        """Whether the subject is its op's main one, or calls are quick; laws try less where they are not."""
        return self.device == "cuda" or self.case.tokens != FEW

    @property
    def one_and_all(self) -> list[int]:
        """One token, and all that the subject has."""
        return sorted({1, self.first_rows()[-1]})


Law = Callable[[Bench], Iterator[str]]


def shard_invariance(bench: Bench) -> Iterator[str]:
    """TP1 = TP2 = TP4 = TP8, for T from 0 to past 2 * tp (on a CPU a few of them; the base grid of cases has all)."""
    for tokens in bench.first_rows():
        tensors = bench.rows(slice(tokens))
        once = _Once(bench)
        expected = once(tensors)
        for tp in (2, 4, 8):
            layout = SpLayout(tokens, tp)
            shards = [once(rank) for rank in _sharded(bench.case, tensors, layout, "nan")]
            joined = [_joined(bench.case, index, [s[index] for s in shards], layout) for index in range(len(expected))]
            yield from _differences(bench.case, expected, joined, f"T = {tokens}: tp {tp} gives other bits than tp 1")


def token_independence(bench: Bench) -> Iterator[str]:
    """A token alone = the token in the batch; rows in another order, or twice, give the same rows."""
    case = bench.case
    batch = bench.run()
    for row in range(case.tokens) if bench.device == "cuda" else [row for row in FEW_ROWS if row < case.tokens]:
        alone = bench.run(bench.rows(slice(row, row + 1)))
        expected = [output[row : row + 1] for output in batch]
        told = f"token {row} alone gives other bits than in a batch of {case.tokens}"
        yield from _differences(case, expected, alone, told)
    yield from _batch_sizes(bench)
    order = torch.tensor([row for row in reversed(range(case.tokens)) for _ in range(2)])
    shuffled = bench.run(bench.rows(order))
    expected = [output[order] if len(output) == case.tokens else output for output in batch]
    yield from _differences(case, expected, shuffled, "reversed and doubled rows give other bits")


def _batch_sizes(bench: Bench) -> Iterator[str]:
    """The first rows of a large batch = a smaller batch of any size.

    Sizes lie on both sides of those at which kernels change launches; an op's main subject has each one on a GPU.
    """
    many = replace(bench, case=_with_tokens(bench, BATCHES[-1]))
    largest = many.run()
    sampled = BATCHES if bench.is_main else FEW_BATCHES
    each = bench.device == "cuda" and bench.case.tokens != FEW
    for tokens in range(1, BATCHES[-1]) if each else sampled[:-1]:
        fewer = many.run(many.rows(slice(tokens)))
        expected = [output[:tokens] for output in largest]
        told = f"a batch of {tokens} gives other bits than one of {BATCHES[-1]}"
        yield from _differences(many.case, expected, fewer, told)


def padding_isolation(bench: Bench) -> Iterator[str]:
    """Pad rows of zeros, NaN, Inf or 1e30 leave the same valid rows."""
    case = bench.case
    layout = _last_that_mixes(case)
    once = _Once(bench)
    seen: dict[str, list[torch.Tensor]] = {}
    for fill in ALL_FILLS:
        shards = [once(rank) for rank in _sharded(case, bench.tensors, layout, fill)]
        seen[fill] = [_joined(case, i, [s[i] for s in shards], layout) for i in range(len(shards[0]))]
        yield from _differences(case, seen["zero"], seen[fill], f"pad rows of {fill} change valid rows")


def _last_that_mixes(case: Case) -> SpLayout:
    """The largest tp at which a rank holds tokens and padding."""
    layouts = [SpLayout(case.tokens, tp) for tp in case.tp]
    return [one for one in layouts if any(0 < one.valid_rows(r) < one.rows_per_rank for r in range(one.tp))][-1]


def writes_all_and_nothing_else(bench: Bench) -> Iterator[str]:
    """Every output element is written, no input changes, nothing outside the outputs is touched, for few and many."""
    benches = [(bench, tokens) for tokens in sorted({bench.first_rows()[0], *bench.one_and_all})]
    if "T" in bench.case.spec.dims:
        benches.append((replace(bench, case=_with_tokens(bench, BATCHES[-1])), BATCHES[-1]))
    for one, tokens in benches:
        call = one.call(one.rows(slice(tokens)))
        for breach in (*call.violations, *_unwritten(one, call.outputs)):
            yield f"T = {tokens}: {breach}"


def _unwritten(bench: Bench, outputs: Outputs) -> Iterator[str]:
    if not bench.implementation.accepts_out:
        return
    for spec, output in zip(bench.case.spec.outputs, outputs, strict=True):
        count = int((bits(output) == POISON[output.dtype]).sum())
        if count:
            yield f"{count} elements of {spec.name} were not written"


def reads_inputs_only(bench: Bench) -> Iterator[str]:
    """What lies beside an input, in its row or past its end, changes nothing; nothing is written there."""
    for tokens in bench.one_and_all:
        tensors = bench.rows(slice(tokens))
        expected = bench.run(tensors, bands="zero")
        for fill in ALL_FILLS[1:]:
            call = bench.call(tensors, bands=fill)
            told = f"T = {tokens}: {fill} around the inputs gives other bits than zero there"
            yield from _differences(bench.case, expected, _kept(call), told)
            yield from (f"T = {tokens}: {breach}" for breach in call.violations)


def own_outputs(bench: Bench) -> Iterator[str]:
    """Without ``out=`` the same bits come back, in memory that no other call or input shares."""
    for tokens in bench.one_and_all:
        tensors = bench.rows(slice(tokens))
        expected = bench.run(tensors)
        without = replace(bench, implementation=replace(bench.implementation, accepts_out=False))
        given = placed(bench.case, tensors, bench.device)
        first, second = (without.call_with(given) for _ in range(2))
        yield from _differences(bench.case, expected, _kept(first), f"T = {tokens}: without out= come other bits")
        yield from (f"T = {tokens}: {breach}" for breach in first.violations)
        held = {output.untyped_storage().data_ptr() for output in first.outputs if output.numel()}
        for spec, output in zip(bench.case.spec.outputs, second.outputs, strict=True):
            if output.numel() and output.untyped_storage().data_ptr() in held:
                yield f"T = {tokens}: {spec.name} shares memory with an earlier result"


def layout_independence(bench: Bench) -> Iterator[str]:
    """Any strides of any input give the same bits, or a clear refusal."""
    names = [argument.name for argument in bench.case.arguments]
    axes = [len(bench.case.shape(argument)) for argument in bench.case.arguments]

    def call(layouts: Sequence[Layout]) -> Call:
        laid_out = replace(bench, case=_with_layouts(bench.case, dict(zip(names, layouts, strict=True))))
        return laid_out.call(bench.tensors)

    optional = [place for place, argument in enumerate(bench.case.arguments) if argument.optional]
    yield from _any_layout(bench, names, axes, call, alone=range(len(names)) if bench.is_main else optional)


def out_layout_independence(bench: Bench) -> Iterator[str]:
    """Any strides of any tensor given as ``out=`` hold the same bits afterwards, or are clearly refused."""
    names = [spec.name for spec in bench.case.spec.outputs]
    axes = [len(spec.dims) for spec in bench.case.spec.outputs]
    alone = range(len(names)) if bench.is_main else ()
    yield from _any_layout(bench, names, axes, lambda layouts: bench.call(out_layouts=layouts), alone, "out ")


def _any_layout(
    bench: Bench,
    names: Sequence[str],
    axes: Sequence[int],
    call: Callable[[Sequence[Layout]], Call],
    alone: Collection[int],
    kind: str = "",
) -> Iterator[str]:
    """Try mixtures of layouts, then some tensors alone; a mixture that is refused says nothing about its other tensors.

    ``alone`` has the places of those tensors: in one layout where calls are slow, in all after a refusal.
    """
    expected = _kept(call(["contiguous"] * len(names)))
    mixtures = list(_mixtures(axes))
    single = list(_each_alone(axes, range(len(names)), LAYOUTS))
    waiting = [*mixtures, *_each_alone(axes, alone, LAYOUTS if bench.device == "cuda" else LAYOUTS[:1])]
    for layouts in waiting:
        told = " and ".join(f"{kind}{n} as {lie}" for n, lie in zip(names, layouts, strict=True) if lie != "contiguous")
        try:
            got = call(layouts)
        except REFUSALS as error:
            if not _is_clear(error, kind, names):
                yield f"with {told}: raises {type(error).__name__} without a word on whose strides: {error}"
            if layouts in mixtures:
                waiting += [one for one in single if one not in waiting]
            continue
        except Exception as error:
            error.add_note(f"with {told}")
            raise
        yield from (f"with {told}: {breach}" for breach in got.violations)
        yield from _differences(bench.case, expected, _kept(got), f"{told} gives other bits")


def _is_clear(error: Exception, kind: str, names: Sequence[str]) -> bool:
    """Whether an error says that it is about strides, and of which tensor."""
    words = [*names, "out"] if kind else names
    return refuses_layout(error) and any(word in str(error) for word in words)


def _mixtures(axes: Sequence[int]) -> Iterator[list[Layout]]:
    """Every tensor in every layout, neighbours in different ones: a kernel may look at one tensor's strides only."""
    all_layouts: tuple[Layout, ...] = ("contiguous", *LAYOUTS)
    for shift in range(len(all_layouts)):
        layouts = [all_layouts[(place + shift) % len(all_layouts)] for place in range(len(axes))]
        yield [_possible(layout, count) for layout, count in zip(layouts, axes, strict=True)]


def _each_alone(axes: Sequence[int], places: Collection[int], layouts: Sequence[Layout]) -> Iterator[list[Layout]]:
    """One tensor in a layout, all others packed."""
    for place in places:
        for layout in layouts:
            laid_out: list[Layout] = ["contiguous"] * len(axes)
            laid_out[place] = _possible(layout, axes[place])
            yield laid_out


def _possible(layout: Layout, axes: int) -> Layout:
    """One axis cannot be transposed."""
    return "columns" if layout == "transposed" and axes < 2 else layout


def repeatability(bench: Bench) -> Iterator[str]:
    """Every run gives one result."""
    first = bench.run()
    for run in range(2, REPEATS[bench.device] + 1):
        yield from _differences(bench.case, first, bench.run(), f"run {run} gives other bits than run 1")


def forgets_earlier_calls(bench: Bench) -> Iterator[str]:
    """New values, written over the old ones where they lie, give what they give in new tensors.

    Each argument in turn gets other values of the same shape; some output has to change, so that a result or a
    derived weight that is kept by shape or by address shows even if it is kept for both.
    """
    case, tensors = bench.case, bench.rows(slice(FEW))
    given = placed(case, tensors, bench.device)

    first = last = _kept(bench.call_with(given))
    others = {name: _other_values(tensor) for name, tensor in tensors.items()}
    for name, other in others.items():
        given[name].write(other)
        before, last = last, _kept(bench.call_with(given))
        if all(compare(actual=now, expected=then).exact for now, then in zip(last, before, strict=True)):
            yield f"other values of {name}, in the same tensor, leave every output as it was"
    yield from _differences(case, bench.run(others), last, "values written over earlier ones give other bits")
    yield from _differences(case, first, bench.run(tensors), "the first values give other bits after others")


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Values of the same kind, all different: each row backwards, times a number that no norm takes out exactly."""
    return (tensor.flip(-1).float() * 0.75).to(tensor.dtype)


def empty_batch(bench: Bench) -> Iterator[str]:
    """No tokens: every output is empty, of the right shape and dtype, and nothing fails; after a full call too."""
    case = bench.case
    for _ in range(2):
        outputs = bench.run(bench.rows(slice(0)))
        for spec, output in zip(case.spec.outputs, outputs, strict=True):
            sizes = case.sizes | {"T": 0}
            shape = tuple(sizes[dim] for dim in spec.dims)
            if tuple(output.shape) != shape or output.dtype != getattr(torch, spec.dtype):
                yield f"T = 0: {spec.name} is {output.dtype} {list(output.shape)}, expected {spec.dtype} {list(shape)}"
        bench.run()


def gather_commutes(bench: Bench) -> Iterator[str]:
    """The op before the gather = the gather before the op, with one collective and 1/n of the streams' bytes.

    For ops that turn streams into one row a token; source: the collapse of the draft's streams before the gather.
    """
    case, tensors = bench.case, bench.tensors
    for tp in (2, 4, 8):
        layout = SpLayout(case.tokens, tp)
        ranks = _sharded(case, tensors, layout, "nan")
        early, late = CollectiveLog(tp), CollectiveLog(tp)
        first = trim(all_gather([bench.run(rank)[0] for rank in ranks], layout, early), layout)
        gathered = {n: trim(all_gather([rank[n] for rank in ranks], layout, late), layout) for n in tensors}
        last = bench.run(gathered)
        told = f"tp {tp}: op before gather gives other bits than gather before op"
        yield from _differences(case, last, [first], told)
        yield from _accounting(case, layout, early, late)


def _accounting(case: Case, layout: SpLayout, early: CollectiveLog, late: CollectiveLog) -> Iterator[str]:
    rows = (layout.tp - 1) * layout.rows_per_rank
    sent = sum(_row_bytes(case, argument.name) for argument in case.arguments)
    expected = (1, rows * 2 * case.hidden, len(case.arguments), rows * sent)
    counted = (len(early.per_rank[0]), early.received_bytes(), len(late.per_rank[0]), late.received_bytes())
    if counted != expected or not (early.uniform and late.uniform):
        yield f"tp {layout.tp}: (collectives, bytes) before and after are {counted}, expected {expected}"


def _row_bytes(case: Case, name: str) -> int:
    argument = case.spec.argument(name)
    dtype: torch.dtype = getattr(torch, argument.dtype)
    return math.prod(case.shape(argument)[1:]) * dtype.itemsize


_WITH_TOKENS = (shard_invariance, token_independence, padding_isolation, empty_batch)
_WITHOUT_TOKENS_TOO = (
    writes_all_and_nothing_else,
    reads_inputs_only,
    own_outputs,
    layout_independence,
    out_layout_independence,
    repeatability,
    forgets_earlier_calls,
)
LAWS: dict[str, Law] = {law.__name__: law for law in (*_WITH_TOKENS, *_WITHOUT_TOKENS_TOO, gather_commutes)}


def applies(law: str, case: Case, *, accepts_out: bool, needs_out: bool) -> bool:
    """Whether a law says something about a subject, and about a kernel that takes ``out=`` or must have it.

    Some need a token axis, the gather law one row a token.
    """
    if law == "gather_commutes":
        return case.op in ("collapse", "draft_tail", "stream_mean")
    if law == "own_outputs":
        return not needs_out
    if law == "out_layout_independence":
        return accepts_out
    return LAWS[law] not in _WITH_TOKENS or any(argument.per_token for argument in case.arguments)


class _Once:
    """Runs a bench on each inputs once: a rank's kernel sees nothing but its inputs, and many ranks have the same."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._done: dict[tuple[object, ...], Outputs] = {}

    def __call__(self, tensors: Tensors) -> Outputs:
        key = tuple((name, *t.shape, bits(t).contiguous().numpy().tobytes()) for name, t in tensors.items())
        if key not in self._done:
            self._done[key] = self._bench.run(tensors)
        return self._done[key]


def _kept(call: Call) -> Outputs:
    return tuple(output.cpu().clone(memory_format=torch.contiguous_format) for output in call.outputs)


def _sharded(case: Case, tensors: Tensors, layout: SpLayout, fill: PadFill) -> list[dict[str, torch.Tensor]]:
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.tp)]
    for name, tensor in tensors.items():
        per_token = case.spec.argument(name).per_token
        parts = shard(tensor, layout, pad_value(fill, tensor.dtype)) if per_token else [tensor] * layout.tp
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part
    return ranks


def _joined(case: Case, index: int, shards: list[torch.Tensor], layout: SpLayout) -> torch.Tensor:
    if case.spec.outputs[index].dims[0] != "T" or shards[0].shape[0] != layout.rows_per_rank:
        return shards[0]
    return trim(all_gather(shards, layout), layout)


def _differences(case: Case, expected: Any, actual: Any, sentence: str) -> Iterator[str]:
    for spec, left, right in zip(case.spec.outputs, expected, actual, strict=False):
        verdict = compare(actual=right, expected=left)
        if not verdict.exact:
            faults = ", ".join(fault.name.lower() for fault in verdict.faults)
            what = f"wrong {faults}" if faults else f"{verdict.mismatching} of {verdict.total}"
            yield f"{sentence} ({spec.name}: {what})"


def _with_tokens(bench: Bench, tokens: int) -> Case:
    """The subject with more tokens; on a CPU so few columns that these cost little."""
    document = bench.case.model_dump(by_alias=True, exclude_unset=True, mode="json")
    narrow = {"hidden": 9} if "hidden" in document and bench.device == "cpu" else {}
    return Case.model_validate(document | narrow | {"tokens": tokens})


def _with_layouts(case: Case, layouts: dict[str, Layout]) -> Case:
    document = case.model_dump(by_alias=True, exclude_unset=True, mode="json")
    given, default = document["inputs"].get("arguments", {}), document["inputs"]["default"]
    arguments = {name: {**given.get(name, default), "layout": layout} for name, layout in layouts.items()}
    document["inputs"]["arguments"] = arguments
    return Case.model_validate(document)
