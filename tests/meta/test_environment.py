"""What a worker's environment becomes: GPUs that the caller allowed, threads, compile caches of its own."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.environment import (
    CACHE_VARIABLES,
    gpu_of_worker,
    physical_gpus,
    prepare,
    shares_of_gpu,
    visible_gpus,
    workers_for,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        (None, ["0", "1"], ["0", "1", "0", "1"]),
        ("1", ["0", "1"], ["1", "1", "1", "1"]),
        ("2,3", ["0", "1", "2", "3"], ["2", "3", "2", "3"]),
        ("0,-1,1", ["0", "1"], ["0"] * 4),
        ("GPU-8f1c, GPU-22aa", ["0", "1"], ["GPU-8f1c", "GPU-22aa", "GPU-8f1c", "GPU-22aa"]),
        ("MIG-3b", ["0"], ["MIG-3b"] * 4),
        ("", ["0", "1"], [None] * 4),
        ("0,0", ["0", "1"], [None] * 4),
        (None, [], [None] * 4),
        ("0", [], [None] * 4),
    ],
)
def test_workers_stay_on_the_gpus_that_the_caller_allowed(
    visible: str | None, gpus: list[str], expected: list[str | None]
) -> None:
    """Catches the worker number modulo the count written back as an absolute number: "1" would become "0"."""
    assert [gpu_of_worker(f"gw{number}", visible, gpus) for number in range(4)] == expected


def test_a_run_without_workers_keeps_its_gpus() -> None:
    assert gpu_of_worker("main", "0,1", ["0", "1"]) is None


@pytest.mark.parametrize(
    ("nodes", "numbers"),
    [(("nvidia0", "nvidia1"), ["0", "1"]), (("nvidia3",), ["0"]), (("nvidia2", "nvidia10"), ["0", "1"]), ((), [])],
)
def test_gpus_are_counted_as_cuda_counts_them(nodes: tuple[str, ...], numbers: list[str], tmp_path: Path) -> None:
    """Catches a host's number for a GPU given to CUDA in a container: every worker would see none."""
    for node in (*nodes, "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / node).touch()
    assert physical_gpus(tmp_path) == numbers


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", ["0"]),
        ("1,0", ["1", "0"]),
        (" 0 , 1", ["0", "1"]),
        ("+1,00", ["1", "0"]),
        ("1st,0", ["1", "0"]),
        ("0;1", ["0"]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        (",0", []),
        ("0,-1,1", ["0"]),
        ("0,,1", ["0"]),
        ("0,1,7", ["0", "1"]),
        ("7,0", []),
        ("0,0", []),
        ("0,1,0", []),
        ("0,7,7", []),
        ("0,-1,0", ["0"]),
        ("0,GPU-a", ["0"]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        ("GPU-a,GPU-a", []),
        ("GPU-a,0", ["GPU-a"]),
        ("GPU-a,MIG-b", ["GPU-a"]),
        (" GPU-a", []),
        ("MIG-GPU-a/1/0,MIG-GPU-a/2/0", ["MIG-GPU-a/1/0", "MIG-GPU-a/2/0"]),
    ],
)
def test_the_visible_gpus_are_those_that_torch_sees(
    visible: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a list read on past the entry at which CUDA stops, and "no GPU" written in a way taken for a GPU.

    Held to torch's own parser, up to a number past the last GPU, where torch stops once it has counted them.
    """
    gpus = ["0", "1"]
    assert visible_gpus(visible, gpus) == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    listed = [str(entry) for entry in torch.cuda._parse_visible_devices()]
    assert list(itertools.takewhile(lambda entry: not entry.isdecimal() or entry in gpus, listed)) == expected


def test_a_list_that_torch_does_not_read_is_read() -> None:
    """Catches Python's refusal of integers with thousands of digits, and an identifier lost for the space before it."""
    assert visible_gpus("9" * 5000, ["0"]) == []
    assert visible_gpus("GPU-a, GPU-b", ["0", "1"]) == ["GPU-a", "GPU-b"]


def test_each_worker_has_one_thread_and_its_own_caches(tmp_path: Path) -> None:
    environments = [{"PYTEST_XDIST_WORKER": f"gw{number}"} for number in range(2)]
    for env in environments:
        prepare(env, cache=tmp_path, gpus=[])
    first, second = environments
    assert first["OMP_NUM_THREADS"] == second["OMP_NUM_THREADS"] == "1"
    for variable in CACHE_VARIABLES:
        assert first[variable] != second[variable]
        assert Path(first[variable]).is_dir()


def test_a_single_process_keeps_its_threads(tmp_path: Path) -> None:
    env: dict[str, str] = {}
    prepare(env, cache=tmp_path, gpus=[])
    assert "OMP_NUM_THREADS" not in env
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_workers_on_gpus_share_what_was_compiled(tmp_path: Path) -> None:
    """Catches every worker compiling every kernel anew, and compilers that share a scratch folder."""
    environments = [{"PYTEST_XDIST_WORKER": f"gw{number}"} for number in range(2)]
    for env in environments:
        prepare(env, cache=tmp_path, gpus=["0", "1"])
    first, second = environments
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert first["TRITON_CACHE_DIR"] == second["TRITON_CACHE_DIR"]
    assert first["TILELANG_TMP_DIR"] != second["TILELANG_TMP_DIR"]


@pytest.mark.parametrize(
    ("cores", "gpus", "memory", "expected"),
    [
        (16, 1, 139 * GIB, 16),
        (4, 1, 139 * GIB, 4),
        (128, 8, 139 * GIB, 128),
        (64, 1, 80 * GIB, 9),
        (16, 2, 24 * GIB, 2),
        (16, 1, 15 * GIB, 1),
        (16, 1, 0, 1),
        (16, 2, -5, 2),
        (0, 1, 139 * GIB, 1),
        (16, 0, 139 * GIB, 1),
    ],
)
def test_a_gpu_machine_gets_as_many_workers_as_it_holds(cores: int, gpus: int, memory: int, expected: int) -> None:
    """Catches a worker for each core of a machine whose GPU has room for nine, and a count of zero or below."""
    assert workers_for(cores, gpus, memory) == expected


@pytest.mark.parametrize("need", [0, -1])
def test_a_worker_needs_memory(need: int) -> None:
    """Catches a division by zero, or a negative count of workers."""
    with pytest.raises(ValueError, match="need must be at least 1 byte"):
        workers_for(16, 1, 139 * GIB, need)


@pytest.mark.parametrize(
    ("env", "total", "shares"),
    [
        ({}, 139, (139, 139)),
        ({"PYTEST_XDIST_WORKER_COUNT": "16", "MHC_GPU_COUNT": "1"}, 136, (6, 30)),
        ({"PYTEST_XDIST_WORKER_COUNT": "2", "MHC_GPU_COUNT": "2"}, 24, (24, 24)),
        ({"PYTEST_XDIST_WORKER_COUNT": "5", "MHC_GPU_COUNT": "2"}, 48, (7, 31)),
        ({"PYTEST_XDIST_WORKER_COUNT": "3", "MHC_GPU_COUNT": "1"}, 24, (8, 8)),
        ({"PYTEST_XDIST_WORKER_COUNT": "0", "MHC_GPU_COUNT": "0"}, 24, (24, 24)),
    ],
)
def test_workers_divide_the_memory_of_their_gpu(env: dict[str, str], total: int, shares: tuple[int, int]) -> None:
    """Catches shares that add up, with one turn, to more than a GPU has, and one GPU taken for all of them."""
    assert [round(share * total, 6) for share in shares_of_gpu(env, total * GIB)] == list(shares)


def test_a_worker_knows_how_many_gpus_all_workers_share(tmp_path: Path) -> None:
    """Catches a worker that sees its own GPU alone and takes its memory for itself and no other."""
    env = {"PYTEST_XDIST_WORKER": "gw3", "CUDA_VISIBLE_DEVICES": "1,3", "PYTEST_XDIST_WORKER_COUNT": "4"}
    prepare(env, cache=tmp_path, gpus=["0", "1", "2", "3"])
    assert (env["CUDA_VISIBLE_DEVICES"], shares_of_gpu(env, 24 * GIB)) == ("3", (0.5, 0.5))
    assert visible_gpus("", ["0"]) == []
