"""Each law can be broken: a kernel that breaks it is told so, and the right kernel is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from oracle.arithmetic import Arithmetic, Order, WeightedSum
from tests.implementations import Implementation, of_oracle
from tests.laws import LAWS, subject
from tests.mutants import generic

CALLS = itertools.count()
STATIC = torch.empty(0)


def by_batch(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Sums in another order when there are few tokens."""
    order: Order = "descending" if residual.shape[0] <= 4 else "ascending"
    return oracle.collapse(residual, pre_mix, arithmetic=Arithmetic("mutant", collapse=WeightedSum(order=order)))


def by_large_batch(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Sums in another order from 65 tokens on."""
    order: Order = "descending" if residual.shape[0] >= 65 else "ascending"
    return oracle.collapse(residual, pre_mix, arithmetic=Arithmetic("mutant", collapse=WeightedSum(order=order)))


def untouched(residual: Tensor, pre_mix: Tensor, *, out: Tensor) -> Tensor:  # noqa: ARG001 - that is the fault
    """Does nothing at all."""
    return out


def unsteady(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Gives another result every third call, as a race does."""
    result = oracle.collapse(residual, pre_mix)
    return result.roll(1, -1) if next(CALLS) % 3 == 2 else result


def wrongly_empty(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Returns one row for no tokens."""
    return oracle.collapse(residual, pre_mix) if len(residual) else torch.zeros(1, residual.shape[2]).bfloat16()


def only_with_out(residual: Tensor, pre_mix: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Forgets to compute where it allocates its own output."""
    if out is None:
        return torch.zeros(residual.shape[0], residual.shape[2], dtype=torch.bfloat16)
    return out.copy_(oracle.collapse(residual, pre_mix))


def aliased(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Returns a buffer that every call shares."""
    global STATIC
    STATIC = torch.empty(17 * 97, dtype=torch.bfloat16) if not STATIC.numel() else STATIC
    return (
        STATIC[: residual.shape[0] * residual.shape[2]]
        .view(-1, residual.shape[2])
        .copy_(oracle.collapse(residual, pre_mix))
    )


BREAKERS: list[tuple[str, Callable[..., Any], bool]] = [
    ("shard_invariance", by_batch, False),
    ("token_independence", by_batch, False),
    ("token_independence", by_large_batch, False),
    ("token_independence", generic.row_crosstalk("collapse"), False),
    ("padding_isolation", generic.pad_row_read("collapse"), False),
    ("writes_all_and_nothing_else", untouched, True),
    ("writes_all_and_nothing_else", generic.tail_column_unwritten("collapse"), True),
    ("own_outputs", only_with_out, True),
    ("own_outputs", aliased, False),
    ("layout_independence", generic.strides_ignored("collapse"), False),
    ("repeatability", unsteady, False),
    ("empty_batch", wrongly_empty, False),
    ("gather_commutes", by_batch, False),
]


@pytest.mark.parametrize(("name", "function", "takes_out"), BREAKERS)
def test_a_law_is_broken_by_what_it_is_about(name: str, function: Callable[..., Any], takes_out: bool) -> None:
    """Catches a law that cannot fail."""
    wrong = Implementation("collapse", "mutant", function, takes_out)
    assert list(LAWS[name](wrong, subject("collapse", tokens=17), "cpu"))


@pytest.mark.parametrize("name", LAWS)
def test_every_law_has_a_breaker_and_the_right_kernel_keeps_it(name: str) -> None:
    assert name in {breaker[0] for breaker in BREAKERS}
    assert not list(LAWS[name](of_oracle("collapse"), subject("collapse", tokens=17), "cpu"))
