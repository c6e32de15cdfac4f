"""Upstream's formulas in fp64 or at any precision of mpmath, and how far a rounded evaluation may lie from
them.

Nothing here knows how the oracle evaluates; only the mathematics is shared.
"""

from __future__ import annotations

import math

import mpmath
import torch
from torch import Tensor

from oracle import MhcConfig
from tests.oracle.exact import U


def split(mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fp64 logits of pre [T, n], post [T, n] and comb [T, n, n]; the fp32 inputs count as exact."""
    scale = torch.cat([hc_scale[i : i + 1].double().expand(size) for i, size in enumerate((n, n, n * n))])
    logits = mixes.double() * scale + hc_base.double()
    return logits[:, :n], logits[:, n : 2 * n], logits[:, 2 * n :].reshape(-1, n, n)


def logit_error(mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds of |z - exact z| after two roundings: u |mix * scale| (1 + u) + u |z|, split like the logits."""
    product = split(mixes, hc_scale, torch.zeros_like(hc_base), n)
    total = split(mixes, hc_scale, hc_base, n)
    pre, post, comb = (U * (1 + U) * p.abs() + U * z.abs() for p, z in zip(product, total, strict=True))
    return pre, post, comb


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Return the fp64 mixing matrices: softmax over rows + eps, columns, then iters - 1 times rows and columns."""
    comb = torch.softmax(logits.double(), 2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


def sinkhorn_mpmath(logits: list[list[float]], iters: int, eps: float) -> list[list[float]]:
    """Return one mixing matrix with 50 digits, written element by element."""
    n = len(logits)
    with mpmath.workdps(50):
        powers = [[mpmath.exp(mpmath.mpf(value)) for value in row] for row in logits]
        comb = [[value / mpmath.fsum(row) + eps for value in row] for row in powers]
        for step in range(2 * iters - 1):
            if step % 2 == 0:
                sums = [mpmath.fsum(row[k] for row in comb) + eps for k in range(n)]
                comb = [[row[k] / sums[k] for k in range(n)] for row in comb]
            else:
                comb = [[value / (mpmath.fsum(row) + eps) for value in row] for row in comb]
        return [[float(value) for value in row] for row in comb]


def contraction(matrices: Tensor) -> Tensor:
    """Return Birkhoff's contraction coefficient of positive matrices [T, n, n]: tanh(D / 4).

    D is the largest log of (m[i,k] m[j,l]) / (m[j,k] m[i,l]); scaling rows and columns leaves it as it is.
    """
    logs = matrices.double().log()
    ratio = logs[:, :, None, :, None] - logs[:, None, :, :, None]
    cross = ratio - (logs[:, :, None, None, :] - logs[:, None, :, None, :])
    return torch.tanh(cross.flatten(1).amax(1) / 4)


def sinkhorn_bound(logits: Tensor, logit_errors: Tensor, iters: int, eps: float) -> Tensor:
    """Return a bound [T] of the relative error of every entry of a matrix evaluated in fp32.

    Derivation, in logs of (computed / exact), u = 2^-24, second-order terms covered by the factor 1.01 at
    the end. An entry of the matrix is kernel * row factor * column factor.
    Kernel error: R = dz + u (max - z) from the subtraction, 3u exp (within 1 ULP of rounded), u division, u
    + eps, and u of the division in each of the 2 iters - 1 later steps.
    Factor errors: each step divides by a sum that carries n u of its own (n - 1 additions after a start
    from +0, and + eps). A row step turns column factor errors of spread s into row factor errors of spread
    at most k s + 2R + 2nu, where k is Birkhoff's coefficient of the kernel, and a column step likewise; so
    spreads stay below s = (2R + 2nu) / (1 - k). eps in the sums only adds a term without error, which
    lessens this. The last step sets the columns: an entry's error is its row factor's, less the weighted
    mean of those of its column: at most s + 2R + nu.

    Where that is worse (few rounds, or rows that hardly mix) errors are taken to double: a division by a
    sum of entries that are each within e gives 2e + (n + 2) u at most, + eps included; the first of them is
    the softmax, whose entries come with dz + u (max - z) + 3u.
    """
    n = logits.shape[1]
    z = logits.double()
    depth = (z.amax(2, keepdim=True) - z).amax((1, 2))
    kernel = logit_errors.amax((1, 2)) + U * depth + (5 + 2 * iters - 1) * U
    k = contraction(torch.softmax(z, 2) + eps)
    spread = (2 * kernel + 2 * n * U) / (1 - k)
    doubled = logit_errors.amax((1, 2)) + U * depth + 3 * U
    for _ in range(2 * iters):
        doubled = 2 * doubled + (n + 2) * U
    return 1.01 * torch.minimum(spread + 2 * kernel + n * U, doubled)


def gates(mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, config: MhcConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp64 pre_mix, post_mix and comb_mix."""
    pre, post, comb = split(mixes, hc_scale, hc_base, config.hc_mult)
    eps = float(torch.tensor(config.hc_sinkhorn_eps))
    return (
        torch.sigmoid(pre) + float(torch.tensor(config.hc_pre_eps)),
        config.post_mult * torch.sigmoid(post),
        sinkhorn(comb, config.sinkhorn_iters, eps),
    )


def sum_bound(terms_of_one_lane: int, segments: int) -> float:
    """Return g with |pinned sum - exact| <= g * sum |terms|: one rounding an fma, six tree steps, one a segment."""
    steps = terms_of_one_lane + 6 + segments
    return steps * U / (1 - steps * U)


def lane_terms(n: int, hidden: int) -> tuple[int, int]:
    """Return how many fma steps the fullest lane takes, and how many segments there are."""
    return n * min(8, math.ceil(hidden / 64)), math.ceil(hidden / 512)
