"""Which of nvcc's options let it contract a product and a sum, wherever they were given.

nvcc reads `NVCC_PREPEND_FLAGS`, its command line, `NVCC_APPEND_FLAGS`; the last `-fmad` holds, and without one it
contracts. `--use_fast_math` changes that only where there is none.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

BEFORE, AFTER = "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"
FROM_FILE = ("--options-file", "-optf")


def keep_apart(options: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether nvcc, given `options` in this environment, leaves each product and sum its own rounding.

    False where options come from a file, which is not read here.
    """
    around = surroundings(environment)
    given = [*shlex.split(around.get(BEFORE, "")), *options, *shlex.split(around.get(AFTER, ""))]
    stated = [option for option in _joined(given) if _is_contraction(option)]
    hidden = any(option.startswith(FROM_FILE) for option in given)
    return not hidden and bool(stated) and stated[-1].endswith("=false")


def others(options: Sequence[str]) -> list[str]:
    """The options less those about contraction."""
    return [option for option in _joined(options) if not _is_contraction(option)]


def surroundings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables from which nvcc takes options, those that are set."""
    return {name: environment[name] for name in (BEFORE, AFTER) if environment.get(name)}


def _is_contraction(option: str) -> bool:
    return option.lstrip("-").partition("=")[0] == "fmad"


def _joined(options: Sequence[str]) -> Iterator[str]:
    """The options, `-fmad false` as the one word `-fmad=false`."""
    words = iter(options)
    for word in words:
        yield f"{word}={next(words, '')}" if word in ("-fmad", "--fmad") else word
