"""Planted wrong kernels in TileLang: the suite's own, with one fault each, run through the C target.

The oracle's mutants (`tests.mutants`) show that the cases can see a fault; these show that they see it in the code
that production kernels are written in, and that the fault is one that this code can have. Every class of the glossary
in cases/flags.toml is planted here, or `NO_KERNEL` says why it is no fault of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutants.tilelang_edits import Edit


@dataclass(frozen=True)
class Planted:
    """One fault in the kernel of ``op``, and the case that catches it at ``tp`` ranks.

    ``kind`` is its class, a word of ``[catches]`` in cases/flags.toml.
    """

    kind: str
    op: str
    case: str
    edits: tuple[Edit, ...]
    tp: int = 1

    def __str__(self) -> str:
        return f"{self.kind}:{self.op}:{self.case}"


def _plant(kind: str, op: str, case: str, *edits: tuple[str, str, str], tp: int = 1) -> Planted:
    return Planted(kind, op, case, tuple(Edit(*edit) for edit in edits), tp)


_NO_SHARD = "a step of the sequence-parallel layer around a kernel: no kernel shards, gathers or trims"

NO_KERNEL = {
    "rank-off-by-one": _NO_SHARD,
    "trim-forgotten": _NO_SHARD,
    "token-dropped": _NO_SHARD,
    "layout-guessed": _NO_SHARD,
    "side-input-unsharded": _NO_SHARD,
    "scaled-by-ranks": _NO_SHARD,
}

# How the C target rounds to bf16; on a GPU this is one instruction.
_ROUNDING = "return (uint16_t)((i + 0x7fffu + ((i >> 16) & 1u)) >> 16);"
_PRODUCT = "inline float hc_mul(float a, float b) { return a * b; }"
_QUOTIENT = "inline float hc_div(float a, float b) { return a / b; }"
_ROOT = "inline float hc_sqrt(float a) { return __builtin_sqrtf(a); }"
_FMA = "inline float hc_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }"
_ROOT_OF_MEAN = "self.div(self.constant(1.0), self.sqrt(self.add(self.div(squares, count), eps)))"
_WEIGHTED = "sums[e] = o.add(sums[e], o.mul(weight, o.widen(source[e])))"
_PAIRS_OF_PAIRS = "self.add(self.tree(values[:middle]), self.tree(values[middle:]))"

_ROW_OF_SOFTMAX = "matrix[i, j, k] = o.add(o.div(powers[k], below), g.sinkhorn_eps)"

_STORES = (
    _plant("truncating-store", "collapse", "collapse-ties", ("numerics", _ROUNDING, "return (uint16_t)(i >> 16);")),
    _plant(
        "round-half-up", "collapse", "collapse-ties", ("numerics", _ROUNDING, "return (uint16_t)((i + 0x8000u) >> 16);")
    ),
    _plant(
        "overflow-clamped",
        "collapse",
        "collapse-largest-rounds-to-inf",
        (
            "numerics",
            _ROUNDING,
            "i += 0x7fffu + ((i >> 16) & 1u);\n"
            "  return (uint16_t)((i & 0x7f800000u) == 0x7f800000u ? (i >> 31 << 15) | 0x7f7fu : i >> 16);",
        ),
    ),
    _plant("nan-lost", "collapse", "collapse-inf-nan", ("numerics", "return 0x7fc0;", "return 0;")),
    _plant(
        "nan-rounded",
        "collapse",
        "collapse-full-nan",
        ("numerics", "if ((i & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;", ""),
    ),
    _plant(
        "subnormal-flushed",
        "collapse",
        "collapse-subnormal-products",
        (
            "numerics",
            _PRODUCT,
            "inline float hc_mul(float a, float b) {\n"
            "  float c = a * b;\n"
            "  return __builtin_fabsf(c) < 0x1p-126f ? __builtin_copysignf(0.0f, c) : c;\n"
            "}",
        ),
    ),
    _plant(
        "tail-column-unwritten", "collapse", "collapse-width-h1025", ("collapse", "if h < size:", "if h < size - 1:")
    ),
    _plant(
        "row-misplaced",
        "post",
        "post-permutation",
        ("streams", "move(o, v, mapped, (0,), out, (t, k, h))", "move(o, v, mapped, (0,), out, (t, n - 1 - k, h))"),
    ),
    _plant(
        "row-misplaced",
        "expand",
        "expand-copies",
        ("streams", "move(o, v, hidden, (t, h), row, (0,))", "move(o, v, hidden, (tokens - 1 - t, h), row, (0,))"),
    ),
    _plant(
        "empty-launch",
        "collapse",
        "grid-collapse-t00",
        ("collapse", "    return layer_input\n", '    return layer_input if given["T"] else residual\n'),
    ),
)

_LOADS = (
    _plant(
        "strides-ignored",
        "post",
        "aiter-5292-post-strided-mixes",
        (
            "build",
            "return [stride // self.vector if size > 1 else 0 for size, stride in outer] + [inner[1]]",
            "return [math.prod(self.tensor.shape[axis + 1 :]) for axis in range(self.tensor.dim())]",
        ),
    ),
    _plant(
        "offset-32bit",
        "collapse",
        "collapse-far-offsets",
        ("collapse", "rt: T.int64,", "rt: T.int32,"),
        # A GPU wraps; C++ must be told to.
        ("build", '"-fno-strict-aliasing"]', '"-fno-strict-aliasing", "-fwrapv"]'),
    ),
    _plant(
        "vector-misaligned",
        "collapse",
        "collapse-layout-offset",
        (
            "build",
            "return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor",
            "start = tensor.storage_offset() // 8 * 8\n"
            "    aligned = tensor.as_strided(tensor.shape, tensor.stride(), start)\n"
            "    return aligned.view(torch.uint16) if tensor.dtype == torch.bfloat16 else aligned",
        ),
    ),
    _plant(
        "hc-mult-fixed",
        "collapse",
        "collapse-streams-n8",
        ("collapse", "for i in o.loop(n):\n        weight =", "for i in o.loop(4):\n        weight ="),
    ),
    _plant(
        "streams-rounded-up",
        "fn_broadcast",
        "broadcast-streams-n7",
        (
            "coefficients",
            'parts = fn.unflatten(1, (n, given["H"]))',
            'steps = (1 << (n - 1).bit_length()) * given["H"], given["H"], 1\n'
            '    parts = fn.flatten().repeat(2).as_strided((given["M"], n, given["H"]), steps)',
        ),
    ),
    _plant(
        "streams-padded",
        "sinkhorn",
        "sinkhorn-streams-n6",
        (
            "coefficients",
            f"        for k in o.loop(g.n):\n            {_ROW_OF_SOFTMAX}",
            "        for _ in T.serial(g.n, g.most):\n"
            "            below = o.add(below, exp(o, o.sub(o.constant(0.0), top)))\n"
            f"        for k in o.loop(g.n):\n            {_ROW_OF_SOFTMAX}",
        ),
    ),
    _plant(
        "row-crosstalk",
        "mixes",
        "mixes-v4",
        (
            "coefficients",
            "o.reciprocal_rms(squares[t], numel, eps)",
            "o.reciprocal_rms(squares[T.if_then_else(t > 0, t - 1, t)], numel, eps)",
        ),
    ),
    _plant(
        "pad-row-read",
        "stream_mean",
        "vllm-40047-stream-mean-nan-pads",
        (
            "streams",
            "total[e] = o.add(total[e], o.widen(streams[i, e]))",
            "total[e] = o.add(o.add(total[e], o.widen(streams[i, e])),"
            " o.mul(o.constant(0.0), o.widen(residual[tokens - 1, i, h + e])))",
        ),
        tp=4,
    ),
    _plant(
        "mix-rounded",
        "collapse",
        "collapse-order-cancelling",
        ("collapse", "weight = weights[place, i]", "weight = o.widen(o.round(weights[place, i]))"),
    ),
    _plant(
        "comb-transposed", "post", "post-permutation", ("streams", "weight = comb[t, i, k]", "weight = comb[t, k, i]")
    ),
    _plant(
        "comb-transposed",
        "sinkhorn",
        "sinkhorn-normal",
        ("coefficients", "comb[g.first + i, j, k] = matrix[i, j, k]", "comb[g.first + i, k, j] = matrix[i, j, k]"),
    ),
)

_PRODUCT_OF_X = "exact[e] = o.mul(gate, o.widen(row[e]))"
_PRODUCT_OF_FIRST = "o.mul(comb[t, 0, k], o.widen(streams[0, e]))"
_OVER_STREAMS = "for i in o.loop(n):\n        weight = comb[t, i, k]"
_OVER_LATER_STREAMS = "for i in T.serial(1, n):\n        weight = comb[t, i, k]"

_STREAM_SUMS = (
    _plant(
        "fma-contraction",
        "collapse",
        "collapse-order-cancelling",
        ("numerics", _WEIGHTED, "sums[e] = o.fma(weight, o.widen(source[e]), sums[e])"),
    ),
    _plant(
        "fma-contraction",
        "post",
        "post-order-cancelling",
        ("numerics", _WEIGHTED, "sums[e] = o.fma(weight, o.widen(source[e]), sums[e])"),
    ),
    _plant(
        "reversed-order",
        "collapse",
        "collapse-order-cancelling",
        (
            "collapse",
            "weight = weights[place, i]\n        move(o, v, streams, (i, 0), stream, (0,))",
            "weight = weights[place, n - 1 - i]\n        move(o, v, streams, (n - 1 - i, 0), stream, (0,))",
        ),
    ),
    _plant(
        "pairwise-order",
        "collapse",
        "collapse-order-cancelling",
        (
            "collapse",
            "    round_to(o, v, total, stream)",
            "    for e in T.unroll(v):\n"
            "        total[e] = o.add(\n"
            "            o.add(o.mul(weights[place, 0], o.widen(streams[0, e])),"
            " o.mul(weights[place, 1], o.widen(streams[1, e]))),\n"
            "            o.add(o.mul(weights[place, 2], o.widen(streams[2, e])),"
            " o.mul(weights[place, 3], o.widen(streams[3, e]))),\n"
            "        )\n"
            "    round_to(o, v, total, stream)",
        ),
    ),
    _plant(
        "negative-zero-lost",
        "collapse",
        "collapse-negative-zero",
        ("numerics", "target[e] = o.constant(0.0)", "target[e] = o.constant(-0.0)"),
    ),
    _plant(
        "negative-zero-lost",
        "post",
        "post-keeps-negative-zero",
        ("streams", _PRODUCT_OF_X, "exact[e] = o.add(o.constant(0.0), o.mul(gate, o.widen(row[e])))"),
    ),
    _plant(
        "sublayer-added-last",
        "post",
        "post-order-cancelling",
        ("streams", _PRODUCT_OF_X, "exact[e] = o.constant(0.0)"),
        (
            "streams",
            "    round_to(o, v, exact, mapped)",
            "    add_weighted(o, v, gate, row, exact)\n    round_to(o, v, exact, mapped)",
        ),
    ),
    _plant(
        "grouped-order",
        "pre",
        "pre-collapse-order-n8",
        (
            "collapse",
            "    clear(o, v, total)\n    for i in o.loop(n):\n",
            "    fours = T.alloc_local((v,), F)\n"
            "    clear(o, v, fours)\n"
            "    clear(o, v, total)\n"
            "    for i in o.loop(n):\n"
            "        if i % 4 == 0:\n"
            "            for e in T.unroll(v):\n"
            "                fours[e] = o.add(fours[e], total[e])\n"
            "            clear(o, v, total)\n",
        ),
        (
            "collapse",
            "    round_to(o, v, total, stream)",
            "    for e in T.unroll(v):\n"
            "        total[e] = o.add(fours[e], total[e])\n"
            "    round_to(o, v, total, stream)",
        ),
    ),
    _plant(
        "first-term-fused",
        "post",
        "post-opposing",
        ("streams", _PRODUCT_OF_X, f"exact[e] = o.fma(gate, o.widen(row[e]), {_PRODUCT_OF_FIRST})"),
        ("streams", _OVER_STREAMS, _OVER_LATER_STREAMS),
    ),
    _plant(
        "other-product-fused",
        "post",
        "post-opposing",
        (
            "streams",
            _PRODUCT_OF_X,
            f"exact[e] = {_PRODUCT_OF_FIRST.replace('mul', 'fma')[:-1]}, o.mul(gate, o.widen(row[e])))",
        ),
        ("streams", _OVER_STREAMS, _OVER_LATER_STREAMS),
    ),
    _plant(
        "post-rounding-dropped",
        "draft_tail",
        "draft-tail-keeps-rounding",
        ("streams", "    round_to(o, v, exact, mapped)", "    move(o, v, exact, (0,), mapped, (0,))"),
        (
            "streams",
            "\n    mapped = T.alloc_local((v,), o.bf16)",
            "\n    mapped = T.alloc_local((v,), F)\n    rounded = T.alloc_local((v,), o.bf16)",
        ),
        (
            "streams",
            "add_weighted(o, v, factor, mapped, total)",
            "for e in T.unroll(v):\n            total[e] = o.add(total[e], o.mul(factor, mapped[e]))",
        ),
        (
            "streams",
            "round_to(o, v, total, mapped)\n    move(o, v, mapped, (0,), out, (t, h))",
            "round_to(o, v, total, rounded)\n    move(o, v, rounded, (0,), out, (t, h))",
        ),
    ),
    _plant(
        "mean-by-reciprocal",
        "stream_mean",
        "mean-streams-n3",
        (
            "numerics",
            "return self.div(total, T.cast(count, F32))",
            "return self.mul(total, self.div(self.constant(1.0), T.cast(count, F32)))",
        ),
    ),
    _plant(
        "mean-per-stream",
        "stream_mean",
        "mean-subnormal",
        (
            "streams",
            "total[e] = o.add(total[e], o.widen(streams[i, e]))",
            "total[e] = o.add(total[e], o.widen(o.round(o.share(o.widen(streams[i, e]), n))))",
        ),
        ("streams", "total[e] = o.share(total[e], n)", "total[e] = total[e]"),
    ),
    _plant(
        "wrong-stream-mean",
        "stream_mean",
        "vllm-46995-mean-definition",
        ("streams", "total[e] = o.add(total[e], o.widen(streams[i, e]))", "total[e] = o.widen(streams[i, e])"),
        ("streams", "total[e] = o.share(total[e], n)", "total[e] = total[e]"),
    ),
    _plant(
        "broadcast-tree",
        "fn_broadcast",
        "broadcast-order",
        (
            "coefficients",
            "                    move(o, v, total, (0,), out, (row, h))",
            "                    for e in T.unroll(v):\n"
            "                        total[e] = o.add(\n"
            "                            o.add(parts[row, 0, h + e], parts[row, 1, h + e]),\n"
            "                            o.add(parts[row, 2, h + e], parts[row, 3, h + e]),\n"
            "                        )\n"
            "                    move(o, v, total, (0,), out, (row, h))",
        ),
    ),
)

_STREAMS_INSIDE = """    c = block * LANES + 2 * lane + first
    if s.segment * SEGMENT + c < s.size:
        for j in T.serial(s.lines):
            _step(s, turn, warp, j, c,"""
_STREAMS_OUTSIDE = """    c = block * LANES + 2 * lane + first
    for q in T.serial(block * s.lines, (block + 1) * s.lines):
        if s.segment * SEGMENT + q % BLOCKS * LANES + 2 * lane + first < s.size:
            _step(s, turn, warp, q // BLOCKS, q % BLOCKS * LANES + 2 * lane + first,"""

_PROJECTIONS = (
    _plant(
        "segment-order-reversed",
        "project",
        "project-order",
        ("coefficients", "partials[t, segment, slot]", "partials[t, segments - 1 - segment, slot]"),
    ),
    _plant("segment-ignored", "norm", "norm-near-ties", ("numerics", "SEGMENT = 512\n", "SEGMENT = 2048\n")),
    _plant(
        "serial-lanes",
        "norm",
        "norm-near-ties",
        ("numerics", _PAIRS_OF_PAIRS, "self.add(self.tree(values[:-1]), values[-1])"),
    ),
    _plant(
        "strided-tree",
        "norm",
        "norm-near-ties",
        (
            "numerics",
            _PAIRS_OF_PAIRS,
            "self.tree([self.add(*pair) for pair in zip(values[:middle], values[middle:], strict=True)])",
        ),
    ),
    _plant("streams-outside", "project", "project-absorbing", ("sweep", _STREAMS_INSIDE, _STREAMS_OUTSIDE)),
    _plant(
        "double-rounded-fma",
        "project",
        "project-fma-rounded-once",
        ("numerics", _FMA, _FMA.replace("__builtin_fmaf(a, b, c)", "(float)((double)a * b + c)")),
    ),
    _plant(
        "unfused-projection",
        "project",
        "project-cancelling",
        (
            "sweep",
            "o.fma(weights[e], values[i, e], dots[i, m, first + e])",
            "o.add(o.mul(weights[e], values[i, e]), dots[i, m, first + e])",
        ),
    ),
    _plant(
        "tf32-projection",
        "project",
        "project-order",
        (
            "sweep",
            "o.fma(weights[e], values[i, e], dots[i, m, first + e])",
            "o.fma(o.from_bits(o.bits(weights[e]) & ~0x1FFF), values[i, e], dots[i, m, first + e])",
        ),
    ),
    _plant(
        "flushed-projection",
        "pre",
        "pre-subnormal-weights",
        (
            "sweep",
            "o.fma(weights[e], values[i, e], dots[i, m, first + e])",
            "o.fma(T.if_then_else(o.bits(weights[e]) & 0x7F800000 == 0, o.constant(0.0), weights[e]),"
            " values[i, e], dots[i, m, first + e])",
        ),
    ),
    _plant(
        "split-by-tokens",
        "project",
        "project-threshold-t16",
        (
            "sweep",
            "lanes[i, SUMS + warp * tile.rows + m, lane]",
            "lanes[i, SUMS + warp * tile.rows + m, T.if_then_else(s.tokens < 16, lane, lane % 2 * 16 + lane // 2)]",
        ),
    ),
)

_ONE_RECIPROCAL_ROOT = "inline float hc_rsqrt(float a) { return (float)(1.0 / __builtin_sqrt((double)a)); }"

_SCALED = "o.mul(o.mul(o.widen(rounded[e]), factor), o.widen(factors[e]))"
_ONE_UNIT = (("high", "+ 1"), ("low", "- 1"))

_NORMS = (
    _plant(
        "approximate-rsqrt",
        "mixes",
        "mixes-v4",
        ("numerics", _ROOT, f"{_ROOT}\n{_ONE_RECIPROCAL_ROOT}"),
        ("numerics", _ROOT_OF_MEAN, 'T.call_extern(F32, "hc_rsqrt", self.add(self.div(squares, count), eps))'),
    ),
    _plant(
        "rms-eps-outside",
        "mixes",
        "mixes-zero-row",
        ("numerics", _ROOT_OF_MEAN, "self.div(self.constant(1.0), self.add(self.sqrt(self.div(squares, count)), eps))"),
    ),
    _plant(
        "rms-eps-fixed",
        "norm",
        "norm-zero-row",
        ("norm", "o.reciprocal_rms(total, count, norm_eps)", "o.reciprocal_rms(total, count, o.constant(1e-6))"),
    ),
    _plant(
        "norm-weight-first",
        "norm",
        "norm-near-ties",
        ("norm", _SCALED, "o.mul(o.mul(o.widen(rounded[e]), o.widen(factors[e])), factor)"),
    ),
    _plant(
        "zeros-skipped",
        "norm",
        "norm-far-values",
        (
            "norm",
            _SCALED,
            f"T.if_then_else(o.widen(factors[e]) == o.constant(0.0), o.constant(0.0), {_SCALED})",
        ),
    ),
    _plant(
        "norm-weight-folded",
        "norm",
        "norm-root-units-h96",
        ("norm", _SCALED, "o.mul(o.widen(rounded[e]), o.mul(factor, o.widen(factors[e])))"),
    ),
    _plant(
        "norm-rounded-early",
        "norm",
        "norm-root-units-h96",
        ("norm", _SCALED, "o.mul(o.widen(o.round(o.mul(o.widen(rounded[e]), factor))), o.widen(factors[e]))"),
    ),
    _plant(
        "collapse-rounding-dropped",
        "collapse_norm",
        "collapse-norm-root-units-unrounded-h96",
        (
            "norm",
            "        round_to(o, v, exact, rounded)\n        scale(o, v, rounded, sums[place], weight, h)\n",
            "        factors = T.alloc_local((v,), o.bf16)\n"
            "        move(o, v, weight, (h,), factors, (0,))\n"
            "        for e in T.unroll(v):\n"
            "            exact[e] = o.mul(o.mul(exact[e], sums[place]), o.widen(factors[e]))\n"
            "        round_to(o, v, exact, rounded)\n",
        ),
    ),
    _plant(
        "segment-length-changed", "norm", "norm-root-units-h1100", ("numerics", "SEGMENT = 512\n", "SEGMENT = 256\n")
    ),
    _plant("lane-count-changed", "norm", "norm-root-units-h96", ("numerics", "LANES = 64\n", "LANES = 32\n")),
    *(
        _plant(
            f"root-one-unit-{side}",
            "norm",
            "norm-root-units-h96",
            ("numerics", _ROOT_OF_MEAN, f"self.from_bits(self.bits({_ROOT_OF_MEAN}) {step})"),
        )
        for side, step in _ONE_UNIT
    ),
    _plant(
        "squares-swapped",
        "collapse_norm",
        "collapse-norm-unrounded",
        ("norm", "if unrounded == 0:", "if unrounded != 0:"),
    ),
)

_BALANCE = """    each(g.o, g.threads, g.many * g.most, _divide_column, g, matrix)
    for _ in T.serial(g.iters - 1):
        each(g.o, g.threads, g.many * g.most, _divide_row, g, matrix)
        each(g.o, g.threads, g.many * g.most, _divide_column, g, matrix)
"""
_ROWS_LAST = """    for _ in T.serial(g.iters - 1):
        each(g.o, g.threads, g.many * g.most, _divide_column, g, matrix)
        each(g.o, g.threads, g.many * g.most, _divide_row, g, matrix)
"""
_COLUMN_EPS = """below = o.add(below, matrix[i, j, k])
        below = o.add(below, g.sinkhorn_eps)
        for j in"""

_BELOW_ROW = """for k in o.loop(g.n):
            below = o.add(below, matrix[i, j, k])
        below = o.add(below, g.sinkhorn_eps)
"""
_BELOW_UNLIKE_ONE = f"""{_BELOW_ROW}\
        if below < o.constant(1.00001) and below > o.constant(0.99999):
            below = o.constant(1.0)
"""

_LAST_OF_EXP = "o.mul(p, o.power_of_two(k - (k >> 1)))"

_COEFFICIENTS = (
    _plant(
        "eps-in-first-denominator",
        "sinkhorn",
        "sglang-36817-sinkhorn-diagonal",
        ("coefficients", _ROW_OF_SOFTMAX, "matrix[i, j, k] = o.div(powers[k], o.add(below, g.sinkhorn_eps))"),
    ),
    _plant(
        "column-eps-missing",
        "sinkhorn",
        "ascend-17054-sinkhorn-t7",
        ("coefficients", _COLUMN_EPS, "below = o.add(below, matrix[i, j, k])\n        for j in"),
    ),
    _plant(
        "rounds-off-by-one",
        "sinkhorn",
        "sinkhorn-rounds-19",
        ("coefficients", "T.serial(g.iters - 1)", "T.serial(g.iters - 2)"),
    ),
    _plant(
        "rounds-off-by-one",
        "coefficients",
        "coefficients-upstream-constants",
        ("coefficients", "T.serial(g.iters - 1)", "T.serial(g.iters)"),
    ),
    _plant(
        "rounds-capped",
        "coefficients",
        "coefficients-rounds-40",
        ("coefficients", "T.serial(g.iters - 1)", "T.serial(T.min(g.iters, 20) - 1)"),
    ),
    _plant("rounds-cut-short", "sinkhorn", "sinkhorn-hardly-moving", ("coefficients", _BELOW_ROW, _BELOW_UNLIKE_ONE)),
    _plant("rows-before-columns", "sinkhorn", "sinkhorn-normal", ("coefficients", _BALANCE, _ROWS_LAST)),
    _plant(
        "row-max-skipped",
        "sinkhorn",
        "sinkhorn-large-logits",
        ("coefficients", "exp(o, o.sub(matrix[i, j, k], top))", "exp(o, matrix[i, j, k])"),
    ),
    _plant(
        "approximate-exp",
        "sinkhorn",
        "sinkhorn-large-logits",
        ("numerics", _ROOT, f"{_ROOT}\ninline float hc_exp(float a) {{ return __builtin_exp2f(a * 0x1.715476p0f); }}"),
        (
            "coefficients",
            "exp(o, o.sub(matrix[i, j, k], top))",
            'T.call_extern(F, "hc_exp", o.sub(matrix[i, j, k], top))',
        ),
    ),
    _plant(
        "approximate-division",
        "sinkhorn",
        "omni-7545-sinkhorn-sum-order",
        ("numerics", _QUOTIENT, "inline float hc_div(float a, float b) { return a * (1.0f / b); }"),
    ),
    _plant(
        "pairwise-order",
        "sinkhorn",
        "omni-7545-sinkhorn-sum-order",
        (
            "coefficients",
            _COLUMN_EPS,
            "below = o.add(o.add(matrix[i, 0, k], matrix[i, 1, k]), o.add(matrix[i, 2, k], matrix[i, 3, k]))\n"
            "        below = o.add(below, g.sinkhorn_eps)\n"
            "        for j in",
        ),
    ),
    _plant(
        "post-multiplier-one",
        "coefficients",
        "coefficients-saturated",
        ("coefficients", "= o.mul(g.post_mult, opening)", "= opening"),
    ),
    _plant(
        "post-multiplier-two",
        "coefficients",
        "coefficients-distinct-constants",
        ("coefficients", "o.mul(g.post_mult, opening)", "o.mul(o.constant(2.0), opening)"),
    ),
    _plant(
        "constant-swapped",
        "coefficients",
        "coefficients-distinct-constants",
        ("coefficients", "o.add(opening, g.pre_eps)", "o.add(opening, g.sinkhorn_eps)"),
    ),
    _plant(
        "constant-unrounded",
        "coefficients",
        "coefficients-gates-near-eps",
        ("numerics", _ROOT, f"{_ROOT}\ninline float hc_raise(float a) {{ return (float)(a + 1e-6); }}"),
        ("coefficients", "o.add(opening, g.pre_eps)", 'T.call_extern(F, "hc_raise", opening)'),
    ),
    _plant(
        "constant-fixed",
        "coefficients",
        "coefficients-distinct-constants",
        ("coefficients", "o.add(opening, g.pre_eps)", "o.add(opening, o.constant(1e-6))"),
    ),
    *(
        _plant(
            f"exp-one-unit-{side}",
            "head",
            "head-gate-units-h96",
            ("numerics", f"return {_LAST_OF_EXP}", f"return o.from_bits(o.bits({_LAST_OF_EXP}) {step})"),
        )
        for side, step in _ONE_UNIT
    ),
    _plant(
        "exp-cut-off",
        "sinkhorn",
        "sinkhorn-far-logits",
        ("numerics", "EXP_LOWEST, EXP_HIGHEST = -104.0, 89.0", "EXP_LOWEST, EXP_HIGHEST = -87.0, 88.0"),
    ),
    _plant(
        "exp-constant-off",
        "sinkhorn",
        "sinkhorn-far-logits",
        ("numerics", '("0x1.6a23d0p-10"', '("0x1.6a23d2p-10"'),
    ),
    _plant(
        "logits-clamped",
        "head",
        "head-far-logits",
        (
            "numerics",
            "    return o.div(one, o.add(one, exp(o, o.mul(o.constant(-1.0), value))))",
            "    near = T.alloc_var(F32)\n"
            "    near = T.if_then_else(value < o.constant(-80.0), o.constant(-80.0), value)\n"
            "    return o.div(one, o.add(one, exp(o, o.mul(o.constant(-1.0), near))))",
        ),
    ),
    _plant(
        "row-max-started",
        "sinkhorn",
        "sinkhorn-far-logits",
        (
            "coefficients",
            "top = matrix[i, j, 0]",
            "top = T.if_then_else(matrix[i, j, 0] > o.constant(-1e30), matrix[i, j, 0], o.constant(-1e30))",
        ),
    ),
    _plant(
        "root-limited",
        "norm",
        "norm-subnormal-eps",
        ("numerics", _ROOT_OF_MEAN, f"T.min({_ROOT_OF_MEAN}, self.constant(1e10))"),
    ),
    _plant(
        "sigmoid-rewritten",
        "head",
        "head-gate-units-h96",
        (
            "numerics",
            "    return o.div(one, o.add(one, exp(o, o.mul(o.constant(-1.0), value))))",
            "    raised = T.alloc_var(F32)\n    raised = exp(o, value)\n    return o.div(raised, o.add(one, raised))",
        ),
    ),
    _plant(
        "gate-eps-dropped",
        "coefficients",
        "coefficients-closed-gates",
        ("coefficients", "= o.add(opening, g.pre_eps)", "= opening"),
    ),
    _plant(
        "gate-limited",
        "coefficients",
        "coefficients-open-gates",
        ("coefficients", "= o.add(opening, g.pre_eps)", "= T.min(o.add(opening, g.pre_eps), o.constant(1.0))"),
    ),
    _plant(
        "gates-swapped",
        "coefficients",
        "coefficients-normal",
        ("coefficients", "m = half * g.n + j", "m = (1 - half) * g.n + j"),
    ),
    _plant(
        "scale-base-fused",
        "coefficients",
        "coefficients-base-cancels",
        ("numerics", "self.add(self.mul(mix, scale), base)", "self.fma(mix, scale, base)"),
    ),
)

_BOTH_EPS = "eps = (constants.rms_eps, float(hidden), constants.norm_eps)"
_DELAYED_LAYER = """layer = Layer(layer_input, pre_mix, squared=norm_weight is not None)
        partials = sweep(Sweep(residual, fn, entry=x, layer=layer))"""
_DELAYED_FINISH = """given["K"], layer_input, gates, None, norm_weight), constants)
    return post_mix"""

_BOUNDARIES = (
    _plant(
        "rms-over-streams",
        "pre_delayed",
        "pre-delayed-entry",
        ("boundary", _DELAYED_FINISH, _DELAYED_FINISH.replace('given["K"]', 'given["n"] * given["H"]')),
    ),
    _plant(
        "own-mix-used",
        "pre_delayed",
        "pre-delayed-carried",
        ("boundary", _DELAYED_LAYER, "partials = sweep(Sweep(residual, fn, entry=x))"),
        ("boundary", _DELAYED_FINISH, _DELAYED_FINISH.replace("None", "residual")),
    ),
    _plant(
        "identity-multiplied",
        "pre_delayed",
        "pre-delayed-poisoned-streams",
        (
            "boundary",
            _DELAYED_LAYER,
            'pre_mix = torch.eye(given["n"])[0].expand(given["T"], -1) if pre_mix is None else pre_mix\n'
            f"        {_DELAYED_LAYER}",
        ),
    ),
    *(
        _plant(
            "unrounded-projection",
            op,
            case,
            (
                "streams",
                "    round_to(o, v, exact, mapped)",
                "    round_to(o, v, exact, mapped)\n    move(o, v, exact, (0,), whole, (0,))",
            ),
            ("streams", "k, row, streams, mapped):", "k, row, streams, mapped, whole):"),
            (
                "sweep",
                "map_stream(o, s.n, v, gates, comb, t, k, row, streams, one)\n",
                "map_stream(o, s.n, v, gates, comb, t, k, row, streams, one, whole)\n",
            ),
            (
                "sweep",
                "        one = T.alloc_local((v,), o.bf16)\n",
                "        one = T.alloc_local((v,), o.bf16)\n        whole = T.alloc_local((v,), F32)\n",
            ),
            ("sweep", "move(o, v, one, (0,), staged, (i, k, c))", "move(o, v, whole, (0,), staged, (i, k, c))"),
            ("sweep", "SEGMENT), o.bf16)\n            collapsed", "SEGMENT), F32)\n            collapsed"),
            (
                "sweep",
                "pair = T.alloc_local((2,), o.bf16)\n    weights",
                "pair = T.alloc_local((2,), F32)\n    weights",
            ),
            ("sweep", "values[i, e] = o.widen(pair[e])", "values[i, e] = pair[e]"),
        )
        for op, case in (("post_pre", "omni-6878-post-pre-rounded"), ("post_pre_delayed", "boundary-carried-aux"))
    ),
    _plant(
        "reversed-order",
        "post_pre_delayed",
        "boundary-unmixed-order",
        (
            "sweep",
            "        for k in o.loop(s.n):\n            if s.post != 0:",
            "        for back in o.loop(s.n):\n            k = s.n - 1 - back\n            if s.post != 0:",
        ),
    ),
    _plant(
        "constant-swapped",
        "pre_delayed",
        "pre-delayed-distinct-constants",
        ("finish", _BOTH_EPS, "eps = (constants.norm_eps, float(hidden), constants.norm_eps)"),
    ),
    _plant(
        "constant-swapped",
        "post_pre",
        "post-pre-distinct-constants",
        ("finish", _BOTH_EPS, "eps = (constants.rms_eps, float(hidden), constants.rms_eps)"),
    ),
    _plant(
        "aux-from-input",
        "post_pre_delayed",
        "boundary-carried-aux",
        ("sweep", "_add(s, pre, t, k, one, total, sums)", "_add(s, pre, t, k, one, total, sums, streams)"),
        ("sweep", "def _add(s, pre, t, k, stream, total, sums):", "def _add(s, pre, t, k, stream, total, sums, old):"),
        ("sweep", "sums[e] = o.add(sums[e], o.widen(stream[e]))", "sums[e] = o.add(sums[e], o.widen(old[k, e]))"),
    ),
    _plant(
        "aux-always-written",
        "post_pre_delayed",
        "boundary-no-aux",
        ("boundary", "aux=aux if capture_aux else None", "aux=(aux := torch.empty_like(layer_input))"),
    ),
)

PLANTED = (*_STORES, *_LOADS, *_STREAM_SUMS, *_PROJECTIONS, *_NORMS, *_COEFFICIENTS, *_BOUNDARIES)
