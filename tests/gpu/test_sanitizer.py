"""compute-sanitizer over a small run of every op, where the tool exists and can attach to the GPU.

memcheck sees reads and writes outside allocations that happen to hit mapped memory; racecheck sees shared memory that
threads read and write without a barrier between.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin import Session

ROOT = Path(__file__).parents[2]
REFUSALS = ("Device not supported", "Failed to initialize", "not supported on this")
FOUND = 99


@pytest.mark.more_than_a_gpu
@pytest.mark.timeout(420)
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(backend: str, tool: str, session: Session) -> None:
    """Catches an access outside a tensor that harms nothing today, and a missing barrier that has not lost yet."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    if backend not in session.backends:
        pytest.skip(f"{backend} is not selected or not available")
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-m", "tests.gpu.sanitized"]
    # Without its cache, torch gives each tensor an allocation of its own, whose ends the tool knows.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run([*command, backend], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode and any(refusal in said for refusal in REFUSALS):
        pytest.skip("compute-sanitizer cannot attach to this GPU")
    assert done.returncode == 0, said[-4000:]
    assert "ran" in said
