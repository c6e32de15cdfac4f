"""What the machine offers, and the sentence it gives where it offers nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from fast import backends
from fast.backends import Backend, probe
from tests.meta.test_house import pins

ROOT = Path(__file__).parents[2]
LANGUAGES = ("triton", "tilelang")
LAZY = """
import sys, fast
fast.probe(); fast.ops("triton"); fast.ops("tilelang"); fast.supports("collapse", "triton", hc_mult=9)
print([name for name in ("triton", "tilelang", "tvm") if name in sys.modules])
import torch
print(torch.cuda.is_initialized())
"""


def versions(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    """Make package metadata say that these packages, and no others, are installed."""

    def version(package: str) -> str:
        if package not in found:
            raise importlib.metadata.PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without a GPU, with both languages at good versions and Triton asked to interpret."""
    versions(monkeypatch, triton="3.9.0", tilelang="0.1.15")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in LANGUAGES else None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    return monkeypatch


def test_asking_imports_no_kernel_language_and_starts_no_cuda() -> None:
    """Catches an eager import, which costs seconds and forces TRITON_INTERPRET to be set too early."""
    said = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["[]", "False"]


@pytest.mark.usefixtures("cpu")
def test_both_languages_run_on_a_cpu() -> None:
    """Catches a mode or device that does not fit: tensors go where these two say."""
    assert probe("auto") == probe("cpu")
    assert probe()["triton"] == Backend("triton", True, "", "3.9.0", "interpreted", "cpu")
    assert probe()["tilelang"] == Backend("tilelang", True, "", "0.1.15", "c", "cpu")


def test_both_languages_run_on_a_gpu(cpu: pytest.MonkeyPatch) -> None:
    """Catches a probe that stays on the CPU where there is a GPU, and one that asks for a GPU in vain."""
    cpu.setattr(torch.cuda, "device_count", lambda: 1)
    cpu.delenv("TRITON_INTERPRET")
    found = probe()
    assert found["triton"] == Backend("triton", True, "", "3.9.0", "compiled", "cuda")
    assert (found["tilelang"].mode, found["tilelang"].device) == ("cuda", "cuda")
    assert probe("cpu")["tilelang"].mode == "c"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_missing_language_is_said_to_be_missing(cpu: pytest.MonkeyPatch, language: str) -> None:
    """Catches a reason that blames something else."""
    versions(cpu, **{name: "9.9" for name in LANGUAGES if name != language})
    found = probe()
    assert found[language].reason == f"{language} is not installed"
    assert (found[language].available, found[language].version) == (False, None)
    assert all(backend.available for name, backend in found.items() if name != language)


@pytest.mark.parametrize(
    ("language", "version", "available"),
    [
        ("triton", "3.5.1", False),
        ("triton", "3.6.0", True),
        ("triton", "3.6.0+git1", True),
        ("triton", "3.10.0", True),
        ("tilelang", "0.1.9", False),
        ("tilelang", "0.1.11.post2", False),
        ("tilelang", "0.1.12", True),
        ("tilelang", "0.1.15+cuda", True),
    ],
)
def test_an_old_version_is_refused(cpu: pytest.MonkeyPatch, language: str, version: str, available: bool) -> None:
    """Catches comparing versions as text, where 3.10 would be older than 3.6, and releases with a suffix."""
    versions(cpu, **{"triton": "3.9.0", "tilelang": "0.1.15", language: version})
    found = probe()
    assert found[language].available == available
    assert all(backend.available for name, backend in found.items() if name != language)


def test_an_old_version_is_said_to_be_old(cpu: pytest.MonkeyPatch) -> None:
    """Catches a reason that leaves open which version there is, or which is needed."""
    versions(cpu, triton="3.5.1", tilelang="0.1.11")
    said = {name: backend.reason for name, backend in probe().items()}
    assert said == {
        "triton": "triton 3.5.1 is older than 3.6, the oldest that these kernels are for",
        "tilelang": "tilelang 0.1.11 is older than 0.1.12, the oldest that these kernels are for",
    }


