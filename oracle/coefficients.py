"""From streams to mixing coefficients: projection, RMS scaling, gates and Sinkhorn."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle import arguments
from oracle.arith import constant, exp, packed, sigmoid, sqrt, widen
from oracle.arithmetic import CONTRACT_1, Arithmetic, Order
from oracle.config import MhcConfig
from oracle.reduce import add_product, index_sum, pinned_dot, pinned_squares


@torch.no_grad()
def project(x: Tensor, fn: Tensor, *, arithmetic: Arithmetic = CONTRACT_1) -> tuple[Tensor, Tensor]:
    """Return the dot products with each row of `fn`, fp32 [T, M], and the sum of squares, fp32 [T].

    x: bf16 [T, n, H], or [T, H] as one stream. fn: fp32 [M, n*H] (or [M, H]), any M >= 1, stream after
    stream. Order and roundings: `oracle.reduce.pinned_dot`; they depend on neither T nor M.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. Source: contract 1.
    """
    if isinstance(x, Tensor) and x.dim() == 2:
        arguments.rows("project", "x", x)
        x = x.unsqueeze(1)
    _, streams, hidden = arguments.residual("project", x, name="x")
    arguments.tensor("project", "fn", fn, torch.float32, ("M", "n*H"))
    outputs = arguments.count("project", "rows of fn", fn.shape[0])
    arguments.sized("project", "fn", fn, torch.float32, (outputs, streams * hidden))
    arguments.same_device("project", x=x, fn=fn)
    return project_unrounded(widen(x), fn, arithmetic)


def project_unrounded(streams: Tensor, fn: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Return what `project` does for fp32 [T, n, H] streams; arguments are not checked."""
    rows = fn.reshape(fn.shape[0], *streams.shape[1:])
    return pinned_dot(streams, rows, arithmetic.dot), pinned_squares(streams, arithmetic.dot)


@torch.no_grad()
def mixes(sums: Tensor, squares: Tensor, *, numel: int, rms_eps: float) -> Tensor:
    """Return the RMS-scaled dot products, fp32 [T, M]: sums * r with r = 1 / sqrt(squares / numel +
    rms_eps).

    sums: fp32 [T, M]. squares: fp32 [T]. numel: how many values were squared (n*H, or H at a broadcast
    entry). Division, addition, root, reciprocal and product are each rounded to fp32, and so are numel and
    rms_eps. Raises TypeError for a wrong dtype or type, ValueError for a wrong shape, value or device.
    Source: upstream scales after the projection; it has no norm weight there.
    """
    arguments.tensor("mixes", "sums", sums, torch.float32, ("T", "M"))
    arguments.sized("mixes", "squares", squares, torch.float32, sums.shape[:1])
    arguments.count("mixes", "numel", numel)
    arguments.real("mixes", "rms_eps", rms_eps)
    arguments.same_device("mixes", sums=sums, squares=squares)
    return packed(sums * reciprocal_rms(squares, numel, rms_eps).unsqueeze(1))


def reciprocal_rms(squares: Tensor, numel: int, eps: float) -> Tensor:
    """Return 1 / sqrt(squares / numel + eps), each step rounded to fp32; arguments are not checked."""
    mean = squares / constant(numel, squares)
    return constant(1.0, squares) / sqrt(mean + constant(eps, squares))


@torch.no_grad()
def sinkhorn(
    logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float, arithmetic: Arithmetic = CONTRACT_1
) -> Tensor:
    """Return the mixing matrix of each token, fp32 [T, n, n], indexed [input stream, output stream].

    logits: fp32 [T, n, n]. sinkhorn_iters: rounds, at least 1. sinkhorn_eps: rounded to fp32.
    Round 1: softmax of each row (subtract the row's maximum; exp; divide by the row sum, no eps there),
    then add eps to every entry, then divide by (column sum + eps). Every further round: divide by (row sum
    + eps), then by (column sum + eps). Sums run in index order from +0, each step is rounded to fp32.
    Columns so sum to 1 within roundings and eps; rows only nearly. A logit of -Inf counts as exp = 0; a
    NaN, a +Inf, or a row of -Inf alone makes that row NaN in the softmax, and every column step then makes
    the whole matrix NaN. Raises TypeError for a wrong dtype or type, ValueError for a wrong shape or value.
    Source: upstream, all backends.
    """
    arguments.tensor("sinkhorn", "logits", logits, torch.float32, ("T", "n", "n"))
    streams = arguments.count("sinkhorn", "rows of logits", logits.shape[1], highest=arguments.MAX_STREAMS)
    arguments.sized("sinkhorn", "logits", logits, torch.float32, (logits.shape[0], streams, streams))
    arguments.count("sinkhorn", "sinkhorn_iters", sinkhorn_iters)
    arguments.real("sinkhorn", "sinkhorn_eps", sinkhorn_eps)
    eps, order = constant(sinkhorn_eps, logits), arithmetic.index_order
    comb = _divide_columns(_softmax_rows(logits, order) + eps, eps, order)
    for _ in range(sinkhorn_iters - 1):
        comb = _divide_columns(_divide_rows(comb, eps, order), eps, order)
    return packed(comb)


