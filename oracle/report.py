"""Turn a failed comparison into the text that a kernel engineer reads: the verdict first, then where to look.

All words for people about a mismatch are here; `oracle.compare` holds data only.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from oracle.rearrangement import Move, Rearrangement
from oracle.verdict import Block, Comparison, Element, Fault, Kind, Tally

LISTED = 6  # entries of a line that lists all
MOST = 3  # entries of a line that names the worst
SHORT = 1 / 8  # of a narrow row: no more of it is called a tail
CHANCE = 1 / 25  # and it is not called one where mismatches anywhere would be in it as often


class Outcome(enum.Enum):
    """What became of one case on one backend; each ends in exactly one of these."""

    EXACT = "exact"
    MISMATCH = "mismatch"
    ERROR = "error"
    TIMEOUT = "timeout"
    SKIPPED = "skipped"
    UNAVAILABLE = "unavailable"

    @property
    def failed(self) -> bool:
        """Whether the run must end with a non-zero status."""
        return self in (Outcome.MISMATCH, Outcome.ERROR, Outcome.TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where a result came from; what is None or empty is left out of the text.

    ``rank`` is set when one rank's result was compared on its own, ``order`` names the order of op and gather,
    ``rerun`` is the command that repeats this case, ``candidate`` the path of a minimised case file. With a ``law``,
    ``case`` is the law's subject. ``about`` says what the case pins or the law demands, ``catches`` names the wrong
    kernels that it is for, ``strides`` tells of each input that is not packed how it lies.
    """

    case: str
    op: str
    output: str
    backend: str
    tp: int | None = None
    rank: int | None = None
    fill: str | None = None
    order: str | None = None
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    rerun: str | None = None
    candidate: str | None = None
    law: str | None = None
    about: str | None = None
    catches: Sequence[str] = ()
    strides: Mapping[str, str] = field(default_factory=dict)


_AXES: Mapping[str, tuple[str, ...]] = {
    "residual": ("token", "stream", "column"),
    "comb_mix": ("token", "in", "out"),
    "pre_mix": ("token", "stream"),
    "post_mix": ("token", "stream"),
    "next_pre_mix": ("token", "stream"),
    "sums": ("token", "mix"),
    "mixes": ("token", "mix"),
    "squares": ("token",),
    "fn_broadcast": ("mix", "column"),
}
_ANY_AXES = {1: ("token",), 2: ("token", "column"), 3: ("token", "stream", "column")}

_KINDS = {
    Kind.UNWRITTEN: "unwritten",
    Kind.NAN: "NaN",
    Kind.INF: "infinity",
    Kind.SIGN_OF_ZERO: "sign of zero",
    Kind.ONE_ULP: "1 ULP",
    Kind.MORE: "more",
}
_COUNTED = {**_KINDS, Kind.ONE_ULP: "by 1 ULP", Kind.MORE: "by more than 1 ULP"}
_NOTED = (Kind.UNWRITTEN, Kind.NAN, Kind.INF, Kind.SIGN_OF_ZERO)  # the ULP column tells the others


def headline(context: Context, verdict: str) -> str:
    """One sentence: what ran where, and what came of it."""
    where = [f"{context.op} on {context.backend}"]
    where += [] if context.tp is None else [f"tp {context.tp}"]
    where += [] if context.rank is None else [f"rank {context.rank}"]
    where += [] if context.fill is None else [f"pad fill {context.fill}"]
    where += [] if context.law is None else [f"law {context.law}"]
    return f"{', '.join(where)}: {verdict}"


def failure(context: Context, verdict: str, details: Sequence[tuple[str, str]] = ()) -> str:
    """The report of a fault without a comparison: a raised error, a time limit, a broken rule or law.

    ``details`` are labels of at most eight letters, each with a line of text.
    """
    lines = [headline(context, verdict), *_labelled([*_origin(context), *details])]
    return "\n".join([*lines, *_labelled(_ending(context))])


def report(comparison: Comparison, context: Context, explanations: Sequence[str] = ()) -> str:
    """The whole report of one comparison as text, without a final newline.

    ``explanations`` are sentences about evaluation orders that give the actual bits (see `oracle.explain`).
    """
    lines = [headline(context, _verdict(comparison, context))]
    lines += _labelled(_origin(context))
    lines += _labelled([("cause", text) for text in explanations])
    lines += _labelled([("hint", text) for text in _hints(comparison, context)])
    if comparison.mismatching:
        lines += _table(comparison, context)
        lines += _labelled(_counts(comparison, context))
    return "\n".join([*lines, *_labelled(_ending(context))])


