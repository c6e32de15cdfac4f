"""Faults of a case that the schema cannot see: nothing blessed, a wrong size class, too few bit patterns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cases.flags import DATA_DIR
from cases.ops import OPS
from cases.schema import CONTRACT, ArgumentInput, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL_WIDTH = 2048
"""The hidden size from which a case is of a model's width, and no longer small."""

SMALL_ELEMENTS = 1 << 19
"""The largest argument of a small case, in elements; an interpreter walks through each of them."""


def faults(case: Case) -> Iterator[str]:
    """Each fault as one sentence that begins with the case's name."""
    for fault in (*_expected(case), *_size(case), *_words(case), *_files(case), *_patterns(case)):
        yield f"{case.name}: {fault}"


def _expected(case: Case) -> Iterator[str]:
    if case.expected is None:
        bless = f"./run cases bless {case.name} --reason WHY"
        yield f"expected: digests under contract {CONTRACT} needed, got none; run `{bless}`"


def _size(case: Case) -> Iterator[str]:
    largest = max(math.prod(case.shape(argument)) for argument in case.arguments)
    if case.size == "small" and (case.hidden >= FULL_WIDTH or largest > SMALL_ELEMENTS):
        yield f"size: expected 'full' or 'large' for H = {case.hidden} and {largest} elements, got 'small'"


def _words(case: Case) -> Iterator[str]:
    for key in ("flags", "catches", "tp", "pad_fills"):
        words = getattr(case, key)
        if len(set(words)) != len(words):
            yield f"{key}: expected each word once, got {list(words)}"
    if case.title.endswith(".") or case.title != " ".join(case.title.split()):
        yield f"title: expected one sentence without a full stop or double blanks, got {case.title!r}"
    if any(case.title == op for op in OPS):
        yield f"title: expected what the case pins, got an op's name {case.title!r}"


def _files(case: Case) -> Iterator[str]:
    for argument in case.arguments:
        file = case.made_by(argument.name).file
        if file is not None and not (DATA_DIR / file).is_file():
            yield f"inputs.arguments.{argument.name}.file: expected a file in cases/data, got {file!r}"


def _patterns(case: Case) -> Iterator[str]:
    for argument in case.arguments:
        made = case.made_by(argument.name)
        fault = miscounted(made, argument.name, math.prod(case.shape(argument)))
        if made.recipe == "bits" and fault:
            yield fault


def miscounted(made: ArgumentInput, name: str, elements: int) -> str:
    """What is wrong with the number of an argument's bit patterns, one for each element; empty when it is right."""
    if len(made.bits) == elements:
        return ""
    return f"inputs.arguments.{name}.bits: expected {elements} patterns, got {len(made.bits)}"
