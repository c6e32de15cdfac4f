"""What the cases can see: for each class of wrong kernel one case that catches it, and what random data would see.

`./run power` prints the table. `tests/test_mutants.py` holds it to be true.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cases.load import load_all
from cases.schema import Case
from tests.judge import Failure, judge
from tests.mutants import MUTANTS, Mutant


@dataclass(frozen=True)
class Flagship:
    """A class of fault, planted in one op, and the case that catches it at ``tp`` ranks.

    ``stage`` is the step that is wrong, for a class that an op can have at several. ``random_sees`` records whether
    the same case with ordinary normal inputs, packed, catches it as well.
    """

    kind: str
    op: str
    case: str
    random_sees: bool
    tp: int = 1
    stage: str = ""

    @property
    def mutants(self) -> tuple[Mutant, ...]:
        """The planted kernels of the class, of the stage alone where there is one."""
        return tuple(one for one in MUTANTS[self.kind, self.op] if self.stage in ("", one.stage))


FLAGSHIPS = (
    Flagship("truncating-store", "collapse", "collapse-ties", True),
    Flagship("round-half-up", "collapse", "collapse-ties", False),
    Flagship("fma-contraction", "collapse", "collapse-order-cancelling", False),
    Flagship("reversed-order", "collapse", "collapse-order-cancelling", False),
    Flagship("pairwise-order", "collapse", "collapse-order-cancelling", False),
    Flagship("fma-contraction", "post", "post-order-cancelling", False),
    Flagship("sublayer-added-last", "post", "post-order-cancelling", False),
    Flagship("comb-transposed", "post", "post-permutation", True),
    Flagship("post-rounding-dropped", "draft_tail", "draft-tail-keeps-rounding", True),
    Flagship("negative-zero-lost", "post", "post-keeps-negative-zero", False),
    Flagship("negative-zero-lost", "collapse", "collapse-negative-zero", False),
    Flagship("subnormal-flushed", "collapse", "collapse-subnormal-products", False),
    Flagship("nan-lost", "collapse", "collapse-inf-nan", False),
    Flagship("offset-32bit", "collapse", "collapse-far-offsets", False),
    Flagship("strides-ignored", "post", "aiter-5292-post-strided-mixes", False),
    Flagship("tail-column-unwritten", "collapse", "collapse-width-h1025", True),
    Flagship("hc-mult-fixed", "post", "vllm-52737-post-n2", True),
    Flagship("mean-by-reciprocal", "stream_mean", "mean-streams-n3", False),
    Flagship("pad-row-read", "collapse", "grid-collapse-t03", True, tp=2),
    Flagship("rank-off-by-one", "collapse", "grid-collapse-t03", True, tp=2),
    Flagship("token-dropped", "collapse", "veomni-1139-collapse-t56700", True, tp=8),
    Flagship("trim-forgotten", "collapse", "grid-collapse-t03", True, tp=2),
    Flagship("layout-guessed", "collapse", "vllm-50691-collapse-t1-tp2", True, tp=2),
    Flagship("side-input-unsharded", "collapse", "local-vllm-623-collapse-side-input", True, tp=4),
    Flagship("scaled-by-ranks", "post", "vllm-48763-post-unit-scale", True, tp=4),
    Flagship("eps-in-first-denominator", "sinkhorn", "sglang-36817-sinkhorn-diagonal", True),
    Flagship("column-eps-missing", "sinkhorn", "ascend-17054-sinkhorn-t7", True),
    Flagship("rounds-off-by-one", "sinkhorn", "sinkhorn-rounds-19", True),
    Flagship("rounds-off-by-one", "coefficients", "coefficients-upstream-constants", True),
    Flagship("rows-before-columns", "sinkhorn", "sinkhorn-normal", True),
    Flagship("row-max-skipped", "sinkhorn", "sinkhorn-large-logits", True),
    Flagship("comb-transposed", "sinkhorn", "sinkhorn-normal", True),
    Flagship("approximate-exp", "sinkhorn", "sinkhorn-large-logits", True),
    Flagship("approximate-division", "sinkhorn", "omni-7545-sinkhorn-sum-order", True),
    Flagship("pairwise-order", "sinkhorn", "omni-7545-sinkhorn-sum-order", True),
    Flagship("post-multiplier-one", "coefficients", "coefficients-saturated", True),
    Flagship("gate-eps-dropped", "coefficients", "coefficients-closed-gates", True),
    Flagship("gates-swapped", "coefficients", "coefficients-normal", True),
    Flagship("scale-base-fused", "coefficients", "coefficients-base-cancels", True),
    Flagship("segment-order-reversed", "project", "project-order", True),
    Flagship("serial-lanes", "project", "project-order", True),
    Flagship("strided-tree", "project", "project-order", True),
    Flagship("segment-ignored", "project", "project-order", True),
    Flagship("streams-outside", "project", "project-absorbing", True),
    Flagship("unfused-projection", "project", "project-cancelling", True),
    Flagship("split-by-tokens", "project", "project-threshold-t130", True),
    Flagship("tf32-projection", "project", "project-order", True),
    Flagship("approximate-rsqrt", "mixes", "mixes-v4", True),
    Flagship("rms-eps-outside", "mixes", "mixes-zero-row", False),
    Flagship("rms-eps-fixed", "norm", "norm-zero-row", False),
    Flagship("norm-weight-first", "norm", "norm-near-ties", False),
    Flagship("squares-swapped", "collapse_norm", "collapse-norm-unrounded", True),
    Flagship("broadcast-tree", "fn_broadcast", "broadcast-order", True),
    Flagship("rms-over-streams", "pre_delayed", "pre-delayed-entry", True),
    Flagship("own-mix-used", "pre_delayed", "pre-delayed-carried", True),
    Flagship("identity-multiplied", "pre_delayed", "pre-delayed-poisoned-streams", False),
    Flagship("unrounded-projection", "post_pre", "omni-6878-post-pre-rounded", True),
    Flagship("unrounded-projection", "post_pre_delayed", "boundary-carried-aux", True),
    Flagship("aux-from-input", "post_pre_delayed", "boundary-carried-aux", True),
    Flagship("aux-always-written", "post_pre_delayed", "boundary-no-aux", True),
    Flagship("first-term-fused", "post", "post-opposing", False),
    Flagship("other-product-fused", "post", "post-opposing", True),
    Flagship("double-rounded-fma", "project", "project-fma-rounded-once", False),
    Flagship("double-rounded-fma", "post_pre_delayed", "boundary-fma-rounded-once", False),
    Flagship("fma-contraction", "post_pre", "post-pre-collapse-order", False, stage="collapse"),
    Flagship("reversed-order", "post_pre_delayed", "boundary-unmixed-order", False, stage="collapse"),
    Flagship("reversed-order", "post_pre_delayed", "boundary-unmixed-order", False, stage="mean"),
    Flagship("mean-by-reciprocal", "post_pre_delayed", "boundary-mean-ties-n3", False, stage="mean"),
    Flagship("serial-lanes", "post_pre_delayed", "boundary-norm-ties", False, stage="norm-squares"),
    Flagship("root-one-unit-high", "pre", "pre-norm-ties", False, stage="norm"),
    Flagship("constant-swapped", "pre_delayed", "pre-delayed-distinct-constants", True, stage="mixes"),
    Flagship("constant-swapped", "post_pre", "post-pre-distinct-constants", True, stage="norm"),
)


def on_random_inputs(case: Case) -> Case:
    """The same situation with ordinary normal data, packed, in place of the case's own inputs."""
    document = case.model_dump(by_alias=True, exclude_unset=True, mode="json", exclude={"expected", "history"})
    optional = {argument.name for argument in case.spec.arguments if argument.optional}
    given = document.get("inputs", {}).get("arguments", {})
    document["inputs"] = {"arguments": {name: {"recipe": "normal"} for name in given if name in optional}}
    return Case.model_validate(document)


