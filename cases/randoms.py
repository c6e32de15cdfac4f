"""Random numbers that never change: raw Philox bits, turned into floats by exact arithmetic only.

Only the bit generator of numpy is used; its output is fixed for good. The distributions that numpy builds on top
may change with its version, and log and cos differ between machines, so bell-shaped values are sums here.
Every element takes one raw number in row-major order: the values of the first tokens do not depend on T.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Raw: TypeAlias = npt.NDArray[np.uint64]
Shape: TypeAlias = tuple[int, ...]

_LANE = np.uint64(0xFFFF)
_LANES_MEAN = 2 * 65535
_LANES_STD = 65536 / math.sqrt(3)


def raw(key: str, shape: Shape) -> Raw:
    """64 random bits an element, a function of the text `key` and the element's position alone."""
    seed = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], dtype="<u8")
    count = math.prod(shape)
    return np.asarray(np.random.Philox(key=seed).random_raw(count), dtype=np.uint64).reshape(shape)


def bell(bits: Raw) -> Floats:
    """Bell-shaped values of mean 0 and variance 1 within +-3.47: the sum of four 16-bit numbers of each element."""
    total = np.zeros(bits.shape, dtype=np.int64)
    for lane in range(4):
        total += ((bits >> np.uint64(16 * lane)) & _LANE).astype(np.int64)
    return (total - _LANES_MEAN).astype(np.float32) * np.float32(1 / _LANES_STD)


def uniform(bits: Raw) -> Floats:
    """Values in [0, 1), multiples of 2^-24."""
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def below(bits: Raw, limit: int) -> npt.NDArray[np.int64]:
    """Integers in [0, limit), from the high half of the bits."""
    return ((bits >> np.uint64(32)) % np.uint64(limit)).astype(np.int64)


def signs(bits: Raw) -> Floats:
    """+1 or -1, from the lowest bit."""
    return np.float32(1) - np.float32(2) * (bits & np.uint64(1)).astype(np.float32)


def normal(key: str, shape: Shape) -> Floats:
    """Bell-shaped values for `key`."""
    return bell(raw(key, shape))


def between(key: str, shape: Shape, low: float, high: float) -> Floats:
    """Evenly spread values in [low, high]."""
    return np.float32(low) + np.float32(high - low) * uniform(raw(key, shape))


def spread(key: str, shape: Shape, limit: int) -> Floats:
    """Values of any sign with 24 random bits and an exponent from -limit to limit, each as likely."""
    bits = raw(key, shape)
    exponents = below(bits, 2 * limit + 1) - limit
    fractions = np.float32(1) + ((bits >> np.uint64(1)) & np.uint64(0x7FFFFF)).astype(np.float32) * np.float32(2.0**-23)
    return np.ldexp(signs(bits) * fractions, exponents.astype(np.int32))
