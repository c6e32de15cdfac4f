"""Each law can be broken: a kernel that breaks it is told so, and the right kernel is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from cases.schema import Case
from fast.registry import Unsupported
from oracle.arithmetic import Arithmetic, Order, WeightedSum
from tests.implementations import Implementation, of_oracle
from tests.judge import built, parameters
from tests.laws import LAWS, Bench, applies
from tests.mutants import generic
from tests.subjects import SUBJECTS

CALLS = itertools.count()
STATIC = torch.empty(0)
KEPT: dict[object, Tensor] = {}


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


def storage_set(residual: Tensor, pre_mix: Tensor, *, out: Tensor) -> Tensor:
    """Makes the out= it was given another tensor; whoever holds a view of the memory sees none of it."""
    out.set_(oracle.collapse(residual, pre_mix))  # type: ignore[call-overload]
    return out


def data_replaced(residual: Tensor, pre_mix: Tensor, *, out: Tensor) -> Tensor:
    """The same by assignment."""
    out.data = oracle.collapse(residual, pre_mix)
    return out


def resized(residual: Tensor, pre_mix: Tensor, *, out: Tensor) -> Tensor:
    """Makes room for itself in the out= it was given: beyond its memory where that is too small."""
    out.resize_(2 * out.shape[0], *out.shape[1:])
    out[: len(residual)] = oracle.collapse(residual, pre_mix)
    return out


def overrun_when_many(residual: Tensor, pre_mix: Tensor, *, out: Tensor) -> Tensor:
    """Stores a whole block of tokens, past the end, in the launch that it takes from 65 tokens on."""
    out.copy_(oracle.collapse(residual, pre_mix))
    if len(residual) >= 65:
        out.as_strided((out.numel() + 1,), (1,))[-1] = 0
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
    place = STATIC[: residual.shape[0] * residual.shape[2]].view(-1, residual.shape[2])
    return place.copy_(oracle.collapse(residual, pre_mix))


def expanded_view(hidden: Tensor, hc_mult: int) -> Tensor:
    """Returns the input itself, as a view with as many streams."""
    return hidden[:, None].expand(-1, hc_mult, -1)


def aux_beside_layer_input(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Keeps both results of a token in one row of a workspace too short for them."""
    *outputs, aux = oracle.post_pre_delayed(*tensors, **options)
    shared = torch.empty(2 * aux.numel() - 1, dtype=aux.dtype)
    outputs[3] = shared[: aux.numel()].view(aux.shape).copy_(outputs[3])
    return (*outputs, shared[aux.numel() - 1 :].view(aux.shape).copy_(aux))