def cause(comparison: Comparison, explanations: Sequence[str] = (), fill: str | None = None) -> str:
    """What probably went wrong, in words that many results share: by it the failures of a run are counted.

    ``fill`` is what the pad rows held.
    """
    if explanations:
        return re.split(r" in the \d| \(first ", explanations[0])[0]
    if comparison.faults:
        return f"wrong {', '.join(fault.name.lower() for fault in comparison.faults)}"
    hints = _hints(comparison, Context(case="", op="", output="", backend="", fill=fill))
    return re.sub(r" \[\d+, \d+\)| with pad fill \w+", "", hints[0]) if hints else "other values"


def _labelled(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Indented lines, the label only where it changes."""
    lines: list[str] = []
    last = ""
    for label, text in entries:
        lines.append(f"  {label if label != last else '':<9}{text}")
        last = label
    return lines


def _origin(context: Context) -> list[tuple[str, str]]:
    parts = [context.case]
    parts += [] if context.order is None else [f"order {context.order}"]
    parts += [] if context.seed is None else [f"seed {context.seed}"]
    strides = [("strides", f"{name} {lie}") for name, lie in context.strides.items()]
    about = [("about", context.about or ""), ("catches", ", ".join(context.catches)), *strides]
    return [("case" if context.law is None else "subject", ", ".join(parts)), *((k, v) for k, v in about if v)]


def _ending(context: Context) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in context.versions.items())
    entries = [("versions", versions), ("smaller", context.candidate), ("rerun", context.rerun)]
    return [(label, text) for label, text in entries if text]


def _verdict(comparison: Comparison, context: Context) -> str:
    name, expected, actual = context.output, comparison.expected, comparison.actual
    unread = []
    if Fault.DTYPE in comparison.faults:
        unread.append(f"has dtype {_dtype(actual.dtype)}, expected {_dtype(expected.dtype)}")
    if Fault.SHAPE in comparison.faults:
        unread.append(f"has shape {list(actual.shape)}, expected {list(expected.shape)}")
    if unread:
        return f"{name} {' and '.join(unread)}; no value was compared"
    if Fault.LAYOUT in comparison.faults:
        strides = f"strides {list(actual.strides)}, expected {list(_contiguous_strides(actual.shape))}"
        return f"{name} is not contiguous ({strides}); {_values_verdict(comparison, name)}"
    return _values_verdict(comparison, name)


def _values_verdict(comparison: Comparison, name: str) -> str:
    wrong, total = comparison.mismatching, comparison.total
    if not wrong:
        return f"all {total} {name} values are exact"
    amount = f"all {total}" if wrong == total else f"{wrong} of {total}"
    verb = "differs" if wrong == 1 else "differ"
    verdict = f"{amount} {name} values {verb} ({_kinds(comparison)})"
    place = _place(comparison)
    return f"{verdict}, {place}" if place else verdict


def _kinds(comparison: Comparison) -> str:
    """Counts by kind, most frequent first; equal counts in order of Kind."""
    counts = sorted(comparison.kinds.items(), key=lambda item: (-item[1], item[0]))
    if len(counts) == 1:
        kind, count = counts[0]
        return _COUNTED[kind] if count == 1 else f"all {_COUNTED[kind]}"
    return ", ".join(f"{count} {_COUNTED[kind]}" for kind, count in counts)


def _place(comparison: Comparison) -> str:
    ranks = [tally.key for tally in comparison.ranks if tally.wrong]
    pad = _only_pad(comparison)
    everywhere = len(ranks) == len(comparison.ranks)
    if everywhere or not ranks:
        return "all in pad rows" if pad else ""
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"all in pad rows of {where}" if pad else f"all in {where}"


def _only_pad(comparison: Comparison) -> bool:
    return 0 < comparison.mismatching == comparison.pad_mismatching


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _axes(comparison: Comparison, context: Context) -> tuple[str, ...]:
    dims = len(comparison.expected.shape)
    axes = _AXES.get(context.output, ())
    return axes if len(axes) == dims else _ANY_AXES.get(dims, tuple(f"axis {axis}" for axis in range(dims)))


def _table(comparison: Comparison, context: Context) -> list[str]:
    shown = list(comparison.worst)
    if comparison.first is not None and comparison.first not in shown:
        shown.append(comparison.first)
    shown.sort(key=lambda element: element.index)
    rows = [_header(comparison, context), *(_row(element, comparison) for element in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    title = f"the first and the {len(comparison.worst)} worst, by index"
    if comparison.mismatching == len(shown):
        title = "every mismatch, by index"
    return [f"  {title}:", *(f"    {line}".rstrip() for line in padded)]


def _header(comparison: Comparison, context: Context) -> list[str]:
    place = ["rank:row"] if _sharded(comparison) else []
    return [f"[{', '.join(_axes(comparison, context))}]", *place, "expected", "", "actual", "", "ULP", ""]


def _row(element: Element, comparison: Comparison) -> list[str]:
    dtype = comparison.expected.dtype
    place = [f"{element.rank}:{element.local_row}{' pad' if element.pad else ''}"] if _sharded(comparison) else []
    return [
        str(list(element.index)),
        *place,
        _hex(element.expected_bits, dtype),
        _number(element.expected, dtype),
        _hex(element.actual_bits, dtype),
        _number(element.actual, dtype),
        "-" if element.ulp is None else str(element.ulp),
        _KINDS[element.kind] if element.kind in _NOTED else "",
    ]


def _sharded(comparison: Comparison) -> bool:
    return len(comparison.ranks) > 1


def _hex(pattern: int, dtype: torch.dtype) -> str:
    return f"0x{pattern:0{2 * dtype.itemsize}x}"


def _number(value: float, dtype: torch.dtype) -> str:
    """Nine digits tell any two fp32 numbers apart; eight show most bf16 numbers in full."""
    return f"{value:.{9 if dtype == torch.float32 else 8}g}"


def _counts(comparison: Comparison, context: Context) -> list[tuple[str, str]]:
    axes = _axes(comparison, context)
    entries = [
        ("ULP", _histogram(comparison)),
        ("rank", _only_wrong(comparison.ranks)),
        ("padding", _pad_share(comparison)),
        (axes[0], _token_rows(comparison)),
        (axes[1] if len(axes) == 3 else "", _only_wrong(comparison.streams)),
        (axes[-1], _blocks(comparison.columns)),
    ]
    return [(label, text) for label, text in entries if text]


def _tallies(tallies: Sequence[Tally]) -> str:
    return ", ".join(f"{tally.key}: {tally.wrong}/{tally.total}" for tally in tallies)


def _only_wrong(tallies: Sequence[Tally]) -> str:
    wrong = [tally for tally in tallies if tally.wrong]
    if len(tallies) < 2:
        return ""
    return _tallies(wrong) + (", others exact" if len(wrong) < len(tallies) else "")


def _token_rows(comparison: Comparison) -> str:
    """The wrong rows, or how many there are, from where to where, and the worst."""
    if comparison.rows_affected <= len(comparison.rows):
        return _tallies(sorted(comparison.rows, key=lambda tally: tally.key))
    first = comparison.first.index[0] if comparison.first is not None else 0
    differ = f"{comparison.rows_affected} rows differ, from {first} to {comparison.last_row}"
    if comparison.mismatching == comparison.rows_affected * comparison.rows[0].wrong:
        return f"{differ}, each {comparison.rows[0].wrong}/{comparison.rows[0].total}"
    return f"{differ}, most in {_tallies(comparison.rows[:MOST])}"


def _pad_share(comparison: Comparison) -> str:
    if not comparison.pad_total:
        return ""
    valid, pad = comparison.total - comparison.pad_total, comparison.pad_total
    return f"valid rows {comparison.valid_mismatching}/{valid}, pad rows {comparison.pad_mismatching}/{pad}"


def _blocks(blocks: Sequence[Block]) -> str:
    if len(blocks) < 2:
        return ""
    wrong = [block for block in blocks if block.wrong]
    if len(wrong) <= LISTED:
        return _spans(wrong) + (", others exact" if len(wrong) < len(blocks) else "")
    most = sorted(wrong, key=lambda block: (-block.wrong, block.start))[:MOST]
    amount = f"all {len(blocks)}" if len(wrong) == len(blocks) else f"{len(wrong)} of {len(blocks)}"
    if most[0].wrong * len(wrong) == sum(block.wrong for block in wrong):
        return f"{amount} {_unit(blocks)} differ, each {wrong[0].wrong}"
    return f"{amount} {_unit(blocks)} differ, most in {_spans(most)}"


def _spans(blocks: Sequence[Block]) -> str:
    return ", ".join(f"{_span(block)}: {block.wrong}" for block in blocks)


def _unit(blocks: Sequence[Block]) -> str:
    return "blocks" if blocks[0].stop - blocks[0].start > 1 else "columns"


def _span(block: Block) -> str:
    return str(block.start) if block.stop - block.start == 1 else f"[{block.start}, {block.stop})"


def _histogram(comparison: Comparison) -> str:
    """ULP distances in log2 buckets, the far ones together; nothing when all numbers are 1 apart."""
    buckets = comparison.histogram
    nan = comparison.mismatching - sum(bucket.wrong for bucket in buckets)
    if all(bucket.stop == 2 for bucket in buckets):
        return ""
    shown, far = buckets[:LISTED], buckets[LISTED:]
    parts = [f"{_distances(bucket)}: {bucket.wrong}" for bucket in shown]
    parts += [f"from {_power(far[0].start)}: {sum(bucket.wrong for bucket in far)}"] if far else []
    return ", ".join([*parts, *([f"NaN: {nan}"] if nan else [])])


def _distances(bucket: Block) -> str:
    if bucket.start == 1:
        return "1"
    high = bucket.stop - 1 if bucket.stop <= 1024 else bucket.stop
    return f"{_power(bucket.start)}..{_power(high)}"


def _power(distance: int) -> str:
    return str(distance) if distance < 1024 else f"2^{distance.bit_length() - 1}"


def _hints(comparison: Comparison, context: Context) -> list[str]:
    if not comparison.mismatching:
        return []
    found = (
        _pad_hint(comparison, context),
        _unwritten_hint(comparison),
        _move_hint(comparison, context),
        _tail_hint(comparison),
        _stream_hint(comparison, context),
        _rounding_hint(comparison),
    )
    return [text for text in found if text]


def _pad_hint(comparison: Comparison, context: Context) -> str:
    if _only_pad(comparison):
        return "every mismatch is in pad rows, which are judged like tokens: a row may read another, or be left out"
    foreign = comparison.kinds.get(Kind.NAN, 0) + comparison.kinds.get(Kind.INF, 0)
    if context.fill in _LOUD_FILLS and foreign == comparison.mismatching:
        return f"NaN or infinity in valid rows with pad fill {context.fill}: a pad row may be read"
    return ""


def _unwritten_hint(comparison: Comparison) -> str:
    if comparison.kinds.get(Kind.UNWRITTEN, 0) < comparison.mismatching:
        return ""
    return "every wrong value is the fill put there before the run: the kernel did not write it"


def _tail_hint(comparison: Comparison) -> str:
    start = _tail_start(comparison)
    return "" if start is None else f"every mismatch is in the last column block [{start}, {_width(comparison)}): tail"


def _tail_start(comparison: Comparison) -> int | None:
    """Where the tail begins that holds every mismatch.

    In a wide row that is its last block of columns. A narrow one is counted by columns: there it is what lies beyond
    a multiple of some power of two, if so short that mismatches anywhere would hardly all be in it.
    """
    blocks = [block for block in comparison.columns if block.wrong]
    if len(comparison.columns) < 2 or not blocks:
        return None
    if comparison.columns[0].stop > 1:
        return blocks[0].start if blocks[0] == comparison.columns[-1] else None
    width = _width(comparison)
    tails = (width % (1 << power) for power in range(1, width.bit_length()))
    tail = next((size for size in tails if size and width - size <= blocks[0].start), width)
    share = tail / width
    return width - tail if share <= SHORT and share**comparison.mismatching <= CHANCE else None


def _width(comparison: Comparison) -> int:
    return comparison.columns[-1].stop


def _stream_hint(comparison: Comparison, context: Context) -> str:
    """Four or more, because a mismatch or two are always in few places."""
    wrong = [tally for tally in comparison.streams if tally.wrong]
    if len(wrong) != 1 or len(comparison.streams) < 2 or comparison.mismatching < 4:
        return ""
    return f"every mismatch is at {_axes(comparison, context)[1]} {wrong[0].key}"


def _rounding_hint(comparison: Comparison) -> str:
    """Eight mismatches on one side are no chance (1 in 256 each way); fewer are not called truncation."""
    near = comparison.kinds.get(Kind.ONE_ULP, 0)
    if comparison.kinds.get(Kind.SIGN_OF_ZERO, 0) == comparison.mismatching:
        return "only signs of zero differ: a sum not started from +0, or a -0 lost"
    if near < comparison.mismatching or near < 8:
        return ""
    if comparison.nearer_zero == near:
        return "every actual value is 1 ULP nearer to zero: a conversion that truncates"
    return "all within 1 ULP: the order, contraction or rounding of a sum, not an index"


def _move_hint(comparison: Comparison, context: Context) -> str:
    found = comparison.rearrangement
    return "" if found is None else _move(found, _axes(comparison, context))


def _move(found: Rearrangement, axes: tuple[str, ...]) -> str:
    by = f"{found.by:+d}"
    moved = ", ".join(f"{place} holds {source}" for place, source in enumerate(found.order) if place != source)
    sentences = {
        Move.ROWS: f"right values, wrong row: {axes[0]} t holds the expected {axes[0]} t{by}",
        Move.RANKS: f"right values, wrong rank: rank r holds the expected rows of rank r{by}",
        Move.STREAMS: f"right values, wrong {axes[1 % len(axes)]}: {moved}",
        Move.COLUMNS: f"right values, wrong {axes[-1]}: {axes[-1]} h holds the expected {axes[-1]} h{by}",
        Move.TRANSPOSED: f"transposed: {axes[-2 % len(axes)]} and {axes[-1]} are swapped",
    }
    return sentences[found.move]


_LOUD_FILLS = ("nan", "inf")
