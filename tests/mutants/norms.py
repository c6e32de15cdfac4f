"""Norms and heads with one step of their arithmetic changed: a sum, a root, a product, a gate.

Their results are BF16, and eight bits hide nearly all of this on ordinary data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import oracle
from oracle import MhcConfig
from oracle.arith import bits, constant, exp, from_bits, packed, round_bf16, sigmoid, sqrt, widen
from oracle.arithmetic import CONTRACT_1, Arithmetic, Dot
from oracle.coefficients import pre_gate, reciprocal_rms
from oracle.collapse import unrounded_collapse
from oracle.norm import SquaresOf
from oracle.reduce import CONTRACT_DOT, pinned_dot, pinned_squares
from tests.mutants.coefficients import exp_cut_off, root_limited
from tests.mutants.generic import flush, patched, under, zeros_skipped

Function = Callable[..., Any]


def one_unit(function: Function, step: int) -> Function:
    """The function with each result one FP32 unit further from zero (`step` 1) or nearer (-1)."""

    def mutant(*arguments: Any) -> Tensor:
        return from_bits(bits(function(*arguments)) + step)

    return mutant


def root_in_one_step(squares: Tensor, numel: int, eps: float) -> Tensor:
    """1 / sqrt with one rounding, as a reciprocal root does even where it is correctly rounded."""
    mean = squares / constant(numel, squares) + constant(eps, squares)
    return (1 / mean.double().sqrt()).float()


def mean_by_reciprocal(squares: Tensor, numel: int, eps: float) -> Tensor:
    """Multiplies by a rounded 1 / H, as a compiler does for a constant H."""
    mean = squares * (constant(1.0, squares) / constant(numel, squares))
    return constant(1.0, squares) / sqrt(mean + constant(eps, squares))


def eps_outside(squares: Tensor, numel: int, eps: float) -> Tensor:
    """1 / (sqrt(mean) + eps)."""
    return constant(1.0, squares) / (sqrt(squares / constant(numel, squares)) + constant(eps, squares))


def _scaled_by(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Function:
    """The norm's last step with another product of row, root and weight."""

    def scaled(
        rounded: Tensor, squared: Tensor, norm_weight: Tensor, norm_eps: float, arithmetic: Arithmetic
    ) -> Tensor:
        squares = pinned_squares(squared.unsqueeze(1), arithmetic.dot)
        r = reciprocal_rms(squares, rounded.shape[1], norm_eps).unsqueeze(1)
        return packed(round_bf16(product(widen(rounded), r, widen(norm_weight))))

    return scaled


def collapse_rounding_dropped(
    residual: Tensor, pre_mix: Tensor, norm_weight: Tensor, *, norm_eps: float, squares_of: SquaresOf
) -> Tensor:
    """Scales the collapse that it still holds in FP32 registers."""
    exact = unrounded_collapse(residual, pre_mix, CONTRACT_1)
    squared = exact if squares_of == "unrounded" else widen(round_bf16(exact))
    squares = pinned_squares(squared.unsqueeze(1))
    r = reciprocal_rms(squares, exact.shape[1], norm_eps).unsqueeze(1)
    return round_bf16((exact * r) * widen(norm_weight))


def _gates_rounded(logits: Tensor, config: MhcConfig) -> Tensor:
    """Casts the gates to the activations' dtype."""
    return widen(round_bf16(pre_gate(logits, config)))


def hardware_exp(values: Tensor) -> Tensor:
    """2 ** (x * log2 e), the product rounded first."""
    return torch.exp2((values * constant(1.4426950408889634, values)).double()).float()


def exp_over_sum(values: Tensor) -> Tensor:
    """exp(z) / (1 + exp(z)): the same number, other roundings."""
    power = exp(values)
    return power / (constant(1.0, values) + power)


def product_of_some(y: Tensor, r: Tensor, w: Tensor) -> Tensor:
    """Leaves 0 where the row or the weight is 0."""
    return torch.where((y == 0) | (w == 0), torch.zeros_like(y), (y * r) * w)


def sigmoid_of_clamped(values: Tensor) -> Tensor:
    """Clamps the logit, so that exp neither overflows nor vanishes."""
    return sigmoid(values.clamp(-80.0, 80.0))


def head_in_tf32(residual: Tensor, fn: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    """Cuts the weights to TF32, as a tensor core reads them."""
    return oracle.head(residual, from_bits(bits(fn) & ~0x1FFF), *tensors, **options)


def flushed_dot(streams: Tensor, fn: Tensor, rule: Dot = CONTRACT_DOT) -> Tensor:
    """Reads subnormal weights as zero."""
    return pinned_dot(streams, flush(fn), rule)


def split_by_tokens(streams: Tensor, fn: Tensor, rule: Dot = CONTRACT_DOT) -> Tensor:
    """Takes shorter segments in a batch of more than 128 tokens."""
    return pinned_dot(streams, fn, Dot(segment=256) if streams.shape[0] > 128 else rule)


def _of_the_root(op: str) -> dict[str, Function]:
    """Another sum of squares' order, another mean, another root."""
    return {
        "lane-count-changed": under(op, dot=Dot(lanes=32)),
        "segment-length-changed": under(op, dot=Dot(segment=256)),
        "approximate-division": patched(op, reciprocal_rms=mean_by_reciprocal),
        "approximate-rsqrt": patched(op, reciprocal_rms=root_in_one_step),
        "root-one-unit-high": patched(op, reciprocal_rms=one_unit(reciprocal_rms, 1)),
        "root-one-unit-low": patched(op, reciprocal_rms=one_unit(reciprocal_rms, -1)),
        "rms-eps-outside": patched(op, reciprocal_rms=eps_outside),
        "root-limited": patched(op, reciprocal_rms=root_limited),
    }


def _of_the_product(op: str) -> dict[str, Function]:
    """Another grouping or rounding of row, root and weight."""
    return {
        "norm-weight-first": patched(op, _scaled=_scaled_by(lambda y, r, w: (y * w) * r)),
        "norm-weight-folded": patched(op, _scaled=_scaled_by(lambda y, r, w: y * (r * w))),
        "zeros-skipped": patched(op, _scaled=_scaled_by(product_of_some)),
        "norm-rounded-early": patched(op, _scaled=_scaled_by(lambda y, r, w: widen(round_bf16(y * r)) * w)),
    }


BY_OP: dict[str, dict[str, Function]] = {
    "norm": _of_the_root("norm") | _of_the_product("norm"),
    "collapse_norm": {
        **_of_the_root("collapse_norm"),
        **_of_the_product("collapse_norm"),
        "collapse-rounding-dropped": collapse_rounding_dropped,
    },
    "head": {
        **_of_the_root("head"),
        "mix-rounded": patched("head", pre_gate=_gates_rounded),
        "approximate-exp": patched("head", exp=hardware_exp),
        "exp-one-unit-high": patched("head", exp=one_unit(exp, 1)),
        "exp-one-unit-low": patched("head", exp=one_unit(exp, -1)),
        "exp-cut-off": patched("head", exp=exp_cut_off),
        "logits-clamped": patched("head", sigmoid=sigmoid_of_clamped),
        "sigmoid-rewritten": patched("head", sigmoid=exp_over_sum),
        "tf32-projection": head_in_tf32,
        "flushed-projection": patched("head", pinned_dot=flushed_dot),
        "zeros-skipped": zeros_skipped("head"),
        "split-by-tokens": patched("head", pinned_dot=split_by_tokens),
    },
}
