"""The guess at the evaluation order: it names the sequence that made the bits, and stays silent otherwise.

A guess that accepts a near miss, looks only at some of the rows, or blames a known sequence for random faults fails
here. Inputs nearly cancel, so that the sequences differ in their bits at all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import oracle.explain
from oracle.arith import bits, from_bits, widen
from oracle.arithmetic import CONTRACT_1, KNOWN, Arithmetic, candidates, combine
from oracle.collapse import unrounded_collapse
from oracle.explain import OUTPUTS, explain
from oracle.reduce import index_sum
from oracle.streams import unrounded_post

TOKENS, STREAMS, HIDDEN = 10, 4, 96
SINGLE = {"collapse": "layer_input", "post": "residual", "draft_tail": "layer_input", "stream_mean": "aux"}


def inputs(op: str) -> dict[str, Tensor]:
    """Pairs of streams and of weights that differ in their last bits and cancel.

    The mean of such streams is exact in every order; its own are far apart in size before they cancel.
    """
    random = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    residual = normal(TOKENS, STREAMS, HIDDEN)
    if op == "stream_mean":
        residual[:, 0] *= 2**20
        residual[:, 2] = -residual[:, 0]
    else:
        residual[:, 1::2] = -residual[:, ::2] * (1 + normal(TOKENS, STREAMS // 2, HIDDEN) / 256)
    pre_mix = normal(TOKENS, STREAMS).abs() + 0.5
    pre_mix[:, 1::2] = pre_mix[:, ::2] * (1 + 1e-6 * normal(TOKENS, STREAMS // 2))
    tensors = {
        "x": normal(TOKENS, HIDDEN).bfloat16(),
        "residual": residual.bfloat16(),
        "post_mix": normal(TOKENS, STREAMS).abs() * 1e-3,
        "comb_mix": pre_mix[:, :, None] * (1 + normal(TOKENS, STREAMS, STREAMS) / 1e5),
        "pre_mix": normal(TOKENS, STREAMS) if op == "draft_tail" else pre_mix,
    }
    names = {
        "collapse": ("residual", "pre_mix"),
        "stream_mean": ("residual",),
        "post": ("x", "residual", "post_mix", "comb_mix"),
        "draft_tail": tuple(tensors),
    }
    return {name: tensors[name] for name in names[op]}


def computed(op: str, tensors: dict[str, Tensor], arithmetic: Arithmetic) -> Tensor:
    result = getattr(oracle, op)(**tensors, arithmetic=arithmetic)
    assert isinstance(result, Tensor)
    return result


def sentence(name: str) -> str:
    return f"'{name}' gives exactly these bits"


def post_of(tensors: dict[str, Tensor]) -> Tensor:
    """The fp32 value of the post before its rounding."""
    x, residual, post_mix, comb_mix = (tensors[name] for name in ("x", "residual", "post_mix", "comb_mix"))
    return unrounded_post(x, residual, post_mix, comb_mix, CONTRACT_1)


def truncate(values: Tensor) -> Tensor:
    return from_bits((bits(values) >> 16).to(torch.int16))


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in SINGLE for name in candidates(op)])
def test_every_known_sequence_is_named_where_its_bits_differ(op: str, name: str) -> None:
    tensors = inputs(op)
    actual = computed(op, tensors, KNOWN[name])
    told = explain(op, tensors, actual, output=SINGLE[op])
    differs = not torch.equal(bits(actual), bits(computed(op, tensors, CONTRACT_1)))
    assert (sentence(name) in told) is differs
    assert bool(told) is differs


def test_these_inputs_tell_the_sequences_apart() -> None:
    """Without this, the test above could pass with nothing to explain."""
    for op, least in {"collapse": 5, "post": 5, "draft_tail": 5, "stream_mean": 2}.items():
        tensors = inputs(op)
        made = {tuple(bits(computed(op, tensors, record)).flatten().tolist()) for record in candidates(op).values()}
        assert len(made) >= least


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("dot without fma", "sums"),
        ("dot with a distant-pair tree", "sums"),
        ("dot with segments of 256", "sums"),
        ("dot with segments of 256", "squares"),
    ],
)
def test_order_of_a_projection_is_named(name: str, output: str) -> None:
    random = torch.Generator().manual_seed(12)
    tensors = {
        "x": torch.randn(40, 2, 600, generator=random).bfloat16(),
        "fn": torch.randn(8, 1200, generator=random),
    }
    made = oracle.project(**tensors, arithmetic=KNOWN[name])
    assert sentence(name) in explain("project", tensors, made[OUTPUTS["project"].index(output)], output=output)


def test_parameters_of_the_call_are_used() -> None:
    random = torch.Generator().manual_seed(13)
    tensors = {
        "mixes": torch.randn(200, 24, generator=random),
        "hc_scale": torch.rand(3, generator=random),
        "hc_base": torch.randn(24, generator=random),
    }
    params = {"config": oracle.MhcConfig.v41()}
    gates = oracle.coefficients(**tensors, config=oracle.MhcConfig.v41(), arithmetic=KNOWN["gates contracted to fma"])
    told = explain("coefficients", tensors, gates[0], output="pre_mix", params=params)
    assert told[0] == sentence("gates contracted to fma")


@pytest.mark.parametrize(
    ("op", "accumulator"),
    [
        ("collapse", lambda t: unrounded_collapse(t["residual"], t["pre_mix"], CONTRACT_1)),
        ("post", post_of),
        ("stream_mean", lambda t: index_sum(widen(t["residual"]).unbind(1)) / torch.tensor(float(STREAMS))),
    ],
)
def test_truncating_store_is_named(op: str, accumulator: Callable[[dict[str, Tensor]], Tensor]) -> None:
    tensors = inputs(op)
    told = explain(op, tensors, truncate(accumulator(tensors)), output=SINGLE[op])
    assert told == [sentence("contract 1 with a store that truncates")]


def test_tail_without_the_rounding_between_is_named() -> None:
    tensors = inputs("draft_tail")
    new = post_of(tensors)
    total = torch.zeros(TOKENS, HIDDEN)
    for stream in range(STREAMS):
        total = total + tensors["pre_mix"][:, stream, None] * new[:, stream]
    told = explain("draft_tail", tensors, total.bfloat16(), output="layer_input")
    assert told == [sentence("contract 1 without the bf16 rounding of the post")]


def test_inputs_read_wrongly_are_named() -> None:
    tensors = inputs("post")
    transposed = computed("post", {**tensors, "comb_mix": tensors["comb_mix"].mT.contiguous()}, CONTRACT_1)
    told = explain("post", tensors, transposed, output="residual")
    assert told == [sentence("comb_mix read as [output stream, input stream]")]
    narrowed = computed("post", {**tensors, "post_mix": tensors["post_mix"].bfloat16().float()}, CONTRACT_1)
    assert explain("post", tensors, narrowed, output="residual") == [sentence("post_mix rounded to bf16 before use")]


def test_two_faults_are_named_together_when_no_single_one_fits() -> None:
    """Streams that the post makes equal, and pre-mixes that nearly cancel: both ops show in the bits."""
    tensors = inputs("draft_tail")
    tensors["comb_mix"] = tensors["comb_mix"][:, :, :1].expand(-1, -1, STREAMS).contiguous()
    tensors["post_mix"] = tensors["post_mix"][:, :1].expand(-1, STREAMS).contiguous()
    tensors["pre_mix"][:, 1::2] = -tensors["pre_mix"][:, ::2] * (1 + 1e-6)
    names = ("post from stream n-1 down", "collapse pairwise, contracted to fma")
    actual = computed("draft_tail", tensors, combine("both", *(KNOWN[name] for name in names)))
    told = explain("draft_tail", tensors, actual, output="layer_input")
    assert sentence(f"{names[1]} with {names[0]}") in told
    assert all("collapse" in text and names[0] in text for text in told)


def test_sequence_with_a_truncating_store_is_named() -> None:
    tensors = inputs("collapse")
    record = KNOWN["collapse pairwise"]
    actual = truncate(unrounded_collapse(tensors["residual"], tensors["pre_mix"], record))
    told = explain("collapse", tensors, actual, output="layer_input")
    assert told == [sentence("collapse pairwise with a store that truncates")]


def test_rows_that_follow_another_sequence_are_counted() -> None:
    """As when a kernel is picked by the number of tokens, or one rank runs another build."""
    tensors = inputs("collapse")
    actual = computed("collapse", tensors, CONTRACT_1)
    name = "collapse contracted to fma"
    actual[3:9] = computed("collapse", tensors, KNOWN[name])[3:9]
    told = explain("collapse", tensors, actual, output="layer_input")
    where = "in the 6 of 10 tokens that differ, the others follow contract 1"
    assert told == [f"{sentence(name)} {where}"]


def test_one_wrong_bit_more_and_nothing_is_claimed() -> None:
    """In a row that the first tries do not look at."""
    tensors = inputs("collapse")
    actual = computed("collapse", tensors, KNOWN["collapse contracted to fma"])
    bits(actual)[9, 95] ^= 1
    assert explain("collapse", tensors, actual, output="layer_input") == []


def test_exact_and_unrelated_results_are_not_explained() -> None:
    tensors = inputs("collapse")
    exact = computed("collapse", tensors, CONTRACT_1)
    assert explain("collapse", tensors, exact, output="layer_input") == []
    assert explain("collapse", tensors, -exact, output="layer_input") == []
    assert explain("collapse", tensors, exact[:3], output="layer_input") == []
    assert explain("collapse", tensors, exact[:, :3], output="layer_input") == []
    assert explain("collapse", tensors, exact.float(), output="layer_input") == []
    empty = {name: tensor[:0] for name, tensor in tensors.items()}
    assert explain("collapse", empty, exact[:0], output="layer_input") == []


def test_nan_of_any_pattern_does_not_spoil_a_match() -> None:
    tensors = inputs("collapse")
    tensors["residual"][4, 0, 7] = float("nan")
    actual = computed("collapse", tensors, KNOWN["collapse pairwise"])
    bits(actual)[4, 7] = -1
    assert sentence("collapse pairwise") in explain("collapse", tensors, actual, output="layer_input")


def test_large_results_are_looked_at_in_part_and_the_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle.explain, "CHECKED", 4 * HIDDEN)
    tensors = inputs("collapse")
    actual = computed("collapse", tensors, KNOWN["collapse pairwise"])
    told = explain("collapse", tensors, actual, output="layer_input")
    assert told == [f"{sentence('collapse pairwise')} (first 5 of 10 rows tried)"]


def test_unknown_op_and_output_are_named() -> None:
    with pytest.raises(ValueError, match=r"op must be one of expand, collapse, .* got 'colapse'"):
        explain("colapse", {}, torch.ones(1), output="layer_input")
    with pytest.raises(ValueError, match="output must be one of sums, squares for project, got 'sum'"):
        explain("project", {}, torch.ones(1), output="sum")


@pytest.mark.parametrize(
    ("changed", "output"),
    [
        ({"sinkhorn_iters": 19}, "comb_mix"),
        ({"sinkhorn_iters": 21}, "comb_mix"),
        ({"hc_sinkhorn_eps": 0.0}, "comb_mix"),
        ({"hc_pre_eps": 0.0}, "pre_mix"),
        ({"post_mult": 1.0}, "post_mix"),
    ],
)
def test_another_constant_is_named(changed: dict[str, Any], output: str) -> None:
    """Catches a report that is silent on a constant that a kernel baked in, though one number explains all its bits."""
    config, random = oracle.MhcConfig.v41(), torch.Generator().manual_seed(5)
    mixes = torch.randn(TOKENS, 24, generator=random) * 4
    scale, base = torch.ones(3), torch.zeros(24)
    tensors = {"mixes": mixes, "hc_scale": scale, "hc_base": base}
    outputs = oracle.coefficients(mixes, scale, base, config=replace(config, **changed))
    actual = outputs[OUTPUTS["coefficients"].index(output)]
    ((name, value),) = changed.items()
    told = explain("coefficients", tensors, actual, output=output, params={"config": config})
    assert f"'{name} = {value:g} in place of {getattr(config, name):g}' gives exactly these bits" in told
    assert all(sentence.startswith(f"'{name} = ") for sentence in told), "epsilons of 0 and 1e-20 may look alike"


def boundary_inputs(tokens: int, hidden: int, seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    return {
        "x": normal(tokens, hidden).bfloat16(),
        "residual": normal(tokens, STREAMS, hidden).bfloat16(),
        "post_mix": normal(tokens, STREAMS).abs(),
        "comb_mix": normal(tokens, STREAMS, STREAMS).abs() / STREAMS,
        "fn": normal(24, STREAMS * hidden) / hidden,
        "hc_scale": torch.ones(3),
        "hc_base": normal(24),
    }


def with_roots_off(monkeypatch: pytest.MonkeyPatch, tensors: dict[str, Any], step: int, every: int) -> list[Tensor]:
    """The boundary's outputs where some tokens' reciprocal root is a few units off, as a quick square root makes it."""
    coefficients = importlib.import_module("oracle.coefficients")
    exact = coefficients.reciprocal_rms

    def off(squares: Tensor, numel: int, eps: float) -> Tensor:
        root: Tensor = exact(squares, numel, eps)
        bits(root)[::every] += step
        return root

    with monkeypatch.context() as patch:
        patch.setattr(coefficients, "reciprocal_rms", off)
        return list(oracle.post_pre(**tensors, config=oracle.MhcConfig.v41()))


@pytest.mark.parametrize(("tokens", "step", "every"), [(1, 1, 1), (3, -1, 2), (8, 1, 5)])
def test_no_order_is_blamed_for_a_root_one_unit_off(
    monkeypatch: pytest.MonkeyPatch, tokens: int, step: int, every: int
) -> None:
    """Catches agreement in a token or two taken for proof: half of the orders of a sum move its root by that unit."""
    params = {"config": oracle.MhcConfig.v41()}
    by_chance = False
    for seed in range(3):
        tensors = boundary_inputs(tokens, 96, seed)
        made = with_roots_off(monkeypatch, tensors, step, every)
        for output, actual in zip(OUTPUTS["post_pre"], made, strict=True):
            assert explain("post_pre", tensors, actual, output=output, params=params) == []
            if not by_chance:
                with monkeypatch.context() as lenient:
                    lenient.setattr(oracle.explain, "ENOUGH", 0.0)
                    by_chance = bool(explain("post_pre", tensors, actual, output=output, params=params))
    assert by_chance, "these tokens ask nothing"


def rows_one_ulp_apart(name: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tokens of one column that a known sequence collapses to one ULP from contract 1, with both results."""
    random = torch.Generator().manual_seed(3)
    residual = torch.randn(1 << 15, 2, 1, generator=random)
    residual[:, 1] = -residual[:, 0] * (1 + torch.randn(1 << 15, 1, generator=random) / 256)
    tensors = {"residual": residual.bfloat16(), "pre_mix": torch.tensor([[0.7, 0.70001]]).expand(1 << 15, 2)}
    made, exact = (computed("collapse", tensors, record) for record in (KNOWN[name], CONTRACT_1))
    rows = ((bits(made) - bits(exact)).abs() == 1).flatten().nonzero().flatten()
    return {key: tensor[rows].contiguous() for key, tensor in tensors.items()}, made[rows], exact[rows]


