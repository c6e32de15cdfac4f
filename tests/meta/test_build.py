"""The builder: values that never change, recipes that do what they claim, layouts that lie as they say."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import cases.build
import oracle
from cases.build import build
from cases.digest import digest
from cases.flags import CASES_DIR
from cases.layouts import FAR, GAP, pad_value, relayout
from cases.load import load_case
from cases.ops import OPS
from cases.randoms import bell, below, raw, signs, spread, uniform
from cases.schema import Case, CaseInputs
from oracle.arith import bits, exp, from_bits, round_bf16
from oracle.arithmetic import CONTRACT_1, Arithmetic, Dot, Mean, Post, WeightedSum
from oracle.collapse import unrounded_collapse
from tests.meta.documents import case

RECIPES = ("normal", "cancelling", "absorbing", "near_tie", "wide", "integer", "one_hot", "token_id", "special")
SUBLAYER_RECIPES = ("opposing", "mean_tie")
FUSED = WeightedSum(contraction="fused")
DESCENDING = WeightedSum(order="descending")
PAIRWISE = WeightedSum(order="pairwise")

PINNED_RAW = ["4529fae006b8dfb5", "950e9132f117d872", "2b2f2ebcea663344"]
PINNED_BELL = ["0x1.0a84f20000000p-2", "0x1.9f55660000000p+0", "-0x1.d889e40000000p-1"]
PINNED_UNIFORM = ["0x1.14a7e80000000p-2", "0x1.2a1d220000000p-1", "0x1.5979700000000p-3"]
PINNED_BELOW = [4, 58, 44]
PINNED_RECIPES = "5a48919ff8e75b1a0ffbabfd212d4a188edb9c56e96bf2ad0a45e3bab131fb8d"
PINNED_SUBLAYER_RECIPES = "739956d4a7c24bea940f8c5c35ec22ea8c8fbe39e119844f74c64acacd2b7ac1"


def tensor(recipe: str, argument: str = "residual", **changes: Any) -> torch.Tensor:
    """One argument of the case that `changes` describe, all of it made by one recipe."""
    return build(case(inputs={"default": {"recipe": recipe}}, **changes)).tensors[argument]


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements have other bits."""
    return int((bits(one) != bits(other)).sum())


def collapses(recipe: str, rule: WeightedSum, hc_mult: int = 4) -> int:
    """How many of 3 x 512 results a collapse in another sequence changes."""
    made = build(case(hidden=512, hc_mult=hc_mult, inputs={"default": {"recipe": recipe}})).tensors
    other = oracle.collapse(*made.values(), arithmetic=Arithmetic("other", collapse=rule))
    return differing(oracle.collapse(*made.values()), other)


def means(recipe: str, rule: Mean, hc_mult: int = 4) -> int:
    """The same for the stream mean."""
    residual = tensor(recipe, op="stream_mean", hidden=512, hc_mult=hc_mult)
    other = oracle.stream_mean(residual, arithmetic=Arithmetic("other", mean=rule))
    return differing(oracle.stream_mean(residual), other)


def posts(recipe: str, rule: Post, hc_mult: int = 4) -> int:
    """The same for the post, of 3 x n x 512 results."""
    made = build(case(op="post", hidden=512, hc_mult=hc_mult, inputs={"default": {"recipe": recipe}})).tensors
    other = oracle.post(*made.values(), arithmetic=Arithmetic("other", post=rule))
    return differing(oracle.post(*made.values()), other)


def test_random_bits_are_pinned() -> None:
    """Catches another generator, seed or byte order: every digest of every case would move."""
    assert [f"{int(one):016x}" for one in raw("mhc", (3,))] == PINNED_RAW


def test_numbers_from_bits_are_pinned() -> None:
    """Catches a distribution that depends on a library's version, or on the machine's log or cos."""
    made = raw("mhc", (3,))
    assert [float(one).hex() for one in bell(made)] == PINNED_BELL
    assert [float(one).hex() for one in uniform(made)] == PINNED_UNIFORM
    assert [int(one) for one in below(made, 100)] == PINNED_BELOW


