"""The layer boundaries of V4 and V4.1, against the ops that they are made of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from oracle import MhcConfig, arith
from oracle.arithmetic import KNOWN, UPSTREAM_FUSED
from tests.oracle import exact
from tests.oracle.samples import Sample, sample

HIDDEN = 130
V4, V41 = MhcConfig.v4(), MhcConfig.v41()


def gates(residual: Tensor, call: Sample, config: MhcConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre_mix, post_mix and comb_mix of a residual by the single ops."""
    fn, scale, base = (call.tensors[name] for name in ("fn", "hc_scale", "hc_base"))
    sums, squares = oracle.project(residual, fn)
    mix = oracle.mixes(sums, squares, numel=residual[0].numel(), rms_eps=config.rms_eps)
    return oracle.coefficients(mix, scale, base, config=config)


def check(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Fail unless all outputs have the bits expected."""
    assert [exact.differing(a, b) for a, b in zip(outputs, expected, strict=True)] == [0] * len(expected)


def given(call: Sample, *names: str) -> list[Tensor]:
    """Return some tensors of a call."""
    return [call.tensors[name] for name in names]


@pytest.mark.parametrize("normed", [False, True])
def test_pre_collapses_with_its_own_gate(normed: bool) -> None:
    """Catches outputs out of order, a carried pre_mix, and V4.1's squares in V4's norm."""
    call = sample("pre", tokens=9, hidden=HIDDEN)
    residual, weight = given(call, "residual", "norm_weight")
    pre_mix, post_mix, comb_mix = gates(residual, call, V4)
    layer_input = oracle.collapse(residual, pre_mix)
    if normed:
        layer_input = oracle.collapse_norm(residual, pre_mix, weight, norm_eps=1e-6, squares_of="unrounded")
    outputs = call.call(config=V4, norm_weight=weight if normed else None)
    check(outputs, (post_mix, comb_mix, layer_input))


@pytest.mark.parametrize("normed", [False, True])
def test_pre_delayed_collapses_with_the_carried_mix_and_hands_on_its_own(normed: bool) -> None:
    """Catches this sublayer's pre-mix used where the carried one belongs (attention's for the FFN's), and V4's norm."""
    call = sample("pre_delayed", tokens=9, hidden=HIDDEN)
    residual, carried, weight = given(call, "residual", "pre_mix", "norm_weight")
    next_pre_mix, post_mix, comb_mix = gates(residual, call, V41)
    layer_input = oracle.collapse(residual, carried)
    if normed:
        layer_input = oracle.norm(layer_input, weight, norm_eps=1e-20)
    outputs = call.call(config=V41, norm_weight=weight if normed else None)
    check(outputs, (post_mix, comb_mix, layer_input, next_pre_mix))
    assert exact.differing(oracle.collapse(residual, next_pre_mix), oracle.collapse(residual, carried)) > 1000


def test_without_a_carried_mix_the_layer_input_is_a_bit_copy_of_stream_0() -> None:
    """Catches a collapse with one-hot weights: it loses -0 and NaN payloads, and 0 * Inf of stream 1 is NaN."""
    call = sample("pre_delayed", tokens=1, n=2, hidden=5)
    pattern = torch.tensor([-0x8000, 0x7FC1, 0x7F80, 1, -0x0080], dtype=torch.int16)
    residual = torch.stack([arith.from_bits(pattern), torch.full((5,), math.inf).bfloat16()])[None]
    copied = call.call(residual=residual, pre_mix=None, norm_weight=None)[2]
    assert torch.equal(arith.bits(copied)[0], pattern)
    by_one_hot = oracle.collapse(residual, exact.fp32([[1, 0]]))
    assert bool(by_one_hot.isnan().all())
    copied.zero_()
    assert torch.equal(arith.bits(residual)[0, 0], pattern), "the copy is a view"


def test_a_normed_copy_of_stream_0_is_the_norm_of_stream_0() -> None:
    """Catches a norm that is skipped, or taken over all streams, at an entry."""
    call = sample("pre_delayed", tokens=3, hidden=HIDDEN)
    residual, weight = given(call, "residual", "norm_weight")
    expected = oracle.norm(residual[:, 0], weight, norm_eps=1e-20)
    assert exact.differing(call.call(config=V41, pre_mix=None)[2], expected) == 0


@pytest.mark.parametrize("op", ["pre", "pre_delayed"])
def test_an_entry_projects_x_alone_over_h_values(op: str) -> None:
    """Catches a mean square over n * H at an entry (it is over H), and a projection of the residual in
    place of x.

    eps is large, so that the count of values shows in the coefficients.
    """
    call = sample(op, tokens=3, hidden=HIDDEN)
    config = replace(V41, rms_eps=1.0)
    x = exact.fp32(exact.generator(8).normal(size=(3, HIDDEN))).bfloat16()
    fn, scale, base = given(call, "fn", "hc_scale", "hc_base")
    broadcast = oracle.fn_broadcast(fn, 4)
    outputs = call.call(residual=oracle.expand(x, 4), fn=broadcast, x=x, config=config)
    sums, squares = oracle.project(x, broadcast)
    for numel, equal in ((HIDDEN, True), (4 * HIDDEN, False)):
        mix = oracle.mixes(sums, squares, numel=numel, rms_eps=1.0)
        expected = oracle.coefficients(mix, scale, base, config=config)
        assert (exact.differing(outputs[0], expected[1]) == 0) is equal
        assert (exact.differing(outputs[1], expected[2]) == 0) is equal


def test_an_entry_nearly_equals_the_projection_of_equal_streams() -> None:
    """Catches a broadcast that means instead of sums: both ways compute the same function, in other roundings."""
    call = sample("pre_delayed", tokens=3, hidden=HIDDEN)
    x = exact.fp32(exact.generator(8).normal(size=(3, HIDDEN))).bfloat16()
    residual = oracle.expand(x, 4)
    full = call.call(residual=residual, config=V41)
    entry = call.call(residual=residual, x=x, fn=oracle.fn_broadcast(call.tensors["fn"], 4), config=V41)
    for ours, theirs in zip(entry, full, strict=True):
        assert float((ours.float() - theirs.float()).abs().max()) < 1e-4
    assert exact.differing(entry[1], full[1]) > 0


@pytest.mark.parametrize("normed", [False, True])
def test_post_pre_is_post_then_pre(normed: bool) -> None:
    """Catches a projection or collapse of the old residual, and of the unrounded new one."""
    call = sample("post_pre", tokens=9, hidden=HIDDEN)
    new = oracle.post(*given(call, "x", "residual", "post_mix", "comb_mix"))
    weight = call.tensors["norm_weight"] if normed else None
    fn, scale, base = given(call, "fn", "hc_scale", "hc_base")
    expected = oracle.pre(new, fn, scale, base, config=V4, norm_weight=weight)
    check(call.call(config=V4, norm_weight=weight), (new, *expected))


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_post_pre_delayed_is_post_then_pre_delayed(normed: bool, carried: bool) -> None:
    """Catches aux from the old residual or from the layer input, and outputs out of order."""
    call = sample("post_pre_delayed", tokens=9, hidden=HIDDEN)
    new = oracle.post(*given(call, "x", "residual", "post_mix", "comb_mix"))
    weight = call.tensors["norm_weight"] if normed else None
    pre_mix = call.tensors["pre_mix"] if carried else None
    fn, scale, base = given(call, "fn", "hc_scale", "hc_base")
    expected = oracle.pre_delayed(new, fn, scale, base, config=V41, pre_mix=pre_mix, norm_weight=weight)
    outputs = call.call(config=V41, pre_mix=pre_mix, norm_weight=weight, capture_aux=True)
    check(outputs, (new, *expected, oracle.stream_mean(new)))


def test_aux_is_empty_unless_captured() -> None:
    """Catches an aux of T rows that nobody asked for, and one that changes the other outputs."""
    call = sample("post_pre_delayed", tokens=3)
    captured, plain = call.call(capture_aux=True), call.call(capture_aux=False)
    assert (captured[5].shape, plain[5].shape) == ((3, 70), (0, 70))
    assert plain[5].dtype == torch.bfloat16
    check(plain[:5], captured[:5])


@pytest.mark.parametrize("op", ["post_pre", "post_pre_delayed"])
def test_a_projection_of_the_unrounded_post_is_another_function(op: str) -> None:
    """Shows that vLLM's small-T projection changes coefficients and nothing else, and that the record names it."""
    call = sample(op, tokens=9, hidden=HIDDEN)
    ours = call.call()
    theirs = call.call(arithmetic=KNOWN["projection of the unrounded post"])
    changed = [exact.differing(a, b) > 0 for a, b in zip(ours, theirs, strict=True)]
    assert changed[:3] == [False, True, True]
    assert exact.differing(ours[2], theirs[2]) > 100
    all_of_it = call.call(arithmetic=UPSTREAM_FUSED)
    assert exact.differing(ours[2], all_of_it[2]) > 100


def test_v4_and_v41_differ_in_what_they_collapse_with_and_in_the_squares() -> None:
    """Catches one version's boundary used for the other: same inputs, same gates, another layer input."""
    call = sample("pre_delayed", tokens=9, hidden=HIDDEN)
    fn, scale, base = given(call, "fn", "hc_scale", "hc_base")
    residual, weight = given(call, "residual", "norm_weight")
    own = gates(residual, call, V41)[0]
    v4 = oracle.pre(residual, fn, scale, base, config=V41, norm_weight=weight)
    same_mix = call.call(config=V41, pre_mix=own)
    check(v4[:2], same_mix[:2])
    assert exact.differing(v4[2], same_mix[2]) > 0
    assert exact.differing(v4[2], call.call(config=V41)[2]) > 500


def test_the_presets_hold_upstreams_numbers() -> None:
    """Catches a constant changed or exchanged between the versions."""
    assert MhcConfig(4, 1e-6, 1e-6, 1e-6, 1e-6, 2.0, 20) == V4
    assert MhcConfig(4, 1e-20, 1e-20, 1e-6, 1e-6, 2.0, 20) == V41