def test_the_oldest_versions_are_the_same_wherever_they_stand() -> None:
    """Catches an installation that the probe then refuses, and a floor that no set tries."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest = pins("cpu-oldest.txt")
    for language, minimum in (("triton", backends.TRITON_MINIMUM), ("tilelang", backends.TILELANG_MINIMUM)):
        assert extras[language] == [f"{language}>={'.'.join(map(str, minimum))}"]
        assert backends._numbers(oldest[language].removeprefix("=="))[: len(minimum)] == minimum
    assert extras["cuda"] == [extras["tilelang"][0].replace("tilelang", "tilelang[nvcc]")]


def test_metadata_without_a_module_is_not_trusted(cpu: pytest.MonkeyPatch) -> None:
    """Catches a half-removed package that would fail at the first kernel."""
    cpu.setattr(importlib.util, "find_spec", lambda _: None)
    assert "cannot be found" in probe()["triton"].reason


@pytest.mark.usefixtures("cpu")
def test_no_gpu_is_the_reason_where_one_is_asked_for() -> None:
    """Catches "available" for a device that is not there."""
    assert {backend.reason for backend in probe("cuda").values()} == {"no CUDA device"}


def test_tritons_mode_must_fit_the_device(cpu: pytest.MonkeyPatch) -> None:
    """Catches kernels compiled for a GPU that get CPU tensors, and the other way round."""
    cpu.delenv("TRITON_INTERPRET")
    assert "set TRITON_INTERPRET=1" in probe("cpu")["triton"].reason
    cpu.setenv("TRITON_INTERPRET", "1")
    cpu.setattr(torch.cuda, "device_count", lambda: 1)
    assert "TRITON_INTERPRET is set" in probe("cuda")["triton"].reason


def test_tilelang_needs_a_compiler(cpu: pytest.MonkeyPatch) -> None:
    """Catches a compiler error in the middle of a run where the machine has none, and CXX being ignored."""
    cpu.setattr(shutil, "which", lambda name: "/opt/own" if name == "own++" else None)
    for variable in ("CXX", "CC", "CUDA_HOME", "CUDA_PATH"):
        cpu.delenv(variable, raising=False)
    assert probe()["tilelang"].reason.startswith("no C++ compiler")
    cpu.setenv("CC", "own++")
    assert probe()["tilelang"].available


@pytest.mark.parametrize("named", ["env g++", "/no/such/g++"])
def test_a_compiler_that_cannot_be_run_is_named(cpu: pytest.MonkeyPatch, named: str) -> None:
    """Catches a probe that looks further than TileLang does, so that every kernel would be an error."""
    cpu.setattr(shutil, "which", {"g++": "/bin/g++", "cc": "/bin/cc"}.get)
    cpu.setenv("CXX", named)
    cpu.setenv("CC", "cc")
    assert probe()["tilelang"].reason == f"no C++ compiler: CXX is {named!r}, which is no program"


def test_an_unknown_device_is_refused() -> None:
    """Catches a typo that would silently mean "auto"."""
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda', got 'gpu'"):
        probe("gpu")


def test_a_language_that_dies_at_import_is_reported(cpu: pytest.MonkeyPatch) -> None:
    """Catches a crash that takes the whole run with it; without try_import it would be met at the first kernel."""
    cpu.setattr(
        backends, "import_failure", lambda name: "importing tilelang died of signal 6" if name[1] == "i" else ""
    )
    assert probe()["tilelang"].available
    found = probe(try_import=True)
    assert (found["tilelang"].available, found["tilelang"].reason) == (False, "importing tilelang died of signal 6")
    assert found["triton"].available


def test_how_an_import_failed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback for a reason, and a signal that reads like an exit status."""
    assert backends.import_failure("json") == ""
    assert backends.import_failure("no_such_module") == (
        "importing no_such_module failed: ModuleNotFoundError: No module named 'no_such_module'"
    )
    killed = subprocess.CompletedProcess([], -6, stdout="", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    assert backends.import_failure("dies") == "importing dies died of signal 6: no message"
