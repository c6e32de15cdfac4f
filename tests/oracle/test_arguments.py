"""Bad input gives one sentence that names op and argument, what was expected and what came."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import oracle
from oracle import MhcConfig
from oracle.arithmetic import FUSED_POST, Arithmetic, candidates, combine
from tests.oracle.samples import OPS, TENSORS, sample

EVERY_TENSOR = [(op, name) for op in OPS for name in TENSORS[op]]


def sentence(error: BaseException) -> str:
    """Return the message, which must be one line."""
    message = str(error)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("op", "name"), EVERY_TENSOR)
def test_a_wrong_dtype_is_refused(op: str, name: str) -> None:
    """Catches a silent cast: fp64 in any place."""
    call = sample(op)
    with pytest.raises(TypeError) as caught:
        call.call(**{name: call.tensors[name].double()})
    assert re.match(rf"{op}: {name} must be (float32|bfloat16) \[.*\], got float64 \[", sentence(caught.value))


@pytest.mark.parametrize(("op", "name"), EVERY_TENSOR)
def test_something_that_is_no_tensor_is_refused(op: str, name: str) -> None:
    """Catches an attribute error from deep inside."""
    call = sample(op)
    with pytest.raises(TypeError) as caught:
        call.call(**{name: [[1.0]]})
    assert re.match(rf"{op}: {name} must be a (float32|bfloat16) \[.*\] tensor, got list$", sentence(caught.value))


@pytest.mark.parametrize(("op", "name"), EVERY_TENSOR)
def test_a_wrong_rank_is_refused(op: str, name: str) -> None:
    """Catches a broadcast over an extra dimension, as of upstream's post_mix [T, n, 1]."""
    call = sample(op)
    with pytest.raises(ValueError, match=rf"^{op}: {name} must be ") as caught:
        call.call(**{name: call.tensors[name][..., None]})
    assert "got" in sentence(caught.value)


# Alone with tokens in its op, or free in its first dimension: no length of these is wrong by itself.
FREE = {
    ("expand", "hidden"),
    ("stream_mean", "residual"),
    ("project", "x"),
    ("project", "fn"),
    ("fn_broadcast", "fn"),
    ("sinkhorn", "logits"),
    ("coefficients", "mixes"),
    ("norm", "hidden"),
    ("head", "residual"),
    ("pre", "residual"),
}


@pytest.mark.parametrize(("op", "name"), [pair for pair in EVERY_TENSOR if pair not in FREE])
def test_a_wrong_length_is_refused(op: str, name: str) -> None:
    """Catches a broadcast of a short first dimension, and rows read past the end of a longer one."""
    call = sample(op)
    value = call.tensors[name]
    longer = torch.cat([value, value[:1]])
    with pytest.raises(ValueError, match=rf"^{op}: \w+ must be ") as caught:
        call.call(**{name: longer})
    sentence(caught.value)


def bad(op: str, says: str, **changes: Any) -> Any:
    """Return one parametrized bad call."""
    return pytest.param(op, says, changes, id=f"{op}-{'-'.join(changes)}-{says[:20]}")


