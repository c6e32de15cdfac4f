"""What the contract allows each kernel, by the name of its function; a kernel without an entry is an error.

`stream_kernel` and the other kernels with pinned sums hand each thread the neighbouring columns that are its lanes, so
their bf16 loads are narrower than 16 bytes by design; what they owe is wide loads of `fn`, where a thread has as much
of it. The n rows of a head's `fn` are too few for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.static.rules import Allowed


@dataclass(frozen=True)
class Entry:
    """A row of the table; 16-byte loads are counted as so many for each of the n streams, and so many besides."""

    fma: bool = False
    division: bool = False
    root: bool = False
    per_stream: int = 0
    besides: int = 0
    narrow_for: tuple[str, ...] = ()

    def allowed(self, op: str, n: int) -> Allowed:
        """What the row means for n streams, in a call of `op`; those in `narrow_for` owe no wide loads."""
        wide = 0 if op in self.narrow_for else self.per_stream * n + self.besides
        return Allowed(self.fma, self.division, self.root, wide)


_COLLAPSE = Entry(per_stream=1)
_EXPAND = Entry(besides=1)
_POST = Entry(per_stream=1, besides=1)
_SINKHORN = Entry(fma=True, division=True)
_COEFFICIENTS = Entry(fma=True, division=True)
_MIXES = Entry(division=True, root=True)
_SUMS = Entry()
_EPILOGUE = Entry(fma=True, division=True, root=True)

ENTRIES = {
    # Triton
    "collapse_kernel": _COLLAPSE,
    "mean_kernel": _COLLAPSE,
    "expand_kernel": _EXPAND,
    "post_kernel": _POST,
    "tail_kernel": _POST,
    "broadcast_kernel": _COLLAPSE,
    "project_kernel": Entry(fma=True, besides=1, narrow_for=("head",)),
    "squares_kernel": Entry(fma=True),
    "collapse_squares_kernel": Entry(fma=True),
    "stream_kernel": Entry(fma=True, besides=1),
    "sum_kernel": _SUMS,
    "mixes_kernel": _MIXES,
    "sinkhorn_kernel": _SINKHORN,
    "coefficients_kernel": _COEFFICIENTS,
    "gate_kernel": _EPILOGUE,
    "epilogue_kernel": _EPILOGUE,
    "scale_kernel": Entry(division=True, root=True, besides=1),
    # TileLang
    "make_collapse": _COLLAPSE,
    "make_stream_mean": _COLLAPSE,
    "make_expand": _EXPAND,
    "make_post": _POST,
    "make_draft_tail": _POST,
    "make_fn_broadcast": _COLLAPSE,
    "make_sweep": Entry(fma=True, besides=1),
    "make_fold": _SUMS,
    "make_mixes": _MIXES,
    "make_sinkhorn": _SINKHORN,
    "make_coefficients": _COEFFICIENTS,
    "make_gates": _EPILOGUE,
    "make_finish": _EPILOGUE,
    "make_norm": Entry(fma=True, division=True, root=True, besides=1),
}
