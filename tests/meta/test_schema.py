"""The case model refuses every document that a judge could misread, and its JSON schema is current."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

import oracle
from cases.flags import CASES_DIR, FLAGS_FILE, glossary
from cases.load import load_all
from cases.ops import OPS
from cases.schema import PRESETS, Case, is_kebab, json_schema
from tests.meta.documents import case, document

NEEDS: dict[str, dict[str, Any]] = {
    "mixes": {"params": {"numel": 64, "rms_eps": 1e-6}},
    "sinkhorn": {"params": {"sinkhorn_iters": 20, "sinkhorn_eps": 1e-6}},
    "norm": {"params": {"norm_eps": 1e-6}},
    "collapse_norm": {"params": {"norm_eps": 1e-6, "squares_of": "rounded"}},
}
DIGEST = "0" * 64
BLESSED = {"contract": 1, "digests": {"layer_input": DIGEST}}

FAULTS: dict[str, dict[str, Any]] = {
    "unknown key": {"hiden": 16},
    "unknown schema version": {"schema": 2},
    "name not in kebab case": {"name": "A_Case"},
    "title too short": {"title": "short"},
    "unknown op": {"op": "colapse"},
    "unknown flag": {"flags": ["ordr"]},
    "no flag": {"flags": []},
    "unknown wrong kernel": {"catches": ["reverse-order"]},
    "no wrong kernel": {"catches": []},
    "shown class that is not caught": {"shows": {"fma-contraction": {"collapse": ["layer_input"]}}},
    "shown class that is unknown": {"shows": {"reverse-order": {"collapse": ["layer_input"]}}},
    "stage that is unknown": {"shows": {"reversed-order": {"colapse": ["layer_input"]}}},
    "stage that the op lacks": {"shows": {"reversed-order": {"post": ["layer_input"]}}},
    "output that the op lacks": {"shows": {"reversed-order": {"collapse": ["aux"]}}},
    "output shown twice": {"shows": {"reversed-order": {"collapse": ["layer_input", "layer_input"]}}},
    "no output shown": {"shows": {"reversed-order": {"collapse": []}}},
    "no stage shown": {"shows": {"reversed-order": {}}},
    "source without a date": {"source": "https://example.org/report"},
    "source in words": {"source": "somewhere"},
    "number as text": {"tokens": "3"},
    "truth as number": {"tokens": True},
    "negative tokens": {"tokens": -1},
    "missing size": {"hidden": None},
    "no column": {"hidden": 0},
    "tokens that no machine holds": {"tokens": 10**23},
    "columns that no machine holds": {"hidden": 10**23},
    "rows that no machine holds": {"op": "project", "rows": 10**23},
    "sizes that are too large together": {"tokens": 2**20, "hidden": 2**12},
    "a scale that is no number": {"inputs": {"default": {"scale": float("inf")}}},
    "an epsilon without end": {"op": "norm", "hc_mult": None, "params": {"norm_eps": float("inf")}},
    "an epsilon that is no number": {"op": "norm", "hc_mult": None, "params": {"norm_eps": float("nan")}},
    "rounds without end": {
        "op": "sinkhorn",
        "hidden": None,
        "params": {"sinkhorn_iters": 10**9, "sinkhorn_eps": 1e-6},
    },
    "nine streams": {"hc_mult": 9},
    "size that the op lacks": {"op": "norm", **NEEDS["norm"]},
    "three ranks": {"tp": [3]},
    "a rank count twice": {"tp": [2, 2]},
    "no rank count": {"tp": []},
    "ranks without tokens": {"op": "fn_broadcast", "tokens": None, "tp": [1, 2]},
    "unknown order": {"orders": ["gather"]},
    "unknown pad fill": {"pad_fills": ["ones"]},
    "rows of a fixed M": {"rows": 24},
    "entry of an op that has none": {"entry": "hidden"},
    "table of no argument": {"inputs": {"arguments": {"x": {"recipe": "normal"}}}},
    "unknown recipe": {"inputs": {"default": {"recipe": "random"}}},
    "unknown layout": {"inputs": {"default": {"layout": "rows"}}},
    "constant without value": {"inputs": {"default": {"recipe": "constant"}}},
    "value of another recipe": {"inputs": {"default": {"recipe": "normal", "value": 1.0}}},
    "kinds of another recipe": {"inputs": {"default": {"recipe": "normal", "kinds": ["nan"]}}},
    "hex digits of another dtype": {"inputs": {"arguments": {"pre_mix": {"recipe": "bits", "bits": ["3f80"]}}}},
    "bits that are not hex": {"inputs": {"arguments": {"residual": {"recipe": "bits", "bits": ["xyz1"]}}}},
    "far layout of fp32": {"inputs": {"arguments": {"pre_mix": {"layout": "far"}}}},
    "patch outside": {"inputs": {"arguments": {"residual": {"set": [{"index": [3], "value": 0.0}]}}}},
    "patch with too many indices": {
        "inputs": {"arguments": {"pre_mix": {"set": [{"index": [0, 0, 0], "value": 0.0}]}}}
    },
    "patch of value and bits": {
        "inputs": {"arguments": {"residual": {"set": [{"index": [0], "value": 0.0, "bits": "0000"}]}}}
    },
    "parameter that the op lacks": {"params": {"norm_eps": 1e-6}},
    "missing parameter": {"op": "sinkhorn", "hidden": None, "params": {"sinkhorn_iters": 20}},
    "config that the op lacks": {"config": {"preset": "v4"}},
    "missing config": {"op": "head"},
    "unknown preset": {"op": "head", "config": {"preset": "v5"}},
    "digest too short": {"expected": {"contract": 1, "digests": {"layer_input": "00"}}},
    "digest of another output": {"expected": {"contract": 1, "digests": {"residual": DIGEST}}},
    "other contract": {"expected": {"contract": 2, "digests": {"layer_input": DIGEST}}},
    "digests without history": {"expected": BLESSED},
    "orders of an op with weights": {"op": "head", "config": {"preset": "v4"}, "orders": ["gather-then-op"]},
    "entry without x": {"op": "pre", "config": {"preset": "v4"}, "entry": "hidden"},
    "x without entry": {
        "op": "pre",
        "config": {"preset": "v4"},
        "inputs": {"arguments": {"x": {"recipe": "normal"}}},
    },
}


def test_the_good_document_is_good() -> None:
    """Without this, every fault below could be refused for a reason of its own."""
    assert case().name == "a-case"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(fault: str) -> None:
    """Catches a model that lets through a document of which a judge would run something else, or nothing."""
    with pytest.raises(ValidationError):
        Case.model_validate(document(**FAULTS[fault]))


def test_a_precise_claim_is_read() -> None:
    """Without this, every `shows` above could be refused for a reason of its own."""
    made = case(shows={"reversed-order": {"collapse": ["layer_input"]}})
    assert made.shows == {"reversed-order": {"collapse": ("layer_input",)}}


def test_every_stage_is_named_by_some_op() -> None:
    """Catches a stage of the table without a meaning in the glossary, and a stale word there."""
    assert set(glossary("stages")) == {stage for op in OPS.values() for stage in op.stages}


def test_a_case_cannot_be_changed_after_loading() -> None:
    """Catches a judge that adjusts the case it reports on."""
    with pytest.raises(ValidationError):
        case().tokens = 4  # type: ignore[misc]


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_good_document(op: str) -> None:
    """Catches an op of the table that no case file could name, and a size that is wrongly asked for."""
    spec = OPS[op]
    sizes = {"tokens": "T", "hc_mult": "nMK", "hidden": "HK"}
    unused = {key: None for key, dims in sizes.items() if spec.dims.isdisjoint(dims)}
    config = {"config": {"preset": "v41"}} if "config" in spec.parameters else {}
    ranks = {} if "T" in spec.dims else {"tp": [1]}
    made = case(op=op, **unused, **ranks, **config, **NEEDS.get(op, {}))
    assert [argument.name for argument in made.arguments] == [one.name for one in spec.required]


def test_a_whole_dump_reads_back_as_the_same_case() -> None:
    """Catches a model whose defaults, once written out, mean something else; NaN and Inf values included."""
    patches = [{"index": [0], "value": float("nan")}, {"index": [1], "value": float("inf")}]
    made = case(inputs={"arguments": {"residual": {"set": patches}}})
    again = Case.model_validate_json(made.model_dump_json(by_alias=True))
    assert again.model_dump_json() == made.model_dump_json()
    assert again.inputs.arguments["residual"].set[1].value == float("inf")


def test_entry_has_one_row_for_each_token() -> None:
    """Catches an entry case built with n * H columns: the mean square would be over the wrong number."""
    made = case(op="project", entry="hidden")
    assert [made.shape(argument) for argument in made.spec.arguments] == [(3, 16), (24, 16)]


def test_fills_apply_only_where_something_is_padded() -> None:
    """Catches a judge sent through four pad fills without a pad row, or through none with one."""
    made = case(tokens=4, tp=[1, 2, 8], pad_fills=["nan", "inf"])
    assert (made.fills(1), made.fills(2), made.fills(8)) == ((), (), ("nan", "inf"))


def test_presets_are_the_oracles() -> None:
    """Catches a constant changed in one of the two places."""
    for name, constants in PRESETS.items():
        assert getattr(oracle.MhcConfig, name)() == oracle.MhcConfig(hc_mult=4, **constants)  # type: ignore[arg-type]


def test_the_committed_json_schema_is_current() -> None:
    """Catches a changed model without `python -m cases schema > cases/schema.json`."""
    assert json.loads((CASES_DIR / "schema.json").read_text()) == json_schema()


def test_every_word_has_a_meaning() -> None:
    """Catches a glossary entry that says nothing, and a word that is not written like the others."""
    for section in tomllib.loads(FLAGS_FILE.read_text()):
        for word, meaning in glossary(section).items():
            assert is_kebab(word)
            assert len(meaning) > 15
            assert meaning.endswith(".")


def test_every_word_is_used() -> None:
    """Catches a flag or wrong kernel in the glossary that no case claims: a hole in the cases, or a stale word."""
    every = load_all()
    for section, used in (("flags", "flags"), ("catches", "catches")):
        assert set(glossary(section)) == {word for one in every for word in getattr(one, used)}
