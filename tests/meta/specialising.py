"""Prints each launch that `tests.static.launches` reads otherwise than Triton: `python -m tests.meta.specialising`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from fast.registry import ops
from fast.triton_kernels.launch import OPTIONS
from tests.static import launches

BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def by_triton(
    kernel: Any, args: tuple[Any, ...], constants: Mapping[str, Any], warps: int
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Types, constants and aligned arguments of a launch, by Triton's own binder."""
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    bound, specialised, _ = bind(*args, **constants, num_warps=warps, **OPTIONS)
    named = dict(zip(bound, specialised, strict=True))
    types = {name: kind for name, (kind, _) in named.items()}
    fixed = {name: str(key) for name, (kind, key) in named.items() if kind == "constexpr"}
    aligned = [name for name, (kind, key) in named.items() if kind != "constexpr" and key and "D" in str(key)]
    return types, fixed, aligned


def main() -> None:
    """Compare every launch of every op."""
    read, count = launches._as_compiled, 0

    def compared(
        kernel: Any, args: tuple[Any, ...], constants: Mapping[str, Any], warps: int, call: launches.Call
    ) -> launches.TritonLaunch:
        nonlocal count
        count += 1
        mine = read(kernel, args, constants, warps, call)
        fixed = {name: str(value) for name, value in mine.constants.items()}
        if by_triton(kernel, args, constants, warps) != (dict(mine.signature), fixed, list(mine.aligned)):
            print(f"{kernel.fn.__name__} ({call.name}) is not what Triton would compile")
        return mine

    with mock.patch.object(launches, "_as_compiled", compared):
        launches.of_triton(ops("triton"))
    print(f"{count} launches compared")


if __name__ == "__main__":
    main()