@pytest.mark.parametrize(
    ("recipes", "pinned"),
    [(RECIPES, PINNED_RECIPES), (SUBLAYER_RECIPES, PINNED_SUBLAYER_RECIPES)],
    ids=["any", "sublayer"],
)
def test_recipes_are_pinned(recipes: tuple[str, ...], pinned: str) -> None:
    """Catches any change in what a recipe makes, for any op and role."""
    total = hashlib.sha256()
    for op, recipe in itertools.product(OPS, recipes):
        for name, made in build(whole_case(op, recipe)).tensors.items():
            total.update(f"{op} {recipe} {name} {digest(made)}\n".encode())
    assert total.hexdigest() == pinned


def whole_case(op: str, recipe: str) -> Case:
    """A case with every argument of the op, optional ones included."""
    sizes = {"tokens": "T", "hc_mult": "nMK", "hidden": "HK"}
    unused = {key: None for key, dims in sizes.items() if OPS[op].dims.isdisjoint(dims)}
    numbers = {"numel": 64, "rms_eps": 1e-6, "norm_eps": 1e-6, "squares_of": "rounded"}
    numbers |= {"sinkhorn_iters": 20, "sinkhorn_eps": 1e-6}
    params = {name: value for name, value in numbers.items() if name in OPS[op].parameters}
    config = {"preset": "v4"} if "config" in OPS[op].parameters else None
    optional = {one.name: {"recipe": recipe} for one in OPS[op].arguments if one.optional}
    entry = "hidden" if "x" in optional else "streams"
    return case(
        op=op, **unused, tp=[1], params=params or None, config=config, entry=entry,
        inputs={"default": {"recipe": recipe}, "arguments": optional},
    )  # fmt: skip


def test_the_bell_is_a_bell() -> None:
    """Catches a scale or a shift: 2^18 values have mean 0 and variance 1 to two digits, and bounded tails."""
    made = torch.from_numpy(bell(raw("bell", (1 << 18,)))).double()
    assert abs(made.mean().item()) < 0.01
    assert abs(made.var().item() - 1) < 0.01
    assert made.abs().max().item() < 3.47


def test_signs_and_spread_use_both_ends() -> None:
    """Catches an exponent range cut short, or one sign only."""
    made = torch.from_numpy(spread("spread", (4096,), 5)).double()
    assert {int(one) for one in made.abs().log2().floor().unique()} == set(range(-5, 6))
    assert abs(int(torch.from_numpy(signs(raw("signs", (4096,)))).sum())) < 300


@pytest.mark.parametrize("recipe", [*RECIPES, *SUBLAYER_RECIPES])
def test_first_tokens_do_not_depend_on_the_number_of_tokens(recipe: str) -> None:
    """Catches values drawn across tokens: cases on both sides of a threshold could not share a row."""
    for argument in ("residual", "pre_mix", "comb_mix"):
        few = tensor(recipe, argument, op="draft_tail", tokens=3)
        assert differing(tensor(recipe, argument, op="draft_tail", tokens=7)[:3], few) == 0


def test_the_seed_replaces_the_name() -> None:
    """Catches a seed without effect, and arguments that share their numbers."""
    shared = {"seed": "shared"}
    first, second = (build(case(name=name, inputs=shared)).tensors for name in ("one", "two"))
    assert differing(first["residual"], second["residual"]) == 0
    assert differing(first["residual"], build(case(name="one")).tensors["residual"]) > 0


@pytest.mark.parametrize("rule", [FUSED, DESCENDING, PAIRWISE])
def test_cancelling_and_absorbing_show_every_order_of_a_collapse(rule: WeightedSum) -> None:
    """Shows the power that ordinary random data lacks: on it, none of 1536 results changes."""
    assert collapses("normal", rule) == 0
    assert collapses("cancelling", rule) > 300
    assert collapses("absorbing", rule) > 300


@pytest.mark.parametrize("hc_mult", [3, 5, 6, 7, 8])
def test_absorbing_shows_a_reversed_collapse_for_any_streams(hc_mult: int) -> None:
    """Catches a recipe whose large streams stand symmetrically, so that both directions round alike."""
    assert collapses("absorbing", DESCENDING, hc_mult) > 300
    assert hc_mult == 3 or collapses("absorbing", PAIRWISE, hc_mult) > 300


