"""`python -m cases new|lint|show|bless|list|schema`: make, check, look at, bless and list case files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases.flags import CASES_DIR, glossary
from cases.lint import faults
from cases.load import CaseError, case_files, find_case, from_caller, load_all, load_case, parse_case, shown
from cases.ops import OPS
from cases.schema import json_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from cases.schema import Case

FAULTS_FOUND = 1
USAGE_ERROR = 2
_FIRST_VALUES = 6
_LOOKING = "a dry run, which writes nothing"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, 1 when lint found faults, or 2 after one sentence on stderr about a misuse."""
    options = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        status = command(options)
        sys.stdout.flush()
    except CaseError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cases", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_new(commands)
    _add_lint(commands)
    show = commands.add_parser("show", help="print a case's inputs, results and digests")
    show.add_argument("case", help="name or file of a case")
    show.set_defaults(command=_show)
    _add_bless(commands)
    _add_list(commands)
    schema = commands.add_parser("schema", help="print the JSON schema of a case file")
    schema.set_defaults(command=_schema)
    return parser


def _add_new(commands: Any) -> None:
    new = commands.add_parser("new", help="write the scaffold of a case file")
    new.set_defaults(command=_new)
    new.add_argument("name", help="kebab-case name, unique among all cases")
    new.add_argument("--op", required=True, choices=list(OPS), metavar="OP", help=f"one of {', '.join(OPS)}")
    new.add_argument("--title", required=True, help="one sentence: what the case pins")
    new.add_argument("--flags", required=True, nargs="+", metavar="FLAG", help="words of [flags] in flags.toml")
    new.add_argument("--catches", required=True, nargs="+", metavar="WORD", help="words of [catches]: wrong kernels")
    new.add_argument("--source", required=True, help="'design:6', 'upstream:3.3', or 'https://... YYYY-MM-DD'")
    new.add_argument("--tokens", type=int, default=5)
    new.add_argument("--hc-mult", type=int, default=4)
    new.add_argument("--hidden", type=int, default=64)
    new.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8])
    new.add_argument("--recipe", default="normal", help="recipe of all arguments")
    new.add_argument("--preset", help="v4 or v41 (the default), only for ops with a config")
    new.add_argument("--into", default=str(CASES_DIR / "edge"), help="directory (default: cases/edge)")


def _add_lint(commands: Any) -> None:
    lint = commands.add_parser("lint", help="check case files; all of them when none is named")
    lint.add_argument("case", nargs="*", help="names or files of cases")
    lint.add_argument("--root", default=str(CASES_DIR), help="directory of all cases (default: cases)")
    lint.add_argument("--recompute", action="store_true", help="also compare every digest with the oracle's")
    lint.set_defaults(command=_lint)


def _add_bless(commands: Any) -> None:
    bless = commands.add_parser("bless", help="set expected digests from the oracle")
    bless.add_argument("case", nargs="+", help="names or files of cases")
    bless.add_argument("--reason", help="why these bits are right; kept in the file's history")
    bless.add_argument("--dry-run", action="store_true", help="show what would change, write nothing; needs no reason")
    bless.set_defaults(command=_bless)


def _add_list(commands: Any) -> None:
    listing = commands.add_parser("list", help="list cases, one a line")
    listing.add_argument("--op", choices=list(OPS), metavar="OP")
    listing.add_argument("--flag", choices=list(glossary("flags")), metavar="FLAG")
    listing.add_argument("--catches", choices=list(glossary("catches")), metavar="WORD")
    listing.set_defaults(command=_list)


def _new(options: argparse.Namespace) -> int:
    path = from_caller(options.into) / f"{options.name}.toml"
    taken = [file for file in (path, *case_files()) if file.stem == options.name and file.exists()]
    if taken:
        raise CaseError(f"new: expected a name that no case has, got {options.name!r}, which {shown(taken[0])} has")
    if not path.parent.is_dir():
        raise CaseError(f"--into: expected a directory, got {options.into!r}")
    text = _scaffold(options)
    parse_case(text, f"new {options.name}")

    from cases.bless import replace_file

    replace_file(path, text)
    print(f"wrote {shown(path)}\n{_next_steps(path, options)}")
    return 0


def _next_steps(path: Path, options: argparse.Namespace) -> str:
    """What makes a case of the scaffold; one outside cases/ has no name that the commands find."""
    if not Path(os.path.realpath(path)).is_relative_to(CASES_DIR):
        return f"no run reads it there: move it into cases/, or only look at it with ./run cases show {path}"
    return (
        f"edit it, then: ./run cases bless {options.name} --reason '...'\n"
        f"what it catches: ./run test tests/test_mutants.py -k {options.name}"
    )


