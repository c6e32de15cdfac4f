"""What follows a sweep: segment sums become coefficients, and the layer input is collapsed or scaled, in one launch.

The first blocks hold the coefficients of some tokens each; the others hold one token's row each. A V4 boundary
collapses here, by gates that every row's block works out for itself, so that no block waits for another; a V4.1
boundary has collapsed in its sweep, and at most scales what it finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T
from torch import Tensor

from fast.arguments import Constants
from fast.tilelang_kernels.build import Wide, fixed, run, vector_of
from fast.tilelang_kernels.coefficients import Gates, give_coefficients, plain, segment_sum, tokens_a_block
from fast.tilelang_kernels.collapse import collapse_columns
from fast.tilelang_kernels.norm import Row, capacity, collapse_into, scale, scale_row, threads_for
from fast.tilelang_kernels.numerics import Numerics, each, move, sigmoid
from fast.tilelang_kernels.sweep import LAYER_SQUARES, SQUARES, SUMS

F = T.float32
NOTHING, SCALE, COLLAPSE, NORM = 0, 1, 2, 3


@dataclass(frozen=True)
class Coefficients:
    """The coefficients that a finish writes: pre_mix and post_mix [T, n], comb_mix [T, n, n], fp32."""

    pre_mix: Tensor
    post_mix: Tensor
    comb_mix: Tensor


@dataclass(frozen=True)
class Finish:
    """What one finish does with the partials of a sweep over `numel` values a token.

    `coefficients` are written if wanted. residual [T, n, H] is collapsed into layer_input [T, H] by gates; with
    norm_weight [H] the result is normed by its unrounded squares. Without residual a norm_weight scales layer_input in
    place, by its squares in the partials.
    """

    partials: Tensor
    hc_scale: Tensor
    hc_base: Tensor
    numel: int
    layer_input: Tensor
    coefficients: Coefficients | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None

    @property
    def task(self) -> int:
        """What is to be done with the layer input."""
        if self.residual is None:
            return NOTHING if self.norm_weight is None else SCALE
        return COLLAPSE if self.norm_weight is None else NORM

    def tensors(self, n: int) -> list[Tensor]:
        """Return every tensor argument, with a harmless one of the right kind in the place of each that is absent."""
        tokens, hidden = self.layer_input.shape
        matrix = self.partials.as_strided((tokens, n, n), (0, 0, 0))
        streams = self.layer_input.unsqueeze(1).expand(tokens, n, hidden)
        gates = self.coefficients or Coefficients(matrix[..., 0], matrix[..., 0], matrix)
        return [
            self.partials,
            self.hc_scale,
            self.hc_base,
            gates.pre_mix,
            gates.post_mix,
            gates.comb_mix,
            streams if self.residual is None else self.residual,
            streams[0, 0] if self.norm_weight is None else self.norm_weight,
            self.layer_input,
        ]


def finish(given: Finish, constants: Constants) -> None:
    """Run what follows a sweep; T is at least 1."""
    (tokens, hidden), n = given.layer_input.shape, constants.hc_mult
    gating, task = int(given.coefficients is not None), given.task
    tensors = given.tensors(n)
    v = vector_of(*tensors[-3:])
    layer = given.layer_input
    room = capacity(layer, hidden) if task == NORM or not layer.is_cuda else 0
    sizes = [given.partials.shape[1], given.hc_base.shape[0], given.hc_scale.shape[0]]
    eps = (constants.rms_eps, float(hidden), constants.norm_eps)
    numbers = [tokens, n, hidden, gating, task, *sizes, float(given.numel), *eps, *plain(constants)]
    key = (room, v, tokens_a_block(layer, n), *fixed(layer, n, hidden, gating, task))
    run(make_finish, key, [*tensors[:-3], *(Wide(tensor, v) for tensor in tensors[-3:])], numbers)


def make_finish(o: Numerics, room: int, v: int, many: int, *fixed_numbers: int | None) -> Any:
    """Trace the kernel: blocks of `many` tokens' coefficients first, then a block for each token's row."""
    threads = threads_for(o, room)

    @T.prim_func
    def finish(
        partials_p: T.ptr(F), scale_p: T.ptr(F), base_p: T.ptr(F), pre_p: T.ptr(F), post_p: T.ptr(F), comb_p: T.ptr(F),
        residual_p: T.ptr(o.bf16), weight_p: T.ptr(o.bf16), layer_p: T.ptr(o.bf16), tokens: T.int32,
        n: T.int32, size: T.int32, gating: T.int32, task: T.int32, segments: T.int32, rows: T.int32, parts: T.int32,
        numel: T.float32, rms_eps: T.float32, count: T.float32, norm_eps: T.float32,
        iters: T.int32, pre_eps: T.float32, sinkhorn_eps: T.float32, post_mult: T.float32,
        st: T.int64, ss: T.int64, sr: T.int64, hs: T.int64, bm: T.int64, pt: T.int64, pn: T.int64,
        qt: T.int64, qn: T.int64, ct: T.int64, ci: T.int64, ck: T.int64,
        rt: T.int64, rn: T.int64, rh: T.int64, wh: T.int64, lt: T.int64, lh: T.int64,
    ):  # fmt: skip
        called = n, size, gating, task
        n, size, gating, task = [o.choice(*pair) for pair in zip(fixed_numbers, called, strict=True)]
        partials = o.tensor(partials_p, F, (tokens, segments, SUMS + rows), (st, ss, sr))
        scales = o.tensor(scale_p, F, (parts,), (hs,))
        base = o.tensor(base_p, F, (rows,), (bm,))
        pre = o.tensor(pre_p, F, (tokens, n), (pt, pn))
        post = o.tensor(post_p, F, (tokens, n), (qt, qn))
        comb = o.tensor(comb_p, F, (tokens, n, n), (ct, ci, ck))
        residual = o.tensor(residual_p, o.bf16, (tokens, n, size), (rt, rn, rh), v)
        weight = o.tensor(weight_p, o.bf16, (size,), (wh,), v)
        layer = o.tensor(layer_p, o.bf16, (tokens, size), (lt, lh), v)
        groups = T.ceildiv(tokens, many) * gating
        with o.kernel(groups + tokens * o.pick(task != NOTHING, 1, 0), threads=threads) as block:
            k = Roots(numel, rms_eps, count, norm_eps)
            if gating != 0 and block < groups:
                g = Gates(o, n, many, threads, tokens, block * many, iters, pre_eps, sinkhorn_eps, post_mult)
                _finish_coefficients(g, k, partials, segments, scales, base, pre, post, comb)
            if task != NOTHING and block >= groups:
                r = Row(o, n, v, threads, size, room, block - groups)
                _finish_row(r, task, k, partials, segments, scales, base, pre_eps, residual, weight, layer)

    return finish


@dataclass(frozen=True)
class Roots:
    """What the two reciprocal roots of a boundary take, while its kernel is traced: counts and eps, fp32."""

    numel: Any
    rms_eps: Any
    count: Any
    norm_eps: Any


@T.macro
def _finish_coefficients(g, k, partials, segments, scales, base, pre, post, comb):
    """Write the coefficients of a block's tokens."""
    sums = g.o.shared((g.many, g.most_rows + 1), F)
    mix = g.o.shared((g.many, g.most_rows), F)
    each(g.o, g.threads, g.many * (g.most_rows + 1), _sum, g, partials, segments, sums)
    each(g.o, g.threads, g.many, _root, g, k, sums)
    each(g.o, g.threads, g.many * g.most_rows, _mix, g, sums, mix)
    give_coefficients(g, mix, scales, base, pre, post, comb)


