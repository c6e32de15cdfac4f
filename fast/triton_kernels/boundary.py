"""Layer boundaries: what happens between two sublayers, in as few passes over the streams as the model allows.

V4.1 collapses with the pre-mix that the sublayer before handed on. Everything that touches the streams is therefore
known when they are read, and the boundary is ONE pass (`stream_kernel`): post, bf16 rounding, new residual, aux, layer
input, and the segment sums of the projection and of the norm, taken from the rounded values in registers. Each input is
read once and each output written once. A small second launch (`epilogue_kernel`) turns segment sums into coefficients
and scales the layer input.

V4 collapses with a pre-mix that is projected from the very streams it weighs. No token's collapse can start before its
whole projection is done, so a V4 boundary is the same pass without the collapse, the epilogue, and a second pass over
the new residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast.arguments import BF16, F32, Arguments, Constants, Output
from fast.registry import Config
from fast.triton_kernels.coefficients import (
    comb_outputs,
    reciprocal_rms,
    run_project,
    store_coefficients,
    token_block,
)
from fast.triton_kernels.collapse import load_streams, load_weights, run_collapse, weighted_sum
from fast.triton_kernels.launch import Tile, arguments, blocks, launch, power_of_two
from fast.triton_kernels.norm import run_collapse_norm, store_normed
from fast.triton_kernels.numerics import block, device, load_bf16, round_bf16, store_bf16, wide
from fast.triton_kernels.reduce import (
    STEPS,
    Segments,
    add_products,
    add_squares,
    lane_columns,
    segment_sum,
    store_squares,
    store_sums,
    zero_squares,
    zero_sums,
)
from fast.triton_kernels.streams import check_post, load_comb, mean_of, post_of, round_streams

# Rows of the segment sums after the M of the projection: its squares, then those of the layer input.
EXTRA_ROWS = tl.constexpr(2)


@triton.jit(do_not_specialize=["tokens"])
def stream_kernel(
    residual, x, post_mix, comb_mix, pre_mix, fn, new, layer_input, aux, partial, tokens, columns, segments,
    residual_t, residual_n, residual_h, x_t, x_h, post_t, post_n, comb_t, comb_i, comb_k, pre_t, pre_n, fn_o, fn_k,
    new_t, new_n, new_h, layer_t, layer_h, aux_t, aux_h,
    POST: tl.constexpr, ENTRY: tl.constexpr, COLLAPSE: tl.constexpr, NORM: tl.constexpr, AUX: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One pass over the streams, for a block of tokens and of segments.

    POST maps the streams first. ENTRY projects x alone, which all streams equal. COLLAPSE is "carried" (by pre_mix),
    "first" (a bit copy of stream 0) or "later". NORM sums the squares of the layer input. AUX takes the stream mean.
    """
    t = block(0, BLOCK_T)
    segment = wide(tl.program_id(1)) * BLOCK_S
    there = t < tokens
    if POST:
        post = load_weights(post_mix + t * post_t, post_n, there, N)
        comb = load_comb(comb_mix + t * comb_t, comb_i, comb_k, there, N)
    pre = ()
    if COLLAPSE == "carried":
        pre = load_weights(pre_mix + t * pre_t, pre_n, there, N)
    sums = zero_sums(M, GROUP, BLOCK_T, BLOCK_S)
    squares = zero_squares(BLOCK_T, BLOCK_S)
    norm_squares = zero_squares(BLOCK_T, BLOCK_S)
    for step in range(STEPS):
        h = lane_columns(segment, step, BLOCK_S)
        inside = h < columns
        mask = there[:, None] & inside[None, :]
        pointer = residual + (t * residual_t)[:, None] + (h * residual_h)[None, :]
        rows = load_streams(pointer, residual_n, mask, N)
        if POST:
            x_tile = load_bf16(x + (t * x_t)[:, None] + (h * x_h)[None, :], mask)
            rows = round_streams(post_of(x_tile, rows, post, comb, N), N)
            for k in tl.static_range(N):
                store_bf16(new + (t * new_t)[:, None] + (h * new_h)[None, :] + wide(new_n) * k, rows[k], mask)
        if AUX:
            store_bf16(aux + (t * aux_t)[:, None] + (h * aux_h)[None, :], mean_of(rows, N), mask)
        if COLLAPSE != "later":
            target = layer_input + (t * layer_t)[:, None] + (h * layer_h)[None, :]
            y = store_layer_input(target, pointer, rows, pre, mask, COLLAPSE, POST, N)
        if NORM:
            norm_squares = add_squares(norm_squares, y, inside, WHOLE)
        if ENTRY:
            f = load_bf16(x + (t * x_t)[:, None] + (h * x_h)[None, :], mask)
            squares = add_squares(squares, f, inside, WHOLE)
            sums = add_products(sums, f, fn + h * fn_k, fn_o, inside, M, GROUP, WHOLE)
        else:
            for j in tl.static_range(N):
                squares = add_squares(squares, rows[j], inside, WHOLE)
                weights = fn + (h + wide(columns) * j) * fn_k
                sums = add_products(sums, rows[j], weights, fn_o, inside, M, GROUP, WHOLE)
    store_sums(partial, sums, t, segment, tokens, segments, M + EXTRA_ROWS, M, GROUP, BLOCK_T, BLOCK_S)
    store_squares(partial, squares, M, t, segment, tokens, segments, M + EXTRA_ROWS, BLOCK_T, BLOCK_S)
    if NORM:
        store_squares(partial, norm_squares, M + 1, t, segment, tokens, segments, M + EXTRA_ROWS, BLOCK_T, BLOCK_S)