def _scaffold(options: argparse.Namespace) -> str:
    """The text of a new case file, its keys in the order in which a reader wants them."""
    op = OPS[options.op]
    keys: dict[str, object] = {"schema": 1, "name": options.name, "title": options.title, "op": op.name}
    sizes = {"tokens": "T", "hc_mult": "nMK", "hidden": "HK"}
    keys |= {size: getattr(options, size) for size, dims in sizes.items() if not op.dims.isdisjoint(dims)}
    keys["tp"] = options.tp if "T" in op.dims else [1]
    keys |= {"flags": options.flags, "catches": options.catches, "source": options.source}
    tables: dict[str, dict[str, object]] = {"inputs.default": {"recipe": options.recipe}}
    plain = {name: _PLAIN[name] for name in op.parameters if name in _PLAIN}
    if "numel" in plain:
        plain["numel"] = options.hc_mult * options.hidden
    if plain:
        tables["params"] = plain
    if "config" in op.parameters:
        tables["config"] = {"preset": options.preset or "v41"}
    elif options.preset is not None:
        raise CaseError(f"--preset: expected none for op {op.name}, which has no config, got {options.preset!r}")
    return "\n".join([_lines(keys), *(f"[{name}]\n{_lines(table)}" for name, table in tables.items())])


def _lines(table: dict[str, object]) -> str:
    """Keys of a TOML table, arrays on one line; JSON writes plain values as TOML does."""
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in table.items())


_PLAIN: dict[str, object] = {
    "numel": 1,
    "rms_eps": 1e-20,
    "norm_eps": 1e-20,
    "squares_of": "rounded",
    "sinkhorn_iters": 20,
    "sinkhorn_eps": 1e-6,
}


def _lint(options: argparse.Namespace) -> int:
    root = from_caller(options.root)
    every = load_all(root)
    chosen = [load_case(_path(name, root)) for name in options.case] or every
    found = dict.fromkeys(fault for case in chosen for fault in (*faults(case), *_recomputed(case, options.recompute)))
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    if not found:
        unseen = "" if options.recompute else "; digests not compared, which --recompute does"
        print(f"{len(chosen)} cases, no fault{unseen}")
    return FAULTS_FOUND if found else 0


def _recomputed(case: Case, wanted: bool) -> list[str]:
    if not wanted or case.expected is None:
        return []

    from cases.bless import expected_digests

    try:
        now, kept = expected_digests(case), case.expected.digests
    except CaseError as fault:
        return [str(fault)]
    return [
        f"{case.name}: expected.digests.{name}: expected {now[name]}, got {kept[name]}"
        for name in now
        if now[name] != kept[name]
    ]


def _path(name: str, root: str | Path = CASES_DIR) -> Path:
    """A case's file from its path or its name."""
    return from_caller(name) if name.endswith(".toml") else find_case(name, root)


def _show(options: argparse.Namespace) -> int:
    case = load_case(_path(options.case))

    from cases.bless import outputs_of
    from cases.build import digest

    inputs = _inputs(case)
    print(f"{case.name}: {case.title}\n{_line(case)}\nsource {case.source}; catches {', '.join(case.catches)}")
    for kind, stages in case.shows.items():
        print("\n".join(f"  {kind} in {stage} alone shows in {', '.join(names)}" for stage, names in stages.items()))
    for name, tensor in inputs.items():
        made = case.made_by(name)
        print(f"  in  {name}: {_tensor(tensor)}, {made.recipe}, {made.layout}, {digest(tensor)[:12]}")
    kept = case.expected.digests if case.expected is not None else {}
    for name, tensor in outputs_of(case).items():
        verdict = {True: "as blessed", False: "NOT as blessed"}[kept.get(name) == digest(tensor)]
        print(f"  out {name}: {_tensor(tensor)}, {digest(tensor)}, {verdict if kept else 'not blessed'}")
    for entry in case.history:
        print(f"  {entry.date} contract {entry.contract}: {entry.reason}")
    return 0


def _inputs(case: Case) -> dict[str, torch.Tensor]:
    """The tensors of a case by argument; raises CaseError when they cannot be built."""
    from cases.build import build

    try:
        return build(case).tensors
    except ValueError as fault:
        raise CaseError(f"{case.name}: {fault}") from None


def _tensor(tensor: torch.Tensor) -> str:
    values = [f"{value:.6g}" for value in tensor.reshape(-1)[:_FIRST_VALUES].tolist()]
    more = " ..." if tensor.numel() > _FIRST_VALUES else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} [{' '.join(values)}{more}]"


def _line(case: Case) -> str:
    tp = "/".join(str(ranks) for ranks in case.tp)
    used = {"T": "T", "n": "nMK", "H": "HK"}
    sizes = [f"{name}={case.sizes[name]}" for name, dims in used.items() if not case.spec.dims.isdisjoint(dims)]
    return f"{case.op} {' '.join(sizes)} tp={tp} {case.size}"


def _bless(options: argparse.Namespace) -> int:
    from cases.bless import apply, propose

    reason = _LOOKING if options.dry_run else options.reason or ""
    changes = [propose(_path(name), reason, date.today()) for name in options.case]
    for change in changes:
        print("\n".join(change.lines()))
        if change.differs and not options.dry_run:
            apply(change)
    return 0


def _list(options: argparse.Namespace) -> int:
    for case in load_all():
        wanted = options.op in (None, case.op)
        wanted &= options.flag is None or options.flag in case.flags
        wanted &= options.catches is None or options.catches in case.catches
        if wanted:
            print(f"{case.name}: {_line(case)}: {case.title}")
    return 0


def _schema(_options: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
