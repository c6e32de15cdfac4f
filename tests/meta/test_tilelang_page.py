"""The page about TileLang on a CPU: its kernel is exact, its guard is needed, and its first table of traps is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fast
from cases.schema import Case
from oracle.arith import bits, from_bits
from tests.implementations import of_user
from tests.judge import judge
from tests.meta.documents import case
from tests.subjects import subject

PAGE = (Path(__file__).parents[2] / "docs" / "tilelang.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
GUARD = "  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;\n"
FULL_NAN, ONE = "7fffffff", "3f800000"
PLAIN = """
import tilelang
import tilelang.language as T


def compiled(result, dtype):
    @T.prim_func
    def plain(given: T.Tensor((1,), dtype), out: T.Tensor((1,), dtype)):
        with T.Kernel(1, threads=1):
            for i in T.serial(1):
                out[i] = result(given[i])

    return tilelang.compile(plain, target="c", execution_backend="cython")


def not_itself(v):
    return T.if_then_else(v != v, T.float32(1), T.float32(2))


def there_and_back(v):
    return (v + T.float32(8388608)) - T.float32(8388608)


def minus_itself(v):
    return v - v


def times_zero(v):
    return v * T.float32(0)


def zero_plus(v):
    return T.float32(0) + v


def itself(v):
    return v
"""


@pytest.fixture(autouse=True)
def quiet_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where TileLang cannot compile for the CPU; its two lines for each kernel are no part of a test's output."""
    found = fast.probe("cpu")["tilelang"]
    if not found.available:
        pytest.skip(found.reason)
    monkeypatch.setenv("TILELANG_PRINT_ON_COMPILATION", "0")


def judged(path: Path, source: str, one: Case) -> int:
    """How many failures the kernel in `source` has on a case, at every tp of the case."""
    path.write_text(source)
    kernel = of_user(f"collapse={path}:my_collapse")
    return sum(len(judge(one, kernel, tp)) for tp in one.tp)


def nan_weights(n: int) -> Case:
    """Two tokens of n streams; the last weight of the first token is the NaN of a GPU, all others are 1."""
    weights = {"recipe": "bits", "bits": [*[ONE] * (n - 1), FULL_NAN, *[ONE] * n]}
    return case(tokens=2, hc_mult=n, inputs={"arguments": {"pre_mix": weights}})


def laid_out(layout: str) -> Case:
    """A case whose inputs both lie otherwise than packed."""
    return subject("collapse", tokens=5, inputs={"default": {"recipe": "cancelling", "layout": layout}})


CASES = {
    **{f"nan-n{n}": nan_weights(n) for n in (1, 2, 3, 4)},
    **{f"tail-h{hidden}": subject("collapse", tokens=5, hidden=hidden) for hidden in (1, 127, 128, 129)},
    "streams-n8": subject("collapse", tokens=17, hc_mult=8),
    "no-tokens": subject("collapse", tokens=0),
    "ties": subject("collapse", tokens=3, inputs={"default": {"recipe": "near_tie"}}),
    "special": subject("collapse", tokens=3, inputs={"default": {"recipe": "special"}}),
    "transposed": laid_out("transposed"),
    "gapped": laid_out("gapped"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_of_the_page_is_exact(name: str, tmp_path: Path) -> None:
    """Catches an example that no longer compiles, or that has a fault which every reader would copy."""
    assert judged(tmp_path / "my_collapse.py", EXAMPLE, CASES[name]) == 0


@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [
        (GUARD, "", "nan-n1"),
        (GUARD, "", "nan-n4"),
        (" + ((bits >> 16) & 1u)", " + 1u", "ties"),
        ("residual.contiguous()", "residual", "gapped"),
        ("residual[t, i, h]", "residual[t, streams - 1 - i, h]", "streams-n8"),
    ],
    ids=["guard-n1", "guard-n4", "to-even", "packing", "order"],
)
def test_what_the_page_explains_is_needed(right: str, wrong: str, name: str, tmp_path: Path) -> None:
    """Catches cases above that would pass an example without its NaN guard, its rounding, its packing or its order."""
    assert EXAMPLE.count(right) == 1
    assert judged(tmp_path / "my_wrong.py", EXAMPLE.replace(right, wrong), CASES[name]) > 0


def plain(folder: Path, function: str, dtype: str = "float32") -> Any:
    """The kernel that applies one function of PLAIN to one value."""
    path = folder / "plain.py"
    path.write_text(PLAIN)
    module = of_user(f"collapse={path}:{function}").function.__globals__
    return module["compiled"](module[function], dtype)


@pytest.mark.parametrize(
    ("function", "given", "made"),
    [
        ("not_itself", 0x7FC00000, 2.0),
        ("there_and_back", 0x3DCCCCCD, from_bits(torch.tensor(0x3DCCCCCD, dtype=torch.int32)).item()),
        ("minus_itself", 0x7F800000, 0.0),
        ("times_zero", 0x7F800000, 0.0),
        ("zero_plus", -0x80000000, -0.0),
    ],
)
def test_the_simplifier_does_what_the_page_says(function: str, given: int, made: float, tmp_path: Path) -> None:
    """Catches a page that warns of algebra which the installed TileLang no longer does: kernels owe it their leaves."""
    out = torch.full((1,), torch.nan)
    plain(tmp_path, function)(from_bits(torch.tensor([given], dtype=torch.int32)), out)
    assert torch.equal(bits(out), bits(torch.tensor([made])))


def test_a_bf16_parameter_fails_as_the_page_says(tmp_path: Path) -> None:
    """Catches a page whose error message a search no longer finds."""
    message = "Cannot convert type bfloat16 to C type"
    assert message in " ".join(PAGE.split())
    with pytest.raises(Exception, match=message):
        plain(tmp_path, "itself", "bfloat16")