def caught(flagship: Flagship, case: Case) -> list[Failure] | str:
    """The failures of the first of the flagship's mutants that a case catches, or what it raised."""
    found: list[Failure] | str = []
    for mutant in flagship.mutants:
        found = found or fails(mutant, case, flagship.tp)
    return found


def fails(mutant: Mutant, case: Case, tp: int) -> list[Failure] | str:
    """The failures of one mutant on a case, or what it raised."""
    try:
        return judge(case, mutant.implementation, tp, pipeline=mutant.pipeline)
    except (RuntimeError, ValueError) as error:
        return str(error)


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 when a flagship's case does not catch its mutant. It takes no option but --help."""
    argparse.ArgumentParser(prog="./run power", description=__doc__).parse_args(arguments)
    cases = {case.name: case for case in load_all()}
    rows = [("wrong kernel", "op", "case", "tp", "values that differ", "with random data")]
    missed = False
    for flagship in FLAGSHIPS:
        case = cases[flagship.case]
        own, random = (_told(caught(flagship, one)) for one in (case, on_random_inputs(case)))
        missed |= own == "none"
        kind = f"{flagship.kind} in {flagship.stage}" if flagship.stage else flagship.kind
        rows.append((kind, flagship.op, flagship.case, str(flagship.tp), own, random))
    print("\n".join(_aligned(rows)))
    return int(missed)


def _told(failures: list[Failure] | str) -> str:
    if isinstance(failures, str):
        return "refused"
    if not failures:
        return "none"
    counted = [failure.comparison for failure in failures if failure.comparison is not None]
    if any(comparison.faults for comparison in counted):
        return "wrong shape"
    return f"{sum(one.mismatching for one in counted)} of {sum(one.total for one in counted)}"


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
