"""Every launch that the ops make for released models, seen without a GPU: tensors are faked, launches written down.

So what is compiled to be read is what a call would compile, whatever the language: same kernel, same key.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import oracle
from cases.ops import OPS

TOKENS = (7, 71)
HIDDEN = 5120
RELEASED, LARGEST = 4, 8
V4, V41 = oracle.MhcConfig.v4(), oracle.MhcConfig.v41()

Options = tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """One call of an op: its sizes, the optional arguments that it passes, and its parameters."""

    op: str
    tokens: int
    hidden: int
    hc_mult: int
    options: Options = ()

    @property
    def name(self) -> str:
        """The call in a few words."""
        return f"{' '.join((self.op, *self.options))}, T = {self.tokens}"

    def tensors(self, device: str) -> dict[str, torch.Tensor]:
        """Tensors for every argument that the call passes, of the right shape and dtype, holding anything."""
        given = [one for one in OPS[self.op].arguments if not one.optional or one.name in self.options]
        return {one.name: self._empty(one.dims, one.dtype, device) for one in given}

    def _empty(self, dims: tuple[str, ...], dtype: str, device: str) -> torch.Tensor:
        n, rows = self.hc_mult, self.hc_mult * (self.hc_mult + 2)
        columns = self.hidden if "x" in self.options and self.op.startswith("pre") else n * self.hidden
        sizes = {"T": self.tokens, "n": n, "H": self.hidden, "M": rows, "K": columns}
        shape = [sizes[dim] if dim in sizes else int(dim) for dim in dims]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    def parameters(self) -> dict[str, object]:
        """The op's plain parameters, as released models have them."""
        config = replace(V41 if "delayed" in self.op else V4, hc_mult=self.hc_mult)
        known: dict[str, object] = {
            "hc_mult": self.hc_mult,
            "numel": self.hc_mult * self.hidden,
            "rms_eps": 1e-6,
            "norm_eps": 1e-6,
            "sinkhorn_iters": 20,
            "sinkhorn_eps": 1e-6,
            "config": config,
            "squares_of": "rounded" if "rounded" in self.options else "unrounded",
            "capture_aux": "capture_aux" in self.options,
        }
        return {name: known[name] for name in OPS[self.op].parameters}

    def run(self, function: Callable[..., Any], given: Mapping[str, torch.Tensor]) -> Any:
        """Call `function`, which has the op's signature, with these tensors."""
        optional = {one.name for one in OPS[self.op].arguments if one.optional}
        positional = [tensor for name, tensor in given.items() if name not in optional]
        named = {name: tensor for name, tensor in given.items() if name in optional}
        return function(*positional, **named, **self.parameters())


# The optional arguments and switches with which models call an op; ops that are not named have none.
CHOSEN: Mapping[str, tuple[Options, ...]] = {
    "collapse_norm": (("unrounded",), ("rounded",)),
    "pre": ((), ("norm_weight",), ("x", "norm_weight")),
    "pre_delayed": (("norm_weight",), ("x", "norm_weight"), ("pre_mix", "norm_weight")),
    "post_pre": ((), ("norm_weight",)),
    "post_pre_delayed": (
        ("norm_weight",),
        ("pre_mix", "norm_weight"),
        ("pre_mix", "norm_weight", "capture_aux"),
    ),
}


def calls(ops: tuple[str, ...], hidden: int = HIDDEN) -> Iterator[Call]:
    """Calls of released models with few tokens and with many, then those with as many streams as kernels take."""
    sizes = [*((RELEASED, tokens) for tokens in TOKENS), (LARGEST, TOKENS[0])]
    for (n, tokens), name in itertools.product(sizes, ops):
        for chosen in CHOSEN.get(name, ((),)):
            yield Call(name, tokens, hidden, n, chosen)


