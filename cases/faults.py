"""What is wrong with a document that a file holds, in one sentence: key, what was expected and what came."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

SHOWN = 5
"""How many faults of one document its sentence lists."""


def sentence(fault: ValidationError, keys: Iterable[str] = ()) -> str:
    """The first faults, and how many more there are; an unknown key may have been meant for one of ``keys``."""
    faults, known = fault.errors(include_url=False), list(keys)
    more = f" (and {len(faults) - SHOWN} more)" if len(faults) > SHOWN else ""
    return "; ".join(_one(one, known) for one in faults[:SHOWN]) + more


def _one(error: ErrorDetails, keys: Sequence[str]) -> str:
    """One fault as `key: expected this, got that`."""
    key = ".".join(str(part) for part in error["loc"])
    got, context = error["input"], error.get("ctx", {})
    if error["type"] == "json_invalid":
        return f"expected JSON, got {context['error']}"
    if error["type"] == "value_error":
        message = str(context["error"])
        return f"{key}: {message}" if key else message
    told = f"expected {_expected(error, context, keys)}, got {_short(got, error['type'])}"
    return f"{key}: {told}" if key else told


def _expected(error: ErrorDetails, context: dict[str, Any], keys: Sequence[str]) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        near = alike(str(error["loc"][-1]), keys)
        return "no such key" + (f" (did you mean {' or '.join(near)}?)" if near else "")
    if kind == "missing":
        return "a value"
    if kind == "too_short":
        return f"{context['min_length']} or more items"
    if kind in ("less_than_equal", "greater_than_equal"):
        return f"at most {context['le']}" if kind == "less_than_equal" else f"at least {context['ge']}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    return error["msg"].removeprefix("Input should be ").replace("a valid i", "an i").replace("a valid ", "a ")


def _short(got: object, kind: str) -> str:
    if kind == "missing":
        return "none"
    text = repr(got)
    return text if len(text) <= 80 else text[:77] + "..."


def alike(word: str, known: Iterable[str]) -> list[str]:
    """At most five of the known words that `word` may have been meant for: those it is in, or else those near it."""
    names = list(known)
    return [name for name in names if word in name][:5] or difflib.get_close_matches(word, names, 5, cutoff=0.7)
