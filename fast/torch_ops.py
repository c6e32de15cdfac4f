"""Every op as `torch.ops.mhc.*`, so that compiled models may call it: schema, fake and kernel.

`torch.ops.mhc.collapse(residual, pre_mix, backend="triton")` runs the kernel that `fast.kernel("collapse", "triton")`
is. A schema knows tensors and numbers only, so ops that take a config take its constants; `op(name, backend)` returns a
function of the kernel's own signature that unpacks the config. Outputs are new tensors, contiguous, as the kernels make
them; the fakes say so without touching memory, for symbolic sizes too. Forward only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fast.arguments import Constants
from fast.registry import Config, kernel

_PLAIN = "int hc_mult, int sinkhorn_iters, float rms_eps, float norm_eps, float hc_pre_eps, "
_CONFIG = _PLAIN + "float hc_sinkhorn_eps, float post_mult"
_CONSTANTS = tuple(part.split()[1] for part in _CONFIG.split(", "))
_POST = "Tensor x, Tensor residual, Tensor post_mix, Tensor comb_mix"
_WEIGHTS = "Tensor fn, Tensor hc_scale, Tensor hc_base"
_OPTIONAL = "Tensor? pre_mix=None, Tensor? x=None, Tensor? norm_weight=None"

SCHEMAS = {
    "expand": "(Tensor hidden, int hc_mult, *, {backend}) -> Tensor",
    "collapse": "(Tensor residual, Tensor pre_mix, *, {backend}) -> Tensor",
    "stream_mean": "(Tensor residual, *, {backend}) -> Tensor",
    "post": f"({_POST}, *, {{backend}}) -> Tensor",
    "draft_tail": f"({_POST}, Tensor pre_mix, *, {{backend}}) -> Tensor",
    "project": "(Tensor x, Tensor fn, *, {backend}) -> (Tensor, Tensor)",
    "mixes": "(Tensor sums, Tensor squares, *, int numel, float rms_eps, {backend}) -> Tensor",
    "sinkhorn": "(Tensor logits, *, int sinkhorn_iters, float sinkhorn_eps, {backend}) -> Tensor",
    "coefficients": f"(Tensor mixes, Tensor hc_scale, Tensor hc_base, *, {_CONFIG}, {{backend}}) "
    "-> (Tensor, Tensor, Tensor)",
    "norm": "(Tensor hidden, Tensor norm_weight, *, float norm_eps, {backend}) -> Tensor",
    "collapse_norm": "(Tensor residual, Tensor pre_mix, Tensor norm_weight, *, float norm_eps, str squares_of, "
    "{backend}) -> Tensor",
    "head": f"(Tensor residual, {_WEIGHTS}, *, {_CONFIG}, {{backend}}) -> Tensor",
    "fn_broadcast": "(Tensor fn, int hc_mult, *, {backend}) -> Tensor",
    "pre": f"(Tensor residual, {_WEIGHTS}, *, {_CONFIG}, Tensor? x=None, Tensor? norm_weight=None, {{backend}}) "
    "-> (Tensor, Tensor, Tensor)",
    "pre_delayed": f"(Tensor residual, {_WEIGHTS}, *, {_CONFIG}, {_OPTIONAL}, {{backend}}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "post_pre": f"({_POST}, {_WEIGHTS}, *, {_CONFIG}, Tensor? norm_weight=None, {{backend}}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "post_pre_delayed": f"({_POST}, {_WEIGHTS}, *, {_CONFIG}, Tensor? pre_mix=None, Tensor? norm_weight=None, "
    "bool capture_aux=False, {backend}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
}

F32 = torch.float32
DEFAULT_BACKEND = "triton"


def _like(tensor: Tensor, shape: tuple[Any, ...], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device)


def _row(residual: Tensor, *_: Any, **__: Any) -> Tensor:
    return _like(residual, (residual.shape[0], residual.shape[2]))


def _same(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return _like(tensor, tuple(tensor.shape))


def _expand(hidden: Tensor, hc_mult: int, **_: Any) -> Tensor:
    return _like(hidden, (hidden.shape[0], hc_mult, hidden.shape[1]))


def _post(x: Tensor, residual: Tensor, *_: Any, **__: Any) -> Tensor:
    del x
    return _same(residual)


def _draft_tail(x: Tensor, residual: Tensor, *_: Any, **__: Any) -> Tensor:
    del x
    return _row(residual)


def _project(x: Tensor, fn: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return _like(x, (x.shape[0], fn.shape[0]), F32), _like(x, (x.shape[0],), F32)


def _gates(tensor: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A token's post_mix (or pre_mix, which looks alike) and comb_mix."""
    tokens = tensor.shape[0]
    return _like(tensor, (tokens, n), F32), _like(tensor, (tokens, n, n), F32)


