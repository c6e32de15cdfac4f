"""Boundaries with one step wrong and all others right, and the same for the coefficients that they end in.

`Steps` is a boundary taken apart as the contract has it. A mutant replaces one of its steps, which is its stage, so
that what a case sees of it is that stage and nothing else. `STAGED` has them by op, class and stage; where a class
can go wrong in several ways at one stage, all of them are there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import oracle
from cases.ops import OPS
from oracle import MhcConfig, arith
from oracle.arith import bits, constant, exp, from_bits, round_bf16, widen
from oracle.arithmetic import CONTRACT_1, Arithmetic, Dot, Mean, Post, WeightedSum
from oracle.coefficients import pre_gate, reciprocal_rms
from oracle.collapse import unrounded_collapse
from oracle.norm import SquaresOf
from oracle.reduce import CONTRACT_DOT, CONTRACT_SUM, add_product, index_sum, pinned_dot, pinned_squares, weighted_sum
from oracle.streams import unrounded_post
from tests.mutants import coefficients, norms, orders, streams
from tests.mutants.generic import Function, flush, patched, product_of_some, replaced, truncated, up_from_half

Staged = dict[str, dict[str, tuple[Function, ...]]]
"""By class of fault and stage, every planted way to get that stage wrong."""

DELAYED = ("pre_delayed", "post_pre_delayed")
BOUNDARIES = ("pre", "post_pre", *DELAYED)


class Sum(NamedTuple):
    """A sum before and after its rounding to BF16: the new streams [T, n, H], or their collapse [T, H]."""

    exact: Tensor
    rounded: Tensor

    @property
    def wide(self) -> Tensor:
        """What was rounded, as FP32."""
        return widen(self.rounded)


def as_read(values: Tensor) -> Sum:
    """BF16 values that a boundary reads and does not make."""
    return Sum(widen(values), values)


def post(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    *,
    rule: Post = CONTRACT_1.post,
    store: Function = round_bf16,
) -> Sum:
    """The new streams."""
    exact = unrounded_post(x, residual, post_mix, comb_mix, Arithmetic("mutant", post=rule))
    return Sum(exact, store(exact))


def projection(read: Sum, fn: Tensor, *, rule: Dot = CONTRACT_DOT) -> Tensor:
    """The dot products of the rounded streams."""
    return pinned_dot(read.wide, fn.reshape(-1, *read.exact.shape[1:]), rule)


def squares(read: Sum, *, rule: Dot = CONTRACT_DOT) -> Tensor:
    """The sum of squares that scales them."""
    return pinned_squares(read.wide, rule)


def mixes(sums: Tensor, squared: Tensor, numel: int, config: MhcConfig, *, root: Function = reciprocal_rms) -> Tensor:
    """The scaled dot products."""
    scale: Tensor = root(squared, numel, config.rms_eps)
    return sums * scale.unsqueeze(1)


def gates(
    mix: Tensor,
    scale: Tensor,
    base: Tensor,
    config: MhcConfig,
    *,
    fused: bool = False,
    opened: Function = pre_gate,
) -> tuple[Tensor, Tensor]:
    """The pre and the post mix."""
    n = config.hc_mult
    pre, then = (add_product(base[at], mix[:, at], scale[i], fused=fused) for i, at in enumerate(_parts(n)))
    return opened(pre, config), constant(config.post_mult, then) * arith.sigmoid(then)


def _parts(n: int) -> tuple[slice, slice]:
    return slice(0, n), slice(n, 2 * n)


def sinkhorn(
    mix: Tensor,
    scale: Tensor,
    base: Tensor,
    config: MhcConfig,
    *,
    balance: Function = oracle.sinkhorn,
    fused: bool = False,
) -> Tensor:
    """The comb mix."""
    n = config.hc_mult
    logits = add_product(base[2 * n :], mix[:, 2 * n :], scale[2], fused=fused).reshape(-1, n, n)
    result: Tensor = balance(logits, sinkhorn_iters=config.sinkhorn_iters, sinkhorn_eps=config.hc_sinkhorn_eps)
    return result


def collapse(read: Sum, pre_mix: Tensor, *, rule: WeightedSum = CONTRACT_SUM, store: Function = round_bf16) -> Sum:
    """The weighted streams."""
    exact = unrounded_collapse(read.rounded, pre_mix, Arithmetic("mutant", collapse=rule))
    return Sum(exact, store(exact))


def norm_squares(collapsed: Sum, squares_of: SquaresOf, *, rule: Dot = CONTRACT_DOT) -> Tensor:
    """The sum of squares of the collapse."""
    squared = collapsed.exact if squares_of == "unrounded" else collapsed.wide
    return pinned_squares(squared.unsqueeze(1), rule)


def norm(
    collapsed: Sum,
    squared: Tensor,
    weight: Tensor,
    config: MhcConfig,
    *,
    root: Function = reciprocal_rms,
    product: Function = lambda y, r, w: (y.wide * r) * w,
    store: Function = round_bf16,
) -> Tensor:
    """The normed layer input."""
    r = root(squared, collapsed.exact.shape[1], config.norm_eps).unsqueeze(1)
    result: Tensor = store(product(collapsed, r, widen(weight)))
    return result


def mean(read: Sum, *, rule: Mean = CONTRACT_1.mean, store: Function = round_bf16) -> Tensor:
    """The aux state of the rounded streams."""
    return store_mean(read.wide, rule, store)


def store_mean(wide: Tensor, rule: Mean, store: Function) -> Tensor:
    """The mean of FP32 streams, rounded."""
    total, n = index_sum(wide.unbind(1), rule.order), constant(wide.shape[1], wide)
    result: Tensor = store(total / n if rule.scale == "divide" else total * (constant(1.0, wide) / n))
    return result


@dataclass(frozen=True)
class Steps:
    """One boundary, step by step; the defaults are the contract's."""

    post: Function = post
    projection: Function = projection
    squares: Function = squares
    mixes: Function = mixes
    gates: Function = gates
    sinkhorn: Function = sinkhorn
    collapse: Function = collapse
    norm_squares: Function = norm_squares
    norm: Function = norm
    mean: Function = mean

    def coefficients(
        self, read: Sum, fn: Tensor, scale: Tensor, base: Tensor, config: MhcConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The pre, post and comb mix made from streams, or from the one row of an entry."""
        mix = self.mixes(self.projection(read, fn), self.squares(read), fn.shape[1], config)
        return (*self.gates(mix, scale, base, config), self.sinkhorn(mix, scale, base, config))

    def layer_input(
        self, op: str, read: Sum, pre_mix: Tensor | None, weight: Tensor | None, config: MhcConfig
    ) -> Tensor:
        """The collapse, or a copy of stream 0, and its norm if there is a weight."""
        collapsed = as_read(read.rounded[:, 0]) if pre_mix is None else self.collapse(read, pre_mix)
        if weight is None:
            return collapsed.rounded.clone(memory_format=torch.contiguous_format)
        squared = self.norm_squares(collapsed, "rounded" if op in DELAYED else "unrounded")
        result: Tensor = self.norm(collapsed, squared, weight, config)
        return result

    def boundary(self, op: str) -> Function:
        """The boundary `op` made of these steps."""

        def function(*tensors: Tensor, config: MhcConfig, **options: Any) -> tuple[Tensor, ...]:
            *sublayer, fn, scale, base = tensors
            read = self.post(*sublayer) if len(sublayer) > 1 else as_read(sublayer[0])
            entry = options.get("x")
            projected = read if entry is None else as_read(entry.unsqueeze(1))
            pre_mix, post_mix, comb_mix = self.coefficients(projected, fn, scale, base, config)
            carried = options.get("pre_mix") if op in DELAYED else pre_mix
            found = {
                "residual": read.rounded,
                "post_mix": post_mix,
                "comb_mix": comb_mix,
                "layer_input": self.layer_input(op, read, carried, options.get("norm_weight"), config),
                "next_pre_mix": pre_mix,
                "aux": self.mean(read) if options.get("capture_aux") else read.rounded[:0, 0],
            }
            return tuple(found[output.name] for output in OPS[op].outputs)

        return function


def of_coefficients(steps: Steps) -> Function:
    """The op `coefficients` made of these steps."""

    def function(mix: Tensor, scale: Tensor, base: Tensor, *, config: MhcConfig) -> tuple[Tensor, ...]:
        return (*steps.gates(mix, scale, base, config), steps.sinkhorn(mix, scale, base, config))

    return function


def of_project(steps: Steps) -> Function:
    """The op `project` made of these steps."""

    def function(x: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
        read = as_read(x if x.dim() == 3 else x.unsqueeze(1))
        return steps.projection(read, fn), steps.squares(read)

    return function


def during(step: Function, **replacements: Function) -> Function:
    """A step with functions of the oracle replaced while it runs."""

    def wrong(*arguments: Any) -> Any:
        with replaced(replacements):
            return step(*arguments)

    return wrong


def fma_in_fp64(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Rounds the FP64 sum again: wrong where that sum lies halfway between two FP32 numbers and is not exact.

    Sums of BF16 squares never do; nor does it change one result of the suite's exp, as trying every float showed.
    """
    return torch.addcmul(c.double(), a.double(), b.double()).float()


def _exact_mean(read: Sum) -> Tensor:
    """The mean of the streams as the post still holds them, before their rounding."""
    return store_mean(read.exact, CONTRACT_1.mean, round_bf16)


def _unrounded_collapse(read: Sum, pre_mix: Tensor) -> Sum:
    """Collapses the FP32 streams that it still holds in registers."""
    exact = weighted_sum([pre_mix[:, i, None] for i in range(pre_mix.shape[1])], read.exact.unbind(1))
    return Sum(exact, round_bf16(exact))


def _in_bf16(*mixes_: Tensor) -> tuple[Tensor, ...]:
    return tuple(widen(round_bf16(mix)) for mix in mixes_)


def _post_in_bf16(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Sum:
    """Casts the mixes of the post to the activations' dtype."""
    return post(x, residual, *_in_bf16(post_mix, comb_mix))


def _other_squares(collapsed: Sum, squares_of: SquaresOf) -> Tensor:
    return norm_squares(collapsed, "rounded" if squares_of == "unrounded" else "unrounded")


_DOTS = {
    "segment-order-reversed": Dot(segments="descending"),
    "segment-ignored": Dot(splits=1),
    "segment-length-changed": Dot(segment=256),
    "lane-count-changed": Dot(lanes=32),
    "serial-lanes": Dot(lane_sum="serial"),
    "strided-tree": Dot(lane_sum="distant"),
}
_ROOTS = {
    "approximate-rsqrt": norms.root_in_one_step,
    "approximate-division": norms.mean_by_reciprocal,
    "root-one-unit-high": norms.one_unit(reciprocal_rms, 1),
    "root-one-unit-low": norms.one_unit(reciprocal_rms, -1),
    "rms-eps-outside": norms.eps_outside,
    "root-limited": coefficients.root_limited,
}
_EXPS = {
    "approximate-exp": {"exp": norms.hardware_exp},
    "exp-one-unit-high": {"exp": norms.one_unit(exp, 1)},
    "exp-one-unit-low": {"exp": norms.one_unit(exp, -1)},
    "exp-cut-off": {"exp": coefficients.exp_cut_off},
}
_STORES = {"truncating-store": truncated, "round-half-up": up_from_half}
_BALANCES: dict[str, Function] = {
    "eps-in-first-denominator": coefficients.eps_in_first_denominator,
    "column-eps-missing": coefficients.column_eps_missing,
    "rows-before-columns": coefficients.rows_before_columns,
    "row-max-skipped": coefficients.row_max_skipped,
    "row-max-started": coefficients.row_max_started,
    "approximate-division": coefficients.approximate_division,
    "comb-transposed": coefficients.sinkhorn_transposed,
    "reversed-order": partial(oracle.sinkhorn, arithmetic=Arithmetic("mutant", index_order="descending")),
    "pairwise-order": partial(oracle.sinkhorn, arithmetic=Arithmetic("mutant", index_order="pairwise")),
}

_EXPS_OFF = tuple(
    coefficients.exp_with(place, step)
    for place in range(len(arith.EXP_POLYNOMIAL) - 2)  # the last two are 1
    for step in (1, -1)
)

WRONG_STEPS: dict[str, dict[str, Function]] = {
    "post": {
        "fma-contraction": partial(post, rule=Post(first="into_first", contraction="fused")),
        "first-term-fused": partial(post, rule=Post(first="into_first")),
        "other-product-fused": during(post, _post_sum=orders.other_product_fused),
        "reversed-order": partial(post, rule=Post(order="descending")),
        "sublayer-added-last": partial(post, rule=Post(first="last")),
        "comb-transposed": lambda x, residual, weights, comb: post(x, residual, weights, comb.transpose(1, 2)),
        "mix-rounded": _post_in_bf16,
        **{kind: partial(post, store=store) for kind, store in _STORES.items()},
    },
    "projection": {
        **{kind: partial(projection, rule=rule) for kind, rule in _DOTS.items()},
        "streams-outside": partial(projection, rule=Dot(streams="flat")),
        "unfused-projection": partial(projection, rule=Dot(contraction="separate")),
        "unrounded-projection": lambda read, fn: pinned_dot(read.exact, fn.reshape(-1, *read.exact.shape[1:])),
        "tf32-projection": lambda read, fn: projection(read, from_bits(bits(fn) & ~0x1FFF)),
        "double-rounded-fma": during(projection, fma=fma_in_fp64),
        "zeros-skipped": during(projection, add_product=product_of_some),
    },
    "squares": {
        **{kind: partial(squares, rule=rule) for kind, rule in _DOTS.items()},
        "streams-outside": partial(squares, rule=Dot(streams="flat")),
        "unrounded-projection": lambda read: pinned_squares(read.exact),
    },
    "mixes": {kind: partial(mixes, root=root) for kind, root in _ROOTS.items()},
    "gates": {
        "scale-base-fused": partial(gates, fused=True),
        "gates-swapped": lambda mix, scale, base, config: coefficients.gates_swapped(mix, scale, base, config=config)[
            :2
        ],
        **{kind: during(gates, **replacements) for kind, replacements in _EXPS.items()},
        "sigmoid-rewritten": during(gates, sigmoid=norms.exp_over_sum),
        "logits-clamped": during(gates, sigmoid=norms.sigmoid_of_clamped),
        "gate-limited": partial(gates, opened=coefficients.gate_limited),
    },
    "sinkhorn": {
        "scale-base-fused": partial(sinkhorn, fused=True),
        **{kind: partial(sinkhorn, balance=balance) for kind, balance in _BALANCES.items()},
        **{kind: during(sinkhorn, **replacements) for kind, replacements in _EXPS.items()},
    },
    "collapse": {
        "fma-contraction": partial(collapse, rule=WeightedSum(contraction="fused")),
        "reversed-order": partial(collapse, rule=WeightedSum(order="descending")),
        "pairwise-order": partial(collapse, rule=WeightedSum(order="pairwise")),
        "grouped-order": during(collapse, weighted_sum=orders.in_fours),
        "post-rounding-dropped": _unrounded_collapse,
        "mix-rounded": lambda read, pre_mix: collapse(read, *_in_bf16(pre_mix)),
        **{kind: partial(collapse, store=store) for kind, store in _STORES.items()},
    },
    "norm-squares": {
        **{kind: partial(norm_squares, rule=rule) for kind, rule in _DOTS.items()},
        "unfused-projection": partial(norm_squares, rule=Dot(contraction="separate")),
        "squares-swapped": _other_squares,
    },
    "norm": {
        **{kind: partial(norm, root=root) for kind, root in _ROOTS.items()},
        "norm-weight-first": partial(norm, product=lambda y, r, w: (y.wide * w) * r),
        "norm-weight-folded": partial(norm, product=lambda y, r, w: y.wide * (r * w)),
        "norm-rounded-early": partial(norm, product=lambda y, r, w: widen(round_bf16(y.wide * r)) * w),
        "collapse-rounding-dropped": partial(norm, product=lambda y, r, w: (y.exact * r) * w),
        "zeros-skipped": partial(norm, product=lambda y, r, w: norms.product_of_some(y.wide, r, w)),
        **{kind: partial(norm, store=store) for kind, store in _STORES.items()},
    },
    "mean": {
        "reversed-order": partial(mean, rule=Mean(order="descending")),
        "pairwise-order": partial(mean, rule=Mean(order="pairwise")),
        "mean-by-reciprocal": partial(mean, rule=Mean(scale="reciprocal")),
        "aux-from-input": _exact_mean,
        "mean-per-stream": lambda read: streams.mean_per_stream(read.rounded),
        "wrong-stream-mean": lambda read: streams.mean_of_last_stream(read.rounded),
        **{kind: partial(mean, store=store) for kind, store in _STORES.items()},
    },
}
"""By stage and class of fault, the step that has it."""

_SAME_WITHOUT_POST = frozenset({"unrounded-projection", "post-rounding-dropped"})
"""Faults that need streams which the boundary has just made; on streams that it read they change nothing."""

CONSTANTS = {
    "mixes": ("rms_eps",),
    "gates": ("hc_pre_eps", "post_mult"),
    "sinkhorn": ("hc_sinkhorn_eps", "sinkhorn_iters"),
    "norm": ("norm_eps",),
}
"""The constants that each stage reads; no two stages read the same one."""

EPSILONS = ("rms_eps", "norm_eps", "hc_pre_eps", "hc_sinkhorn_eps")
FIXED: dict[tuple[str, str], tuple[float, ...]] = {
    ("constant-fixed", "rms_eps"): (0.0, 1e-6, 1e-20),
    ("constant-fixed", "norm_eps"): (0.0, 1e-6, 1e-20),
    ("constant-fixed", "hc_pre_eps"): (1e-6,),
    ("constant-fixed", "hc_sinkhorn_eps"): (0.0, 1e-6),
    ("constant-fixed", "sinkhorn_iters"): (1, 20),
    ("gate-eps-dropped", "hc_pre_eps"): (0.0,),
    ("post-multiplier-one", "post_mult"): (1.0,),
    ("post-multiplier-two", "post_mult"): (2.0,),
}
"""Values that kernels bake in, by class: the released ones, and those that leave the constant out."""


def _equal_by_definition(op: str, stage: str, kind: str) -> bool:
    """Whether the wrong step gives the right bits, so that nothing is planted.

    Squares of BF16 numbers are exact in FP32 down to its subnormals, far below the smallest epsilon of a model, so
    that V4.1's norm cannot tell a fused sum of squares from one of rounded products.
    """
    return (kind in _SAME_WITHOUT_POST and "post" not in OPS[op].stages) or (
        kind == "unfused-projection" and stage == "norm-squares" and op in DELAYED
    )


def steps_of(op: str) -> Staged:
    """The op with one step wrong, by class and stage."""
    found: Staged = {}
    for stage in OPS[op].stages:
        for kind, step in WRONG_STEPS[stage].items():
            if not _equal_by_definition(op, stage, kind):
                steps = replace(Steps(), **{stage.replace("-", "_"): step})
                found.setdefault(kind, {})[stage] = (_made_of(steps, op),)
    return found


def _made_of(steps: Steps, op: str) -> Function:
    makers = {"coefficients": of_coefficients, "project": of_project}
    return makers[op](steps) if op in makers else steps.boundary(op)


def exps_of(op: str) -> Staged:
    """The op with one coefficient of exp a unit too large or too small, in its gates or in its Sinkhorn alone."""
    if op == "head":
        return {"exp-constant-off": {"gates": tuple(patched(op, exp=one) for one in _EXPS_OFF)}}
    return {
        "exp-constant-off": {
            stage: tuple(_made_of(replace(Steps(), **{stage: during(step, exp=one)}), op) for one in _EXPS_OFF)
            for stage, step in (("gates", gates), ("sinkhorn", sinkhorn))
        }
    }


def cut_short_of(op: str) -> Staged:
    """The op with a Sinkhorn that ends before its last round, by several signs that it is done."""
    if op == "sinkhorn":
        return {"rounds-cut-short": {"sinkhorn": coefficients.CUT_SHORT}}
    wrong = tuple(_made_of(Steps(sinkhorn=partial(sinkhorn, balance=one)), op) for one in coefficients.CUT_SHORT)
    return {"rounds-cut-short": {"sinkhorn": wrong}}


def past(tokens: int, step: Function) -> Function:
    """A sum over H that takes shorter segments in a batch of more than so many tokens."""

    def wrong(read: Sum, *fn: Tensor) -> Any:
        return step(read, *fn, rule=Dot(segment=256) if read.exact.shape[0] > tokens else CONTRACT_DOT)

    return wrong


def splits_of(op: str) -> Staged:
    """The boundary with another split in its dot products or its squares, by a number of tokens that kernels have."""
    return {
        "split-by-tokens": {
            stage: tuple(Steps(**{stage: past(tokens, step)}).boundary(op) for tokens in (16, 32, 64, 128))
            for stage, step in (("projection", projection), ("squares", squares))
        }
    }


def flushes_of(op: str) -> Staged:
    """The op with subnormal weights of its projection read as zero, or the projection's subnormal sums stored so."""
    wrong: tuple[Function, ...] = (
        lambda read, fn: projection(read, flush(fn)),
        lambda read, fn: flush(projection(read, fn)),
    )
    return {"flushed-projection": {"projection": tuple(_made_of(Steps(projection=one), op) for one in wrong)}}


def constants_of(op: str) -> Staged:
    """The op with one constant of its config taken from another, fixed, or off by one, by class and stage."""
    found: Staged = {}
    for stage in OPS[op].stages:
        for name in _read_by(op, stage):
            for kind, changes in _changes(name).items():
                wrong = tuple(coefficients.with_config(op, change) for change in changes)
                stages = found.setdefault(kind, {})
                stages[stage] = stages.get(stage, ()) + wrong
    return found


def _read_by(op: str, stage: str) -> tuple[str, ...]:
    """The constants that a stage reads in an op; gates that make no post mix read no multiplier."""
    makes_post = any(output.name == "post_mix" for output in OPS[op].outputs)
    return tuple(name for name in CONSTANTS.get(stage, ()) if makes_post or name != "post_mult")


def _changes(name: str) -> dict[str, tuple[Function, ...]]:
    """By class, how a config departs in one constant."""
    fixed: dict[str, tuple[Function, ...]] = {
        kind: tuple(partial(_fixed, name, value) for value in FIXED[kind, of]) for kind, of in FIXED if of == name
    }
    if name == "sinkhorn_iters":
        off = tuple(partial(_more_rounds, extra) for extra in (1, -1))
        return fixed | {"rounds-off-by-one": off, "rounds-capped": (_at_most_20,)}
    if name in ("rms_eps", "norm_eps"):
        fixed |= {"rms-eps-fixed": (partial(_other_model, name),)}
    if name in EPSILONS:
        others = (other for other in EPSILONS if other != name)
        return fixed | {"constant-swapped": tuple(partial(_taken, name, other) for other in others)}
    return fixed


def _taken(name: str, other: str, config: MhcConfig) -> dict[str, Any]:
    return {name: getattr(config, other)}


def _other_model(name: str, config: MhcConfig) -> dict[str, Any]:
    """V4's epsilon where the case says V4.1's, or the reverse."""
    return {name: coefficients.other_eps(getattr(config, name))}


def _more_rounds(extra: int, config: MhcConfig) -> dict[str, Any]:
    return {"sinkhorn_iters": config.sinkhorn_iters + extra}


def _at_most_20(config: MhcConfig) -> dict[str, Any]:
    return {"sinkhorn_iters": min(config.sinkhorn_iters, 20)}


def _fixed(name: str, value: float, _: MhcConfig) -> dict[str, Any]:
    return {name: value}


STAGED: dict[str, Staged] = {
    **{
        op: steps_of(op) | constants_of(op) | exps_of(op) | cut_short_of(op) | splits_of(op) | flushes_of(op)
        for op in BOUNDARIES
    },
    "coefficients": (
        steps_of("coefficients") | constants_of("coefficients") | exps_of("coefficients") | cut_short_of("coefficients")
    ),
    "sinkhorn": cut_short_of("sinkhorn"),
    "project": steps_of("project") | flushes_of("project"),
    "head": (
        constants_of("head")
        | exps_of("head")
        | {"gate-limited": {"gates": (patched("head", pre_gate=coefficients.gate_limited),)}}
    ),
}