@pytest.mark.parametrize("rule", [Mean(order="descending"), Mean(order="pairwise")])
def test_absorbing_shows_every_order_of_a_mean(rule: Mean) -> None:
    """Cancelling streams add up to 0 in every order, so the mean needs a recipe of its own."""
    assert means("normal", rule) == 0
    assert means("cancelling", rule) == 0
    assert means("absorbing", rule) > 300


@pytest.mark.parametrize("hc_mult", [3, 6, 7])
def test_ties_show_a_mean_by_reciprocal(hc_mult: int) -> None:
    """A rounded 1/n as a factor is off by one FP32 unit at most: only beside a tie does BF16 show it."""
    assert means("normal", Mean(scale="reciprocal"), hc_mult) < 10
    assert means("near_tie", Mean(scale="reciprocal"), hc_mult) > 80


@pytest.mark.parametrize(
    "rule",
    [
        Post(first="into_first", contraction="fused"),
        Post(first="last"),
        Post(order="descending"),
        Post(contraction="fused"),
    ],
)
def test_cancelling_shows_every_order_of_a_post(rule: Post) -> None:
    """Shows the power against a contracted, reversed or re-ordered post."""
    assert posts("normal", rule) <= 1
    assert posts("cancelling", rule) > 2000


@pytest.mark.parametrize("hc_mult", [1, 3, 4, 8])
def test_opposing_shows_which_product_of_a_post_is_rounded(hc_mult: int) -> None:
    """Under `cancelling` the sublayer's output is so faint that its product's own rounding never shows."""
    first = Post(first="into_first")
    assert posts("cancelling", first, hc_mult) == 0
    assert posts("opposing", first, hc_mult) > 300


@pytest.mark.parametrize("hc_mult", [3, 6, 7])
def test_mean_ties_show_a_reciprocal_also_where_a_sublayer_comes_first(hc_mult: int) -> None:
    """`near_tie` makes ties of the post there, and a boundary's aux mean needs ties of its own."""
    made = tensor("mean_tie", op="post", hidden=512, hc_mult=hc_mult)
    other = oracle.stream_mean(made, arithmetic=Arithmetic("other", mean=Mean(scale="reciprocal")))
    assert differing(oracle.stream_mean(made), other) > 50


def projected(rule: Dot, hidden: int) -> int:
    """How many of 3 x 24 dot products of ordinary data another order changes; FP32 results need no recipe."""
    made = build(case(op="project", hidden=hidden)).tensors
    sums, _ = oracle.project(*made.values())
    return differing(sums, oracle.project(*made.values(), arithmetic=Arithmetic("other", dot=rule))[0])


def test_two_segments_cannot_show_their_order_but_three_can() -> None:
    """Catches projection cases that stop at 1024 columns: a + b is b + a, so a reversed segment order passes."""
    reversed_segments = Dot(segments="descending")
    assert projected(reversed_segments, 1024) == 0
    assert projected(reversed_segments, 1025) > 5
    assert projected(reversed_segments, 1100) > 20


@pytest.mark.parametrize("rule", [Dot(lane_sum="serial"), Dot(lane_sum="distant"), Dot(contraction="separate")])
def test_ordinary_projections_show_lanes_and_contraction(rule: Dot) -> None:
    """Shows the power of FP32 outputs; one product a lane (64 columns, one stream) would hide the contraction."""
    assert projected(rule, 200) > 36


def test_captured_logits_tell_every_sum_order_apart() -> None:
    """Catches a data file that was replaced by random logits, of which 1 row in 290 tells the orders apart."""
    made = build(load_case(CASES_DIR / "regressions" / "omni-7545-sinkhorn-sum-order.toml")).tensors["logits"]
    a, b, c, d = exp(made - made.amax(2, keepdim=True)).unbind(2)
    orders = (((a + b) + c) + d, ((d + c) + b) + a, (a + b) + (c + d), (a + c) + (b + d))
    for other in orders[1:]:
        assert differing(orders[0], other) == made.shape[0] * 4


