"""Wrong definitions of expand, mean, post and draft tail, and wrong stream counts in any op.

Wrong orders are in `tests.mutants.orders`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cases.ops import OPS
from oracle.arith import constant, packed, round_bf16, widen
from oracle.arithmetic import CONTRACT_1, Dot, Order, Post, WeightedSum
from oracle.coefficients import sinkhorn as oracle_sinkhorn
from oracle.reduce import CONTRACT_DOT, CONTRACT_SUM, index_sum, pinned_dot, weighted_sum
from oracle.streams import _post_sum, unrounded_post
from tests.mutants.generic import on_inputs, patched

Function = Callable[..., Any]


def post_rounding_dropped(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, pre_mix: Tensor) -> Tensor:
    """Fuses post and collapse, and collapses the FP32 streams that it still holds in registers."""
    new = unrounded_post(x, residual, post_mix, comb_mix, CONTRACT_1)
    return round_bf16(weighted_sum([pre_mix[:, i, None] for i in range(new.shape[1])], new.unbind(1)))


def mean_per_stream(residual: Tensor) -> Tensor:
    """Divides and rounds each stream's share before adding."""
    shares = (widen(residual) / residual.shape[1]).bfloat16()
    return round_bf16(sum(shares.float().unbind(1), torch.zeros_like(shares[:, 0].float())))


def mean_of_last_stream(residual: Tensor) -> Tensor:
    """Takes another aux state than the mean."""
    return residual[:, -1].clone()


def expand_tiled(hidden: Tensor, hc_mult: int) -> Tensor:
    """Tiles the flat buffer instead of repeating rows: streams of one token get other tokens' values."""
    return hidden.repeat(hc_mult, 1).reshape(-1, hc_mult, hidden.shape[1])


def expand_to_four(hidden: Tensor, hc_mult: int) -> Tensor:  # noqa: ARG001 - that is the fault
    """Makes four streams, whatever hc_mult says."""
    return hidden.unsqueeze(1).repeat(1, 4, 1)


def mean_from_first(residual: Tensor) -> Tensor:
    """Starts from the first stream instead of +0: a sum of -0 alone stays -0."""
    total = widen(residual[:, 0])
    for stream in residual.unbind(1)[1:]:
        total = total + widen(stream)
    return round_bf16(total / torch.full((), residual.shape[1], dtype=torch.float32))


def rounded_up(streams: int) -> int:
    """The power of two at or above a stream count."""
    return 1 << (streams - 1).bit_length()


def strides_for(op: str, count: Callable[[int], int]) -> Function:
    """Steps through memory as if there were ``count(n)`` streams, and uses n of them.

    Of each axis of streams, of mixes or of weights that has another length so, the first ones are read where the
    longer or shorter axis would have them; what lies past an array's end is its beginning again.
    """
    specs = {argument.name: argument for argument in OPS[op].arguments}

    def read(name: str, tensor: Tensor) -> Tensor:
        dims = specs[name].dims
        n = _streams(tensor, dims)
        if not n or not tensor.numel():
            return tensor
        sizes = [_length(dim, size, n, count(n)) for dim, size in zip(dims, tensor.shape, strict=True)]
        return _read_as(tensor, sizes)

    return on_inputs(op, read)


def _streams(tensor: Tensor, dims: tuple[str, ...]) -> int:
    """How many streams a tensor's shape tells of, by an axis of streams or of n * (n + 2) mixes; 0 if none."""
    if len(dims) != tensor.dim():
        return 0
    if "n" in dims:
        return tensor.shape[dims.index("n")]
    rows = tensor.shape[dims.index("M")] if "M" in dims else 0
    return next((n for n in range(1, 9) if n * (n + 2) == rows), 0)


