"""Wrong projections, gates, Sinkhorns, norms and boundaries.

Where a fault is another order or another constant, the mutant is the oracle with a changed `Arithmetic` or config;
where it is another formula, the formula stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import oracle
from oracle import MhcConfig
from oracle.arith import EXP_POLYNOMIAL, bits, constant, exp, from_bits, sigmoid, sqrt
from oracle.arithmetic import Arithmetic, Dot
from oracle.coefficients import pre_gate, reciprocal_rms
from oracle.norm import SquaresOf
from oracle.reduce import index_sum
from tests.mutants.generic import nan_rounded, patched, replaced, under, zeros_skipped

Function = Callable[..., Any]


def with_config(op: str, change: Callable[[MhcConfig], dict[str, Any]]) -> Function:
    """The op with a constant of the model changed."""

    def mutant(*tensors: Tensor, config: MhcConfig, **options: Any) -> Any:
        return getattr(oracle, op)(*tensors, config=replace(config, **change(config)), **options)

    return mutant


def split_by_tokens(x: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Spreads a small batch over more splits to fill the machine, so that a token's bits depend on its batch."""
    splits = 8 if x.shape[0] <= 4 else 1
    return oracle.project(x, fn, arithmetic=Arithmetic("mutant", dot=Dot(splits=splits)))