def test_captured_rows_show_one_unit_of_a_reciprocal_root() -> None:
    """On random rows of the same size no order of the squares changes any of 11,000 BF16 results."""
    found = load_case(CASES_DIR / "edge" / "norm-near-ties.toml")
    plain = CaseInputs(arguments={})
    for rule in (Dot(lane_sum="serial"), Dot(lane_sum="distant"), Dot(segments="descending")):
        changed = [normed(one, rule) for one in (found, found.model_copy(update={"inputs": plain}))]
        assert changed[0] > 100
        assert changed[1] == 0


def normed(made: Case, rule: Dot) -> int:
    """How many results of a norm another order of its squares changes."""
    tensors = list(build(made).tensors.values())
    other = oracle.norm(*tensors, norm_eps=1e-20, arithmetic=Arithmetic("other", dot=rule))
    return differing(oracle.norm(*tensors, norm_eps=1e-20), other)


def test_ties_show_rounding_half_up() -> None:
    """Ordinary data has no exact tie, so it cannot tell ties-to-even from ties-away-from-zero."""
    seen = {}
    for recipe in ("normal", "near_tie"):
        exact = unrounded_collapse(
            **build(case(hidden=512, inputs={"default": {"recipe": recipe}})).tensors, arithmetic=CONTRACT_1
        )
        half_up = from_bits(((bits(exact) + 0x8000) >> 16).to(torch.int16))
        seen[recipe] = differing(half_up, round_bf16(exact))
    assert seen["normal"] == 0
    assert seen["near_tie"] > 100


@pytest.mark.parametrize("rule", [FUSED, DESCENDING, PAIRWISE])
def test_integers_are_exact_in_every_order(rule: WeightedSum) -> None:
    """Catches a recipe that would blame addressing for a rounding."""
    assert collapses("integer", rule) == 0


def test_token_ids_name_their_place() -> None:
    """Catches an encoding in which two of 64 tokens, 8 streams or 32 columns look alike."""
    made = tensor("token_id", tokens=64, hc_mult=8, hidden=32)
    assert made.unique().numel() == made.numel()
    value = made[9, 5, 19].item()
    assert value == -(2.0 ** (9 - 32)) * (1 + (16 * 5 + 3) / 128)


def test_one_hot_mixes_select_one_stream() -> None:
    """Catches a mix that selects none, two, or the same for each token."""
    pre = tensor("one_hot", "pre_mix", tokens=8)
    comb = tensor("one_hot", "comb_mix", op="post", tokens=8)
    assert pre.sum(1).eq(1).all()
    assert pre.argmax(1).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert comb.sum(1).eq(1).all()
    assert comb.sum(2).eq(1).all()
    assert not torch.equal(comb, comb.transpose(1, 2))


def test_one_hot_weights_reach_the_last_column() -> None:
    """Catches a projection that never looks at the tail of a row."""
    fn = tensor("one_hot", "fn", op="project", hidden=33)
    assert fn.sum(1).eq(1).all()
    assert fn[0, 0] == 1
    assert fn[-1, -1] == 1


