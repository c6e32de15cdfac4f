"""Kernels by op and backend, loaded when first asked for.

Each backend is a package `fast.<backend>_kernels` whose `__init__` imports no kernel language and
names in `MODULES` which of its files holds which op; the file holds a function of the op's name.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Protocol, cast

from torch import Tensor

from fast.backends import probe

BACKENDS = ("triton", "tilelang")


class Config(Protocol):
    """The constants of one model's mHC, as plain attributes; every float is meant as its fp32 rounding.

    Any object with these attributes will do; kernels unpack it to plain numbers and keep no reference.
    """

    @property
    def hc_mult(self) -> int: ...
    @property
    def rms_eps(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def hc_pre_eps(self) -> float: ...
    @property
    def hc_sinkhorn_eps(self) -> float: ...
    @property
    def post_mult(self) -> float: ...
    @property
    def sinkhorn_iters(self) -> int: ...


class Kernel(Protocol):
    """An op's function: upstream's arguments, then `out=`; one output is a tensor, several are a tuple."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]: ...


class Unsupported(RuntimeError):
    """Raised by a kernel whose arguments are valid but outside the domain that it was written for.

    The message is the reason, in one sentence that names the op and the limit.
    """


def ops(backend: str) -> tuple[str, ...]:
    """The ops that `backend` has kernels for, sorted; loads no kernel language. ValueError if unknown."""
    return tuple(sorted(_package(backend).MODULES))


def kernel(op: str, backend: str) -> Kernel:
    """The kernel of `op` on `backend`: the op's arguments plus `out=None`.

    Loads the kernel language on the first call. Raises ValueError for an unknown op or backend, and
    ImportError, with the reason that `probe` gives, where the language cannot be imported.
    """
    package = _package(backend)
    if op not in package.MODULES:
        raise ValueError(f"kernel: no op {op!r} on backend {backend!r}; it has {', '.join(ops(backend))}")
    return cast(Kernel, getattr(_load(backend, package.MODULES[op]), op))


def refusal(op: str, backend: str, *, hc_mult: int | None = None, hidden_size: int | None = None) -> str:
    """Why the kernel of `op` would refuse these sizes, in one sentence; empty when it takes them.

    A size left out is not looked at. Loads no kernel language. ValueError for an unknown op or backend.
    """
    package = _package(backend)
    if op not in package.MODULES:
        return f"backend {backend!r} has no kernel for {op}"
    for name, size in (("hc_mult", hc_mult), ("hidden_size", hidden_size)):
        if size is not None and size < 1:
            return f"{op}: {name} must be at least 1, got {size}"
    return cast(str, package.refusal(op, hc_mult, hidden_size))


def supports(op: str, backend: str, *, hc_mult: int | None = None, hidden_size: int | None = None) -> bool:
    """Whether `backend` has a kernel of `op` that takes these sizes; `refusal` gives the reason."""
    return not refusal(op, backend, hc_mult=hc_mult, hidden_size=hidden_size)


def _package(backend: str) -> ModuleType:
    if backend not in BACKENDS:
        raise ValueError(f"kernel: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    return importlib.import_module(f"fast.{backend}_kernels")


def _load(backend: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(f"fast.{backend}_kernels.{module}")
    except ImportError as error:
        reason = probe()[backend].reason or str(error)
        raise ImportError(f"backend {backend!r} cannot be used: {reason}") from error
