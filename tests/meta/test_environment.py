"""What a worker's environment becomes: GPUs that the caller allowed, threads, compile caches of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environment import CACHE_VARIABLES, gpu_of_worker, physical_gpus, prepare


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        (None, ["0", "1"], ["0", "1", "0", "1"]),
        ("1", ["0", "1"], ["1", "1", "1", "1"]),
        ("2,3", ["0", "1", "2", "3"], ["2", "3", "2", "3"]),
        ("GPU-8f1c, GPU-22aa", ["0", "1"], ["GPU-8f1c", "GPU-22aa", "GPU-8f1c", "GPU-22aa"]),
        ("MIG-3b", ["0"], ["MIG-3b"] * 4),
        ("", ["0", "1"], [None] * 4),
        (None, [], [None] * 4),
    ],
)
def test_workers_stay_on_the_gpus_that_the_caller_allowed(
    visible: str | None, gpus: list[str], expected: list[str | None]
) -> None:
    """Catches the worker number modulo the count written back as an absolute index: "1" would become "0"."""
    assert [gpu_of_worker(f"gw{number}", visible, gpus) for number in range(4)] == expected


def test_a_run_without_workers_keeps_its_gpus() -> None:
    assert gpu_of_worker("main", "0,1", ["0", "1"]) is None


def test_gpus_are_counted_from_device_nodes(tmp_path: Path) -> None:
    for node in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / node).touch()
    assert physical_gpus(tmp_path) == ["0", "1", "10"]


def test_each_worker_has_one_thread_and_its_own_caches(tmp_path: Path) -> None:
    environments = [{"PYTEST_XDIST_WORKER": f"gw{number}"} for number in range(2)]
    for env in environments:
        prepare(env, cache=tmp_path, gpus=["0", "1"])
    first, second = environments
    assert first["OMP_NUM_THREADS"] == second["OMP_NUM_THREADS"] == "1"
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    for variable in CACHE_VARIABLES:
        assert first[variable] != second[variable]
        assert Path(first[variable]).is_dir()


def test_a_single_process_keeps_its_threads(tmp_path: Path) -> None:
    env: dict[str, str] = {}
    prepare(env, cache=tmp_path, gpus=[])
    assert "OMP_NUM_THREADS" not in env
    assert "CUDA_VISIBLE_DEVICES" not in env
