"""Sums in a pinned order: over streams, over lanes, over the hidden size.

LANES and SEGMENT are part of contract 1: no launch shape, token count, backend or machine may change them.
64 lanes are one warp with two adjacent columns a thread, so the first step of the tree stays inside a
thread; 512 divides the hidden sizes 4096, 5120 and 7168 and leaves 8 to 14 segments to spread a small T
over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oracle.arith import fma
from oracle.arithmetic import Dot, Order, WeightedSum

LANES = 64
SEGMENT = 512
CONTRACT_DOT = Dot(lanes=LANES, segment=SEGMENT)
CONTRACT_SUM = WeightedSum()

# Elements of one accumulator: on a CPU as many as leave its dozen temporaries in the cache, on a GPU enough
# to fill it. The chunks of tokens that follow from it bound the memory and change no bit.
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 24


def index_sum(terms: Sequence[Tensor], order: Order = "ascending") -> Tensor:
    """Return the fp32 sum of equally shaped `terms` in `order`, from +0.0 (so that a lone -0 becomes +0)."""
    if order == "pairwise":
        return torch.zeros_like(terms[0]) + _pairwise(list(terms))
    total = torch.zeros_like(terms[0])
    for term in terms if order == "ascending" else reversed(terms):
        total = total + term
    return total


def weighted_sum(weights: Sequence[Tensor], values: Sequence[Tensor], rule: WeightedSum = CONTRACT_SUM) -> Tensor:
    """Return the fp32 sum of weights[i] * values[i] over i, in the order and with the roundings of `rule`.

    Each weight broadcasts against its value; all are fp32.
    """
    pairs = list(zip(weights, values, strict=True))
    if rule.order == "pairwise":
        return _weighted_pairs(pairs, rule)
    if rule.order == "descending":
        pairs.reverse()
    total = _start(pairs[0], rule)
    for weight, value in pairs[1:]:
        total = add_product(total, weight, value, fused=rule.contraction == "fused")
    return total


def add_product(total: Tensor, weight: Tensor, value: Tensor, *, fused: bool) -> Tensor:
    """Return total + weight * value, with one rounding when `fused`, else with two."""
    return fma(weight, value, total) if fused else total + weight * value


def _start(pair: tuple[Tensor, Tensor], rule: WeightedSum) -> Tensor:
    product = pair[0] * pair[1]
    if rule.start == "first":
        return product
    return add_product(torch.zeros_like(product), *pair, fused=rule.contraction == "fused")


def _weighted_pairs(pairs: list[tuple[Tensor, Tensor]], rule: WeightedSum) -> Tensor:
    terms = []
    for i in range(0, len(pairs), 2):
        term = _start(pairs[i], rule)
        if i + 1 < len(pairs):
            term = add_product(term, *pairs[i + 1], fused=rule.contraction == "fused")
        terms.append(term)
    return _pairwise(terms)


def _pairwise(terms: list[Tensor]) -> Tensor:
    while len(terms) > 1:
        paired = [left + right for left, right in zip(terms[0::2], terms[1::2], strict=False)]
        terms = paired + terms[2 * len(paired) :]
    return terms[0]


def lane_tree(lanes: Tensor) -> Tensor:
    """Return the fp32 sum over the last dimension, a power of two, by the tree a[2i] + a[2i+1]."""
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., 0]


def _distant_tree(lanes: Tensor) -> Tensor:
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _serial(lanes: Tensor) -> Tensor:
    return index_sum(lanes.unbind(-1))


def _warps(lanes: Tensor) -> Tensor:
    return _serial(_distant_tree(lanes.reshape(*lanes.shape[:-1], -1, 32)))


_LANE_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "adjacent": lane_tree,
    "distant": _distant_tree,
    "serial": _serial,
    "warps": _warps,
}


def pinned_dot(streams: Tensor, fn: Tensor, rule: Dot = CONTRACT_DOT) -> Tensor:
    """Return sum over j, h of fn[o, j, h] * streams[t, j, h] as fp32 [T, M], in the pinned order.

    streams: fp32 [T, n, H]. fn: fp32 [M, n, H]. Lane h mod 64 of a segment of 512 h adds by fma, from +0:
    h-blocks of 64 ascending, streams ascending within a block. The 64 lanes are added by the adjacent-pair
    tree, the segments in ascending order from +0. A lane with no h left keeps its value; a lane that never
    had one holds +0 and takes part in the tree. (A step with 0 * 0 in their place gives the same result: it
    could only turn a lane's -0 into +0, and the sum of the segments from +0 loses that sign.)
    """
    return _by_tokens(streams, fn, rule)


def pinned_squares(streams: Tensor, rule: Dot = CONTRACT_DOT) -> Tensor:
    """Return the sum over j, h of streams[t, j, h] squared as fp32 [T], in the order of `pinned_dot`."""
    return _by_tokens(streams, None, rule)[:, 0]


def _by_tokens(streams: Tensor, fn: Tensor | None, rule: Dot) -> Tensor:
    if rule.streams == "flat":
        streams = streams.flatten(1).unsqueeze(1)
        fn = None if fn is None else fn.flatten(1).unsqueeze(1)
    tokens, _, hidden = streams.shape
    outputs = 1 if fn is None else fn.shape[0]
    positions, used = _positions(hidden, rule, streams.device)
    weights = None if fn is None else fn[:, :, positions]
    result = torch.empty(tokens, outputs, dtype=torch.float32, device=streams.device)
    room = _CPU_CHUNK if streams.device.type == "cpu" else _GPU_CHUNK
    step = max(1, room // (outputs * positions[0].numel()))
    for first in range(0, tokens, step):
        chunk = slice(first, first + step)
        result[chunk] = _sum_chunk(streams[chunk], weights, positions, used, rule)
    return result


def _positions(hidden: int, rule: Dot, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the h of [block, segment, lane], clamped to the row, and whether that h exists."""
    length = -(-hidden // rule.splits) if rule.splits else rule.segment
    segments, blocks = -(-hidden // length), -(-length // rule.lanes)
    block = torch.arange(blocks, device=device)[:, None, None]
    segment = torch.arange(segments, device=device)[None, :, None]
    lane = torch.arange(rule.lanes, device=device)
    inside = block * rule.lanes + lane
    position = segment * length + inside
    return position.clamp(max=hidden - 1), (inside < length) & (position < hidden)


def _sum_chunk(streams: Tensor, weights: Tensor | None, positions: Tensor, used: Tensor, rule: Dot) -> Tensor:
    outputs = 1 if weights is None else weights.shape[0]
    lanes = streams.new_zeros(streams.shape[0], outputs, *positions.shape[1:])
    for block, (position, exists) in enumerate(zip(positions, used, strict=True)):
        if not bool(exists.any()):
            continue
        for j in range(streams.shape[1]):
            value = streams[:, j, position].unsqueeze(1)
            weight = value if weights is None else weights[:, j, block]
            added = add_product(lanes, weight, value, fused=rule.contraction == "fused")
            lanes = added if bool(exists.all()) else torch.where(exists, added, lanes)
    sums = _LANE_SUMS[rule.lane_sum](lanes)
    return index_sum(sums.unbind(-1), rule.segments)
