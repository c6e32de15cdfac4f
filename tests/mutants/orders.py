"""Other evaluation sequences: right formulas whose additions, contractions or roundings are not the contract's."""

from __future__ import annotations

from typing import Any

from oracle.arithmetic import FIELDS, Dot, Mean, Post, WeightedSum
from tests.mutants.generic import Function, under

# By class of fault, how each field of an `Arithmetic` departs from the contract.
_DEPARTURES: dict[str, dict[str, Any]] = {
    "fma-contraction": {
        "collapse": WeightedSum(contraction="fused"),
        "post": Post(first="into_first", contraction="fused"),
    },
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


def departures(op: str) -> dict[str, Function]:
    """The wrong sequences that an op can follow, by class of fault."""
    fields = FIELDS[op]
    chosen = {kind: {f: rule for f, rule in rules.items() if f in fields} for kind, rules in _DEPARTURES.items()}
    return {kind: under(op, **rules) for kind, rules in chosen.items() if rules}