WIDE = torch.zeros(3, 9, 70).bfloat16()
BAD = [
    bad("expand", "hc_mult must be 1 to 8, got 9", hc_mult=9),
    bad("expand", "hc_mult must be 1 to 8, got 0", hc_mult=0),
    bad("expand", "hc_mult must be an int, got float", hc_mult=4.0),
    bad("expand", "hc_mult must be an int, got bool", hc_mult=True),
    bad("expand", "hidden must have a hidden size of at least 1, got 0", hidden=torch.zeros(3, 0).bfloat16()),
    bad("collapse", "residual must have 1 to 8 streams, got 9", residual=WIDE),
    bad("collapse", "residual must have 1 to 8 streams, got 0", residual=WIDE[:, :0]),
    bad("collapse", "residual must have a hidden size of at least 1, got 0", residual=WIDE[:, :4, :0]),
    bad("collapse", "pre_mix must be float32 [3, 4], got float32 [3, 5]", pre_mix=torch.zeros(3, 5)),
    bad("post", "x must be bfloat16 [3, 70], got bfloat16 [3, 69]", x=torch.zeros(3, 69).bfloat16()),
    bad("post", "comb_mix must be float32 [3, 4, 4], got float32 [3, 4, 3]", comb_mix=torch.zeros(3, 4, 3)),
    bad("post", "post_mix must be on cpu like x, got meta", post_mix=torch.zeros(3, 4, device="meta")),
    bad("project", "fn must be float32 [2, 280], got float32 [2, 70]", fn=torch.zeros(2, 70)),
    bad("project", "rows of fn must be at least 1, got 0", fn=torch.zeros(0, 280)),
    bad("project", "x must have 1 to 8 streams, got 9", x=WIDE),
    bad("mixes", "numel must be at least 1, got 0", numel=0),
    bad("mixes", "numel must be an int, got float", numel=280.0),
    bad("mixes", "rms_eps must be finite and not negative, got -1e-06", rms_eps=-1e-6),
    bad("mixes", "rms_eps must be finite and not negative, got nan", rms_eps=math.nan),
    bad("mixes", "rms_eps must be a number, got str", rms_eps="1e-6"),
    bad("sinkhorn", "logits must be float32 [3, 4, 4], got float32 [3, 4, 3]", logits=torch.zeros(3, 4, 3)),
    bad("sinkhorn", "rows of logits must be 1 to 8, got 9", logits=torch.zeros(3, 9, 9)),
    bad("sinkhorn", "sinkhorn_iters must be at least 1, got 0", sinkhorn_iters=0),
    bad("coefficients", "mixes must be float32 [3, 24], got float32 [3, 8]", mixes=torch.zeros(3, 8)),
    bad("coefficients", "hc_scale must be float32 [3], got float32 [1]", hc_scale=torch.zeros(1)),
    bad("collapse_norm", "squares_of must be 'unrounded' or 'rounded', got 'both'", squares_of="both"),
    bad("norm", "norm_eps must be finite and not negative, got inf", norm_eps=math.inf),
    bad("head", "residual must have hc_mult = 2 streams, got 4", config=MhcConfig(hc_mult=2)),
    bad("fn_broadcast", "fn must have a multiple of hc_mult = 3 columns, at least one each, got 280", hc_mult=3),
    bad("fn_broadcast", "out must be float32 [24, 70], got float32 [24, 71]", out=torch.zeros(24, 71)),
    bad("pre", "fn must be float32 [24, 280], got float32 [24, 70]", fn=torch.zeros(24, 70)),
    bad("pre", "fn must be float32 [24, 70], got float32 [24, 280]", x=torch.zeros(3, 70).bfloat16()),
    bad("pre_delayed", "pre_mix must be float32 [3, 4], got float32 [3, 3]", pre_mix=torch.zeros(3, 3)),
    bad("post_pre", "residual must have hc_mult = 2 streams, got 4", config=MhcConfig(hc_mult=2)),
    bad(
        "post_pre_delayed",
        "norm_weight must be bfloat16 [70], got bfloat16 [71]",
        norm_weight=torch.zeros(71).bfloat16(),
    ),
]


@pytest.mark.parametrize(("op", "says", "changes"), BAD)
def test_bad_input_is_named_in_one_sentence(op: str, says: str, changes: dict[str, Any]) -> None:
    """Catches a wrong value taken for a plausible one; each message is compared whole."""
    with pytest.raises((TypeError, ValueError)) as caught:
        sample(op).call(**changes)
    assert sentence(caught.value) == f"{op}: {says}"


@pytest.mark.parametrize(
    ("field", "value", "kind", "says"),
    [
        ("hc_mult", 9, ValueError, "hc_mult must be 1 to 8, got 9"),
        ("hc_mult", 4.0, TypeError, "hc_mult must be an int, got 4.0"),
        ("sinkhorn_iters", 0, ValueError, "sinkhorn_iters must be at least 1, got 0"),
        ("sinkhorn_iters", True, TypeError, "sinkhorn_iters must be an int, got True"),
        ("rms_eps", -1.0, ValueError, "rms_eps must be finite and not negative, got -1.0"),
        ("norm_eps", math.nan, ValueError, "norm_eps must be finite and not negative, got nan"),
        ("post_mult", math.inf, ValueError, "post_mult must be finite and not negative, got inf"),
        ("hc_pre_eps", "1", TypeError, "hc_pre_eps must be a number, got '1'"),
    ],
)
def test_a_configuration_checks_itself(field: str, value: Any, kind: type[Exception], says: str) -> None:
    """Catches a typo in a model's constants before any kernel runs on it."""
    with pytest.raises(kind) as caught:
        MhcConfig(**{field: value})
    assert sentence(caught.value) == f"MhcConfig: {says}"


def test_records_name_each_sequence_once_for_an_op() -> None:
    """Catches duplicate candidates, which would make an explanation ambiguous, and a missing default."""
    for op in OPS:
        named = candidates(op)
        assert next(iter(named)) == oracle.CONTRACT_1.name
        assert all(name == record.name for name, record in named.items())
    assert len(candidates("expand")) == 1
    with pytest.raises(ValueError, match=r"^candidates: op must be one of expand, .*; got 'nothing'$"):
        candidates("nothing")


def test_records_combine() -> None:
    """Catches a combination that resets what an earlier record changed."""
    post, gate = Arithmetic("a", post=FUSED_POST), Arithmetic("b", gate="fused")
    assert combine("both", post, gate) == Arithmetic("both", post=FUSED_POST, gate="fused")
