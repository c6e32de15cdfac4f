"""A TileLang kernel of plain operators, launched with and without the flag that keeps compilers from fusing."""

from __future__ import annotations

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


def launches() -> list[TileLangLaunch]:
    """The kernel with the launcher's options, whose code is right but for that flag alone, and without the flag."""
    kept = TileLangLaunch(make_fold, (1024,), Call("project", 1, 1024, 1, ("flagged",)))
    loose: dict[str, list[str]] = {"compile_flags": []}
    return [kept, TileLangLaunch(make_fold, (1024,), Call("project", 1, 1024, 1, ("fused",)), loose)]
