"""Ops over the residual streams: expand, mean, post, and post followed by collapse."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle import arguments
from oracle.arith import constant, fma, packed, round_bf16, widen
from oracle.arithmetic import CONTRACT_1, Arithmetic, Post
from oracle.collapse import collapse
from oracle.reduce import add_product, index_sum


@torch.no_grad()
def expand(hidden: Tensor, hc_mult: int) -> Tensor:
    """Return bf16 [T, n, H], contiguous: every stream a bit copy of `hidden`.

    hidden: bf16 [T, H]. hc_mult: n, 1..8. Raises TypeError for a wrong dtype or type, ValueError for a
    wrong shape or count. Source: upstream repeats the embedding over the streams.
    """
    tokens, width = arguments.rows("expand", "hidden", hidden)
    streams = arguments.count("expand", "hc_mult", hc_mult, highest=arguments.MAX_STREAMS)
    return packed(hidden.unsqueeze(1).expand(tokens, streams, width))


@torch.no_grad()
def stream_mean(residual: Tensor, *, arithmetic: Arithmetic = CONTRACT_1) -> Tensor:
    """Return the mean over streams, bf16 [T, H]: summed in index order from +0, divided by n, rounded once.

    residual: bf16 [T, n, H]. Raises TypeError for a wrong dtype, ValueError for a wrong shape.
    Source: contract 1; upstream takes this mean of the bf16 residual as the auxiliary hidden state.
    """
    _, streams, _ = arguments.residual("stream_mean", residual)
    total = index_sum(widen(residual).unbind(1), arithmetic.mean.order)
    n = constant(streams, total)
    one = constant(1.0, total)
    return packed(round_bf16(total / n if arithmetic.mean.scale == "divide" else total * (one / n)))


@torch.no_grad()
def post(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, *, arithmetic: Arithmetic = CONTRACT_1
) -> Tensor:
    """Return the new residual, bf16 [T, n, H]: new[k] = post[k] * x + sum over i of comb[i, k] *
    residual[i].

    x: bf16 [T, H]. residual: bf16 [T, n, H]. post_mix: fp32 [T, n]. comb_mix: fp32 [T, n, n], indexed
    [input stream, output stream]. Sequence: v = post[k] * x; for i ascending v = v + (comb[i, k] * res[i]),
    each product and sum rounded to fp32; new = bf16(v).
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. Source: contract 1.
    """
    check_post("post", x, residual, post_mix, comb_mix)
    return packed(round_bf16(unrounded_post(x, residual, post_mix, comb_mix, arithmetic)))


@torch.no_grad()
def draft_tail(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    pre_mix: Tensor,
    *,
    arithmetic: Arithmetic = CONTRACT_1,
) -> Tensor:
    """Return the layer input, bf16 [T, H], of `collapse` after `post`; the bf16 rounding between them
    stays.

    Arguments as in `post`, and pre_mix: fp32 [T, n]. Raises TypeError for a wrong dtype, ValueError for a
    wrong shape or device. Source: the tail of upstream's draft model, which collapses on each rank before
    the gather.
    """
    tokens, streams, _ = check_post("draft_tail", x, residual, post_mix, comb_mix)
    arguments.sized("draft_tail", "pre_mix", pre_mix, torch.float32, (tokens, streams))
    arguments.same_device("draft_tail", x=x, pre_mix=pre_mix)
    new = round_bf16(unrounded_post(x, residual, post_mix, comb_mix, arithmetic))
    return collapse(new, pre_mix, arithmetic=arithmetic)


def check_post(op: str, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> tuple[int, int, int]:
    """Return (T, n, H) of the arguments of a post mapping, or raise as `post` does, in the name of `op`."""
    tokens, streams, hidden = arguments.residual(op, residual)
    arguments.sized(op, "x", x, torch.bfloat16, (tokens, hidden))
    arguments.sized(op, "post_mix", post_mix, torch.float32, (tokens, streams))
    arguments.sized(op, "comb_mix", comb_mix, torch.float32, (tokens, streams, streams))
    arguments.same_device(op, x=x, residual=residual, post_mix=post_mix, comb_mix=comb_mix)
    return tokens, streams, hidden


def unrounded_post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return the fp32 [T, n, H] accumulator of `post` before its rounding; arguments are not checked."""
    rule = arithmetic.post
    inputs = list(range(residual.shape[1]))
    if rule.order == "descending":
        inputs.reverse()
    terms = [(comb_mix[:, i, :, None], widen(residual[:, i]).unsqueeze(1)) for i in inputs]
    return _post_sum(post_mix[:, :, None], widen(x).unsqueeze(1), terms, rule)


def _post_sum(weight: Tensor, x: Tensor, terms: list[tuple[Tensor, Tensor]], rule: Post) -> Tensor:
    fused = rule.contraction == "fused"
    if rule.first == "alone":
        value = weight * x
    elif rule.first == "into_first":
        (comb, stream), *terms = terms
        value = fma(weight, x, comb * stream)
    else:
        value = torch.zeros_like(weight * x)
        terms = [*terms, (weight, x)]
    for comb, stream in terms:
        value = add_product(value, comb, stream, fused=fused)
    return value
