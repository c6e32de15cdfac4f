"""The pinned sums over the hidden size: 64 lanes, segments of 512 columns, the same order for every launch shape.

A program takes a block of tokens and a block of segments; its tiles are [tokens, BLOCK_S * LANES], one column for each
lane of each of its segments, and it steps through the segments' h-blocks of 64 together. What it leaves in `partial`
[segment, row, token] is summed over segments, ascending, by whoever reads it. Compiled programs take one segment each,
interpreted ones all of them: no sum crosses a segment here, so the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from fast.triton_kernels.launch import blocks, power_of_two
from fast.triton_kernels.numerics import INTERPRETED, append, device, fma, wide

LANES = tl.constexpr(64)
SEGMENT = tl.constexpr(512)
STEPS = tl.constexpr(8)

# Outputs that one accumulator tile of a compiled program holds; three such tiles make the 24 of four streams.
GROUP = 8
MANY_TOKENS = 32

# What one step of an interpreted program costs, in microseconds: by itself, for each output group, for each 64 lanes.
STEP_COST, GROUP_COST, LANES_COST = 600.0, 500.0, 2.5
INTERPRETED_ROWS = 1 << 14


@dataclass(frozen=True)
class Segments:
    """How a pinned sum over `columns` is laid over programs; chosen for speed, without effect on any bit."""

    tokens: int
    segments: int
    group: int
    columns: int
    warps: int

    @classmethod
    def over(cls, tokens: int, columns: int, outputs: int) -> Segments:
        """The layout for `tokens` rows and `outputs` dot products (0 where only squares are summed)."""
        if INTERPRETED.value:
            return cls._interpreted(tokens, columns, outputs)
        if outputs == 0:
            # One warp whose threads take eight columns each, so that loads are of 16 bytes.
            return cls(4 if tokens > 1 else 1, 1, 1, columns, 1)
        tall = tokens >= MANY_TOKENS and outputs <= 3 * GROUP
        return cls(4 if tall else 1, 1, min(GROUP, power_of_two(outputs)), columns, 4)

    @classmethod
    def _interpreted(cls, tokens: int, columns: int, outputs: int) -> Segments:
        height = power_of_two(tokens)
        widths = _powers(power_of_two(blocks(columns, SEGMENT.value)))
        groups = {min(GROUP, power_of_two(outputs)), power_of_two(outputs)}
        fitting = [
            cls(min(height, max(1, INTERPRETED_ROWS // (width * group))), width, group, columns, 1)
            for width in widths
            for group in groups
        ]
        return min(fitting, key=lambda shape: shape._cost(tokens, outputs))

    def _cost(self, tokens: int, outputs: int) -> float:
        groups = blocks(outputs, self.group)
        rows = self.tokens * self.segments * (groups * self.group + 1)
        across, along = self.grid(tokens)
        return across * along * (STEP_COST + groups * GROUP_COST + rows * LANES_COST)

    @property
    def total(self) -> int:
        """The number of segments."""
        return blocks(self.columns, SEGMENT.value)

    def grid(self, tokens: int) -> tuple[int, int]:
        """The programs over `tokens` and the segments."""
        return blocks(tokens, self.tokens), blocks(self.total, self.segments)

    def partial(self, tokens: int, rows: int, device: torch.device) -> Tensor:
        """Scratch for the segment sums of `rows` quantities."""
        return torch.empty((self.total, rows, tokens), dtype=torch.float32, device=device)

    @property
    def constants(self) -> dict[str, int | bool]:
        """The constexpr arguments that every kernel with a pinned sum takes."""
        whole = self.columns % SEGMENT.value == 0 and self.total % self.segments == 0
        return {"BLOCK_T": self.tokens, "BLOCK_S": self.segments, "WHOLE": whole}


def _powers(largest: int) -> list[int]:
    return [1 << i for i in range(largest.bit_length())]


@device
def lane_columns(segment, step, block_s: tl.constexpr):
    """The columns of h-block `step` in `block_s` segments from `segment` on, lane after lane: int64 [block_s * 64]."""
    lane = tl.arange(0, block_s * LANES)
    if block_s == 1:
        return segment * SEGMENT + step * LANES + lane
    return (segment + lane // LANES) * SEGMENT + step * LANES + lane % LANES


@device
def zero_sums(outputs: tl.constexpr, group: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr):
    """Accumulators for `outputs` dot products: one tile [group, tokens, columns] a group, all +0."""
    sums = ()
    for _ in tl.static_range((outputs + group - 1) // group):
        sums = append(sums, tl.full([group, block_t, block_s * LANES], 0.0, tl.float32))
    return sums


@device
def zero_squares(block_t: tl.constexpr, block_s: tl.constexpr):
    """The accumulator for one sum of squares, [tokens, columns], +0."""
    return tl.full([block_t, block_s * LANES], 0.0, tl.float32)


@device
def add_products(sums, f, fn, fn_o, inside, outputs: tl.constexpr, group: tl.constexpr, whole: tl.constexpr):
    """One step of every dot product: sums = fma(fn, f, sums), lanes outside keep their value.

    f [tokens, columns]; fn are the pointers to the columns of output 0, fn_o the step between outputs.
    """
    stepped = ()
    for g in tl.static_range((outputs + group - 1) // group):
        o = g * group + tl.arange(0, group)
        pointer = fn[None, :] + (wide(o) * fn_o)[:, None]
        if whole and outputs % group == 0:
            weight = tl.load(pointer)
        else:
            weight = tl.load(pointer, mask=(o < outputs)[:, None] & inside[None, :], other=0.0)
        added = fma(weight[:, None, :], f[None, :, :], sums[g])
        stepped = append(stepped, kept(added, sums[g], inside[None, None, :], whole))
    return stepped


@device
def add_squares(squares, f, inside, whole: tl.constexpr):
    """One step of a sum of squares: fma(f, f, squares), lanes outside keep their value."""
    return kept(fma(f, f, squares), squares, inside[None, :], whole)


@device
def kept(stepped, before, inside, whole: tl.constexpr):
    """The step where it lies inside: a step with zeros would turn a lane's -0 into +0 and Inf * 0 into NaN."""
    if whole:
        return stepped
    return tl.where(inside, stepped, before)