def _length(dim: str, size: int, n: int, count: int) -> int:
    return {"n": count, "M": count * (count + 2), "K": size // n * count}.get(dim, size)


def _read_as(tensor: Tensor, sizes: list[int]) -> Tensor:
    """The elements at the places that a packed tensor of other sizes has them, in the tensor's own shape."""
    places = torch.zeros((), dtype=torch.int64)
    for axis, size in enumerate(tensor.shape):
        at = torch.arange(size) * torch.tensor(sizes[axis + 1 :], dtype=torch.int64).prod()
        places = places + at.reshape(-1, *(1 for _ in range(tensor.dim() - 1 - axis)))
    flat = tensor.contiguous().view(-1)
    return flat[places % flat.numel()]


def expand_in_wider_rows(hidden: Tensor, hc_mult: int) -> Tensor:
    """Writes each token's copies where a power of two of streams would have them, until the output is full."""
    tokens, width = hidden.shape
    copies = hidden.unsqueeze(1).expand(tokens, rounded_up(hc_mult), width)
    return packed(copies).view(-1)[: tokens * hc_mult * width].view(tokens, hc_mult, width)


def _with_stale(terms: Sequence[Any]) -> list[Any]:
    """The terms, and the last one again for each that pads them up to a power of two."""
    return [*terms, *[terms[-1]] * (rounded_up(len(terms)) - len(terms))]


def _padded_weighted(weights: Sequence[Tensor], values: Sequence[Tensor], rule: WeightedSum = CONTRACT_SUM) -> Tensor:
    return weighted_sum(_with_stale(weights), _with_stale(values), rule)


def _padded_sum(terms: Sequence[Tensor], order: Order = "ascending") -> Tensor:
    return index_sum(_with_stale(terms), order)


def _padded_post(weight: Tensor, x: Tensor, terms: list[tuple[Tensor, Tensor]], rule: Post) -> Tensor:
    return _post_sum(weight, x, _with_stale(terms), rule)


def _padded_dot(streams: Tensor, fn: Tensor, rule: Dot = CONTRACT_DOT) -> Tensor:
    wide, rows = (torch.stack(_with_stale(one.unbind(1)), 1) for one in (streams, fn))
    return pinned_dot(wide, rows, rule)


def _padded_mean(residual: Tensor) -> Tensor:
    """Divides by the power of two."""
    total = index_sum(widen(residual).unbind(1))
    return round_bf16(total / constant(rounded_up(residual.shape[1]), total))


def _padded_sinkhorn(logits: Tensor, **options: Any) -> Tensor:
    """Balances a matrix of a power of two of rows, zeros in the logits that pad it."""
    n = logits.shape[1]
    wide = logits.new_zeros(logits.shape[0], rounded_up(n), rounded_up(n))
    wide[:, :n, :n] = logits
    return packed(oracle_sinkhorn(wide, **options)[:, :n, :n])


def _by_op() -> dict[str, dict[str, Function]]:
    """Kernels that are right for 1, 2, 4 and 8 streams alone, or for four alone, by op and class."""
    found: dict[str, dict[str, Function]] = {
        op: {"streams-rounded-up": strides_for(op, rounded_up)}
        for op, spec in OPS.items()
        if not spec.dims.isdisjoint("nM")
    }
    found["expand"]["streams-rounded-up"] = expand_in_wider_rows
    for op in ("mixes", "coefficients", "fn_broadcast"):
        found[op]["hc-mult-fixed"] = strides_for(op, lambda _: 4)
    for op, padded in _PADDED.items():
        found[op]["streams-padded"] = padded
    return found


_COLLAPSING = ("collapse", "draft_tail", "collapse_norm", "head", "pre", "pre_delayed", "post_pre", "post_pre_delayed")
_PADDED: dict[str, Function] = {
    **{op: patched(op, weighted_sum=_padded_weighted) for op in _COLLAPSING},
    "stream_mean": _padded_mean,
    "post": patched("post", _post_sum=_padded_post),
    "project": patched("project", pinned_dot=_padded_dot),
    "sinkhorn": _padded_sinkhorn,
    "coefficients": patched("coefficients", sinkhorn=_padded_sinkhorn),
    "fn_broadcast": patched("fn_broadcast", index_sum=_padded_sum),
}

BY_OP = _by_op()