@device
def store_layer_input(
    target, source, rows, pre, mask, collapse: tl.constexpr, mapped: tl.constexpr, n: tl.constexpr
):  # fmt: skip
    """Store the layer input and return it as fp32; `source` are the pointers to stream 0 of what was loaded."""
    if collapse == "carried":
        y = round_bf16(weighted_sum(rows, pre, n))
        store_bf16(target, y, mask)
        return y
    if mapped:
        store_bf16(target, rows[0], mask)
    else:
        # The pattern itself, so that NaN payloads survive.
        tl.store(target, tl.load(source, mask=mask), mask=mask)
    return rows[0]


@triton.jit(do_not_specialize=["tokens", "rows"])
def epilogue_kernel(
    partial, hc_scale, hc_base, pre_mix, post_mix, comb_mix, layer_input, norm_weight, tokens, columns, rows,
    numel, rms_eps, pre_eps, sinkhorn_eps, post_mult, norm_eps, scale_o, base_o,
    pre_t, pre_n, post_t, post_n, comb_t, comb_i, comb_k, layer_t, layer_h, weight_h,
    SEGMENTS: tl.constexpr, ITERS: tl.constexpr, NORM: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr, SCALE_T: tl.constexpr, SCALE_H: tl.constexpr,
):  # fmt: skip
    """Coefficients of a block of tokens from their segment sums; further programs of a block scale its layer input."""
    first = block(0, BLOCK_T)
    role = tl.program_id(1)
    step = wide(tokens) * rows
    if role == 0:
        store_block_coefficients(
            partial, hc_scale, hc_base, pre_mix, post_mix, comb_mix, first, tokens, SEGMENTS, step, ITERS, numel,
            rms_eps, pre_eps, sinkhorn_eps, post_mult, scale_o, base_o, pre_t, pre_n, post_t, post_n,
            comb_t, comb_i, comb_k, N, WIDTH, BLOCK_T,
        )  # fmt: skip
    elif NORM:
        parts = BLOCK_T // SCALE_T
        start = wide(tl.program_id(0)) * BLOCK_T + (role - 1) % parts * SCALE_T
        t = start + tl.arange(0, SCALE_T)
        h = wide((role - 1) // parts) * SCALE_H + tl.arange(0, SCALE_H)
        squares = partial + wide(tokens) * (N * (N + 2) + 1) + t
        store_normed(
            layer_input, norm_weight, squares, layer_input, t, h, tokens, columns, SEGMENTS, step, norm_eps,
            layer_t, layer_h, weight_h, layer_t, layer_h,
        )  # fmt: skip


@device
def store_block_coefficients(
    partial, hc_scale, hc_base, pre_mix, post_mix, comb_mix, t, tokens, segments: tl.constexpr, step,
    iters: tl.constexpr, numel,
    rms_eps, pre_eps, sinkhorn_eps, post_mult, scale_o, base_o, pre_t, pre_n, post_t, post_n, comb_t, comb_i, comb_k,
    n: tl.constexpr, width: tl.constexpr, block_t: tl.constexpr,
):  # fmt: skip
    """Add the segment sums of a block's mixes, scale them by the reciprocal RMS, and store the coefficients."""
    there = t < tokens
    i = tl.arange(0, width)
    k = tl.arange(0, width)
    row = partial + t
    r = reciprocal_rms(segment_sum(row + wide(tokens) * (n * (n + 2)), step, segments, there), numel, rms_eps)
    mask = there[:, None] & (i < n)[None, :]
    pre = segment_sum(row[:, None] + (wide(i) * tokens)[None, :], step, segments, mask)
    post = segment_sum(row[:, None] + (wide(i + n) * tokens)[None, :], step, segments, mask)
    mask = there[:, None, None] & (i < n)[None, :, None] & (k < n)[None, None, :]
    comb = segment_sum(row[:, None, None] + wide(comb_outputs(i, k, n)) * tokens, step, segments, mask)
    store_coefficients(
        pre * r[:, None], post * r[:, None], comb * r[:, None, None], hc_scale, hc_base, scale_o, base_o,
        pre_mix + t * pre_t, post_mix + t * post_t, comb_mix + t * comb_t, pre_n, post_n, comb_i, comb_k,
        there, iters, pre_eps, sinkhorn_eps, post_mult, n, block_t, width,
    )  # fmt: skip


RESIDUAL = Output("residual", BF16, "T n H")
POST_MIX = Output("post_mix", F32, "T n")
COMB_MIX = Output("comb_mix", F32, "T n n")
LAYER_INPUT = Output("layer_input", BF16, "T H")
NEXT_PRE_MIX = Output("next_pre_mix", F32, "T n")


@dataclass(frozen=True)
class Gates:
    """What a boundary turns segment sums into coefficients with, and norms its layer input with, already checked."""

    fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor
    norm_weight: Tensor | None
    constants: Constants

    @classmethod
    def check(
        cls,
        call: Arguments,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        norm_weight: Tensor | None,
        config: Config,
        columns: str,
    ) -> Gates:
        """Check the arguments that all boundaries share; `columns` names the size of a row of fn."""
        constants = call.config(config)
        n = constants.hc_mult
        call.size("M", n * (n + 2))
        call.size("n*H", n * call["H"])
        call.tensor("fn", fn, F32, f"M {columns}")
        call.tensor("hc_scale", hc_scale, F32, "3")
        call.tensor("hc_base", hc_base, F32, "M")
        if norm_weight is not None:
            call.tensor("norm_weight", norm_weight, BF16, "H")
        return cls(fn, hc_scale, hc_base, norm_weight, constants)


@dataclass(frozen=True)
class Pass:
    """One launch of `stream_kernel`: checked inputs, where its outputs go, and what it does on the way.

    With `new` the streams are mapped by post_mix, comb_mix and x; without it x, if given, is projected in their stead.
    Without `layer_input` the collapse comes later; without `pre_mix` it is a bit copy of stream 0.
    """

    residual: Tensor
    x: Tensor | None = None
    post_mix: Tensor | None = None
    comb_mix: Tensor | None = None
    pre_mix: Tensor | None = None
    new: Tensor | None = None
    layer_input: Tensor | None = None
    aux: Tensor | None = None

    def run(self, gates: Gates) -> Tensor:
        """Launch; return the segment sums [S, M + 2, T]."""
        tokens, n, columns = self.residual.shape
        outputs = gates.fn.shape[0]
        shape = Segments.over(tokens, columns, outputs)
        partial = shape.partial(tokens, outputs + EXTRA_ROWS.value, self.residual.device)
        launch(
            stream_kernel, shape.grid(tokens), *self._tensors(gates.fn, partial), tokens, columns, shape.total,
            *self._strides(gates.fn), **self._flags(norm=gates.norm_weight is not None),
            N=n, M=outputs, GROUP=shape.group, warps=shape.warps, **shape.constants,
        )  # fmt: skip
        return partial

    def _tensors(self, fn: Tensor, partial: Tensor) -> tuple[Tensor | None, ...]:
        inputs = (self.residual, self.x, self.post_mix, self.comb_mix, self.pre_mix, fn)
        return (*inputs, self.new, self.layer_input, self.aux, partial)

    def _strides(self, fn: Tensor) -> tuple[int, ...]:
        return (
            *self.residual.stride(), *steps(self.x, 2), *steps(self.post_mix, 2), *steps(self.comb_mix, 3),
            *steps(self.pre_mix, 2), *fn.stride(), *steps(self.new, 3), *steps(self.layer_input, 2),
            *steps(self.aux, 2),
        )  # fmt: skip

    def _flags(self, *, norm: bool) -> dict[str, bool | str]:
        collapse = "later"
        if self.layer_input is not None:
            collapse = "first" if self.pre_mix is None else "carried"
        return {
            "POST": self.new is not None,
            "ENTRY": self.new is None and self.x is not None,
            "COLLAPSE": collapse,
            "NORM": norm and collapse != "later",
            "AUX": self.aux is not None,
        }


def steps(tensor: Tensor | None, dimensions: int) -> tuple[int, ...]:
    """The strides of a tensor, or as many zeros for one that is absent and never touched."""
    return (0,) * dimensions if tensor is None else tensor.stride()


def run_epilogue(
    gates: Gates,
    partial: Tensor,
    pre_mix: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor | None = None,
) -> None:
    """Launch the epilogue of segment sums [S, rows, T]; with a norm weight it also norms `layer_input`, in place."""
    segments, rows, tokens = partial.shape
    constants, n = gates.constants, gates.constants.hc_mult
    columns = 1 if layer_input is None else layer_input.shape[1]
    norm = gates.norm_weight is not None and layer_input is not None
    size = token_block(tokens, n)
    tile = Tile.over(min(tokens, size), columns)
    scaling = size // tile.tokens * blocks(columns, tile.columns) if norm else 0
    launch(
        epilogue_kernel, (blocks(tokens, size), 1 + scaling), partial, gates.hc_scale, gates.hc_base, pre_mix, post_mix,
        comb_mix, layer_input, gates.norm_weight, tokens, columns, rows,
        float(gates.fn.shape[1]), constants.rms_eps, constants.hc_pre_eps, constants.hc_sinkhorn_eps,
        constants.post_mult, constants.norm_eps, *gates.hc_scale.stride(), *gates.hc_base.stride(),
        *pre_mix.stride(), *post_mix.stride(), *comb_mix.stride(), *steps(layer_input, 2), *steps(gates.norm_weight, 1),
        SEGMENTS=segments, ITERS=constants.sinkhorn_iters, NORM=norm, N=n, WIDTH=power_of_two(n), BLOCK_T=size,
        SCALE_T=tile.tokens, SCALE_H=tile.columns, warps=1,
    )  # fmt: skip


def collapse_later(gates: Gates, partial: Tensor, residual: Tensor, outputs: Sequence[Tensor]) -> None:
    """What a V4 boundary does once its segment sums are known; outputs are post_mix, comb_mix, layer_input."""
    post_mix, comb_mix, layer_input = outputs
    pre_mix = torch.empty(residual.shape[:2], dtype=F32, device=residual.device)
    run_epilogue(gates, partial, pre_mix, post_mix, comb_mix)
    if gates.norm_weight is None:
        run_collapse(residual, pre_mix, layer_input)
    else:
        eps = gates.constants.norm_eps
        run_collapse_norm(residual, pre_mix, gates.norm_weight, layer_input, eps, rounded=False)


def check_entry(call: Arguments, residual: Tensor, x: Tensor | None) -> str:
    """Check the streams that a boundary starts from; return the size of a row of the projection that goes with them."""
    call.tensor("residual", residual, BF16, "T n H")
    if x is None:
        return "n*H"
    call.tensor("x", x, BF16, "T H")
    return "H"


def pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: Config,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Enter a V4 sublayer; return post_mix, comb_mix and layer_input, the collapse by the pre-mix just projected.

    residual [T, n, H] bf16, fn [M, n*H] f32 with M = n(n + 2), hc_scale [3] f32, hc_base [M] f32, norm_weight [H] bf16.
    With x [T, H] bf16, which all streams equal, x is projected by the broadcast fn [M, H]. post_mix [T, n] f32,
    comb_mix [T, n, n] f32, layer_input [T, H] bf16; any strides, `out` too. Raises TypeError or ValueError for wrong
    arguments. Source: numerical contract 1; upstream's mhc_pre.
    """
    call = arguments("pre")
    gates = Gates.check(call, fn, hc_scale, hc_base, norm_weight, config, check_entry(call, residual, x))
    outputs = call.outputs([POST_MIX, COMB_MIX, LAYER_INPUT], out)
    partial = run_project(residual if x is None else x.unsqueeze(1), fn)
    collapse_later(gates, partial, residual, outputs)
    return outputs[0], outputs[1], outputs[2]


def pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: Config,
    pre_mix: Tensor | None = None,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Enter a V4.1 sublayer; return post_mix, comb_mix, layer_input by the carried pre_mix, and next_pre_mix.

    Arguments of `pre`, and pre_mix [T, n] f32 from the sublayer before; without it layer_input is a bit copy of stream
    0. next_pre_mix [T, n] f32; any strides, `out` too. Raises TypeError or ValueError for wrong arguments.
    Source: numerical contract 1; upstream's mhc_pre_delayed.
    """
    call = arguments("pre_delayed")
    gates = Gates.check(call, fn, hc_scale, hc_base, norm_weight, config, check_entry(call, residual, x))
    if pre_mix is not None:
        call.tensor("pre_mix", pre_mix, F32, "T n")
    outputs = call.outputs([POST_MIX, COMB_MIX, LAYER_INPUT, NEXT_PRE_MIX], out)
    post_mix, comb_mix, layer_input, next_pre_mix = outputs
    partial = Pass(residual, x=x, pre_mix=pre_mix, layer_input=layer_input).run(gates)
    run_epilogue(gates, partial, next_pre_mix, post_mix, comb_mix, layer_input)
    return post_mix, comb_mix, layer_input, next_pre_mix


def post_pre(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: Config,
    norm_weight: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Leave one V4 sublayer and enter the next; return the new residual, post_mix, comb_mix and layer_input.

    Arguments of `post` (x [T, H] and residual [T, n, H] bf16, post_mix [T, n] and comb_mix [T, n, n] f32), then those
    of `pre`, which reads the new residual; any strides, `out` too. Raises TypeError or ValueError for wrong arguments.
    Source: numerical contract 1; upstream's mhc_fused_post_pre, with the projection taken after the bf16 rounding.
    """
    call = arguments("post_pre")
    check_post(call, x, residual, post_mix, comb_mix)
    gates = Gates.check(call, fn, hc_scale, hc_base, norm_weight, config, "n*H")
    new, *rest = call.outputs([RESIDUAL, POST_MIX, COMB_MIX, LAYER_INPUT], out)
    partial = Pass(residual, x=x, post_mix=post_mix, comb_mix=comb_mix, new=new).run(gates)
    collapse_later(gates, partial, new, rest)
    return new, rest[0], rest[1], rest[2]


def post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: Config,
    pre_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    capture_aux: bool = False,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Leave one V4.1 sublayer and enter the next, in one pass over the streams.

    Arguments of `post_pre`, and pre_mix [T, n] f32 as in `pre_delayed`. Returns residual, post_mix, comb_mix,
    layer_input, next_pre_mix, and aux [T, H] bf16, the mean of the new streams, which is (0, H) unless capture_aux; any
    strides, `out` too. Raises TypeError or ValueError for wrong arguments.
    Source: numerical contract 1; upstream's mhc_fused_post_pre_delayed, projected after the bf16 rounding.
    """
    call = arguments("post_pre_delayed")
    check_post(call, x, residual, post_mix, comb_mix)
    gates = Gates.check(call, fn, hc_scale, hc_base, norm_weight, config, "n*H")
    if pre_mix is not None:
        call.tensor("pre_mix", pre_mix, F32, "T n")
    wanted = [
        RESIDUAL,
        POST_MIX,
        COMB_MIX,
        LAYER_INPUT,
        NEXT_PRE_MIX,
        Output("aux", BF16, "T H" if capture_aux else "0 H"),
    ]
    new, next_post, next_comb, layer_input, next_pre_mix, aux = call.outputs(wanted, out)
    partial = Pass(
        residual, x=x, post_mix=post_mix, comb_mix=comb_mix, pre_mix=pre_mix, new=new, layer_input=layer_input,
        aux=aux if capture_aux else None,
    ).run(gates)  # fmt: skip
    run_epilogue(gates, partial, next_pre_mix, next_post, next_comb, layer_input)
    return new, next_post, next_comb, layer_input, next_pre_mix, aux