def _coefficients(mixes: Tensor, *_: Any, hc_mult: int, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (_gates(mixes, hc_mult)[0], *_gates(mixes, hc_mult))


def _fn_broadcast(fn: Tensor, hc_mult: int, **_: Any) -> Tensor:
    return _like(fn, (fn.shape[0], fn.shape[1] // hc_mult))


def _pre(residual: Tensor, *_: Any, hc_mult: int, **__: Any) -> tuple[Tensor, ...]:
    return (*_gates(residual, hc_mult), _row(residual))


def _pre_delayed(residual: Tensor, *_: Any, hc_mult: int, **__: Any) -> tuple[Tensor, ...]:
    return (*_pre(residual, hc_mult=hc_mult), _gates(residual, hc_mult)[0])


def _post_pre(x: Tensor, residual: Tensor, *_: Any, hc_mult: int, **__: Any) -> tuple[Tensor, ...]:
    del x
    return (_same(residual), *_pre(residual, hc_mult=hc_mult))


def _post_pre_delayed(
    x: Tensor, residual: Tensor, *_: Any, hc_mult: int, capture_aux: bool = False, **__: Any
) -> tuple[Tensor, ...]:
    del x
    aux = _row(residual) if capture_aux else _like(residual, (0, residual.shape[2]))
    return (_same(residual), *_pre_delayed(residual, hc_mult=hc_mult), aux)


_FAKES: dict[str, Callable[..., Any]] = {
    "expand": _expand,
    "collapse": _row,
    "stream_mean": _row,
    "post": _post,
    "draft_tail": _draft_tail,
    "project": _project,
    "mixes": _same,
    "sinkhorn": _same,
    "coefficients": _coefficients,
    "norm": _same,
    "collapse_norm": _row,
    "head": _row,
    "fn_broadcast": _fn_broadcast,
    "pre": _pre,
    "pre_delayed": _pre_delayed,
    "post_pre": _post_pre,
    "post_pre_delayed": _post_pre_delayed,
}

_LIBRARY = torch.library.Library("mhc", "DEF")


def _register(name: str, schema: str) -> None:
    takes_config = _CONFIG in schema

    def call(*args: Any, backend: str = DEFAULT_BACKEND, **keywords: Any) -> Any:
        if takes_config:
            keywords["config"] = Constants(**{constant: keywords.pop(constant) for constant in _CONSTANTS})
        return kernel(name, backend)(*args, **keywords)

    _LIBRARY.define(
        name + schema.format(backend=f'str backend="{DEFAULT_BACKEND}"'), tags=(torch.Tag.pt2_compliant_tag,)
    )
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mhc::{name}", _FAKES[name], lib=_LIBRARY)


for _name, _schema in SCHEMAS.items():
    _register(_name, _schema)


def op(name: str, backend: str) -> Callable[..., Any]:
    """Return `torch.ops.mhc.<name>` as a function of the kernel's own signature, for use in compiled models.

    It takes the arguments of `fast.kernel(name, backend)` less `out=`, with the same results. Raises ValueError for an
    unknown op.
    """
    if name not in SCHEMAS:
        raise ValueError(f"torch_ops: unknown op {name!r}; there are {', '.join(SCHEMAS)}")
    overload = getattr(torch.ops.mhc, name).default

    def function(*args: Any, config: Config | None = None, **keywords: Any) -> Any:
        constants = {} if config is None else {constant: getattr(config, constant) for constant in _CONSTANTS}
        return overload(*args, **constants, **keywords, backend=backend)

    return function


__all__ = ["SCHEMAS", "op"]