def test_special_values_of_every_kind_come() -> None:
    """Catches a kind that is never drawn, and kinds that were not asked for."""
    made = tensor("special", hidden=512).double()
    smallest = torch.finfo(torch.float32).smallest_normal
    assert made.isnan().any()
    assert made.isinf().any()
    assert (made.abs() > 3e38).logical_and(made.isfinite()).any()
    assert (made.abs() < smallest).logical_and(made != 0).any()
    zeros = bits(tensor("special", hidden=512))
    assert (zeros == -0x8000).any()
    only = build(case(inputs={"default": {"recipe": "special", "kinds": ["zero"], "every": 1}})).tensors["residual"]
    assert only.eq(0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_squares_are_never_negative(recipe: str) -> None:
    """Catches a sum of squares that no projection could give."""
    made = tensor(recipe, "squares", op="mixes", tokens=64, hidden=None, params={"numel": 64, "rms_eps": 1e-6})
    assert not (made < 0).any()


def test_repeat_gives_every_token_the_first_ones_values() -> None:
    """Catches a repeat that leaves a row of its own, which a duplicate-row law would then report."""
    made = build(case(tokens=5, inputs={"default": {"repeat": True}})).tensors["residual"]
    assert differing(made, made[:1].expand(5, -1, -1)) == 0
    assert build(case(tokens=0, inputs={"default": {"repeat": True}})).tensors["residual"].shape == (0, 4, 16)


def test_scale_is_applied_before_rounding() -> None:
    """Catches a scale applied to the BF16 values, which would round twice."""
    made = build(case(inputs={"default": {"recipe": "constant", "value": 3.0, "scale": 0.671875}}))
    assert made.tensors["residual"].float().eq(2.015625).all()


def test_patches_and_bits_are_placed_exactly() -> None:
    """Catches a patch that rounds twice, loses a NaN payload or hits another element."""
    patches = [
        {"index": [1], "value": -0.0},
        {"index": [2, 3, 15], "bits": "7fa5"},
        {"index": [0, 0, 0], "value": 1.003},
    ]
    made = bits(build(case(inputs={"arguments": {"residual": {"set": patches}}})).tensors["residual"])
    assert (made[1] == -0x8000).all()
    assert made[2, 3, 15] == 0x7FA5
    assert made[0, 0, 0] == 0x3F80


def test_bits_fill_a_tensor_in_order() -> None:
    """Catches patterns read as numbers, or in column order."""
    patterns = ["3f800000", "80000000", "7fc00001", "00000001"]
    made = build(case(tokens=1, inputs={"arguments": {"pre_mix": {"recipe": "bits", "bits": patterns}}}))
    assert bits(made.tensors["pre_mix"]).tolist() == [[0x3F800000, -0x80000000, 0x7FC00001, 1]]
    short = case(tokens=2, inputs={"arguments": {"pre_mix": {"recipe": "bits", "bits": patterns}}})
    with pytest.raises(ValueError, match=r"pre_mix\.bits: expected 8 patterns, got 4"):
        build(short)


def test_captured_tensors_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file of the wrong shape, key or place that is used all the same."""
    monkeypatch.setattr(cases.build, "DATA_DIR", tmp_path)
    stored = torch.arange(192, dtype=torch.int16).view(torch.bfloat16).reshape(3, 4, 16)
    save_file({"residual": stored, "flat": stored.flatten().clone()}, tmp_path / "captured.safetensors")
    assert differing(captured("captured.safetensors", "residual"), stored) == 0
    with pytest.raises(ValueError, match=r"expected one of the keys \['flat', 'residual'\], got 'x'"):
        captured("captured.safetensors", "x")
    with pytest.raises(ValueError, match=r"expected torch.bfloat16 \[3, 4, 16\], got torch.bfloat16 \[192\]"):
        captured("captured.safetensors", "flat")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"residual\.file: expected a safetensors file, got 'junk.safetensors': "):
        captured("junk.safetensors", "residual")
    with pytest.raises(ValueError, match=r"expected a file in cases/data, got '../captured.safetensors'"):
        captured("../captured.safetensors", "flat")


def captured(file: str, key: str) -> torch.Tensor:
    """The residual of a case that reads it from a file."""
    made = {"recipe": "file", "file": file, "key": key}
    return build(case(inputs={"arguments": {"residual": made}})).tensors["residual"]


def test_params_are_plain_and_complete() -> None:
    """Catches a constant that a case leaves to the implementation's own default."""
    made = build(case(op="head", config={"preset": "v41", "sinkhorn_iters": 19}))
    assert made.params == {
        "config": {
            "hc_mult": 4, "rms_eps": 1e-20, "norm_eps": 1e-20, "hc_pre_eps": 1e-6, "hc_sinkhorn_eps": 1e-6,
            "post_mult": 2.0, "sinkhorn_iters": 19,
        }
    }  # fmt: skip
    assert build(case(op="expand")).params == {"hc_mult": 4}


LAYOUTS = {
    "contiguous": ((64, 16, 1), 0),
    "columns": ((128, 32, 2), 0),
    "transposed": ((64, 1, 4), 0),
    "gapped": ((4 * (16 + GAP), 16 + GAP, 1), 0),
    "offset": ((64, 16, 1), 1),
    "far": ((FAR // 2, 16, 1), FAR),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_their_strides_and_the_same_values(layout: Any) -> None:
    """Catches a layout that is packed after all, and one that changes a bit on the way."""
    values = tensor("special")
    placed = relayout(values, layout)
    assert (placed.stride(), placed.storage_offset()) == LAYOUTS[layout]
    assert differing(placed, values) == 0
    assert placed.dtype == values.dtype


@pytest.mark.parametrize("layout", ["columns", "gapped"])
def test_gaps_hold_nan(layout: Any) -> None:
    """Catches a gap of zeros, which a kernel that reads it would add without a trace."""
    placed = relayout(tensor("ones"), layout)
    buffer = torch.as_strided(placed, (placed.untyped_storage().nbytes() // 2,), (1,), 0)
    assert buffer.isnan().sum() == buffer.numel() - placed.numel()


def test_an_odd_start_is_misaligned() -> None:
    """Catches an offset layout whose data happens to lie where a vector load may read."""
    assert relayout(tensor("ones"), "offset").data_ptr() % 4 == 2


def test_far_offsets_wrap_into_the_same_buffer() -> None:
    """A wrapped 32-bit offset must give a wrong verdict, not a crash: it has to land inside the storage."""
    placed = relayout(tensor("ones"), "far")
    last = 2 * placed.stride(0)
    assert last >= FAR
    assert placed.storage_offset() + last - 2 * FAR >= 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shard_without_rows_can_be_laid_out(layout: Any) -> None:
    """Catches a layout that fails on the empty rank of T = 0, or on a single row."""
    for rows in (0, 1):
        assert relayout(torch.zeros(rows, 4, 16, dtype=torch.bfloat16), layout).shape == (rows, 4, 16)


def test_bad_layouts_are_refused() -> None:
    """Catches a layout that is silently ignored."""
    with pytest.raises(ValueError, match=r"expected layout to be one of contiguous, .* got 'rows'"):
        relayout(torch.zeros(2, 2), "rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected 2 axes or more for 'transposed', got \[2\]"):
        relayout(torch.zeros(2), "transposed")


def test_pad_values() -> None:
    """Catches a fill that a kernel could not tell from data, and a dtype that would overflow 1e30."""
    values = [pad_value(fill, torch.bfloat16) for fill in ("zero", "inf", "huge")]
    assert values == [0.0, float("inf"), 1e30]
    assert pad_value("nan", torch.float32) != pad_value("nan", torch.float32)
    with pytest.raises(ValueError, match="expected fill to be one of zero, nan, inf, huge, got 'one'"):
        pad_value("one", torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected dtype bfloat16 or float32, got torch.float16"):
        pad_value("huge", torch.float16)


def test_a_digest_counts_every_nan_as_one_and_both_zeros_as_two() -> None:
    """Catches a digest of values, and one that tells NaN payloads apart."""
    one = torch.tensor([0x7FC0, 0x0000], dtype=torch.int16).view(torch.bfloat16)
    payload = torch.tensor([0x7FA5, 0x0000], dtype=torch.int16).view(torch.bfloat16)
    negative = torch.tensor([0x7FC0, -0x8000], dtype=torch.int16).view(torch.bfloat16)
    assert digest(one) == digest(payload)
    assert digest(one) != digest(negative)


def test_a_digest_covers_shape_and_dtype_but_not_strides() -> None:
    """Catches a digest under which a transposed, flattened or widened result would pass."""
    made = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert digest(made) == digest(made.t().contiguous().t())
    assert len({digest(one) for one in (made, made.t(), made.flatten(), made.bfloat16(), made[:0])}) == 5


def test_a_digest_is_pinned() -> None:
    """Catches another byte order or header: all committed digests would be wrong at once."""
    header, data = b"bfloat16:2\n", b"\x80\x3f\x00\x80"
    made = torch.tensor([1.0, -0.0], dtype=torch.bfloat16)
    assert digest(made) == hashlib.sha256(header + data).hexdigest()


def test_a_digest_of_another_dtype_is_refused() -> None:
    """Catches an output in FP64 or integers that would be hashed as if it were fine."""
    with pytest.raises(TypeError, match=r"expected a bfloat16 or float32 tensor, got torch.float64"):
        digest(torch.zeros(1, dtype=torch.float64))
