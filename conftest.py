"""Prepares every pytest process before torch or a DSL is imported; all else is in `tests.plugin`."""

from __future__ import annotations

import os
from pathlib import Path

from tests import environment

environment.prepare(os.environ, cache=Path(__file__).parent / ".cache", gpus=environment.physical_gpus())

pytest_plugins = ["tests.plugin"]
