"""Failing inputs as files: written by ``--dump DIR`` where a trial fails, judged anywhere by ``--replay FILE``.

A file holds the case and its inputs, so it still says the same when a recipe, a library or the machine has changed. It
is a safetensors file: the tensors without gaps, and the case, trial and strides as JSON in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cases.build import Inputs
from cases.faults import sentence
from cases.schema import Case
from tests.implementations import UsageError
from tests.judge import Failure, built, parameters

LIMIT_BYTES = 64 << 20
KEY = "mhc_replay"


class About(BaseModel):
    """What a replay needs of the JSON in a file's metadata."""

    model_config = ConfigDict(strict=True, frozen=True)
    case: Case
    params: dict[str, Any]


def dump(folder: Path, case: Case, backend: str, tp: int, failures: Sequence[Failure], limit: int = LIMIT_BYTES) -> str:
    """Write the inputs of a failing trial; return a sentence that says where they are, or why they are not.

    More than ``limit`` bytes are cut to a run of tokens from the first wrong one on: no token depends on another.
    """
    inputs = built(case)
    first, count = _window(case, inputs, failures, limit)
    tensors = {name: _cut(case, name, tensor, first, count) for name, tensor in inputs.tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > limit:
        return f"inputs not written: one token of them takes {size} bytes, the limit is {limit}"
    about = {
        "case": _document(case, count),
        "params": inputs.params,
        "backend": backend,
        "tp": tp,
        "first_token": first,
        "strides": {name: list(tensor.stride()) for name, tensor in inputs.tensors.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.name}-{backend}-tp{tp}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={KEY: json.dumps(about)})
    cut = f", tokens {first} to {first + count - 1} of {case.tokens}" if count != case.tokens else ""
    own = " and the same --impl" if backend.startswith("impl-") else ""
    return f"inputs written{cut}: ./run check --replay {path}{own}"


def load(path: Path) -> tuple[Case, Inputs]:
    """The case and inputs that `dump` wrote. Raises UsageError, one sentence, for any other file, or a folder."""
    if path.is_dir():
        raise UsageError(f"--replay {path}: expected one file that --dump wrote, got a folder{_some_file_of(path)}")
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors: dict[str, torch.Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        about = About.model_validate_json(metadata.get(KEY, ""))
        return about.case, Inputs(_called_with(about.case, tensors), _params(about))
    except ValidationError as fault:
        reason = sentence(fault) if KEY in metadata else f"its metadata has no {KEY}"
    except (OSError, SafetensorError, ValueError) as error:
        reason = str(error)
    raise UsageError(f"--replay {path}: not a file that --dump wrote: {reason}")


def _some_file_of(folder: Path) -> str:
    """How many files in it may be meant, and the first by name."""
    files = sorted(folder.glob("*.safetensors"))
    return f" of {len(files)}; the first is {files[0]}" if files else " without any"


def _called_with(case: Case, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in calling order; ValueError for one that is missing, or is not as the case says."""
    for argument in case.arguments:
        wanted = f"{argument.dtype} {list(case.shape(argument))}"
        given = tensors.get(argument.name)
        got = "none" if given is None else f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
        if got != wanted:
            raise ValueError(f"{argument.name}: expected {wanted}, got {got}")
    return {argument.name: tensors[argument.name] for argument in case.arguments}


def _params(about: About) -> dict[str, object]:
    """The parameters of the call; ValueError for others than the op takes, or a config that is none."""
    wanted = sorted(about.case.spec.parameters)
    if sorted(about.params) != wanted:
        raise ValueError(f"params: expected {wanted}, got {sorted(about.params)}")
    try:
        parameters(about.params)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"params.config: {error}") from None
    return about.params


def _window(case: Case, inputs: Inputs, failures: Sequence[Failure], limit: int) -> tuple[int, int]:
    """The first token to keep, and how many: all when they fit."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in inputs.tensors.items()}
    tokens = sum(size for name, size in sizes.items() if case.spec.argument(name).per_token)
    if sum(sizes.values()) <= limit or case.tokens == 0:
        return 0, case.tokens
    room = limit - (sum(sizes.values()) - tokens)
    count = max(1, min(case.tokens, room * case.tokens // max(tokens, 1)))
    return min(_first_wrong_token(failures), case.tokens - count), count


def _first_wrong_token(failures: Sequence[Failure]) -> int:
    found = [failure.comparison.first for failure in failures if failure.comparison and failure.comparison.first]
    return min((element.index[0] for element in found), default=0)


def _cut(case: Case, name: str, tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return tensor[first : first + count] if case.spec.argument(name).per_token else tensor


def _document(case: Case, tokens: int) -> dict[str, Any]:
    """The case with so many tokens and nothing that its values would be made from or compared with."""
    document = case.model_dump(by_alias=True, exclude_unset=True, mode="json", exclude={"expected", "history"})
    if "tokens" in document:
        document["tokens"] = tokens
    inputs = document.get("inputs", {})
    for made in (inputs.get("default", {}), *inputs.get("arguments", {}).values()):
        made.pop("set", None)
    return document
