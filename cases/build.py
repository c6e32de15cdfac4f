"""Turns a case into the tensors and parameters of one call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from cases.digest import digest
from cases.flags import DATA_DIR
from cases.layouts import pad_value, relayout
from cases.lint import miscounted
from cases.ops import BF16, Argument
from cases.recipes import Request, values

if TYPE_CHECKING:
    from cases.randoms import Floats
    from cases.schema import ArgumentInput, Case, Patch

__all__ = ["DATA_DIR", "Inputs", "build", "digest", "pad_value", "relayout"]

_DTYPES = {BF16: torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """Everything that one call takes: tensors by argument name, in calling order, and plain parameters.

    `params["config"]`, where an op has one, is a dict of every constant of the model, hc_mult included.
    """

    tensors: dict[str, torch.Tensor]
    params: dict[str, object]


def build(case: Case) -> Inputs:
    """The inputs of a case, on the CPU, each argument in its own layout.

    The values depend on the case's seed (its name, unless it gives one), the argument's name and the position
    alone: not on the versions of torch or numpy, nor on T. Raises ValueError when a data file or the number of bit
    patterns does not fit.
    """
    tensors = {one.name: _argument(case, one) for one in case.arguments}
    return Inputs(tensors, _params(case))


def _argument(case: Case, argument: Argument) -> torch.Tensor:
    made, shape, dtype = case.made_by(argument.name), case.shape(argument), _DTYPES[argument.dtype]
    if made.recipe == "bits":
        tensor = _from_bits(made, shape, dtype, argument.name)
    elif made.recipe == "file":
        tensor = _from_file(made, shape, dtype, argument.name)
    else:
        tensor = _from_recipe(case, argument, made, shape)
    for patch in made.set:
        tensor[patch.index] = _patch_value(patch, dtype)
    return relayout(tensor, made.layout)


def _from_recipe(case: Case, argument: Argument, made: ArgumentInput, shape: tuple[int, ...]) -> torch.Tensor:
    alike = made.repeat and argument.per_token and case.tokens > 0
    request = Request(
        seed=case.inputs.seed or case.name,
        argument=argument.name,
        role=argument.role if len(shape) == len(argument.dims) else "hidden",
        shape=(1, *shape[1:]) if alike else shape,
        streams=case.sizes["K"] // case.hidden if argument.role == "projection" else case.hc_mult,
        sum_of=_sum_of(case),
        made=made,
    )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        numbers = values(request)
        if made.scale != 1.0:
            numbers = numbers * np.float32(made.scale)
    return _rounded(np.array(np.broadcast_to(numbers, shape)), _DTYPES[argument.dtype])


def _sum_of(case: Case) -> Literal["mixed", "sublayer", "mean"]:
    roles = {argument.role for argument in case.spec.required}
    if roles == {"streams"}:
        return "mean"
    return "sublayer" if {"hidden", "streams"} <= roles else "mixed"


def _rounded(numbers: Floats, dtype: torch.dtype) -> torch.Tensor:
    """FP32 as it is, or rounded once to BF16, to nearest even; NaN payloads keep their high bits."""
    if dtype == torch.float32:
        return torch.from_numpy(numbers)
    bits = numbers.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    cut = np.where(np.isnan(numbers), bits >> np.uint32(16), nearest)
    return torch.from_numpy(cut.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def _patch_value(patch: Patch, dtype: torch.dtype) -> torch.Tensor:
    if patch.bits is not None:
        return _patterns((patch.bits,), dtype)[0]
    return _rounded(np.array([patch.value], dtype=np.float32), dtype)[0]


def _patterns(patterns: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
    unsigned, signed = (np.uint16, np.int16) if dtype == torch.bfloat16 else (np.uint32, np.int32)
    numbers = np.array([int(one, 16) for one in patterns], dtype=unsigned)
    return torch.from_numpy(numbers.view(signed)).view(dtype)


def _from_bits(made: ArgumentInput, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    fault = miscounted(made, name, math.prod(shape))
    if fault:
        raise ValueError(fault)
    return _patterns(made.bits, dtype).reshape(shape)


def _from_file(made: ArgumentInput, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    from safetensors import SafetensorError, safe_open

    where = f"inputs.arguments.{name}.file"
    path = DATA_DIR / str(made.file)
    if path.parent != DATA_DIR or not path.is_file():
        raise ValueError(f"{where}: expected a file in cases/data, got {made.file!r}")
    try:
        with safe_open(path, framework="pt") as stored:
            if made.key not in stored.keys():  # noqa: SIM118 - the reader is not a mapping
                raise ValueError(f"{where}: expected one of the keys {sorted(stored.keys())}, got {made.key!r}")
            tensor: torch.Tensor = stored.get_tensor(made.key)
    except SafetensorError as fault:
        raise ValueError(f"{where}: expected a safetensors file, got {made.file!r}: {fault}") from None
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{where}: expected {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
    return tensor


def _params(case: Case) -> dict[str, object]:
    params: dict[str, object] = {}
    for name in case.spec.parameters:
        if name == "hc_mult":
            params[name] = case.hc_mult
        elif name == "config" and case.config is not None:
            params[name] = {"hc_mult": case.hc_mult, **case.config.constants}
        elif name == "capture_aux":
            params[name] = bool(case.params and case.params.capture_aux)
        else:
            params[name] = getattr(case.params, name)
    return params