def test_agreement_in_a_few_last_bits_is_no_proof() -> None:
    """Catches a sequence named for three values one ULP off, and for some of many that it should have changed."""
    name = "collapse contracted to fma"
    tensors, made, exact = rows_one_ulp_apart(name)
    for count, told in ((3, False), (8, True)):
        few = {key: tensor[:count] for key, tensor in tensors.items()}
        assert (sentence(name) in explain("collapse", few, made[:count], output="layer_input")) is told
    scattered = exact[:40].clone()
    scattered[::4] = made[:40:4]
    few = {key: tensor[:40] for key, tensor in tensors.items()}
    assert len(made) >= 40
    assert explain("collapse", few, scattered, output="layer_input") == []


def test_sequences_that_agree_and_have_nothing_in_common_are_not_named() -> None:
    """Catches two causes told of which one at least is wrong: here the sum's order, and a rounded weight."""
    unit = 2.0**-24
    tensors = {
        "x": torch.ones(TOKENS, HIDDEN).bfloat16(),
        "residual": torch.ones(TOKENS, 2, HIDDEN).bfloat16(),
        "post_mix": torch.full((TOKENS, 2), 1 + 2.0**-8 + 2 * unit),
        "comb_mix": torch.tensor([[-1.5 * unit] * 2, [0.9 * unit] * 2]).expand(TOKENS, 2, 2).contiguous(),
    }
    last = computed("post", tensors, KNOWN["post with post * x last"])
    narrow = computed("post", {**tensors, "post_mix": widen(tensors["post_mix"].bfloat16())}, CONTRACT_1)
    assert torch.equal(last, narrow)
    assert not torch.equal(last, computed("post", tensors, CONTRACT_1))
    assert explain("post", tensors, last, output="residual") == []


def test_a_nan_is_no_proof_of_an_order() -> None:
    """Catches a pairwise sum named for a kernel that lets NaN in: each makes NaN of a row that overflows."""
    largest = torch.finfo(torch.bfloat16).max
    streams = torch.tensor([largest, largest, -largest, -largest])
    tensors = {"residual": streams[:, None].expand(1, 4, 24).bfloat16(), "pre_mix": torch.ones(1, 4)}
    assert computed("collapse", tensors, CONTRACT_1).isinf().all()
    spoilt = torch.full((1, 24), float("nan")).bfloat16()
    assert torch.equal(computed("collapse", tensors, KNOWN["collapse pairwise"]).isnan(), spoilt.isnan())
    assert explain("collapse", tensors, spoilt, output="layer_input") == []
