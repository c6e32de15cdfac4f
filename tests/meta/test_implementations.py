"""A user's own function: found where it is, refused in one sentence where it is not, held to the op's result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import oracle
from cases.schema import Case
from fast.registry import Unsupported
from tests.implementations import Implementation, UsageError, WrongResult, of_user, refuses_layout
from tests.judge import judge, skip_reason
from tests.meta.documents import case

STREAMS = {"residual": torch.ones(2, 4, 8, dtype=torch.bfloat16), "pre_mix": torch.ones(2, 4)}
COLLAPSED = oracle.collapse(STREAMS["residual"], STREAMS["pre_mix"])


def write(folder: Path, text: str) -> Path:
    path = folder / "kernels.py"
    path.write_text(f"import oracle\nimport torch\n{text}")
    return path


def test_a_function_in_a_file_is_called_with_the_ops_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, "def mine(residual, pre_mix):\n    return oracle.collapse(residual, pre_mix)\n")
    own = of_user(f"collapse={path}:mine")
    assert (own.op, own.name, own.accepts_out) == ("collapse", "impl-mine", False)
    assert torch.equal(own(STREAMS, {})[0], COLLAPSED)


def test_a_function_in_a_module_is_found() -> None:
    assert of_user("collapse=oracle.collapse:collapse").function is oracle.collapse


def test_a_file_is_found_from_where_the_command_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a path read in the project's folder, to which `./run` changes, and not in the caller's."""
    write(tmp_path, "def mine(residual, pre_mix): ...\n")
    monkeypatch.setenv("MHC_CALLED_FROM", str(tmp_path))
    assert of_user("collapse=kernels.py:mine").name == "impl-mine"


def test_a_file_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    """Catches a script without a main guard that ends the whole run while it is imported."""
    path = write(tmp_path, "raise SystemExit(3)\n")
    with pytest.raises(UsageError, match=r"importing .* raised SystemExit: 3"):
        of_user(f"collapse={path}:mine")


def test_a_function_that_only_writes_out_is_judged_by_out(tmp_path: Path) -> None:
    path = write(tmp_path, "def mine(residual, pre_mix, *, out):\n    out.copy_(oracle.collapse(residual, pre_mix))\n")
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    assert of_user(f"collapse={path}:mine")(STREAMS, {}, (out,))[0] is out


def test_how_a_function_takes_out_is_read_off_its_signature(tmp_path: Path) -> None:
    """Catches a kernel that must have out= called without, and one that may have it never given it."""
    text = "def without(residual, pre_mix): ...\ndef may(residual, pre_mix, out=None): ...\n"
    path = write(tmp_path, text + "def must(residual, pre_mix, *, out): ...\n")
    found = {name: of_user(f"collapse={path}:{name}") for name in ("without", "may", "must")}
    taken = {name: (own.accepts_out, own.needs_out) for name, own in found.items()}
    assert taken == {"without": (False, False), "may": (True, False), "must": (True, True)}


@pytest.mark.parametrize(
    ("error", "refuses"),
    [
        (ValueError("x must be contiguous"), True),
        (Unsupported("collapse: residual has strides [8, 2]"), True),
        (NotImplementedError("out: only 16-byte aligned tensors"), True),
        (ValueError("x must have H of at most 4096"), False),
        (RuntimeError("view size is not compatible with input tensor's size and stride"), False),
        (AssertionError("not contiguous"), False),
    ],
)
def test_a_refusal_of_a_layout_is_known_by_its_kind_and_words(error: Exception, refuses: bool) -> None:
    """Catches an accident of a kernel taken for a refusal."""
    assert refuses_layout(error) == refuses


PACKED, GAPPED = (case(inputs={"default": {"layout": layout}}) for layout in ("contiguous", "gapped"))
STRIDES, SIZE = "residual must be contiguous", "H must be at most 4096"


