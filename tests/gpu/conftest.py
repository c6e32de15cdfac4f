"""Marks the tests of this folder, and skips them, with the reason, where kernels run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.ops import OPS

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        if not item.get_closest_marker("more_than_a_gpu"):
            item.add_marker(pytest.mark.gpu)
    pointless = {item for item in here if not _has_what_it_is_for(item)}
    items[:] = [item for item in items if item not in pointless]
    config.hook.pytest_deselected(items=list(pointless))


def _has_what_it_is_for(item: pytest.Item) -> bool:
    """Whether the op of a test has the tokens or streams that the test is about."""
    marker = item.get_closest_marker("ops_with")
    if marker is None or not isinstance(item, pytest.Function) or "kernel_op" not in item.callspec.params:
        return True
    op = OPS.get(str(item.callspec.params["kernel_op"]))
    wanted = {"tokens": {"T"}, "streams": {"T", "n", "H"}}[marker.args[0]]
    if op is None:
        return True
    dims = [*(argument.dims for argument in op.arguments), *(output.dims for output in op.outputs)]
    return any(wanted <= set(one) for one in dims)


@pytest.fixture(autouse=True)
def _needs_cuda(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device; kernels run on the CPU here")
