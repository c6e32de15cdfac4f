"""Every planted wrong TileLang kernel is caught on the CPU, by the case that names its class.

These are the tests of the tests for the code that `./run check --backend tilelang` judges: the kernels' own files with
one fault each, compiled by the C target, called and compared as any kernel is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cases.flags import glossary
from cases.load import load_all
from fast.backends import probe
from tests.implementations import Implementation
from tests.judge import judge
from tests.mutants.tilelang import NO_KERNEL, PLANTED, Planted
from tests.mutants.tilelang_edits import CACHE, Edit, edited

ALL = {case.name: case for case in load_all()}
JUDGED = sorted({(planted.op, planted.case, planted.tp) for planted in PLANTED})
PLANTED_KINDS = {planted.kind for planted in PLANTED}
BLANKED = Edit("collapse", "round_to(o, v, total, stream)", "pass")
HERE = probe("cpu")["tilelang"]

compiles = pytest.mark.skipif(not HERE.available, reason=HERE.reason)
Kernels = Callable[[str], Implementation]


@pytest.fixture(scope="module")
def cache() -> Path:
    """Where planted kernels are kept from run to run: beside this worker's right ones, never among them."""
    return Path(os.environ[CACHE]).with_name("planted_cache")


@pytest.fixture(scope="module")
def right(cache: Path) -> Iterator[Kernels]:
    """The kernels with nothing edited, loaded as the planted ones are."""
    with edited((), cache) as kernels:
        yield kernels


@compiles
@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_it_is_caught(planted: Planted, cache: Path) -> None:
    """A case sees its class in a real kernel too, where the fault is not the oracle's with other words."""
    assert planted.kind in ALL[planted.case].catches
    with edited(planted.edits, cache) as kernels:
        assert judge(ALL[planted.case], kernels(planted.op), planted.tp)


@compiles
@pytest.mark.parametrize(("op", "case", "tp"), JUDGED)
def test_the_right_kernel_is_exact_by_the_same_road(op: str, case: str, tp: int, right: Kernels) -> None:
    """Nothing but the fault is seen: neither the loading nor the smaller blocks change a bit."""
    assert judge(ALL[case], right(op), tp) == []


def test_every_class_is_planted_or_is_no_kernels_fault() -> None:
    """Catches a class of the glossary that was never tried in TileLang, and a reason that a planted kernel refutes."""
    untried = set(glossary("catches")) - PLANTED_KINDS - set(NO_KERNEL)
    assert not untried, "plant these in tests/mutants/tilelang.py, or say in its NO_KERNEL why no kernel has them"
    assert PLANTED_KINDS | set(NO_KERNEL) <= set(glossary("catches"))
    assert not PLANTED_KINDS & set(NO_KERNEL)


def test_each_is_planted_once() -> None:
    """Catches two entries of one name, of which a report could not say which was caught."""
    assert len({str(planted) for planted in PLANTED}) == len(PLANTED)


@compiles
def test_a_planted_kernel_leaves_the_right_ones_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an edit that reaches the real kernels, in their modules or in what they compiled."""
    import fast
    from fast.tilelang_kernels import build

    monkeypatch.setenv(CACHE, str(tmp_path / "right"))
    case, before = ALL["collapse-ties"], build._compiled.cache_info()
    with edited([BLANKED], tmp_path / "planted") as kernels:
        assert judge(case, kernels("collapse"), 1)
    assert build._compiled.cache_info() == before
    assert not (tmp_path / "right").exists()
    assert any((tmp_path / "planted").iterdir())
    assert os.environ[CACHE] == str(tmp_path / "right")
    assert judge(case, Implementation("collapse", "tilelang", fast.kernel("collapse", "tilelang"), True), 1) == []


@compiles
@pytest.mark.parametrize(
    ("op", "edit", "says"),
    [
        ("collapse", Edit("collapse", "no such words", "x"), "collapse.py has these words 0 times, not once"),
        ("collapse", Edit("collapse", "total", "x"), r"collapse.py has these words \d+ times, not once"),
        ("collapse", Edit("norm", "if unrounded == 0:", "if True:"), "collapse does not read norm"),
    ],
)
def test_an_edit_that_changes_nothing_is_refused(op: str, edit: Edit, says: str, tmp_path: Path) -> None:
    """Catches a planted kernel that is the right one, since its source moved on: it would seem never to be caught."""
    with edited([edit], tmp_path) as kernels, pytest.raises(ValueError, match=says):
        kernels(op)
