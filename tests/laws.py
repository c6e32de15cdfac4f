"""The laws: what is true of every correct kernel, whatever its bits are. No reference is used here.

Each law takes an implementation and a subject (a `Case`, usually made by `subject`) and yields one sentence for each
breach. They see what a comparison with a reference on one shape cannot: results that depend on the batch, the shard,
the pad rows, the layout or the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cases.build import build
from cases.layouts import pad_value
from cases.ops import OPS
from cases.schema import ALL_FILLS, Case, PadFill
from fast.registry import Unsupported
from oracle.arith import bits
from oracle.compare import POISON, compare
from oracle.sp import CollectiveLog, SpLayout, all_gather, shard, trim
from tests.implementations import Implementation, Outputs
from tests.judge import Tensors, guarded_call, parameters

Law = Callable[[Implementation, Case, str], Iterator[str]]
LAYOUTS = ("columns", "transposed", "gapped", "offset")
FEW_TOKENS = (0, 1, 3, 8, 9, 17)
BATCHES = (1, 16, 17, 32, 33, 64, 65, 128, 130)
REPEATS = {"cpu": 10, "cuda": 100}


def subject(op: str, *, tokens: int, hidden: int = 97, hc_mult: int = 4, **changes: Any) -> Case:
    """An unblessed case of ``op`` on data that gives every order of additions other bits.

    97 columns leave a tail behind any vector or block; ``changes`` replace keys of the case document.
    """
    spec = OPS[op]
    document: dict[str, Any] = {
        "schema": 1,
        "name": f"law-{op.replace('_', '-')}",
        "title": f"the subject on which the laws try {op}",
        "op": op,
        "tp": [1, 2, 4, 8] if "T" in spec.dims else [1],
        "flags": ["order"],
        "catches": ["row-crosstalk"],
        "source": "design:4",
        "inputs": {"default": {"recipe": "cancelling"}, "arguments": {}},
    }
    sizes = {"tokens": tokens, "hidden": hidden, "hc_mult": hc_mult}
    document |= {key: size for key, size in sizes.items() if not spec.dims.isdisjoint(_MEASURES[key])}
    document |= _NUMBERS.get(op, {})
    return Case.model_validate(document | changes)


_MEASURES = {"tokens": "T", "hidden": "HK", "hc_mult": "nMK"}
_NUMBERS: dict[str, dict[str, Any]] = {
    "mixes": {"params": {"numel": 388, "rms_eps": 1e-6}},
    "sinkhorn": {"params": {"sinkhorn_iters": 20, "sinkhorn_eps": 1e-6}},
    "norm": {"params": {"norm_eps": 1e-6}},
    "collapse_norm": {"params": {"norm_eps": 1e-6, "squares_of": "rounded"}},
    "coefficients": {"config": {"preset": "v4"}},
    "head": {"config": {"preset": "v4"}},
    "pre": {"config": {"preset": "v4"}},
    "post_pre": {"config": {"preset": "v4"}},
    "pre_delayed": {
        "config": {"preset": "v41"},
        "inputs": {"default": {"recipe": "cancelling"}, "arguments": {"pre_mix": {"recipe": "cancelling"}}},
    },
    "post_pre_delayed": {
        "config": {"preset": "v41"},
        "params": {"capture_aux": True},
        "inputs": {"default": {"recipe": "cancelling"}, "arguments": {"pre_mix": {"recipe": "cancelling"}}},
    },
}


def shard_invariance(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """TP1 = TP2 = TP4 = TP8, for T from 0 to past 2 * tp (on a CPU a few of them; the base grid of cases has all)."""
    whole = build(case).tensors
    for tokens in range(case.tokens + 1) if device == "cuda" else FEW_TOKENS:
        tensors = _rows(case, whole, slice(tokens))
        expected = _run(implementation, case, tensors, device)
        for tp in (2, 4, 8):
            layout = SpLayout(tokens, tp)
            shards = [_run(implementation, case, rank, device) for rank in _sharded(case, tensors, layout, "nan")]
            joined = [_joined(case, index, [s[index] for s in shards], layout) for index in range(len(expected))]
            yield from _differences(case, expected, joined, f"T = {tokens}: tp {tp} gives other bits than tp 1")


def token_independence(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """A token alone = the token in the batch; rows in another order, or twice, give the same rows."""
    tensors = build(case).tensors
    batch = _run(implementation, case, tensors, device)
    for row in range(case.tokens):
        alone = _run(implementation, case, _rows(case, tensors, slice(row, row + 1)), device)
        expected = [output[row : row + 1] for output in batch]
        yield from _differences(
            case, expected, alone, f"token {row} alone gives other bits than in a batch of {case.tokens}"
        )
    yield from _batch_sizes(implementation, case, device)
    order = torch.tensor([row for row in reversed(range(case.tokens)) for _ in range(2)])
    shuffled = _run(implementation, case, _rows(case, tensors, order), device)
    yield from _differences(
        case, [output[order] for output in batch], shuffled, "reversed and doubled rows give other bits"
    )


def _batch_sizes(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """The first rows of a large batch = a smaller batch, on both sides of sizes at which kernels change launches."""
    many = _with_tokens(case, BATCHES[-1])
    tensors = build(many).tensors
    largest = _run(implementation, many, tensors, device)
    for tokens in BATCHES[:-1]:
        fewer = _run(implementation, many, _rows(many, tensors, slice(tokens)), device)
        expected = [output[:tokens] for output in largest]
        yield from _differences(
            many, expected, fewer, f"a batch of {tokens} gives other bits than one of {BATCHES[-1]}"
        )


def padding_isolation(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """Pad rows of zeros, NaN, Inf or 1e30 leave the same valid rows."""
    tensors = build(case).tensors
    layout = SpLayout(case.tokens, case.tp[-1])
    seen: dict[str, list[torch.Tensor]] = {}
    for fill in ALL_FILLS:
        shards = [_run(implementation, case, rank, device) for rank in _sharded(case, tensors, layout, fill)]
        seen[fill] = [_joined(case, i, [s[i] for s in shards], layout) for i in range(len(shards[0]))]
        yield from _differences(case, seen["zero"], seen[fill], f"pad rows of {fill} change valid rows")


def writes_all_and_nothing_else(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """Every output element is written, no input changes, nothing outside the outputs is touched."""
    inputs = build(case)
    call = guarded_call(case, implementation, inputs.tensors, inputs.params, device)
    yield from call.violations
    for spec, output in zip(case.spec.outputs, call.outputs, strict=True):
        unwritten = int((bits(output) == POISON[output.dtype]).sum()) if output.dtype in POISON else output.numel()
        if unwritten:
            yield f"{unwritten} elements of {spec.name} were not written"


def own_outputs(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """Without ``out=`` the same bits come back, in memory that no other call or input shares."""
    tensors = build(case).tensors
    expected = _run(implementation, case, tensors, device)
    placed = {name: tensor.to(device) for name, tensor in tensors.items()}
    params = parameters(build(case).params)
    first, second = (implementation(placed, params) for _ in range(2))
    yield from _differences(case, expected, [output.cpu() for output in first], "without out= come other bits")
    held = [tensor.untyped_storage().data_ptr() for tensor in (*placed.values(), *first) if tensor.numel()]
    for spec, output in zip(case.spec.outputs, second, strict=True):
        if output.numel() and output.untyped_storage().data_ptr() in held:
            yield f"{spec.name} shares memory with an input or with an earlier result"


def layout_independence(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """Any strides of any input give the same bits, or a clear refusal."""
    tensors = build(case).tensors
    expected = _run(implementation, case, tensors, device)
    for argument in case.arguments:
        for layout in LAYOUTS:
            if layout == "transposed" and len(argument.dims) < 2:
                continue
            changed = _with_layout(case, argument.name, layout)
            try:
                actual = _run(implementation, changed, tensors, device)
            except (Unsupported, ValueError):
                continue
            yield from _differences(case, expected, actual, f"{argument.name} laid out as {layout} gives other bits")


def repeatability(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """Every run gives one result."""
    tensors = build(case).tensors
    first = _run(implementation, case, tensors, device)
    for run in range(2, REPEATS[device] + 1):
        again = _run(implementation, case, tensors, device)
        yield from _differences(case, first, again, f"run {run} gives other bits than run 1")


def empty_batch(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """No tokens: every output is empty, of the right shape and dtype, and nothing fails; after a full call too."""
    tensors = build(case).tensors
    for _ in range(2):
        outputs = _run(implementation, case, _rows(case, tensors, slice(0)), device)
        for spec, output in zip(case.spec.outputs, outputs, strict=True):
            sizes = case.sizes | {"T": 0}
            shape = tuple(sizes[dim] for dim in spec.dims)
            if tuple(output.shape) != shape or output.dtype != getattr(torch, spec.dtype):
                yield f"T = 0: {spec.name} is {output.dtype} {list(output.shape)}, expected {spec.dtype} {list(shape)}"
        _run(implementation, case, tensors, device)


def gather_commutes(implementation: Implementation, case: Case, device: str) -> Iterator[str]:
    """The op before the gather = the gather before the op, with one collective and 1/n of the streams' bytes.

    For ops that turn streams into one row a token; source: the collapse of the draft's streams before the gather.
    """
    tensors = build(case).tensors
    for tp in (2, 4, 8):
        layout = SpLayout(case.tokens, tp)
        ranks = _sharded(case, tensors, layout, "nan")
        early, late = CollectiveLog(tp), CollectiveLog(tp)
        first = trim(all_gather([_run(implementation, case, rank, device)[0] for rank in ranks], layout, early), layout)
        gathered = {n: trim(all_gather([rank[n] for rank in ranks], layout, late), layout) for n in tensors}
        last = _run(implementation, case, gathered, device)
        yield from _differences(
            case, last, [first], f"tp {tp}: op before gather gives other bits than gather before op"
        )
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


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        shard_invariance,
        token_independence,
        padding_isolation,
        writes_all_and_nothing_else,
        own_outputs,
        layout_independence,
        repeatability,
        empty_batch,
        gather_commutes,
    )
}


def applies(law: str, op: str) -> bool:
    """Whether a law says something about an op: all but one need a token axis, the gather law one row a token."""
    spec = OPS[op]
    if law == "gather_commutes":
        return op in ("collapse", "draft_tail", "stream_mean")
    if law in ("writes_all_and_nothing_else", "own_outputs", "layout_independence", "repeatability"):
        return True
    return any(argument.per_token for argument in spec.arguments)


def _run(implementation: Implementation, case: Case, tensors: Tensors, device: str) -> Outputs:
    call = guarded_call(case, implementation, tensors, build(case).params, device)
    return tuple(output.cpu().clone() for output in call.outputs)


def _rows(case: Case, tensors: Tensors, rows: slice | torch.Tensor) -> dict[str, torch.Tensor]:
    return {n: tensor[rows] if case.spec.argument(n).per_token else tensor for n, tensor in tensors.items()}


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


def _with_tokens(case: Case, tokens: int) -> Case:
    document = case.model_dump(by_alias=True, exclude_unset=True, mode="json")
    narrow = {"hidden": 9} if "hidden" in document else {}
    return Case.model_validate(document | narrow | {"tokens": tokens})


def _with_layout(case: Case, name: str, layout: str) -> Case:
    document = case.model_dump(by_alias=True, exclude_unset=True, mode="json")
    arguments: Mapping[str, Any] = document["inputs"].get("arguments", {})
    own = arguments.get(name, document["inputs"]["default"])
    document["inputs"]["arguments"] = {**arguments, name: {**own, "layout": layout}}
    return Case.model_validate(document)
