"""What is wrong with a JSON document that a file holds, in the words of the suite's other messages."""

from __future__ import annotations

import re

from pydantic import ValidationError

WIDTH = 60  # characters of what came


def first_fault(fault: ValidationError) -> str:
    """The first fault of a document as `key: expected this, got that`, in one line."""
    error = fault.errors(include_url=False)[0]
    key, context = ".".join(map(str, error["loc"])), error.get("ctx", {})
    if error["type"] == "json_invalid":
        return f"expected JSON, got {context['error']}"
    told = (
        str(context["error"]) if error["type"] == "value_error" else _told(error["type"], error["msg"], error["input"])
    )
    return f"{key}: {told}" if key else told


def _told(kind: str, message: str, came: object) -> str:
    """A fault in pydantic's words, which begin "Input should be" or "String should match"."""
    if kind == "missing":
        return "expected a value, got none"
    wanted = "no such key" if kind == "extra_forbidden" else re.sub(r"^\w+ should (be )?", _expectation, message)
    text = repr(came)
    return f"expected {wanted}, got {text if len(text) <= WIDTH else text[: WIDTH - 3] + '...'}"


def _expectation(found: re.Match[str]) -> str:
    return "" if found[1] else "to "
