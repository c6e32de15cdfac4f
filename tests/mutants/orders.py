"""Other evaluation sequences: right formulas whose additions, contractions or roundings are not the contract's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cases.ops import OPS
from oracle.arith import fma
from oracle.arithmetic import FIELDS, Dot, Mean, Post, WeightedSum
from oracle.reduce import CONTRACT_SUM, add_product, index_sum, weighted_sum
from tests.mutants.generic import Function, patched, under

# By class of fault, how each field of an `Arithmetic` departs from the contract.
_DEPARTURES: dict[str, dict[str, Any]] = {
    "fma-contraction": {
        "collapse": WeightedSum(contraction="fused"),
        "post": Post(first="into_first", contraction="fused"),
    },
    "first-term-fused": {"post": Post(first="into_first")},
    "reversed-order": {
        "collapse": WeightedSum(order="descending"),
        "mean": Mean(order="descending"),
        "post": Post(order="descending"),
    },
    "pairwise-order": {"collapse": WeightedSum(order="pairwise"), "mean": Mean(order="pairwise")},
    "sublayer-added-last": {"post": Post(first="last")},
    "mean-by-reciprocal": {"mean": Mean(scale="reciprocal")},
    "unrounded-projection": {"projects": "unrounded"},
    "scale-base-fused": {"gate": "fused"},
    "segment-order-reversed": {"dot": Dot(segments="descending")},
    "segment-ignored": {"dot": Dot(splits=1)},
    "serial-lanes": {"dot": Dot(lane_sum="serial")},
    "strided-tree": {"dot": Dot(lane_sum="distant")},
    "streams-outside": {"dot": Dot(streams="flat")},
    "unfused-projection": {"dot": Dot(contraction="separate")},
}


def departures(op: str) -> dict[str, dict[str, Function]]:
    """The wrong sequences that an op can follow, by class of fault and stage; "" where one rule serves two stages."""
    found: dict[str, dict[str, Function]] = {}
    for kind, rules in _DEPARTURES.items():
        for field in rules.keys() & set(FIELDS[op]):
            found.setdefault(kind, {})[_stage(op, field)] = under(op, **{field: rules[field]})
    if "collapse" in OPS[op].stages:
        found["grouped-order"] = {"collapse": patched(op, weighted_sum=in_fours)}
    if op in ("post", "draft_tail"):
        found["other-product-fused"] = {"post": patched(op, _post_sum=other_product_fused)}
    return found


_STAGES = {"gate": "gates", "projects": "projection", "index_order": "sinkhorn"}


def _stage(op: str, field: str) -> str:
    """The stage that one field of an `Arithmetic` changes."""
    if field == "dot":
        return "norm-squares" if "norm-squares" in OPS[op].stages else ""
    return _STAGES.get(field, field)


def in_fours(weights: Sequence[Tensor], values: Sequence[Tensor], _: WeightedSum = CONTRACT_SUM) -> Tensor:
    """Sums four streams at a time, each four from +0, and then these sums."""
    fours = (slice(first, first + 4) for first in range(0, len(values), 4))
    return index_sum([weighted_sum(weights[four], values[four]) for four in fours])


def other_product_fused(weight: Tensor, x: Tensor, terms: list[tuple[Tensor, Tensor]], _: Post) -> Tensor:
    """fma(comb0, res0, post * x), and then each further term with two roundings."""
    (comb, stream), *rest = terms
    value = fma(comb, stream, weight * x)
    for weight_, value_ in rest:
        value = add_product(value, weight_, value_, fused=False)
    return value