@pytest.mark.parametrize(
    ("error", "of_a_user", "on", "reason"),
    [
        (ValueError(STRIDES), True, GAPPED, f"refuses strides: {STRIDES}"),
        (NotImplementedError(f"{STRIDES}\nsee the manual"), True, GAPPED, f"refuses strides: {STRIDES}"),
        (Unsupported(STRIDES), True, GAPPED, f"refuses strides: {STRIDES}"),
        (ValueError(STRIDES), True, PACKED, ""),
        (Unsupported(STRIDES), True, PACKED, ""),
        (ValueError(STRIDES), False, GAPPED, ""),
        (ValueError(SIZE), True, GAPPED, ""),
        (Unsupported(SIZE), True, PACKED, SIZE),
        (Unsupported(SIZE), False, GAPPED, SIZE),
    ],
)
def test_what_excuses_a_kernel_in_a_case(error: Exception, of_a_user: bool, on: Case, reason: str) -> None:
    """Catches an excuse for inputs that every kernel must take, and one for the suite's own kernels."""
    kernel = Implementation("collapse", "mine", oracle.collapse, accepts_out=False, request="mine" if of_a_user else "")
    assert skip_reason(on, kernel, error) == reason


def late_refusal(residual: torch.Tensor, pre_mix: torch.Tensor) -> torch.Tensor:
    """Wrong with one fill of the pad rows, and refuses the next."""
    if bool(residual.isnan().any()):
        raise ValueError(STRIDES)
    return oracle.collapse(residual, pre_mix) * 2


def test_wrong_bits_before_a_refusal_are_not_forgotten() -> None:
    """Catches a wrong kernel that is skipped for what it raises on a later rank."""
    assert judge(GAPPED, Implementation("collapse", "mine", late_refusal, accepts_out=False, request="mine"), 2)


def test_optional_arguments_and_parameters_go_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def record(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        seen.update(options, positional=len(tensors))
        return (torch.zeros(1),) * 4

    tensors = {name: torch.zeros(1) for name in ("residual", "fn", "hc_scale", "hc_base", "pre_mix")}
    Implementation("pre_delayed", "mine", record, accepts_out=False)(tensors, {"config": 1})
    assert seen == {"positional": 4, "pre_mix": tensors["pre_mix"], "config": 1}


def test_what_a_users_function_warns_of_is_not_judged(tmp_path: Path) -> None:
    """Catches the suite's own strictness ending a user's run: Triton's interpreter warns of every Inf * 0."""
    warn = "    import warnings\n    warnings.warn('overflow encountered in multiply', RuntimeWarning)\n"
    path = write(tmp_path, f"def mine(residual, pre_mix):\n{warn}    return oracle.collapse(residual, pre_mix)\n")
    assert torch.equal(of_user(f"collapse={path}:mine")(STREAMS, {})[0], COLLAPSED)


@pytest.mark.parametrize(
    ("request_text", "words"),
    [
        ("collapse", "expects OP=FILE.py:FUNCTION or OP=MODULE:FUNCTION, got 'collapse'"),
        ("collapse=mine.py", "expects OP=FILE.py:FUNCTION or OP=MODULE:FUNCTION"),
        ("colapse=mine.py:f", "unknown op 'colapse', expected one of expand, collapse"),
        ("collapse=missing.py:f", "there is no file missing.py"),
        ("collapse=no_such_module_here:f", "importing no_such_module_here raised ModuleNotFoundError"),
        ("collapse=oracle.collapse:nothing", "oracle.collapse has no function 'nothing'"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_sentence(request_text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        of_user(request_text)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_raises_is_named_with_its_error(tmp_path: Path) -> None:
    path = write(tmp_path, "raise OSError('no driver')\n")
    with pytest.raises(UsageError, match="raised OSError: no driver"):
        of_user(f"collapse={path}:mine")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *_: None, "collapse must return one tensor (layer_input), mine returned a NoneType"),
        (lambda *_: 3.0, "mine returned a float"),
        (lambda *_: [torch.zeros(1), "x"], "mine returned a list of Tensor, str"),
        (lambda *_: (torch.zeros(1),) * 2, "mine returned 2"),
    ],
)
def test_a_wrong_kind_of_result_is_named(function: Callable[..., object], words: str) -> None:
    with pytest.raises(WrongResult) as raised:
        Implementation("collapse", "mine", function, accepts_out=False)(STREAMS, {})
    assert words in str(raised.value)
