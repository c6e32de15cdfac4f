"""The words of flags.toml: flags, names of wrong kernels, stages and kinds of source, each with its meaning."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

CASES_DIR = Path(__file__).resolve().parent
FLAGS_FILE = CASES_DIR / "flags.toml"
DATA_DIR = CASES_DIR / "data"


@cache
def glossary(section: str) -> dict[str, str]:
    """The words of one section (`flags`, `catches`, `stages` or `sources`), each with its meaning.

    Raises KeyError when the file has no such section.
    """
    words: dict[str, str] = tomllib.loads(FLAGS_FILE.read_text(encoding="utf-8"))[section]
    return words