def kept_by_shape(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Remembers its result for each shape."""
    kept: Tensor = KEPT.setdefault(residual.shape, oracle.collapse(residual, pre_mix))
    return kept.clone()


def kept_weights(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Converts the projection once for each address."""
    residual, fn, *rest = tensors
    return oracle.pre(residual, KEPT.setdefault(fn.data_ptr(), fn.clone()), *rest, **options)


def kept_scales(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Reads the three scales back from the GPU once, for a model has one set."""
    residual, fn, hc_scale, hc_base = tensors
    kept = KEPT.setdefault(hc_scale.shape, hc_scale.clone())
    return oracle.pre(residual, fn, kept, hc_base, **options)


def beyond_row(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Loads one column too many, and multiplies what it finds there by zero."""
    wide = residual.as_strided((*residual.shape[:2], residual.shape[2] + 1), residual.stride())
    return oracle.collapse(residual, pre_mix) + (wide[..., -1:].float() * 0).sum(1).bfloat16()


def written_beside_input(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Pads the mixes to a vector where they lie."""
    pre_mix.as_strided((pre_mix.numel() + 1,), (1,))[-1] = 0
    return oracle.collapse(residual, pre_mix)


def out_as_packed(residual: Tensor, pre_mix: Tensor, *, out: Tensor) -> Tensor:
    """Stores as if out= were packed."""
    out.as_strided(out.shape, (out.shape[1], 1)).copy_(oracle.collapse(residual, pre_mix))
    return out


def out_copied(residual: Tensor, pre_mix: Tensor, *, out: Tensor) -> Tensor:
    """Packs a strided out= first, writes that and forgets to copy back."""
    out.contiguous().copy_(oracle.collapse(residual, pre_mix))
    return out


def out_refused_unclearly(residual: Tensor, pre_mix: Tensor, *, out: Tensor) -> Tensor:
    """Raises something of which nobody learns what to change."""
    if out.stride(-1) != 1 and len(out):
        raise ValueError("unsupported input")
    return out.copy_(oracle.collapse(residual, pre_mix))


def mixes_as_packed(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Asks the streams for their strides, but not the mixes."""
    if residual.is_contiguous():
        pre_mix = pre_mix.as_strided(pre_mix.shape, (pre_mix.shape[1], 1))
    return oracle.collapse(residual.contiguous(), pre_mix)


def normed_with_neighbour(*tensors: Tensor, norm_weight: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Norms each row by its neighbour's squares, in the variant that norms."""
    outputs = oracle.pre(*tensors, norm_weight=norm_weight, **options)
    return outputs if norm_weight is None else (*outputs[:2], outputs[2] + outputs[2].roll(1, 0) * 0.5)


def entry_by_batch(*tensors: Tensor, x: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """Adds the segments in another order for few rows, at an entry."""
    outputs = oracle.pre_delayed(*tensors, x=x, **options)
    return outputs if x is None or len(x) > 1 else (outputs[0] * (1 + 2**-20), *outputs[1:])


COLLAPSE = "collapse"
BREAKERS: list[tuple[str, str, Callable[..., Any], bool]] = [
    ("shard_invariance", COLLAPSE, by_batch, False),
    ("shard_invariance", "pre-delayed-entry", entry_by_batch, False),
    ("token_independence", COLLAPSE, by_batch, False),
    ("token_independence", COLLAPSE, by_large_batch, False),
    ("token_independence", COLLAPSE, generic.row_crosstalk("collapse"), False),
    ("token_independence", "pre-norm", normed_with_neighbour, False),
    ("padding_isolation", COLLAPSE, generic.pad_row_read("collapse"), False),
    ("padding_isolation", "collapse-five", generic.pad_row_read("collapse"), False),
    ("writes_all_and_nothing_else", COLLAPSE, untouched, True),
    ("writes_all_and_nothing_else", COLLAPSE, generic.tail_column_unwritten("collapse"), True),
    ("writes_all_and_nothing_else", COLLAPSE, storage_set, True),
    ("writes_all_and_nothing_else", COLLAPSE, data_replaced, True),
    ("writes_all_and_nothing_else", COLLAPSE, resized, True),
    ("writes_all_and_nothing_else", COLLAPSE, overrun_when_many, True),
    ("writes_all_and_nothing_else", COLLAPSE, written_beside_input, False),
    ("reads_inputs_only", COLLAPSE, beyond_row, False),
    ("reads_inputs_only", COLLAPSE, written_beside_input, False),
    ("own_outputs", COLLAPSE, only_with_out, True),
    ("own_outputs", COLLAPSE, aliased, False),
    ("own_outputs", "expand", expanded_view, False),
    ("own_outputs", "expand-alone", expanded_view, False),
    ("own_outputs", "post-pre-delayed-norm-aux", aux_beside_layer_input, False),
    ("layout_independence", COLLAPSE, generic.strides_ignored("collapse"), False),
    ("layout_independence", COLLAPSE, mixes_as_packed, False),
    ("out_layout_independence", COLLAPSE, out_as_packed, True),
    ("out_layout_independence", COLLAPSE, out_copied, True),
    ("out_layout_independence", COLLAPSE, out_refused_unclearly, True),
    ("repeatability", COLLAPSE, unsteady, False),
    ("forgets_earlier_calls", COLLAPSE, kept_by_shape, False),
    ("forgets_earlier_calls", "pre-norm", kept_weights, False),
    ("forgets_earlier_calls", "pre", kept_scales, False),
    ("empty_batch", COLLAPSE, wrongly_empty, False),
    ("gather_commutes", COLLAPSE, by_batch, False),
]


def bench(subject: str, function: Callable[..., Any], takes_out: bool) -> Bench:
    KEPT.clear()
    case = SUBJECTS[subject]
    return Bench(Implementation(case.op, "mutant", function, takes_out), case, "cpu")


@pytest.mark.parametrize(("law", "subject", "function", "takes_out"), BREAKERS)
def test_a_law_is_broken_by_what_it_is_about(
    law: str, subject: str, function: Callable[..., Any], takes_out: bool
) -> None:
    """Catches a law that cannot fail."""
    assert list(LAWS[law](bench(subject, function, takes_out)))


@pytest.mark.parametrize("law", LAWS)
def test_every_law_has_a_breaker_and_the_right_kernel_keeps_it(law: str) -> None:
    assert law in {breaker[0] for breaker in BREAKERS}
    assert not list(LAWS[law](Bench(of_oracle(COLLAPSE), SUBJECTS[COLLAPSE], "cpu")))


def refusing(*, out: bool) -> Callable[..., Tensor]:
    """A right kernel that takes packed tensors only, and says so."""

    def collapse(residual: Tensor, pre_mix: Tensor, **options: Tensor) -> Tensor:
        for name, tensor in (("residual", residual), ("pre_mix", pre_mix), *options.items()):
            if not tensor.is_contiguous():
                raise Unsupported(f"collapse: {name} must be contiguous, got strides {list(tensor.stride())}")
        result = oracle.collapse(residual, pre_mix)
        return options["out"].copy_(result) if out else result

    return collapse


@pytest.mark.parametrize(("law", "out"), [("layout_independence", False), ("out_layout_independence", True)])
def test_a_clear_refusal_of_strides_keeps_the_laws_of_layout(law: str, out: bool) -> None:
    """Catches a law that fails a right kernel."""
    assert not list(LAWS[law](bench(COLLAPSE, refusing(out=out), out)))


def refusing_first(residual: Tensor, pre_mix: Tensor) -> Tensor:
    """Refuses strided streams and ignores the strides of the mixes."""
    if not residual.is_contiguous():
        raise ValueError("collapse: residual must be contiguous")
    return oracle.collapse(residual, pre_mix.as_strided(pre_mix.shape, (pre_mix.shape[1], 1)))


def test_a_refusal_hides_nothing_about_other_tensors() -> None:
    """Catches a law that takes the refusal of a mixture for all of it."""
    assert list(LAWS["layout_independence"](bench(COLLAPSE, refusing_first, False)))


def test_a_kernel_that_must_have_out_is_not_called_without() -> None:
    """Catches an error verdict on a right kernel, and laws that say nothing counted as kept."""
    case = SUBJECTS[COLLAPSE]
    assert not applies("own_outputs", case, accepts_out=True, needs_out=True)
    assert not applies("out_layout_independence", case, accepts_out=False, needs_out=False)


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_every_subject_tells_its_tokens_and_columns_apart(subject: Case) -> None:
    """Catches inputs whose results are all zero or all alike, on which every law holds."""
    inputs = built(subject)
    for spec, output in zip(
        subject.spec.outputs, of_oracle(subject.op)(inputs.tensors, parameters(inputs.params)), strict=True
    ):
        one_value = spec.name == "comb_mix" and subject.hc_mult == 1
        for axis in {0, output.dim() - 1}:
            if output.shape[axis] > 1 and output.numel() and not one_value:
                assert not torch.equal(output, output.roll(1, axis)), f"{spec.name} is the same along axis {axis}"


def test_the_subjects_have_every_stream_count_and_optional_input_in_every_company() -> None:
    """Catches a variant that no law runs on: with and without each optional input, beside each other one."""
    cases = list(SUBJECTS.values())
    assert {case.hc_mult for case in cases} == set(range(1, 9))
    for op, spec in {case.op: case.spec for case in cases}.items():
        options = [one.name for one in spec.arguments if one.optional]
        seen = [{*(a.name for a in case.arguments), *_aux(case)} for case in cases if case.op == op]
        names = [*options, *(["aux"] if "capture_aux" in spec.parameters else [])]
        for one, other in itertools.combinations(names, 2):
            company = {(one in given, other in given) for given in seen}
            assert len(company) == 4, f"{op}: {one} and {other} come only as {company}"


def _aux(case: Case) -> list[str]:
    return ["aux"] if case.params is not None and case.params.capture_aux else []
