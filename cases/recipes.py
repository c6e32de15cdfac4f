"""The input recipes: values that make wrong kernels show.

Ordinary random numbers hide almost every fault of order and rounding, so most recipes are built around one fault.
A recipe knows an argument's role. Where it has nothing special to say about a role, the role's plain values stand.
All values are float32 here; the builder rounds them to the argument's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from cases.randoms import Floats, Shape, below, between, normal, raw, signs, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cases.schema import ArgumentInput

FN_SIZE = 0.02
"""Size of a projection's weights, as the released models initialise them."""

SCALES = (0.55, 0.3, 1.1)
"""hc_scale for the pre, post and comb gates: near the 0.5, 0.25 and 1 of upstream's tests, whose products are exact."""

ABSORBED = 2.0**18
"""How much larger `absorbing` makes two of the streams: a small one keeps only a few of its bits beside them."""

FAINT = 2.0**-20
"""Size of a sublayer's output under `cancelling`: about what the streams leave behind."""


@dataclass(frozen=True)
class Request:
    """What a recipe is asked for: `seed` names the case, `streams` is n, `sum_of` says what the op adds up.

    sum_of: "mixed" for weighted streams, "sublayer" when a sublayer's output x comes first, "mean" for bare streams.
    """

    seed: str
    argument: str
    role: str
    shape: Shape
    streams: int
    sum_of: Literal["mixed", "sublayer", "mean"]
    made: ArgumentInput

    def key(self, part: str = "") -> str:
        """The text that seeds one random array of this argument."""
        return f"{self.seed}/{self.argument}/{part}" if part else f"{self.seed}/{self.argument}"


def values(request: Request) -> Floats:
    """The values of one argument before `scale`, `repeat` and `set`; shape as requested."""
    return _RECIPES[request.made.recipe](request)


def _plain(request: Request) -> Floats:
    """Values of an ordinary size for the role."""
    key, shape, role = request.key(), request.shape, request.role
    if role == "scale":
        return np.resize(np.array(SCALES, dtype=np.float32), shape)
    if role in ("pre", "comb"):
        return between(key, shape, 0.0625, 1.0)
    if role == "post":
        return between(key, shape, 0.125, 2.0)
    if role == "squares":
        return between(key, shape, 64.0, 4096.0)
    return normal(key, shape) * np.float32(_SIZES.get(role, 1.0)) + np.float32(role == "weight")


_SIZES = {"projection": FN_SIZE, "weight": 0.125, "logits": 2.0, "sums": 8.0}


def _cancelling(request: Request) -> Floats:
    """Streams in pairs that nearly cancel, so that the sum is all rounding error, and shows every order."""
    plain, role = _plain(request), request.role
    if role == "hidden":
        return plain * np.float32(FAINT)
    for odd in range(1, request.streams, 2):
        if role == "streams":
            plain[:, odd] = -plain[:, odd - 1]
        elif role in ("pre", "comb", "projection"):
            stream = _stream_axis(plain, request)
            stream[:, odd] = _nudged(stream[:, odd - 1], request.key(f"nudge{odd}"))
    if role == "streams" and request.streams % 2:
        plain[:, -1] *= np.float32(FAINT)
    return plain


def _nudged(base: Floats, key: str) -> Floats:
    """base * (1 + d) with d of either sign and about 1e-6."""
    sizes = between(f"{key}/size", base.shape, 5e-7, 1.5e-6)
    return base * (np.float32(1) + signs(raw(key, base.shape)) * sizes)


def _absorbing(request: Request) -> Floats:
    """A large stream 0 that a later stream cancels: how much of the small ones survives depends on the order.

    The other large one is stream 2 of four or more, else stream 1; the first and the last would make the sum the
    same from either end.
    """
    plain, role = _plain(request), request.role
    partner = 2 if request.streams > 3 else 1
    if request.streams == 1:
        return plain
    if role == "streams":
        plain[:, 0] *= np.float32(ABSORBED)
        plain[:, partner] = -plain[:, 0]
    elif role in ("pre", "comb", "projection"):
        stream = _stream_axis(plain, request)
        stream[:, partner] = stream[:, 0]
    return plain


