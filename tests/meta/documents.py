"""Case documents for the tests of the case files' own machinery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from cases.schema import Case


def document(**changes: Any) -> dict[str, Any]:
    """A good case document, as TOML gives it, with keys replaced; a key set to None is left out."""
    good: dict[str, Any] = {
        "schema": 1,
        "name": "a-case",
        "title": "a case that tests of the case files change",
        "op": "collapse",
        "tokens": 3,
        "hc_mult": 4,
        "hidden": 16,
        "tp": [1, 2],
        "flags": ["order"],
        "catches": ["reversed-order"],
        "source": "design:6",
    }
    return {key: value for key, value in (good | changes).items() if value is not None}


def case(**changes: Any) -> Case:
    """The same as a model."""
    return Case.model_validate(document(**changes))


def write(directory: Path, **changes: Any) -> Path:
    """The same as a file of its own name."""
    path = directory / f"{changes.get('name', 'a-case')}.toml"
    path.write_text(tomli_w.dumps(document(**changes)))
    return path
