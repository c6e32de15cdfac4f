"""Callables under judgement: the suite's own backends and functions that a user names with ``--impl``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

import oracle
from cases.load import from_caller
from cases.ops import OPS
from fast.registry import Unsupported
from tests import interpreter

Outputs = tuple[torch.Tensor, ...]

REFUSALS = (Unsupported, ValueError, NotImplementedError)
"""What a kernel may raise to say that it does not take a layout."""

_NAMES_LAYOUT = re.compile(r"strid|contigu|packed|align", re.IGNORECASE)


class UsageError(Exception):
    """A request that the user has to correct; the text is one sentence for them."""


class WrongResult(Exception):
    """A kernel returned something that is not the op's result; the text says what was expected and what came."""


def refuses_layout(error: BaseException) -> bool:
    """Whether an error says clearly that a kernel does not take a tensor's strides, gaps or alignment."""
    return isinstance(error, REFUSALS) and _NAMES_LAYOUT.search(str(error)) is not None


@dataclass(frozen=True)
class Implementation:
    """One function that computes one op.

    ``name`` is the backend's name in tables and ids, ``accepts_out`` tells whether it takes ``out=`` and ``needs_out``
    whether it must have it, ``request`` is the user's ``--impl`` value that it came from.
    """

    op: str
    name: str
    function: Callable[..., object]
    accepts_out: bool
    request: str = ""
    needs_out: bool = False

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], params: Mapping[str, object], out: Outputs | None = None
    ) -> Outputs:
        """Call the function with the op's signature and return its outputs as a tuple.

        ``tensors`` maps argument names to tensors, absent optional ones left out. Raises WrongResult when what
        comes back is not the op's number of tensors.
        """
        spec = OPS[self.op]
        positional = [tensors[argument.name] for argument in spec.arguments if not argument.optional]
        keywords: dict[str, object] = dict(params)
        keywords |= {a.name: tensors[a.name] for a in spec.arguments if a.optional and a.name in tensors}
        if out is not None and self.accepts_out:
            keywords["out"] = out[0] if len(out) == 1 else out
        with warnings.catch_warnings():
            if self.request:  # a user's kernel is judged by its bits, not by what it or its language warns of
                warnings.simplefilter("ignore")
            result = self.function(*positional, **keywords)
        if result is None and out is not None and self.accepts_out:
            return out
        return self._as_outputs(result)

    def _as_outputs(self, result: object) -> Outputs:
        expected = [output.name for output in OPS[self.op].outputs]
        outputs = (result,) if isinstance(result, torch.Tensor) else result
        if not isinstance(outputs, tuple | list) or not all(isinstance(item, torch.Tensor) for item in outputs):
            raise WrongResult(f"{self.op} must return {_tensors(expected)}, {self.name} returned {_kind(result)}")
        if len(outputs) != len(expected):
            raise WrongResult(f"{self.op} must return {_tensors(expected)}, {self.name} returned {len(outputs)}")
        return tuple(outputs)


def of_oracle(op: str) -> Implementation:
    """The oracle's own function for an op."""
    return Implementation(op, "oracle", getattr(oracle, op), accepts_out=False)


def of_backend(op: str, backend: str) -> Implementation:
    """The suite's kernel for an op on a backend ("triton", "tilelang"); imports that backend's DSL."""
    import fast

    return Implementation(op, backend, fast.kernel(op, backend), accepts_out=True)


def of_user(request: str) -> Implementation:
    """A user's function from ``OP=FILE.py:FUNCTION`` or ``OP=MODULE:FUNCTION``.

    Raises UsageError, one sentence, when the request does not parse, the op is unknown, or the file, module or
    function cannot be had.
    """
    op, equals, target = request.partition("=")
    place, colon, function_name = target.rpartition(":")
    if not (equals and colon and place and function_name):
        raise UsageError(f"--impl expects OP=FILE.py:FUNCTION or OP=MODULE:FUNCTION, got {request!r}")
    if op not in OPS:
        raise UsageError(f"--impl {request}: unknown op {op!r}, expected one of {', '.join(OPS)}")
    interpreter.repair()
    function = getattr(_import(place, request), function_name, None)
    if not callable(function):
        raise UsageError(f"--impl {request}: {place} has no function {function_name!r}")
    accepts, needs = _takes_out(function)
    return Implementation(op, f"impl-{function_name}", function, accepts, request, needs)


def _import(place: str, request: str) -> ModuleType:
    path = from_caller(place)
    try:
        if path.suffix != ".py":
            return importlib.import_module(place)
        if not path.is_file():
            raise UsageError(f"--impl {request}: there is no file {place}")
        return _import_file(path.resolve())
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script that was not meant to be imported may end the process
        raise UsageError(f"--impl {request}: importing {place} raised {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, its folder importable so that it may have neighbours."""
    name = f"mhc_impl_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _takes_out(function: Callable[..., object]) -> tuple[bool, bool]:
    """Whether a function takes ``out=``, and whether it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins and some compiled callables have no signature to read
        return False, False
    return "out" in parameters, "out" in parameters and parameters["out"].default is inspect.Parameter.empty


def _tensors(names: list[str]) -> str:
    return f"one tensor ({names[0]})" if len(names) == 1 else f"{len(names)} tensors ({', '.join(names)})"


def _kind(result: object) -> str:
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of {', '.join(type(item).__name__ for item in result) or 'nothing'}"
    return f"a {type(result).__name__}"