def _stream_axis(plain: Floats, request: Request) -> Floats:
    """A view whose axis 1 counts streams; a projection over one row per token has none, and is its own stream 0."""
    if request.role != "projection":
        return plain
    rows, columns = plain.shape
    return plain.reshape(rows, request.streams, columns // request.streams)


def _opposing(request: Request) -> Floats:
    """A sublayer's output that stream 0 nearly cancels, the other streams faint: what remains of the first two
    products shows which of them was rounded on its own.
    """
    role = request.role
    if role in ("hidden", "streams"):
        opposed = normal(f"{request.seed}/opposed", (request.shape[0], request.shape[-1]))
        if role == "hidden":
            return opposed
        made = _plain(request) * np.float32(FAINT)
        made[:, 0] = -opposed
        return made
    if role in ("post", "comb"):
        weights = between(f"{request.seed}/opposed-mix", (request.shape[0], request.streams), 0.125, 2.0)
        if role == "post":
            return weights
        made = _plain(request)
        made[:, 0] = _nudged(weights, request.key("nudge"))
        return made
    return _plain(request)


def _mean_tie(request: Request) -> Floats:
    """Streams whose mean is the middle between two BF16 values, or an FP32 number next to it; all else plain."""
    return _tie_mean(request) if request.role == "streams" else _plain(request)


def _near_tie(request: Request) -> Floats:
    """Sums v + half an ulp of v, exactly or 2^-15 of it off: the middle between two BF16 values."""
    role, after_x = request.role, request.sum_of == "sublayer"
    if role == "hidden" and after_x:
        return _tie_base(request, request.shape)
    if role == "streams":
        return _tie_mean(request) if request.sum_of == "mean" else _tie_streams(request, 0 if after_x else 1)
    if role == "post":
        return np.ones(request.shape, dtype=np.float32)
    if role == "comb" or (role == "pre" and not after_x):
        return _tie_mix(request, 0 if role == "comb" else 1)
    return _plain(request)


def _tie_base(request: Request, shape: Shape) -> Floats:
    """BF16 values v with exponents from -4 to 4, the same for all arguments of a case."""
    bits = raw(f"{request.seed}/tie", shape)
    mantissas = np.float32(1) + below(bits, 128).astype(np.float32) * np.float32(2.0**-7)
    exponents = ((bits >> np.uint64(8)) % np.uint64(9)).astype(np.int32) - 4
    return np.asarray(np.ldexp(signs(bits) * mantissas, exponents), dtype=np.float32)


def _tie_halves(request: Request, base: Floats) -> Floats:
    """Half a BF16 unit of each v, of either sign."""
    return np.asarray(np.ldexp(signs(raw(request.key("half"), base.shape)), np.frexp(base)[1] - 9))


def _tie_streams(request: Request, half_stream: int) -> Floats:
    """Half a unit in one stream, v in the one before it if there is one (else x holds v), zeros elsewhere."""
    base = _tie_base(request, (request.shape[0], request.shape[-1]))
    made = np.zeros(request.shape, dtype=np.float32)
    if half_stream == 1:
        made[:, 0] = base
    if half_stream < request.streams:
        made[:, half_stream] = _tie_halves(request, base)
    return made


def _tie_mean(request: Request) -> Floats:
    """Streams whose sum is n times a tie, or the FP32 number next to that.

    A rounded 1/n as a factor finds the exact multiples as the division does, but not their neighbours. So stream 0
    is n times a value of few bits, stream 1 n times one or three half units, and stream 2 the last bit of the sum.
    """
    tokens, n, hidden = request.shape
    bits = raw(f"{request.seed}/tie", (tokens, hidden))
    coarse = signs(bits) * (np.float32(1) + below(bits, 16).astype(np.float32) * np.float32(2.0**-4))
    odd = np.float32(1) + np.float32(2) * ((bits >> np.uint64(1)) & np.uint64(1)).astype(np.float32)
    made = np.zeros(request.shape, dtype=np.float32)
    made[:, 0] = n * coarse
    if n > 1:
        made[:, 1] = n * odd * np.copysign(np.float32(2.0**-8), coarse)
    if n > 2:
        last_bit = np.ldexp(np.float32(1), np.frexp(made[:, 0] + made[:, 1])[1] - 24)
        made[:, 2] = last_bit * (below(raw(request.key("bit"), coarse.shape), 3) - 1).astype(np.float32)
    return made


def _tie_mix(request: Request, half_stream: int) -> Floats:
    """1 for v, and 1 or 1 +- 2^-15 by turns of the tokens for the half; 1.5 for a lone stream."""
    made = _plain(request)
    if half_stream == 1:
        made[:, 0] = 1.0 if request.streams > 1 else 1.5
    if half_stream < request.streams:
        factors = np.array([1.0, 1.0 + 2.0**-15, 1.0 - 2.0**-15], dtype=np.float32)
        turns = factors[np.arange(request.shape[0]) % 3]
        made[:, half_stream] = turns.reshape(-1, *([1] * (made.ndim - 2)))
    return made


def _wide(request: Request) -> Floats:
    """Exponents far apart, evenly spread; squares stay positive."""
    if request.role in ("scale", "weight"):
        return _plain(request)
    made = spread(request.key(), request.shape, _LIMITS.get(request.role, 30))
    return np.abs(made) if request.role == "squares" else made


_LIMITS = {"streams": 50, "hidden": 50, "logits": 7, "mixes": 7, "base": 5}


def _integer(request: Request) -> Floats:
    """Small integers, and powers of two for the mixes: every order of the sum is exact."""
    bits, role = raw(request.key(), request.shape), request.role
    if role in ("pre", "post", "comb"):
        return signs(bits) * np.ldexp(np.float32(1), (below(bits, 4) - 2).astype(np.int32))
    if role in ("scale", "squares", "weight"):
        return np.ldexp(np.float32(1), below(bits, 4).astype(np.int32))
    return (below(bits, 7) - 3).astype(np.float32)


def _one_hot(request: Request) -> Floats:
    """Mixes that select one stream, another for each token; weights that select one column, the last included."""
    made, role = np.zeros(request.shape, dtype=np.float32), request.role
    first = np.arange(request.shape[0])
    if role in ("pre", "post"):
        made[first, first % request.streams] = 1.0
    elif role == "comb":
        for stream in range(request.streams):
            made[first, stream, (first + stream + 1) % request.streams] = 1.0
    elif role == "projection":
        rows, columns = request.shape
        made[first, first * (columns - 1) // max(rows - 1, 1)] = 1.0
    else:
        return _plain(request)
    return made


def _token_id(request: Request) -> Floats:
    """Values that say where they belong: exponent = token, mantissa = stream and column, sign = column / 16.

    BF16: 2^(token % 64 - 32) * (1 + (16 * stream + column % 16) / 128), negative in every other 16 columns. The
    exponent repeats after 64 tokens. FP32 mixes: token % 64 + input stream / 8 + output stream / 64.
    """
    places = np.indices(request.shape, sparse=True)
    if request.role in ("hidden", "streams"):
        token, column = places[0], places[-1]
        stream = places[1] if request.role == "streams" else np.zeros_like(token)
        mantissa = 1.0 + (16 * stream + column % 16) / 128.0
        sign = 1.0 - 2.0 * ((column // 16) % 2)
        return (sign * np.ldexp(mantissa, token % 64 - 32)).astype(np.float32)
    if request.role in ("pre", "post", "comb"):
        parts = (places[0] % 64, *(place / 8.0**turn for turn, place in enumerate(places[1:], start=1)))
        return np.broadcast_to(sum(parts), request.shape).astype(np.float32)
    return _plain(request)


def _special(request: Request) -> Floats:
    """Plain values with one in `every` replaced by a special bit pattern of the wanted kinds."""
    made, table = request.made, _special_bits(request)
    bits = raw(request.key("special"), request.shape)
    chosen = (bits & np.uint64(0xFFFFFFFF)) % np.uint64(made.every) == 0
    picked = table[below(bits, len(table))]
    return np.where(chosen, picked, _plain(request).view(np.uint32)).view(np.float32)


def _special_bits(request: Request) -> np.typing.NDArray[np.uint32]:
    """Bit patterns in FP32; those of a BF16 argument end in 16 zero bits, so that nothing is lost."""
    narrow = request.role in ("hidden", "streams", "weight")
    patterns = _BF16_SPECIALS if narrow else _F32_SPECIALS
    kinds: Iterable[str] = request.made.kinds or patterns
    both = [bits | sign for kind in kinds for bits in patterns[kind] for sign in (0, 0x80000000)]
    if request.role == "squares":
        both = [bits for bits in both if bits < 0x80000000]
    return np.array(both, dtype=np.uint32)


_BF16_SPECIALS = {
    "zero": (0x00000000,),
    "subnormal": (0x00010000, 0x00400000, 0x007F0000, 0x00800000),
    "inf": (0x7F800000,),
    "nan": (0x7FC00000, 0x7FA50000),
    "largest": (0x7F7F0000, 0x7F000000),
}
_F32_SPECIALS = {
    "zero": (0x00000000,),
    "subnormal": (0x00000001, 0x00400000, 0x007FFFFF, 0x00800000),
    "inf": (0x7F800000,),
    "nan": (0x7FC00000, 0x7FA5A5A5),
    "largest": (0x7F7FFFFF, 0x7F000000),
}


def _zeros(request: Request) -> Floats:
    return np.zeros(request.shape, dtype=np.float32)


def _ones(request: Request) -> Floats:
    return np.ones(request.shape, dtype=np.float32)


def _constant(request: Request) -> Floats:
    return np.full(request.shape, request.made.value, dtype=np.float32)


_RECIPES: dict[str, Callable[[Request], Floats]] = {
    "normal": _plain,
    "cancelling": _cancelling,
    "absorbing": _absorbing,
    "opposing": _opposing,
    "near_tie": _near_tie,
    "mean_tie": _mean_tie,
    "wide": _wide,
    "integer": _integer,
    "one_hot": _one_hot,
    "token_id": _token_id,
    "special": _special,
    "zeros": _zeros,
    "ones": _ones,
    "constant": _constant,
}