@device
def lane_tree(lanes, rows: tl.constexpr, block_s: tl.constexpr):
    """The lanes added by the adjacent-pair tree, a[2i] + a[2i+1] six times: [rows, block_s] from rows of lanes."""
    tree = lanes
    for level in tl.static_range(6):
        left, right = tl.split(tl.reshape(tree, [rows, block_s * (LANES >> (level + 1)), 2]))
        tree = left + right
    return tree


@device
def store_sums(
    partial, sums, t, segment, tokens, segments, rows,
    outputs: tl.constexpr, group: tl.constexpr, block_t: tl.constexpr, block_s: tl.constexpr,
):  # fmt: skip
    """Reduce the lanes of every dot product and leave its segment sums in rows 0 to outputs - 1 of `partial`."""
    for g in tl.static_range((outputs + group - 1) // group):
        tree = tl.reshape(lane_tree(sums[g], group * block_t, block_s), [group, block_t, block_s])
        o = g * group + tl.arange(0, group)
        s = segment + tl.arange(0, block_s)
        pointer = partial + ((s[None, :] * rows + o[:, None]) * tokens)[:, None, :] + t[None, :, None]
        inside = (o < outputs)[:, None, None] & (t < tokens)[None, :, None] & (s < segments)[None, None, :]
        tl.store(pointer, tree, mask=inside)


@device
def store_squares(
    partial, squares, row, t, segment, tokens, segments, rows, block_t: tl.constexpr, block_s: tl.constexpr
):
    """Reduce the lanes of a sum of squares and leave its segment sums in `row` of `partial`."""
    tree = tl.reshape(lane_tree(squares, block_t, block_s), [block_t, block_s])
    s = segment + tl.arange(0, block_s)
    pointer = partial + ((s * rows + row) * tokens)[None, :] + t[:, None]
    tl.store(pointer, tree, mask=(t < tokens)[:, None] & (s < segments)[None, :])


@device
def segment_sum(pointer, step, segments: tl.constexpr, mask):
    """The values at `pointer` and each `step` further, one a segment, added in ascending order from +0."""
    total = tl.full(pointer.shape, 0.0, tl.float32)
    for s in range(segments):
        total = total + tl.load(pointer + wide(s) * step, mask=mask, other=0.0)
    return total


@device
def parts(tile, count: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):
    """The first `count` columns of a tile [rows, width], in order, as vectors [rows]; width is 1, 2, 4 or 8.

    A tile is only ever halved into its even and odd columns, so what a column holds does not hang on how the compiler
    lays tiles over threads. After a level, member r holds the columns that are r modulo the number of members.
    """
    members = append((), tile)
    for level in tl.static_range(3):
        if (1 << level) < width:
            low, high = (), ()
            for r in tl.static_range(1 << level):
                even, odd = tl.split(tl.reshape(members[r], [rows, width >> (level + 1), 2]))
                low = append(low, even)
                high = append(high, odd)
            members = low + high
    columns = ()
    for i in tl.static_range(count):
        columns = append(columns, tl.reshape(members[i], [rows]))
    return columns


@device
def index_sum(tile, count: tl.constexpr, block_t: tl.constexpr, width: tl.constexpr):
    """The first `count` entries of each row of a tile [tokens, width, width], added in index order: [tokens, width]."""
    columns = parts(tl.reshape(tile, [block_t * width, width]), count, block_t * width, width)
    total = columns[0]
    for i in tl.static_range(1, count):
        total = total + columns[i]
    return tl.reshape(total, [block_t, width])


@device
def index_max(tile, count: tl.constexpr, block_t: tl.constexpr, width: tl.constexpr):
    """The greatest of the first `count` entries of each row of a tile [tokens, width, width]: [tokens, width]."""
    columns = parts(tl.reshape(tile, [block_t * width, width]), count, block_t * width, width)
    highest = columns[0]
    for i in tl.static_range(1, count):
        highest = tl.maximum(highest, columns[i])
    return tl.reshape(highest, [block_t, width])