@contextlib.contextmanager
def faked_gpu() -> Iterator[None]:
    """Let tensors be made on "cuda" here, with shapes and strides but no memory."""
    with (
        FakeTensorMode(),
        mock.patch.object(FakeTensor, "data_ptr", create=True, return_value=0),
        mock.patch.object(FakeTensor, "__getitem__", _indexed, create=True),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
    ):
        yield


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """What plain indexing gives, by calls that a PyTorch without CUDA can make on a tensor said to be there."""
    items = index if isinstance(index, tuple) else (index,)
    if Ellipsis in items:
        place = items.index(Ellipsis)
        missing = tensor.dim() + 1 + items.count(None) - len(items)
        items = (*items[:place], *[slice(None)] * missing, *items[place + 1 :])
    dim, result = 0, tensor
    for item in items:
        if isinstance(item, int):
            result = result.select(dim, item)
            continue
        if item is None:
            result = result.unsqueeze(dim)
        else:
            start, stop, _ = item.indices(result.shape[dim])
            result = result.narrow(dim, start, stop - start)
        dim += 1
    return result


@dataclass(frozen=True)
class TileLangLaunch:
    """A launch of a TileLang kernel: the function that traces it, its key, and the call that made it.

    `options` are compile options that replace the launcher's: none, save in kernels planted to be found.
    """

    make: Callable[..., Any]
    key: tuple[Any, ...]
    call: Call
    options: Mapping[str, Any] = field(default_factory=dict)


def of_tilelang(ops: tuple[str, ...]) -> list[TileLangLaunch]:
    """Every different launch that TileLang's ops make, with the first call that makes it."""
    from fast import kernel
    from fast.tilelang_kernels import build

    found: dict[tuple[Any, ...], TileLangLaunch] = {}

    def compiled(make: Callable[..., Any], _: object, key: tuple[Any, ...], *, call: Call) -> Callable[..., None]:
        found.setdefault((make, key), TileLangLaunch(make, key, call))
        return lambda *_: None

    with faked_gpu(), mock.patch.object(build, "target_of", return_value=build.Target(True, "sm_90")):
        for call in calls(ops):
            with mock.patch.object(build, "compiled", functools.partial(compiled, call=call)):
                call.run(kernel(call.op, "tilelang"), call.tensors("cuda"))
    return list(found.values())


@dataclass(frozen=True)
class TritonLaunch:
    """A launch of a Triton kernel as its compiler sees it, and the call that made it.

    `signature` has every argument's Triton type, `constants` the value of each "constexpr", `aligned` the arguments
    known to be divisible by 16. `options` are as in `TileLangLaunch`.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    warps: int
    call: Call
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What Triton compiles by, as text."""
        kinds, constants = sorted(self.signature.items()), sorted(self.constants.items(), key=str)
        parts = (kinds, constants, self.aligned, self.warps, dict(self.options))
        return f"{self.kernel.fn.__name__} {parts}"


def of_triton(ops: tuple[str, ...]) -> list[TritonLaunch]:
    """Every different launch that Triton's ops make, with the first call that makes it.

    Raises RuntimeError where kernels are interpreted.
    """
    from fast import kernel
    from fast.triton_kernels import MODULES
    from fast.triton_kernels.numerics import INTERPRETED

    if INTERPRETED.value:
        raise RuntimeError("kernels are interpreted in this process, so that no launch compiles")
    found: dict[str, TritonLaunch] = {}
    with faked_gpu(), contextlib.ExitStack() as patches:
        current: list[Call] = []

        def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, **constants: Any) -> None:
            del grid
            launched = _as_compiled(kernel, args, constants, warps, current[-1])
            found.setdefault(launched.key, launched)

        for name in sorted(set(MODULES.values())):
            module = importlib.import_module(f"fast.triton_kernels.{name}")
            patches.enter_context(mock.patch.object(module, "launch", launch))
        for call in calls(ops):
            current.append(call)
            call.run(kernel(call.op, "triton"), call.tensors("cuda"))
    return list(found.values())


_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def _as_compiled(
    kernel: Any, args: tuple[Any, ...], constants: Mapping[str, Any], warps: int, call: Call
) -> TritonLaunch:
    """What Triton specialises a launch on: types, constants, arguments of 1, and which are divisible by 16."""
    fixed, signature, aligned = dict(constants), {}, []
    general = {kernel.arg_names[i] if isinstance(i, int) else i for i in kernel.do_not_specialize or ()}
    for name, value in zip(kernel.arg_names, args, strict=False):
        if value is None or (isinstance(value, int) and value == 1 and name not in general):
            fixed[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            aligned.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned += [name] if value % 16 == 0 and name not in general else []
    signature |= dict.fromkeys(fixed, "constexpr")
    return TritonLaunch(kernel, signature, fixed, tuple(aligned), warps, call)
