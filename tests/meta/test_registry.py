"""Kernels by name, and the checks that stand before every kernel."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fast
import oracle
from cases.ops import OPS
from fast import registry
from fast.arguments import BF16, F32, Arguments, Output

TRITON_OPS = fast.ops("triton")


def checked() -> Arguments:
    """The checks of a collapse of three tokens, four streams and five columns."""
    call = Arguments("collapse")
    call.tensor("residual", torch.zeros(3, 4, 5, dtype=BF16), BF16, "T n H")
    return call


def out(tensor: Any) -> Tensor:
    """Offer `tensor` as the output of that collapse."""
    (taken,) = checked().outputs([Output("layer_input", BF16, "T H")], tensor)
    return taken


def test_triton_has_every_op() -> None:
    """Catches an op of the table that no Triton kernel judges, and a kernel that no case reaches."""
    assert sorted(OPS) == sorted(TRITON_OPS)


@pytest.mark.parametrize("op", TRITON_OPS)
def test_a_kernel_takes_what_the_oracle_takes(op: str) -> None:
    """Catches arguments in another order or under another name, and a kernel without `out`."""
    pytest.importorskip("triton")
    taken = inspect.signature(fast.kernel(op, "triton")).parameters
    wanted = inspect.signature(getattr(oracle, op)).parameters
    assert [name for name in taken if name != "out"] == [name for name in wanted if name not in ("arithmetic", "out")]
    assert all(taken[name].kind == wanted[name].kind for name in taken if name in wanted and name != "out")
    assert taken["out"].default is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fast.kernel("collaps", "triton"), r"no op 'collaps' on backend 'triton'; it has .*collapse"),
        (lambda: fast.kernel("collapse", "cuda"), r"unknown backend 'cuda'; there are triton, tilelang"),
        (lambda: fast.ops("cuda"), r"unknown backend 'cuda'"),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(call: Callable[[], object], message: str) -> None:
    """Catches a bare KeyError."""
    with pytest.raises(ValueError, match=message):
        call()


def test_an_unsupported_size_has_a_reason() -> None:
    """Catches a refusal that is met only at the call, and one that does not say the limit."""
    assert fast.supports("post", "triton", hc_mult=8, hidden_size=1)
    assert not fast.supports("post", "triton", hc_mult=9)
    assert fast.refusal("post", "triton", hc_mult=9) == (
        "post: hc_mult must be 1 to 8 (streams are unrolled in registers), got 9"
    )
    for backend in ("triton", "tilelang"):
        assert fast.refusal("post", backend, hc_mult=0) == "post: hc_mult must be at least 1, got 0"
        assert not fast.supports("norm", backend, hidden_size=-1)
    assert "no kernel for sort" in fast.refusal("sort", "triton")


def test_a_language_that_cannot_be_imported_gives_probes_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a ModuleNotFoundError from deep inside."""
    reason = fast.Backend("triton", False, "triton is not installed", None, "interpreted", "cpu")
    monkeypatch.setattr(registry, "probe", lambda: {"triton": reason})

    def fail(name: str) -> object:
        raise ImportError(name)

    package = importlib.import_module("fast.triton_kernels")
    monkeypatch.setattr(importlib, "import_module", lambda n: package if n.count(".") == 1 else fail(n))
    with pytest.raises(ImportError, match="backend 'triton' cannot be used: triton is not installed"):
        fast.kernel("collapse", "triton")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, TypeError, r"collapse: pre_mix must be a tensor \[T, n\], got int"),
        (torch.zeros(3, 4, dtype=torch.float64), TypeError, "collapse: pre_mix must be float32, got float64"),
        (torch.zeros(3), ValueError, r"collapse: pre_mix must be \[T, n\], got \[3\]"),
        (torch.zeros(3, 2), ValueError, r"collapse: pre_mix must be \[T, n\] with n = 4, got \[3, 2\]"),
        (torch.zeros(3, 4, device="meta"), ValueError, "collapse: pre_mix must be on cpu like residual, got meta"),
    ],
)
def test_a_wrong_tensor_is_named(value: Any, error: type[Exception], message: str) -> None:
    """Catches an error that does not say which argument, what was expected or what came."""
    with pytest.raises(error, match=message):
        checked().tensor("pre_mix", value, F32, "T n")


def test_more_streams_than_a_kernel_unrolls_are_refused() -> None:
    """Catches a compile that never ends, or a Triton error from deep inside."""
    with pytest.raises(ValueError, match=r"post: residual must have n of at most 8, got \[1, 9, 2\]"):
        Arguments("post").tensor("residual", torch.zeros(1, 9, 2, dtype=BF16), BF16, "T n H")


