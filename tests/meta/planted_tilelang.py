"""TileLang kernels launched with and without the flag that keeps compilers from fusing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T

from fast.tilelang_kernels.numerics import Numerics
from tests.static.launches import Call, TileLangLaunch

F = T.float32


def make_fold(o: Numerics, size: int) -> Any:
    """Trace a kernel whose products and sums any compiler may contract."""
    del o

    @T.prim_func
    def planted(x: T.Tensor((size,), F), y: T.Tensor((size,), F), out: T.Tensor((size,), F)):
        with T.Kernel(1, threads=128):
            for h in T.Parallel(size):
                out[h] = x[h] * y[h] + x[h]

    return planted


def make_sweep(o: Numerics, size: int) -> Any:
    """Trace the same kernel under a name whose sequence has fma."""
    return make_fold(o, size)


def make_sinkhorn(o: Numerics, size: int) -> Any:
    """Trace it with operations that no compiler contracts."""

    @T.prim_func
    def planted(x: T.Tensor((size,), F), y: T.Tensor((size,), F), out: T.Tensor((size,), F)):
        with T.Kernel(1, threads=128):
            for h in T.Parallel(size):
                out[h] = o.add(o.mul(x[h], y[h]), x[h])

    return planted


def launch(make: Callable[..., Any], case: str, *flags: str) -> TileLangLaunch:
    """A launch with these flags in place of the launcher's."""
    call = Call("project", 1, 1024, 1, (case,))
    return TileLangLaunch(make, (1024,), call, {"compile_flags": list(flags)})


def launches() -> list[TileLangLaunch]:
    """Plain operators with the launcher's flag, which alone keeps them right, and without it; right ones without it."""
    return [
        launch(make_fold, "flagged", "-fmad=false"),
        launch(make_fold, "fused"),
        launch(make_sweep, "fused where fma is due"),
        launch(make_sweep, "told to fuse where fma is due", "-fmad=true"),
        launch(make_sinkhorn, "left to the compiler"),
    ]
