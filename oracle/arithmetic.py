"""Evaluation sequences as data: which order and which roundings each op uses.

`CONTRACT_1` is the contract; kernels of this suite follow it and nothing else. The other records describe
what foreign kernels do, so that one can be judged for exactness against its *own* sequence, or its bits be
explained.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

Order = Literal["ascending", "descending", "pairwise"]
Contraction = Literal["separate", "fused"]


@dataclass(frozen=True)
class WeightedSum:
    """A sum of weight * value over streams.

    order: index order from the start value, or "pairwise" (adjacent pairs, then pairs of pairs).
    contraction: "separate" rounds product and sum on their own, "fused" is one fma a term.
    start: "zero" adds the first product to +0.0 (so that -0 is lost), "first" begins with the first product
    itself.
    """

    order: Order = "ascending"
    contraction: Contraction = "separate"
    start: Literal["zero", "first"] = "zero"


@dataclass(frozen=True)
class Mean:
    """The mean over streams: order of the sum; a division by n, or a product with a rounded 1 / n."""

    order: Order = "ascending"
    scale: Literal["divide", "reciprocal"] = "divide"


@dataclass(frozen=True)
class Post:
    """The post mapping: post * x and the terms comb[i] * residual[i], streams i in `order`.

    first: "alone" rounds post * x and adds the terms to it; "into_first" takes fma(post, x, comb *
    residual) with the first term's product rounded, then goes on; "last" sums the terms from +0 and adds
    post * x at the end. contraction: how each following term (and post * x when last) is added.
    """

    first: Literal["alone", "into_first", "last"] = "alone"
    order: Literal["ascending", "descending"] = "ascending"
    contraction: Contraction = "separate"


@dataclass(frozen=True)
class Dot:
    """A sum over the hidden size, as the projection and every sum of squares take it.

    Position h belongs to lane h mod `lanes` (within its segment); a segment is `segment` consecutive h, or,
    when `splits` is not 0, one of that many equal parts. streams: "interleaved" adds the streams of an
    h-block before the next block, "flat" treats [n, H] as one row of n * H.
    lane_sum: "adjacent" tree a[2i] + a[2i+1]; "distant" tree a[i] + a[i + half] (a butterfly of shuffles);
    "warps", that butterfly in each 32 lanes and then the warps in index order; "serial", all lanes in index
    order. segments: the order in which segment sums are added to +0.
    """

    lanes: int = 64
    segment: int = 512
    splits: int = 0
    streams: Literal["interleaved", "flat"] = "interleaved"
    lane_sum: Literal["adjacent", "distant", "warps", "serial"] = "adjacent"
    segments: Literal["ascending", "descending"] = "ascending"
    contraction: Contraction = "fused"


@dataclass(frozen=True)
class Arithmetic:
    """One evaluation sequence for every op; the defaults are contract 1.

    projects: whether a fused boundary projects its new residual after ("rounded") or before ("unrounded")
    the rounding to bf16. gate: how mix * scale + base is contracted. index_order: the sums over n in
    Sinkhorn.
    """

    name: str
    collapse: WeightedSum = field(default_factory=WeightedSum)
    mean: Mean = field(default_factory=Mean)
    post: Post = field(default_factory=Post)
    dot: Dot = field(default_factory=Dot)
    projects: Literal["rounded", "unrounded"] = "rounded"
    gate: Contraction = "separate"
    index_order: Order = "ascending"


CONTRACT_1 = Arithmetic("contract 1")

# What upstream's fused TileLang boundary was seen to do, on an H200: bit for bit for the post; the
# projection is read from its source (128 threads, 8 parts of H, warp butterflies, the unrounded residual
# from registers).
FUSED_POST = Post(first="into_first", contraction="fused")
FUSED_SUM = WeightedSum(contraction="fused")
BOUNDARY_DOT = Dot(lanes=128, splits=8, lane_sum="warps")

_COLLAPSES = {
    "collapse contracted to fma": FUSED_SUM,
    "collapse from stream n-1 down": WeightedSum(order="descending"),
    "collapse from stream n-1 down, contracted to fma": WeightedSum(order="descending", contraction="fused"),
    "collapse pairwise": WeightedSum(order="pairwise"),
    "collapse pairwise, contracted to fma": WeightedSum(order="pairwise", contraction="fused"),
    "collapse starting at the first product": WeightedSum(start="first"),
}
_MEANS = {
    "mean from stream n-1 down": Mean(order="descending"),
    "mean pairwise": Mean(order="pairwise"),
    "mean by a rounded reciprocal": Mean(scale="reciprocal"),
}
_POSTS = {
    "post contracted, post * x into the first term (vLLM 0.33 mhc_post_tilelang)": FUSED_POST,
    "post contracted, post * x rounded first": Post(contraction="fused"),
    "post with post * x into the first term only": Post(first="into_first"),
    "post with post * x last": Post(first="last"),
    "post with post * x last, contracted": Post(first="last", contraction="fused"),
    "post from stream n-1 down": Post(order="descending"),
    "post from stream n-1 down, contracted": Post(order="descending", contraction="fused"),
}
_DOTS = {
    "dot with segments from the last down": Dot(segments="descending"),
    "dot with the lanes summed in index order": Dot(lane_sum="serial"),
    "dot with a distant-pair tree": Dot(lane_sum="distant"),
    "dot without fma": Dot(contraction="separate"),
    "dot over flat n * H, stream after stream": Dot(streams="flat"),
    "dot with one segment": Dot(splits=1),
    "dot with segments of 256": Dot(segment=256),
    "dot with segments of 1024": Dot(segment=1024),
    "dot with 32 lanes": Dot(lanes=32),
    "dot with 128 lanes": Dot(lanes=128),
    "dot of the fused boundary in 8 parts (vLLM mhc_fused_tilelang)": BOUNDARY_DOT,
    "dot of the fused boundary in 4 parts": Dot(lanes=256, splits=4, lane_sum="warps"),
    "dot of the separate projection, 512 threads (vLLM)": Dot(lanes=512, splits=1, streams="flat", lane_sum="warps"),
    "dot of the separate projection, 1024 threads (vLLM)": Dot(lanes=1024, splits=1, streams="flat", lane_sum="warps"),
}


def _named() -> dict[str, Arithmetic]:
    records = [CONTRACT_1]
    records += [Arithmetic(name, collapse=rule) for name, rule in _COLLAPSES.items()]
    records += [Arithmetic(name, mean=rule) for name, rule in _MEANS.items()]
    records += [Arithmetic(name, post=rule) for name, rule in _POSTS.items()]
    records += [Arithmetic(name, dot=rule) for name, rule in _DOTS.items()]
    records += [
        Arithmetic("projection of the unrounded post", projects="unrounded"),
        Arithmetic("gates contracted to fma", gate="fused"),
        Arithmetic("Sinkhorn sums from the last down", index_order="descending"),
        Arithmetic("Sinkhorn sums pairwise", index_order="pairwise"),
        UPSTREAM_UNFUSED,
        UPSTREAM_FUSED,
        UPSTREAM_TORCH,
    ]
    return {record.name: record for record in records}


UPSTREAM_UNFUSED = Arithmetic(
    "vLLM 0.33 separate TileLang kernels",
    collapse=FUSED_SUM,
    post=FUSED_POST,
    dot=Dot(lanes=512, splits=1, streams="flat", lane_sum="warps"),
    gate="fused",
)
UPSTREAM_FUSED = Arithmetic(
    "vLLM 0.33 fused TileLang boundary (small T)",
    collapse=FUSED_SUM,
    post=FUSED_POST,
    dot=BOUNDARY_DOT,
    projects="unrounded",
    gate="fused",
)
UPSTREAM_TORCH = Arithmetic("vLLM torch reference", post=Post(first="last"))

KNOWN: dict[str, Arithmetic] = _named()

# Which fields of a record an op's bits depend on.
FIELDS: dict[str, tuple[str, ...]] = {
    "expand": (),
    "collapse": ("collapse",),
    "stream_mean": ("mean",),
    "post": ("post",),
    "draft_tail": ("post", "collapse"),
    "project": ("dot",),
    "mixes": (),
    "sinkhorn": ("index_order",),
    "coefficients": ("gate", "index_order"),
    "norm": ("dot",),
    "collapse_norm": ("collapse", "dot"),
    "head": ("collapse", "dot", "gate"),
    "fn_broadcast": ("index_order",),
    "pre": ("collapse", "dot", "gate", "index_order"),
    "pre_delayed": ("collapse", "dot", "gate", "index_order"),
    "post_pre": ("collapse", "post", "dot", "projects", "gate", "index_order"),
    "post_pre_delayed": ("collapse", "mean", "post", "dot", "projects", "gate", "index_order"),
}


def candidates(op: str) -> dict[str, Arithmetic]:
    """Return the known records that differ in what `op` depends on, contract 1 first; ValueError for an
    unknown op.

    Records that follow one sequence for this op are given once, under the first of their names.
    """
    if op not in FIELDS:
        raise ValueError(f"candidates: op must be one of {', '.join(FIELDS)}; got {op!r}")
    found: dict[tuple[object, ...], Arithmetic] = {}
    for record in KNOWN.values():
        found.setdefault(tuple(getattr(record, name) for name in FIELDS[op]), record)
    return {record.name: record for record in found.values()}


def combine(name: str, *records: Arithmetic) -> Arithmetic:
    """Return contract 1 with every field in which one of `records` departs from it; later records win."""
    changes = {
        part.name: getattr(record, part.name)
        for record in records
        for part in fields(Arithmetic)
        if part.name != "name" and getattr(record, part.name) != getattr(CONTRACT_1, part.name)
    }
    return replace(CONTRACT_1, name=name, **changes)
