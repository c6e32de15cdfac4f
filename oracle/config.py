"""The numbers of an mHC model that its kernels need."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class MhcConfig:
    """Constants of one model; every float is meant as its fp32 rounding.

    hc_mult: residual streams n, 1..8. rms_eps: added to the mean square before the projection's root.
    norm_eps: the same for the RMSNorm of the collapse. hc_pre_eps: added to each pre gate. hc_sinkhorn_eps:
    see `sinkhorn`. post_mult: factor of the post gates. sinkhorn_iters: rounds, the softmax and its column
    step being the first. Source: the released configurations (hc_eps is one number there and serves as both
    hc eps). Raises TypeError or ValueError for a number out of its range.
    """

    hc_mult: int = 4
    rms_eps: float = 1e-6
    norm_eps: float = 1e-6
    hc_pre_eps: float = 1e-6
    hc_sinkhorn_eps: float = 1e-6
    post_mult: float = 2.0
    sinkhorn_iters: int = 20

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name in ("hc_mult", "sinkhorn_iters"):
                _check_count(part.name, value)
            else:
                _check_real(part.name, value)

    @classmethod
    def v4(cls) -> MhcConfig:
        """Return the constants of DeepSeek-V4: both RMS eps are 1e-6."""
        return cls(rms_eps=1e-6, norm_eps=1e-6)

    @classmethod
    def v41(cls) -> MhcConfig:
        """Return the constants of DeepSeek-V4.1: both RMS eps are 1e-20."""
        return cls(rms_eps=1e-20, norm_eps=1e-20)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"MhcConfig: {name} must be an int, got {value!r}")
    if value < 1 or (name == "hc_mult" and value > 8):
        wanted = "1 to 8" if name == "hc_mult" else "at least 1"
        raise ValueError(f"MhcConfig: {name} must be {wanted}, got {value}")


def _check_real(name: str, value: object) -> None:
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise TypeError(f"MhcConfig: {name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"MhcConfig: {name} must be finite and not negative, got {value}")
