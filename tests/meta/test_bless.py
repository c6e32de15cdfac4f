"""Blessing: what it changes, what it keeps, and that no failure costs the old file."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest

from cases.bless import apply, expected_digests, outputs_of, propose, replace_file
from cases.load import CaseError, load_case
from tests.meta.documents import case, write

TODAY = date(2026, 9, 30)
REASON = "a reason long enough to be read"


def blessed(directory: Path, **changes: object) -> Path:
    """A case file with the oracle's digests."""
    path = write(directory, **changes)
    apply(propose(path, REASON, TODAY))
    return path


def test_blessing_writes_digests_and_history(tmp_path: Path) -> None:
    """Catches a blessing that forgets an output, the contract or the reason."""
    made = load_case(blessed(tmp_path))
    assert made.expected is not None
    assert made.expected.digests == expected_digests(made)
    assert [(entry.date, entry.contract, entry.reason) for entry in made.history] == [(TODAY, 1, REASON)]


def test_what_a_person_wrote_stays(tmp_path: Path) -> None:
    """Catches a rewrite of the whole file, which loses comments and order."""
    path = write(tmp_path)
    head = f"# why this case exists\n{path.read_text()}"
    path.write_text(head)
    for _ in range(2):
        apply(propose(path, REASON, TODAY))
    assert path.read_text().startswith(head)


def test_a_case_with_nan_patches_can_be_blessed(tmp_path: Path) -> None:
    """Catches a comparison of the case before and after in which NaN differs from itself."""
    patches = [{"index": [0], "value": float("nan")}]
    assert load_case(blessed(tmp_path, inputs={"arguments": {"residual": {"set": patches}}})).expected is not None


def test_a_second_blessing_adds_to_the_history(tmp_path: Path) -> None:
    """Catches a history that keeps its last entry only."""
    path = blessed(tmp_path)
    apply(propose(path, "another good reason", date(2026, 10, 1)))
    assert [entry.reason for entry in load_case(path).history] == [REASON, "another good reason"]


def test_a_change_is_shown_before_it_is_made(tmp_path: Path) -> None:
    """Catches a proposal that writes, and one that hides which output moves."""
    path = blessed(tmp_path)
    path.write_text(path.read_text().replace("tokens = 3", "tokens = 5"))
    before = path.read_text()
    change = propose(path, REASON, TODAY)
    assert path.read_text() == before
    assert change.differs
    assert [line.split(":")[1].strip() for line in change.lines()] == ["layer_input"]
    apply(change)
    assert not propose(path, REASON, TODAY).differs


def test_a_reason_is_needed(tmp_path: Path) -> None:
    """Catches digests that nobody answers for."""
    path = write(tmp_path)
    with pytest.raises(CaseError, match="--reason: expected 10 characters or more"):
        propose(path, "  fix  ", TODAY)


def test_a_bad_file_is_refused_untouched(tmp_path: Path) -> None:
    """Catches a blessing that repairs, or destroys, what it cannot read."""
    path = blessed(tmp_path)
    bad = path.read_text().replace("hidden = 16", "hiden = 16")
    path.write_text(bad)
    with pytest.raises(CaseError, match="hiden: expected no such key"):
        propose(path, REASON, TODAY)
    assert path.read_text() == bad


def test_keys_below_the_tail_are_not_lost(tmp_path: Path) -> None:
    """Catches a tail that is cut off together with a table that a person put under it."""
    path = blessed(tmp_path)
    text = path.read_text() + '\n[inputs.default]\nrecipe = "cancelling"\n'
    path.write_text(text)
    with pytest.raises(CaseError, match=r"expected \[expected\] and \[\[history\]\] to be its last tables"):
        propose(path, REASON, TODAY)
    assert path.read_text() == text


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_blessing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Catches a file opened for writing in place: a full disk or a kill would leave half of it."""
    path = blessed(tmp_path)
    before = path.read_text()

    def interrupted(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, interrupted)
    with pytest.raises(CaseError, match="expected to replace it, got No space left"):
        replace_file(path, "half a fi")
    assert path.read_text() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_killed_blessing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a temporary file that the loader would take for a case, if a kill leaves it behind."""
    path = blessed(tmp_path)
    before = path.read_text()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(Path, "unlink", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, "half a fi")
    assert path.read_text() == before
    assert [file.name for file in tmp_path.glob("*.toml")] == [path.name]


def test_a_directory_that_refuses_is_named(tmp_path: Path) -> None:
    """Catches an operating system's traceback."""
    with pytest.raises(CaseError, match="expected to write beside it, got No such file"):
        replace_file(tmp_path / "none" / "a-case.toml", "text")


def test_an_edit_made_since_is_kept(tmp_path: Path) -> None:
    """Catches a run over many files that writes what it read minutes ago over what somebody saved since."""
    path = write(tmp_path)
    change = propose(path, REASON, TODAY)
    edited = path.read_text() + "# a comment\n"
    path.write_text(edited)
    with pytest.raises(CaseError, match="expected the file as it was read, got one edited since"):
        apply(change)
    assert path.read_text() == edited


def test_a_link_stays_one(tmp_path: Path) -> None:
    """Catches a link replaced by a copy, which leaves the file that it led to unblessed."""
    (tmp_path / "elsewhere").mkdir()
    path = write(tmp_path / "elsewhere")
    link = tmp_path / path.name
    link.symlink_to(path)
    apply(propose(link, REASON, TODAY))
    assert link.is_symlink()
    assert load_case(path).expected is not None


def test_permissions_are_kept(tmp_path: Path) -> None:
    """Catches a replaced file that only its writer can read."""
    path = write(tmp_path)
    path.chmod(0o664)
    apply(propose(path, REASON, TODAY))
    assert path.stat().st_mode & 0o777 == 0o664


def test_outputs_are_the_oracles_in_order() -> None:
    """Catches outputs paired with each other's names."""
    config = {"preset": "v41"}
    made = case(op="pre_delayed", config=config, inputs={"arguments": {"pre_mix": {"recipe": "normal"}}})
    shapes = {name: tuple(tensor.shape) for name, tensor in outputs_of(made).items()}
    assert shapes == {"post_mix": (3, 4), "comb_mix": (3, 4, 4), "layer_input": (3, 16), "next_pre_mix": (3, 4)}


def test_the_oracles_refusal_is_one_sentence() -> None:
    """Catches a traceback for inputs that the oracle cannot take."""
    short = {"recipe": "bits", "bits": ["3f800000"]}
    with pytest.raises(CaseError, match=r"^a-case: inputs\.arguments\.pre_mix\.bits: expected 12 patterns, got 1$"):
        outputs_of(case(inputs={"arguments": {"pre_mix": short}}))
