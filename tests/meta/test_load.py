"""The loader: order, names, and one sentence for every bad file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.load import CaseError, case_files, find_case, load_all, load_case, shown
from tests.meta.documents import write


def said(path: Path) -> str:
    """The message with which a file is refused."""
    with pytest.raises(CaseError) as fault:
        load_case(path)
    message = str(fault.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_all_committed_cases_load_in_order() -> None:
    """Catches a bad committed file, and an order that depends on the file system."""
    every = load_all()
    names = [case.name for case in every]
    assert names == sorted(names)
    assert len(names) >= 300
    assert len({case.title for case in every}) == len(every), "two cases say that they pin the same"


def test_flags_are_no_case() -> None:
    """Catches a loader that takes the glossary for a case."""
    assert not [path for path in case_files() if path.name == "flags.toml"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hiden": 16}, ("hiden", "expected no such key (did you mean hidden?)", "got 16")),
        ({"zzz": 16}, ("zzz: expected no such key, got 16",)),
        ({"tokens": 10**23}, ("tokens: expected at most 1048576, got 1000",)),
        ({"hidden": None}, ("hidden", "expected a number for op collapse", "got none")),
        ({"op": "colapse"}, ("op", "expected one of expand, collapse", "got 'colapse'")),
        ({"flags": ["ordr"]}, ("flags.0", "[flags] in flags.toml", "got 'ordr'")),
        ({"catches": ["x"]}, ("catches.0", "[catches] in flags.toml", "got 'x'")),
        ({"catches": []}, ("catches: expected 1 or more items", "got []")),
        (
            {"shows": {"reversed-order": {"post": ["residual"]}}},
            ("shows.reversed-order.post: expected a stage of collapse (collapse)", "got 'post'"),
        ),
        ({"tokens": "3"}, ("tokens", "expected an integer", "got '3'")),
        ({"tp": [3]}, ("tp.0", "expected 1, 2, 4 or 8", "got 3")),
        ({"source": "web"}, ("source", "expected text that matches", "got 'web'")),
        (
            {"inputs": {"arguments": {"pre_mix": {"layout": "rows"}}}},
            ("inputs.arguments.pre_mix.layout", "'contiguous'", "got 'rows'"),
        ),
        ({"rows": 3}, ("rows", "expected nothing", "got 3")),
    ],
)
def test_a_bad_key_is_named(tmp_path: Path, change: dict[str, object], words: tuple[str, ...]) -> None:
    """Catches a message that does not name the key, what was expected and what came."""
    message = said(write(tmp_path, **change))
    for word in words:
        assert word in message


def test_several_faults_are_listed(tmp_path: Path) -> None:
    """Catches a message that hides how much is wrong, and one of pages."""
    both = said(write(tmp_path, hiden=1, tokns=2))
    assert "hiden: expected" in both
    assert "; tokns: expected" in both
    assert said(write(tmp_path, **{f"key{i}": i for i in range(8)})).endswith("(and 3 more)")


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    """Catches a parser's traceback."""
    path = tmp_path / "broken.toml"
    path.write_text("schema = = 1\n")
    assert "expected TOML" in said(path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    """Catches a decoder's traceback."""
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "expected a readable case file, got bytes that are not UTF-8" in said(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Catches an operating system's traceback."""
    assert "expected a readable case file, got No such file" in said(tmp_path / "none.toml")


def test_a_file_of_another_name(tmp_path: Path) -> None:
    """Catches a copied case that keeps its old name: reports would name the wrong file."""
    path = write(tmp_path).rename(tmp_path / "other.toml")
    assert "name: expected 'other'" in said(path)


def test_a_name_used_twice(tmp_path: Path) -> None:
    """Catches two directories that hold the same name: one of the cases would never be selected."""
    for directory in ("edge", "regressions"):
        (tmp_path / directory).mkdir()
        write(tmp_path / directory)
    with pytest.raises(
        CaseError, match=r"regressions/a-case\.toml: name: .* got 'a-case', which .*edge/a-case\.toml has"
    ):
        load_all(tmp_path)


def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    """Catches a mistyped directory that reads as no cases at all."""
    with pytest.raises(CaseError, match="expected a directory of case files"):
        load_all(tmp_path / "none")


def test_a_case_is_found_by_name(tmp_path: Path) -> None:
    """Catches a search that takes a prefix for the name."""
    path = write(tmp_path)
    assert find_case("a-case", tmp_path) == path
    with pytest.raises(CaseError, match=r"expected the name of a case, got 'a-cas'; did you mean a-case\?"):
        find_case("a-cas", tmp_path)
    with pytest.raises(CaseError, match=r"expected the name of a case, got 'zzz'$"):
        find_case("zzz", tmp_path)


def test_paths_are_shown_from_the_project() -> None:
    """Catches messages with a machine's own directories in them."""
    assert shown(case_files()[0]).startswith("cases/edge/")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tokens = " + "9" * 5000, "expected TOML, got Exceeds the limit"),
        ("tp = " + "[" * 20_000 + "]" * 20_000, "expected TOML, got arrays or tables nested too deeply"),
    ],
    ids=["digits", "nesting"],
)
def test_a_hostile_text_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    """Catches what the TOML reader raises that is no TOMLDecodeError."""
    path = tmp_path / "a-case.toml"
    path.write_text(text)
    assert words in said(path)


def test_a_loop_of_links_is_one_sentence(tmp_path: Path) -> None:
    """Catches a path that cannot be resolved, in the message about it."""
    path = tmp_path / "a-case.toml"
    path.symlink_to(path)
    assert "expected a readable case file, got Too many levels of symbolic links" in said(path)