@T.macro
def _sum(g, partials, segments, sums, item):
    """Sum the segments of one row of one token into sums[token, row]; row 0 holds the squares."""
    i = item // (g.most_rows + 1)
    r = item % (g.most_rows + 1)
    if g.first + i < g.tokens and r <= g.rows:
        sums[i, r] = segment_sum(g.o, partials, g.first + i, slot_of(r), segments)


def slot_of(row: Any) -> Any:
    """Return the slot of `partials` that holds row 0, the squares, or a dot product."""
    return T.if_then_else(row == 0, SQUARES, row + SUMS - 1)


@T.macro
def _root(g, k, sums, item):
    """Replace one token's sum of squares by the factor that scales its dot products."""
    if g.first + item < g.tokens:
        sums[item, 0] = g.o.reciprocal_rms(sums[item, 0], k.numel, k.rms_eps)


@T.macro
def _mix(g, sums, mix, item):
    """Scale one dot product of one token."""
    i = item // g.most_rows
    m = item % g.most_rows
    if g.first + i < g.tokens and m < g.rows:
        mix[i, m] = g.o.mul(sums[i, 1 + m], sums[i, 0])


@T.macro
def _finish_row(r, task, k, partials, segments, scales, base, pre_eps, residual, weight, layer):
    """Scale one token's layer input, or collapse its streams by gates of its own, with or without a norm."""
    o = r.o
    sums = o.shared((o.most(r.n) + 1,), F)
    gates = o.shared((1, o.most(r.n)), F)
    row = o.shared((max(r.room, 1),), F)
    if task == SCALE:
        each(r.o, r.threads, 1, _layer_root, r, k, partials, segments, sums)
        each(r.o, r.threads, T.ceildiv(r.size, r.v), _scale_found, r, sums, weight, layer)
    else:
        each(r.o, r.threads, r.n + 1, _sum_own, r, partials, segments, sums)
        each(r.o, r.threads, r.n, _own_gate, r, k, sums, scales, base, pre_eps, gates)
    if task == COLLAPSE:
        each(r.o, r.threads, T.ceildiv(r.size, r.v), _collapse_own, r, residual, gates, layer)
    if task == NORM:
        each(r.o, r.threads, r.room // r.v, collapse_into, r, 1, residual, gates, 0, row)
        scale_row(r, 1, row, weight, layer, k.count, k.norm_eps)


@T.macro
def _layer_root(r, k, partials, segments, sums, item):
    """Leave in sums[0] the factor that scales a layer input whose squares a sweep has summed."""
    squares = segment_sum(r.o, partials, r.token, LAYER_SQUARES, segments)
    sums[item] = r.o.reciprocal_rms(squares, k.count, k.norm_eps)


@T.macro
def _scale_found(r, sums, weight, layer, item):
    """Scale `v` columns of the layer input in place."""
    h = item * r.v
    if h < r.size:
        found = T.alloc_local((r.v,), r.o.bf16)
        move(r.o, r.v, layer, (r.token, h), found, (0,))
        scale(r.o, r.v, found, sums[0], weight, h)
        move(r.o, r.v, found, (0,), layer, (r.token, h))


@T.macro
def _sum_own(r, partials, segments, sums, item):
    """Sum the segments of the squares, item 0, or of one pre row."""
    sums[item] = segment_sum(r.o, partials, r.token, slot_of(item), segments)


@T.macro
def _own_gate(r, k, sums, scales, base, pre_eps, gates, item):
    """Leave one pre gate of this block's token in gates[0]."""
    o = r.o
    mix = T.alloc_var(F)
    mix = o.mul(sums[1 + item], o.reciprocal_rms(sums[0], k.numel, k.rms_eps))
    gates[0, item] = o.add(sigmoid(o, o.logit(mix, scales[0], base[item])), pre_eps)


@T.macro
def _collapse_own(r, residual, gates, layer, item):
    """Collapse `v` columns of this block's token."""
    h = item * r.v
    if h < r.size:
        collapse_columns(r.o, r.n, r.v, residual, gates, 0, layer, r.token, h)