@pytest.mark.parametrize("value", [-1e-6, float("nan"), float("inf")])
def test_an_eps_is_finite_and_not_negative(value: float) -> None:
    """Catches a constant that makes every row NaN; the oracle refuses the same ones."""
    with pytest.raises(ValueError, match="norm: norm_eps must be finite and not negative, got"):
        Arguments("norm").number("norm_eps", value)
    with pytest.raises(TypeError, match="norm: norm_eps must be a number, got bool"):
        Arguments("norm").number("norm_eps", True)


def test_only_tokens_may_be_none() -> None:
    """Catches H = 0, for which no launch shape and no mean exist; T = 0 is a rank without tokens."""
    call = Arguments("norm")
    call.tensor("hidden", torch.zeros(0, 5, dtype=BF16), BF16, "T H")
    with pytest.raises(ValueError, match=r"norm: hidden must have H of at least 1, got \[2, 0\]"):
        Arguments("norm").tensor("hidden", torch.zeros(2, 0, dtype=BF16), BF16, "T H")


def test_the_device_must_be_the_kernels() -> None:
    """Catches CPU memory handed to a compiled kernel."""
    call = Arguments("norm", "cuda", "kernels are compiled")
    with pytest.raises(ValueError, match=r"norm: hidden must be on cuda \(kernels are compiled\), got cpu"):
        call.tensor("hidden", torch.zeros(2, 3, dtype=BF16), BF16, "T H")


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (torch.zeros(3, 5), TypeError, r"out \(layer_input\) must be bfloat16, got float32"),
        (torch.zeros(3, 6, dtype=BF16), ValueError, r"must be \[T, H\] = \[3, 5\], got \[3, 6\]"),
        (torch.zeros(3, 5, dtype=BF16, device="meta"), ValueError, "must be on cpu, got meta"),
        (torch.zeros(5, dtype=BF16).expand(3, 5), ValueError, "must hold each element once"),
        ([torch.zeros(3, 5, dtype=BF16)] * 2, ValueError, r"out must be 1 tensors \(layer_input\), got 2"),
        ([3], TypeError, r"out \(layer_input\) must be a tensor, got int"),
    ],
)
def test_a_wrong_output_is_named(tensor: Any, error: type[Exception], message: str) -> None:
    """Catches an output that would be written out of bounds, in part, or in another type."""
    with pytest.raises(error, match=message):
        out(tensor)


def test_outputs_are_fresh_or_the_callers_own() -> None:
    """Catches a copy where the caller's memory was meant, and strides that are refused for no reason."""
    assert out(None).is_contiguous()
    scattered = torch.zeros(5, 7, dtype=BF16).T[:3]
    assert out(scattered) is scattered


def test_an_output_may_not_lie_in_an_argument() -> None:
    """Catches a kernel that reads what it has just overwritten; neighbours in one buffer are no overlap."""
    room = torch.zeros(100, dtype=BF16)
    for start, message in ((0, "got that of residual"), (59, "got that of residual"), (60, None)):
        call = Arguments("collapse")
        call.tensor("residual", room[:60].view(3, 4, 5), BF16, "T n H")
        mine = room[start : start + 15].view(3, 5)
        if message is None:
            assert call.outputs([Output("layer_input", BF16, "T H")], mine) == (mine,)
        else:
            with pytest.raises(ValueError, match=message):
                call.outputs([Output("layer_input", BF16, "T H")], mine)


def test_two_outputs_may_not_be_one() -> None:
    """Catches one buffer given twice, of which the later output would win."""
    both = [Output("pre_mix", F32, "T n"), Output("post_mix", F32, "T n")]
    buffer = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"out \(post_mix\) must have memory of its own, got that of out \(pre_mix\)"):
        checked().outputs(both, [buffer, buffer])


def test_a_config_is_checked_by_its_attributes() -> None:
    """Catches a config without a constant, of a wrong kind, and one of another number of streams."""
    assert checked().config(oracle.MhcConfig.v41()).rms_eps == 1e-20
    with pytest.raises(ValueError, match=r"collapse: config.hc_mult must be n = 4, got 2"):
        checked().config(oracle.MhcConfig(hc_mult=2))
    with pytest.raises(TypeError, match=r"collapse: config must have every constant, got .*sinkhorn_iters"):
        checked().config(type("Half", (), {"hc_mult": 4})())
    with pytest.raises(TypeError, match=r"collapse: config.sinkhorn_iters must be an int, got float"):
        checked().config(type("Wrong", (), {"hc_mult": 4, "sinkhorn_iters": 2.0})())
