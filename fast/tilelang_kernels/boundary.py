"""Layer boundaries: what happens between two sublayers, as one sweep over the streams and one finish.

V4 collapses with the pre-mix of the sublayer that is entered, so the finish reads the streams once more. V4.1
("delayed") collapses with the one carried from the sublayer before, in the sweep itself, and hands on the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fast.arguments import BF16, F32, Arguments, Constants, Output
from fast.registry import Config
from fast.tilelang_kernels import MAX_STREAMS
from fast.tilelang_kernels.build import arguments
from fast.tilelang_kernels.finish import Coefficients, Finish, finish
from fast.tilelang_kernels.norm import check_room
from fast.tilelang_kernels.streams import check_post
from fast.tilelang_kernels.sweep import Layer, Post, Sweep, sweep

RESIDUAL = Output("residual", BF16, "T n H")
POST_MIX = Output("post_mix", F32, "T n")
COMB_MIX = Output("comb_mix", F32, "T n n")
LAYER_INPUT = Output("layer_input", BF16, "T H")
NEXT_PRE_MIX = Output("next_pre_mix", F32, "T n")


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
    """Enter a V4 sublayer: return post_mix [T, n], comb_mix [T, n, n] (fp32) and layer_input [T, H] (bf16).

    residual [T, n, H] bf16; fn [M, n*H], hc_scale [3], hc_base [M] fp32, M = n(n + 2); x [T, H] bf16, at an entry
    whose streams all equal it, with fn its broadcast [M, H]; norm_weight [H] bf16, for a norm by the squares of the
    unrounded collapse. Any strides; n is 1 to 8. TypeError or ValueError for arguments that do not fit, Unsupported
    for a norm of too wide a row. Source: contract 1.
    """
    given = arguments("pre")
    given.tensor("residual", residual, BF16, "T n H")
    constants = _weights(given, fn, hc_scale, hc_base, config, x)
    _optional(given, None, norm_weight)
    _check_norm("pre", norm_weight)
    post_mix, comb_mix, layer_input = given.outputs([POST_MIX, COMB_MIX, LAYER_INPUT], out)
    if given["T"]:
        partials = sweep(Sweep(residual, fn, entry=x))
        gates = Coefficients(torch.empty_like(post_mix), post_mix, comb_mix)
        finish(Finish(partials, hc_scale, hc_base, given["K"], layer_input, gates, residual, norm_weight), constants)
    return post_mix, comb_mix, layer_input


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
    """Enter a V4.1 sublayer: return post_mix, comb_mix, layer_input [T, H] bf16 and next_pre_mix [T, n] fp32.

    Arguments of `pre`, and pre_mix [T, n] fp32, carried from the sublayer before; without it the layer input is a bit
    copy of stream 0. A norm is by the squares of the bf16 layer input. TypeError or ValueError for arguments that do
    not fit. Source: contract 1.
    """
    given = arguments("pre_delayed")
    given.tensor("residual", residual, BF16, "T n H")
    constants = _weights(given, fn, hc_scale, hc_base, config, x)
    _optional(given, pre_mix, norm_weight)
    outputs = given.outputs([POST_MIX, COMB_MIX, LAYER_INPUT, NEXT_PRE_MIX], out)
    post_mix, comb_mix, layer_input, next_pre_mix = outputs
    if given["T"]:
        layer = Layer(layer_input, pre_mix, squared=norm_weight is not None)
        partials = sweep(Sweep(residual, fn, entry=x, layer=layer))
        gates = Coefficients(next_pre_mix, post_mix, comb_mix)
        finish(Finish(partials, hc_scale, hc_base, given["K"], layer_input, gates, None, norm_weight), constants)
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
    """Cross a V4 boundary, post then pre: return residual [T, n, H], post_mix, comb_mix and layer_input.

    x [T, H] bf16, residual, post_mix and comb_mix as in `post`, the rest as in `pre`; the projection and the collapse
    read the new residual after its rounding. TypeError or ValueError for arguments that do not fit, Unsupported for a
    norm of too wide a row. Source: contract 1.
    """
    given = arguments("post_pre")
    check_post(given, x, residual, post_mix, comb_mix)
    constants = _weights(given, fn, hc_scale, hc_base, config, None)
    _optional(given, None, norm_weight)
    _check_norm("post_pre", norm_weight)
    mapped, next_post, next_comb, layer_input = given.outputs([RESIDUAL, POST_MIX, COMB_MIX, LAYER_INPUT], out)
    if given["T"]:
        partials = sweep(Sweep(residual, fn, post=Post(x, post_mix, comb_mix, mapped)))
        gates = Coefficients(torch.empty_like(next_post), next_post, next_comb)
        finish(Finish(partials, hc_scale, hc_base, given["K"], layer_input, gates, mapped, norm_weight), constants)
    return mapped, next_post, next_comb, layer_input


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
    """Cross a V4.1 boundary: return residual, post_mix, comb_mix, layer_input, next_pre_mix and aux.

    Arguments of `post_pre`, and pre_mix as in `pre_delayed`, of the new residual. aux [T, H] bf16 is the stream mean
    of the new residual with capture_aux, else (0, H). TypeError or ValueError for arguments that do not fit.
    Source: contract 1.
    """
    given = arguments("post_pre_delayed")
    check_post(given, x, residual, post_mix, comb_mix)
    constants = _weights(given, fn, hc_scale, hc_base, config, None)
    _optional(given, pre_mix, norm_weight)
    aux_of = Output("aux", BF16, "T H" if capture_aux else "0 H")
    outputs = given.outputs([RESIDUAL, POST_MIX, COMB_MIX, LAYER_INPUT, NEXT_PRE_MIX, aux_of], out)
    mapped, next_post, next_comb, layer_input, next_pre, aux = outputs
    if given["T"]:
        step = Post(x, post_mix, comb_mix, mapped)
        layer = Layer(layer_input, pre_mix, squared=norm_weight is not None)
        partials = sweep(Sweep(residual, fn, post=step, layer=layer, aux=aux if capture_aux else None))
        gates = Coefficients(next_pre, next_post, next_comb)
        finish(Finish(partials, hc_scale, hc_base, given["K"], layer_input, gates, None, norm_weight), constants)
    return mapped, next_post, next_comb, layer_input, next_pre, aux


def _weights(
    given: Arguments, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, config: Config, x: Tensor | None
) -> Constants:
    """Check config, what the gates take, and the row of an entry; size "K" is how many values are projected."""
    constants = given.config(config)
    n = given.integer("config.hc_mult", constants.hc_mult, 1, MAX_STREAMS)
    given.size("M", n * (n + 2))
    given.size("K", given["H"] if x is not None else n * given["H"])
    if x is not None:
        given.tensor("x", x, BF16, "T H")
    given.tensor("fn", fn, F32, "M K")
    given.tensor("hc_scale", hc_scale, F32, "3")
    given.tensor("hc_base", hc_base, F32, "M")
    return constants


def _optional(given: Arguments, pre_mix: Tensor | None, norm_weight: Tensor | None) -> None:
    """Check a carried pre-mix and a norm weight, where there are any."""
    if pre_mix is not None:
        given.tensor("pre_mix", pre_mix, F32, "T n")
    if norm_weight is not None:
        given.tensor("norm_weight", norm_weight, BF16, "H")


def _check_norm(op: str, norm_weight: Tensor | None) -> None:
    """Raise Unsupported where a finish would have to norm a row that no block can hold."""
    if norm_weight is not None:
        check_room(op, norm_weight.shape[0])
