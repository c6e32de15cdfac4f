"""What holds for every op of the oracle: tokens do not see each other, layouts do not show, nothing is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
from oracle import arithmetic
from tests.oracle import exact
from tests.oracle.samples import OPS, TENSORS, sample, scattered

TOKEN_OPS = tuple(op for op in OPS if op != "fn_broadcast")


def check_equal(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    """Fail unless all outputs have the same bits."""
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        assert exact.differing(ours, theirs) == 0


def test_the_tables_name_every_op() -> None:
    """Catches an op that these tests would silently leave out."""
    assert set(OPS) == set(TENSORS) == set(arithmetic.FIELDS)


@pytest.mark.parametrize("op", OPS)
def test_outputs_are_dense_whatever_the_strides_of_the_inputs(op: str) -> None:
    """Catches a stride assumed, an output that inherits strides, and NaN read from between the elements."""
    call = sample(op)
    spread = {name: scattered(value) for name, value in call.tensors.items()}
    assert not any(value.is_contiguous() for value in spread.values() if value.numel() > 1)
    outputs = call.call(**spread)
    check_equal(call.call(), outputs)
    for value in outputs:
        assert value.stride() == torch.empty(value.shape).stride()


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("op", TOKEN_OPS)
def test_no_token_and_one_token_have_their_shapes(op: str, tokens: int) -> None:
    """Catches an empty launch that fails, or returns another shape, dtype or stride than the rows of a batch."""
    whole, few = sample(op, tokens=3).call(), sample(op, tokens=tokens).call()
    for value, row in zip(whole, few, strict=True):
        assert row.shape == (tokens, *value.shape[1:])
        assert row.dtype == value.dtype
        assert row.stride() == torch.empty(row.shape).stride()


@pytest.mark.parametrize("op", TOKEN_OPS)
def test_a_token_alone_equals_the_token_in_a_batch(op: str) -> None:
    """Catches arithmetic chosen by T: each of 130 tokens, in batches of 1, 2, 3, 33, 64 and 130 around thresholds."""
    call = sample(op, tokens=130, n=2, hidden=17)
    whole = call.call()
    for size in (1, 2, 3, 33, 64, 129):
        first = 0
        while first < 130:
            part = slice(first, first + size)
            check_equal(tuple(value[part] for value in whole), call.call(**call.rows(part)))
            first += 13 * size


@pytest.mark.parametrize("op", TOKEN_OPS)
def test_permuted_and_doubled_tokens_permute_and_double_results(op: str) -> None:
    """Catches a result that depends on the position of a token."""
    call = sample(op, tokens=5, hidden=17)
    order = torch.tensor([4, 0, 0, 3, 1, 2, 4])
    check_equal(tuple(value[order] for value in call.call()), call.call(**call.rows(order)))


@pytest.mark.parametrize("op", TOKEN_OPS)
def test_a_neighbour_of_nan_changes_nothing(op: str) -> None:
    """Catches a leak between rows: the middle token is NaN throughout, the outer two keep their bits."""
    call = sample(op)
    rows = call.rows(slice(None))
    poisoned = {name: value.index_fill(0, torch.tensor([1]), float("nan")) for name, value in rows.items()}
    outer = torch.tensor([0, 2])
    outputs = call.call(**poisoned)
    check_equal(tuple(value[outer] for value in call.call()), tuple(value[outer] for value in outputs))
    assert any(bool(value[1].isnan().any()) for value in outputs)


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_untouched_and_parameters_are_taken(op: str) -> None:
    """Catches an op in place, an output that is a view of an input, and a graph built behind trained weights."""
    call = sample(op)
    before = {name: value.clone() for name, value in call.tensors.items()}
    outputs = call.call(**{name: value.clone().requires_grad_() for name, value in before.items()})
    check_equal(outputs, call.call())
    assert not any(value.requires_grad for value in outputs)
    for name, value in call.tensors.items():
        assert exact.differing(value, before[name]) == 0
    for value in outputs:
        value.zero_()
    check_equal(tuple(before.values()), tuple(call.tensors.values()))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("hidden", [1, 31, 64, 513])
@pytest.mark.parametrize("op", OPS)
def test_every_width_and_stream_count_runs(op: str, n: int, hidden: int) -> None:
    """Catches a shape assumption: finite inputs give finite outputs of the right size for odd H and n != 4."""
    outputs = sample(op, tokens=2, n=n, hidden=hidden).call()
    assert all(bool(value.isfinite().all()) for value in outputs)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_show(threads: int) -> None:
    """Catches a sum that torch splits over threads."""
    call = sample("post_pre_delayed", tokens=40, hidden=70)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        many = call.call()
    finally:
        torch.set_num_threads(before)
    check_equal(many, call.call())


@pytest.mark.parametrize("name", arithmetic.KNOWN)
def test_every_known_record_runs_through_every_op_that_takes_one(name: str) -> None:
    """Catches a record that an op cannot follow, at a width that no lane count or split divides."""
    record = arithmetic.KNOWN[name]
    for op in OPS:
        if arithmetic.FIELDS[op] and op != "mixes":
            outputs = sample(op, tokens=2, hidden=67).call(arithmetic=record)
            assert all(bool(value.isfinite().all()) for value in outputs), op


def test_the_package_exports_ops_and_records_only() -> None:
    """Catches a helper that leaks into the public names."""
    assert {name for name in oracle.__all__ if name[0].isupper()} == {"Arithmetic", "CONTRACT_1", "MhcConfig"}
