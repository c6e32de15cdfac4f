"""The learned collapse that ends a V4 model and its draft."""

from __future__ import annotations

from torch import Tensor

from fast.arguments import BF16, F32, Output
from fast.registry import Config
from fast.tilelang_kernels import MAX_STREAMS
from fast.tilelang_kernels.build import arguments
from fast.tilelang_kernels.finish import Finish, finish
from fast.tilelang_kernels.sweep import Sweep, sweep


def head(
    residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, *, config: Config, out: Tensor | None = None
) -> Tensor:
    """Return hidden [T, H] bf16: the collapse of residual [T, n, H] bf16 by gates projected from it.

    fn [n, n*H], hc_scale [1] and hc_base [n] fp32, any strides; n = config.hc_mult is 1 to 8. TypeError or ValueError
    for arguments that do not fit. Nothing is rounded to bf16 before the collapse. Source: contract 1; DeepSeek's own
    head keeps the scaled values in fp32.
    """
    given = arguments("head")
    given.tensor("residual", residual, BF16, "T n H")
    constants = given.config(config)
    given.integer("config.hc_mult", constants.hc_mult, 1, MAX_STREAMS)
    given.size("n*H", given["n"] * given["H"])
    given.tensor("fn", fn, F32, "n n*H")
    given.tensor("hc_scale", hc_scale, F32, "1")
    given.tensor("hc_base", hc_base, F32, "n")
    (hidden,) = given.outputs([Output("hidden", BF16, "T H")], out)
    if given["T"]:
        partials = sweep(Sweep(residual, fn))
        finish(Finish(partials, hc_scale, hc_base, given["n*H"], hidden, residual=residual), constants)
    return hidden