def sinkhorn_rounds(extra: int) -> Function:
    """Sinkhorn with ``extra`` rounds more (or fewer)."""

    def mutant(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
        return oracle.sinkhorn(logits, sinkhorn_iters=sinkhorn_iters + extra, sinkhorn_eps=sinkhorn_eps)

    return mutant


def _rows(comb: Tensor, eps: Tensor) -> Tensor:
    return comb / (index_sum(comb.unbind(2)).unsqueeze(2) + eps)


def _columns(comb: Tensor, eps: Tensor) -> Tensor:
    return comb / (index_sum(comb.unbind(1)).unsqueeze(1) + eps)


def cut_short(near: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Sinkhorn that leaves a token's matrix as it is once a round changed it so little that ``near`` holds."""

    def mutant(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
        eps = constant(sinkhorn_eps, logits)
        comb = oracle.sinkhorn(logits, sinkhorn_iters=1, sinkhorn_eps=sinkhorn_eps)
        done = torch.zeros(logits.shape[0], 1, 1, dtype=torch.bool)
        for _ in range(sinkhorn_iters - 1):
            after = torch.where(done, comb, _columns(_rows(comb, eps), eps))
            done, comb = done | near(comb, after), after
        return comb

    return mutant


def _changed_less_than(least: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda before, after: (after - before).abs().amax((1, 2), keepdim=True) < least


def _rows_sum_to_one(_: Tensor, after: Tensor) -> Tensor:
    return (after.sum(2, keepdim=True) - 1).abs().amax(1, keepdim=True) < 1e-5


CUT_SHORT = tuple(cut_short(near) for near in (_changed_less_than(1e-6), _changed_less_than(1e-9), _rows_sum_to_one))
"""Sinkhorns that take a matrix for balanced before its last bit stands still."""


def _powers(logits: Tensor) -> Tensor:
    return exp(logits - logits.amax(2, keepdim=True))


def _balance(comb: Tensor, eps: Tensor, iters: int) -> Tensor:
    comb = _columns(comb, eps)
    for _ in range(iters - 1):
        comb = _columns(_rows(comb, eps), eps)
    return comb


def eps_in_first_denominator(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """exp / (sum + eps) where the definition says exp / sum + eps."""
    eps = constant(sinkhorn_eps, logits)
    return _balance(_rows(_powers(logits), eps), eps, sinkhorn_iters)


def column_eps_missing(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """Leaves the epsilon out of the column sums."""
    eps, none = constant(sinkhorn_eps, logits), constant(0.0, logits)
    comb = _columns(_rows(_powers(logits), none) + eps, none)
    for _ in range(sinkhorn_iters - 1):
        comb = _columns(_rows(comb, eps), none)
    return comb


def rows_before_columns(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """Ends every round with the rows."""
    eps, none = constant(sinkhorn_eps, logits), constant(0.0, logits)
    comb = _rows(_powers(logits), none) + eps
    for _ in range(sinkhorn_iters - 1):
        comb = _rows(_columns(comb, eps), eps)
    return comb


def row_max_skipped(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """Takes exp of the logits as they are: large ones overflow, and all others round elsewhere."""
    eps, none = constant(sinkhorn_eps, logits), constant(0.0, logits)
    return _balance(_rows(exp(logits), none) + eps, eps, sinkhorn_iters)


def row_max_started(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """Starts the maximum of a row from -1e30 instead of -Inf or its first logit."""
    eps, none = constant(sinkhorn_eps, logits), constant(0.0, logits)
    powers = exp(logits - logits.amax(2, keepdim=True).clamp(min=-1e30))
    return _balance(_rows(powers, none) + eps, eps, sinkhorn_iters)


def approximate_exp(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """The hardware's way: 2 ** (x * log2 e), the product rounded first."""
    eps, none = constant(sinkhorn_eps, logits), constant(0.0, logits)
    shifted = (logits - logits.amax(2, keepdim=True)) * constant(1.4426950408889634, logits)
    powers = torch.exp2(shifted.double()).float()
    return _balance(_rows(powers, none) + eps, eps, sinkhorn_iters)


def approximate_division(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """Multiplies by a rounded reciprocal instead of dividing."""
    eps, one = constant(sinkhorn_eps, logits), constant(1.0, logits)

    def scaled(comb: Tensor, axis: int, added: Tensor) -> Tensor:
        return comb * (one / (index_sum(comb.unbind(axis)).unsqueeze(axis) + added))

    comb = scaled(scaled(_powers(logits), 2, constant(0.0, logits)) + eps, 1, eps)
    for _ in range(sinkhorn_iters - 1):
        comb = scaled(scaled(comb, 2, eps), 1, eps)
    return comb


def sinkhorn_transposed(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """Returns comb as [output stream, input stream]."""
    comb = oracle.sinkhorn(logits, sinkhorn_iters=sinkhorn_iters, sinkhorn_eps=sinkhorn_eps)
    return comb.transpose(1, 2).contiguous()


def padded_eps(logits: Tensor, *, sinkhorn_iters: int, sinkhorn_eps: float) -> Tensor:
    """Adds the column epsilon to the first half of the staged tokens only."""
    half = (logits.shape[0] + 1) // 2
    first = oracle.sinkhorn(logits[:half], sinkhorn_iters=sinkhorn_iters, sinkhorn_eps=sinkhorn_eps)
    second = column_eps_missing(logits[half:], sinkhorn_iters=sinkhorn_iters, sinkhorn_eps=sinkhorn_eps)
    return torch.cat([first, second])


def gates_swapped(
    mixes: Tensor, hc_scale: Tensor, hc_base: Tensor, *, config: MhcConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the first n mixes as post and the next as pre."""
    n = config.hc_mult
    order = torch.cat([torch.arange(n, 2 * n), torch.arange(n), torch.arange(2 * n, n * (n + 2))])
    scale = hc_scale[torch.tensor([1, 0, 2])]
    return oracle.coefficients(mixes[:, order], scale, hc_base[order], config=config)


def rms_over_streams(residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, **options: Any) -> Any:
    """At the entry, divides the sum of squares of H values by n * H."""
    config, x = options["config"], options["x"]
    sums, squares = oracle.project(x, fn)
    mix = oracle.mixes(sums, squares, numel=config.hc_mult * x.shape[1], rms_eps=config.rms_eps)
    next_pre, post_mix, comb_mix = oracle.coefficients(mix, hc_scale, hc_base, config=config)
    _, _, layer_input, _ = oracle.pre_delayed(residual, fn, hc_scale, hc_base, **options)
    return post_mix, comb_mix, layer_input, next_pre


def rms_eps_outside(sums: Tensor, squares: Tensor, *, numel: int, rms_eps: float) -> Tensor:
    """1 / (sqrt(mean) + eps), as one native implementation has it."""
    mean = squares / constant(numel, squares)
    return sums * (constant(1.0, squares) / (sqrt(mean) + constant(rms_eps, squares))).unsqueeze(1)


def other_eps(eps: float) -> float:
    """The other model's released epsilon."""
    return 1e-20 if eps > 1e-10 else 1e-6


def rms_eps_fixed(op: str) -> Function:
    """Uses V4's epsilon where the case says V4.1's, or the reverse."""

    def mutant(*tensors: Tensor, **options: Any) -> Any:
        if "config" in options:
            config = options["config"]
            options["config"] = replace(config, rms_eps=other_eps(config.rms_eps), norm_eps=other_eps(config.norm_eps))
        options |= {name: other_eps(options[name]) for name in ("rms_eps", "norm_eps") if name in options}
        return getattr(oracle, op)(*tensors, **options)

    return mutant


def approximate_rsqrt(sums: Tensor, squares: Tensor, *, numel: int, rms_eps: float) -> Tensor:
    """Takes 1 / sqrt in one step, as a reciprocal root does even where it is correctly rounded."""
    mean = squares / constant(numel, squares) + constant(rms_eps, squares)
    return sums * (1 / mean.double().sqrt()).float().unsqueeze(1)


def tf32_projection(x: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts the weights to TF32, as a tensor core reads them."""
    return oracle.project(x, from_bits(bits(fn) & ~0x1FFF))


def exp_cut_off(values: Tensor) -> Tensor:
    """Takes exp between -87 and 88 only, where nothing is subnormal and nothing overflows."""
    return exp(values.clamp(-87.0, 88.0))


def exp_with(place: int, step: int) -> Function:
    """The suite's exp with one coefficient of its polynomial `step` FP32 units off."""
    wrong = list(EXP_POLYNOMIAL)
    wrong[place] = float(from_bits(bits(torch.tensor(wrong[place])) + step))

    def mutant(values: Tensor) -> Tensor:
        with replaced({"EXP_POLYNOMIAL": tuple(wrong)}):
            return exp(values)

    return mutant


def gate_eps_in_fp64(logits: Tensor, config: MhcConfig) -> Tensor:
    """sigmoid(z) + 1e-6, where the literal makes the sum FP64."""
    return (sigmoid(logits).double() + config.hc_pre_eps).float()


def gate_limited(logits: Tensor, config: MhcConfig) -> Tensor:
    """Keeps the pre gate within the sigmoid's range."""
    return pre_gate(logits, config).clamp(max=1.0)


def mean_eps_in_fp64(squares: Tensor, numel: int, eps: float) -> Tensor:
    """mean + 1e-6, where the literal makes the sum FP64."""
    mean = (squares / constant(numel, squares)).double() + eps
    return constant(1.0, squares) / sqrt(mean.float())


def root_limited(squares: Tensor, numel: int, eps: float) -> Tensor:
    """Bounds the reciprocal root, so that a row of zeros would stay finite without an epsilon."""
    return reciprocal_rms(squares, numel, eps).clamp(max=1e10)


def squares_swapped(
    residual: Tensor, pre_mix: Tensor, norm_weight: Tensor, *, norm_eps: float, squares_of: SquaresOf
) -> Tensor:
    """V4's sum of squares in V4.1, or the reverse."""
    other: SquaresOf = "rounded" if squares_of == "unrounded" else "unrounded"
    return oracle.collapse_norm(residual, pre_mix, norm_weight, norm_eps=norm_eps, squares_of=other)


def own_mix_used(residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, **options: Any) -> Any:
    """Collapses with the pre-mix just computed where the carried one is meant."""
    *_, next_pre = oracle.pre_delayed(residual, fn, hc_scale, hc_base, **options)
    return oracle.pre_delayed(residual, fn, hc_scale, hc_base, **{**options, "pre_mix": next_pre})


def identity_multiplied(residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, **options: Any) -> Any:
    """Makes the copy of stream 0 by weights 1, 0, 0, 0: -0 is lost and 0 * Inf poisons."""
    weights = torch.zeros(residual.shape[:2])
    weights[:, 0] = 1.0
    return oracle.pre_delayed(residual, fn, hc_scale, hc_base, **{**options, "pre_mix": weights})


def aux_from_input(x: Tensor, residual: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """Takes the aux mean of the residual before the post."""
    *outputs, aux = oracle.post_pre_delayed(x, residual, *tensors, **options)
    return (*outputs, oracle.stream_mean(residual) if options.get("capture_aux") else aux)


def aux_always_written(x: Tensor, residual: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """Returns a full aux tensor although none was asked for."""
    return oracle.post_pre_delayed(x, residual, *tensors, **{**options, "capture_aux": True})


BY_OP: dict[str, dict[str, Function]] = {
    "sinkhorn": {
        "eps-in-first-denominator": eps_in_first_denominator,
        "column-eps-missing": column_eps_missing,
        "rounds-off-by-one": sinkhorn_rounds(-1),
        "rows-before-columns": rows_before_columns,
        "row-max-skipped": row_max_skipped,
        "row-max-started": row_max_started,
        "exp-cut-off": patched("sinkhorn", exp=exp_cut_off),
        "exp-constant-off": patched("sinkhorn", exp=exp_with(0, 1)),
        "approximate-exp": approximate_exp,
        "approximate-division": approximate_division,
        "comb-transposed": sinkhorn_transposed,
        "reversed-order": under("sinkhorn", index_order="descending"),
        "pairwise-order": under("sinkhorn", index_order="pairwise"),
        "row-crosstalk": padded_eps,
    },
    "coefficients": {
        "gates-swapped": gates_swapped,
        "constant-unrounded": patched("coefficients", pre_gate=gate_eps_in_fp64),
        "post-multiplier-one": with_config("coefficients", lambda _: {"post_mult": 1.0}),
        "gate-eps-dropped": with_config("coefficients", lambda _: {"hc_pre_eps": 0.0}),
        "rounds-off-by-one": with_config("coefficients", lambda c: {"sinkhorn_iters": c.sinkhorn_iters + 1}),
    },
    "project": {
        "split-by-tokens": split_by_tokens,
        "tf32-projection": tf32_projection,
        "zeros-skipped": zeros_skipped("project"),
    },
    "mixes": {
        "rms-eps-outside": rms_eps_outside,
        "rms-eps-fixed": rms_eps_fixed("mixes"),
        "approximate-rsqrt": approximate_rsqrt,
        "root-limited": patched("mixes", reciprocal_rms=root_limited),
        "constant-unrounded": patched("mixes", reciprocal_rms=mean_eps_in_fp64),
    },
    "norm": {"rms-eps-fixed": rms_eps_fixed("norm")},
    "collapse_norm": {"squares-swapped": squares_swapped, "rms-eps-fixed": rms_eps_fixed("collapse_norm")},
    "head": {"rms-eps-fixed": rms_eps_fixed("head")},
    "fn_broadcast": {"broadcast-tree": under("fn_broadcast", index_order="pairwise")},
    "pre_delayed": {
        "rms-over-streams": rms_over_streams,
        "own-mix-used": own_mix_used,
        "identity-multiplied": identity_multiplied,
        "nan-rounded": nan_rounded("pre_delayed"),
    },
    "post_pre_delayed": {"aux-from-input": aux_from_input, "aux-always-written": aux_always_written},
}