def _softmax_rows(logits: Tensor, order: Order) -> Tensor:
    powers = exp(logits - logits.amax(2, keepdim=True))
    return powers / index_sum(powers.unbind(2), order).unsqueeze(2)


def _divide_rows(comb: Tensor, eps: Tensor, order: Order) -> Tensor:
    return comb / (index_sum(comb.unbind(2), order).unsqueeze(2) + eps)


def _divide_columns(comb: Tensor, eps: Tensor, order: Order) -> Tensor:
    return comb / (index_sum(comb.unbind(1), order).unsqueeze(1) + eps)


@torch.no_grad()
def coefficients(
    mixes: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: MhcConfig,
    arithmetic: Arithmetic = CONTRACT_1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre_mix [T, n], post_mix [T, n] and comb_mix [T, n, n], all fp32.

    mixes: fp32 [T, M], M = n(n + 2): n for pre, n for post, then n*n for comb, row-major. hc_scale: fp32
    [3], one each for pre, post, comb. hc_base: fp32 [M]. With z = mix * scale + base (two roundings): pre =
    sigmoid(z) + hc_pre_eps, post = post_mult * sigmoid(z), comb = sinkhorn(z).
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. Source: upstream; contract
    1.
    """
    tokens, n = (
        arguments.tensor("coefficients", "mixes", mixes, torch.float32, ("T", "M")).shape[0],
        config.hc_mult,
    )
    arguments.sized("coefficients", "mixes", mixes, torch.float32, (tokens, n * (n + 2)))
    arguments.sized("coefficients", "hc_scale", hc_scale, torch.float32, (3,))
    arguments.sized("coefficients", "hc_base", hc_base, torch.float32, (n * (n + 2),))
    arguments.same_device("coefficients", mixes=mixes, hc_scale=hc_scale, hc_base=hc_base)
    pre, post, comb = (
        _logits(mixes[:, part], hc_scale[i], hc_base[part], arithmetic)
        for i, part in enumerate((slice(0, n), slice(n, 2 * n), slice(2 * n, None)))
    )
    return (
        packed(pre_gate(pre, config)),
        packed(constant(config.post_mult, post) * sigmoid(post)),
        sinkhorn(
            comb.reshape(tokens, n, n),
            sinkhorn_iters=config.sinkhorn_iters,
            sinkhorn_eps=config.hc_sinkhorn_eps,
            arithmetic=arithmetic,
        ),
    )


def _logits(mix: Tensor, scale: Tensor, base: Tensor, arithmetic: Arithmetic) -> Tensor:
    return add_product(base, mix, scale, fused=arithmetic.gate == "fused")


def pre_gate(logits: Tensor, config: MhcConfig) -> Tensor:
    """Return sigmoid(logits) + hc_pre_eps, fp32 of the same shape; arguments are not checked."""
    return sigmoid(logits) + constant(config.hc_pre_eps, logits)


def gate(mix: Tensor, scale: Tensor, base: Tensor, config: MhcConfig, arithmetic: Arithmetic) -> Tensor:
    """Return sigmoid(mix * scale + base) + hc_pre_eps, as the head takes it; arguments are not checked."""
    return pre_gate(_logits(mix, scale, base, arithmetic), config)


@torch.no_grad()
def fn_broadcast(fn: Tensor, hc_mult: int, *, out: Tensor | None = None, arithmetic: Arithmetic = CONTRACT_1) -> Tensor:
    """Return fn summed over its streams in index order from +0, fp32 [M, H], for an entry whose streams are
    equal.

    fn: fp32 [M, n*H]. hc_mult: n, 1..8. out: fp32 [M, H] to refresh in place and return, so that its
    address stays what a captured graph knows. Raises TypeError for a wrong dtype or type, ValueError for a
    wrong shape, count or device. Source: upstream's broadcast of the first layer.
    """
    streams = arguments.count("fn_broadcast", "hc_mult", hc_mult, highest=arguments.MAX_STREAMS)
    outputs, columns = arguments.tensor("fn_broadcast", "fn", fn, torch.float32, ("M", "n*H")).shape
    if columns == 0 or columns % streams:
        wanted = f"a multiple of hc_mult = {streams} columns, at least one each"
        raise ValueError(f"fn_broadcast: fn must have {wanted}, got {columns}")
    total = index_sum(fn.chunk(streams, 1), arithmetic.index_order)
    if out is None:
        return packed(total)
    arguments.sized("fn_broadcast", "out", out, torch.float32, (outputs, columns // streams))
    arguments.same_device("fn_broadcast", fn=fn, out=out)
    return out.copy_(total)
