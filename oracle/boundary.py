"""Layer boundaries: what happens between two sublayers, as one call each.

V4 collapses with the pre-mix of the sublayer that is entered; V4.1 ("delayed") collapses with the one
carried from the sublayer before and hands on the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle import arguments
from oracle.arith import packed, round_bf16, widen
from oracle.arithmetic import CONTRACT_1, Arithmetic
from oracle.coefficients import coefficients, mixes, project_unrounded
from oracle.collapse import collapse
from oracle.config import MhcConfig
from oracle.head import check_streams
from oracle.norm import SquaresOf, check_weight, collapse_norm, norm
from oracle.streams import check_post, stream_mean, unrounded_post


@dataclass(frozen=True)
class _Gates:
    """What a boundary turns its projection into coefficients with."""

    op: str
    fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor
    config: MhcConfig
    arithmetic: Arithmetic

    def check(self, residual: Tensor, columns: int) -> None:
        n = self.config.hc_mult
        arguments.sized(self.op, "fn", self.fn, torch.float32, (n * (n + 2), columns))
        arguments.sized(self.op, "hc_scale", self.hc_scale, torch.float32, (3,))
        arguments.sized(self.op, "hc_base", self.hc_base, torch.float32, (n * (n + 2),))
        parts = {"fn": self.fn, "hc_scale": self.hc_scale, "hc_base": self.hc_base}
        arguments.same_device(self.op, residual=residual, **parts)

    def of(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return pre_mix, post_mix, comb_mix from fp32 [T, n, H] (or [T, 1, H]) values."""
        sums, squares = project_unrounded(values, self.fn, self.arithmetic)
        mix = mixes(sums, squares, numel=self.fn.shape[1], rms_eps=self.config.rms_eps)
        return coefficients(mix, self.hc_scale, self.hc_base, config=self.config, arithmetic=self.arithmetic)

    def of_entry(self, residual: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same from the residual, or from one row x = [T, H] that all streams equal."""
        tokens, streams, hidden = check_streams(self.op, residual, self.config)
        self.check(residual, hidden if x is not None else streams * hidden)
        if x is None:
            return self.of(widen(residual))
        arguments.sized(self.op, "x", x, torch.bfloat16, (tokens, hidden))
        arguments.same_device(self.op, residual=residual, x=x)
        return self.of(widen(x).unsqueeze(1))

    def of_post(
        self, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the new residual and the coefficients projected from it."""
        check_post(self.op, x, residual, post_mix, comb_mix)
        _, streams, hidden = check_streams(self.op, residual, self.config)
        self.check(residual, streams * hidden)
        exact = unrounded_post(x, residual, post_mix, comb_mix, self.arithmetic)
        new = packed(round_bf16(exact))
        projected = exact if self.arithmetic.projects == "unrounded" else widen(new)
        return new, self.of(projected)

    def layer_input(
        self, residual: Tensor, pre_mix: Tensor | None, norm_weight: Tensor | None, squares_of: SquaresOf
    ) -> Tensor:
        """Return the collapse, or with no pre_mix a bit copy of stream 0, and its norm if there is a weight."""
        eps, arithmetic = self.config.norm_eps, self.arithmetic
        if pre_mix is None:
            copied = packed(residual[:, 0])
            return copied if norm_weight is None else norm(copied, norm_weight, norm_eps=eps, arithmetic=arithmetic)
        if norm_weight is None:
            return collapse(residual, pre_mix, arithmetic=arithmetic)
        return collapse_norm(residual, pre_mix, norm_weight, norm_eps=eps, squares_of=squares_of, arithmetic=arithmetic)

    def check_optional(self, residual: Tensor, pre_mix: Tensor | None, norm_weight: Tensor | None) -> None:
        """Raise for a wrong carried pre_mix or norm weight before anything is computed."""
        tokens, streams, hidden = check_streams(self.op, residual, self.config)
        if pre_mix is not None:
            arguments.sized(self.op, "pre_mix", pre_mix, torch.float32, (tokens, streams))
        if norm_weight is not None:
            check_weight(self.op, norm_weight, hidden, self.config.norm_eps)
        arguments.same_device(self.op, residual=residual, pre_mix=pre_mix, norm_weight=norm_weight)


@torch.no_grad()
def pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: MhcConfig,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    arithmetic: Arithmetic = CONTRACT_1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Enter a V4 sublayer: return post_mix [T, n], comb_mix [T, n, n] (fp32) and layer_input [T, H] (bf16).

    residual: bf16 [T, n, H]. fn: fp32 [M, n*H], M = n(n + 2). hc_scale: fp32 [3]. hc_base: fp32 [M]. x:
    bf16 [T, H], at an entry whose streams all equal it; fn is then its broadcast [M, H] and the mean square
    is over H. norm_weight: bf16 [H]; the layer input is then normed with the sum of squares of the
    *unrounded* collapse. Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    Source: upstream mhc_pre.
    """
    gates = _Gates("pre", fn, hc_scale, hc_base, config, arithmetic)
    gates.check_optional(residual, None, norm_weight)
    pre_mix, post_mix, comb_mix = gates.of_entry(residual, x)
    return post_mix, comb_mix, gates.layer_input(residual, pre_mix, norm_weight, "unrounded")


@torch.no_grad()
def pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: MhcConfig,
    pre_mix: Tensor | None = None,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    arithmetic: Arithmetic = CONTRACT_1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Enter a V4.1 sublayer: return post_mix, comb_mix, layer_input [T, H] (bf16) and next_pre_mix [T, n].

    Arguments as in `pre`, and pre_mix: fp32 [T, n], carried from the sublayer before; without it the layer
    input is a bit copy of stream 0, whatever the other streams hold (-0, NaN payloads and Inf stay).
    norm_weight: the layer input is normed with the sum of squares of the bf16 collapse.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    Source: upstream mhc_pre_delayed; the copy follows its torch reference, which slices.
    """
    gates = _Gates("pre_delayed", fn, hc_scale, hc_base, config, arithmetic)
    gates.check_optional(residual, pre_mix, norm_weight)
    next_pre_mix, post_mix, comb_mix = gates.of_entry(residual, x)
    return post_mix, comb_mix, gates.layer_input(residual, pre_mix, norm_weight, "rounded"), next_pre_mix


@torch.no_grad()
def post_pre(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: MhcConfig,
    norm_weight: Tensor | None = None,
    arithmetic: Arithmetic = CONTRACT_1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross a V4 boundary, post then pre: return residual [T, n, H], post_mix, comb_mix and layer_input [T,
    H].

    x: bf16 [T, H]. residual, post_mix, comb_mix as in `post`; fn, hc_scale, hc_base, norm_weight as in
    `pre`. The projection and the collapse read the new residual after its rounding to bf16.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device. Source: upstream
    mhc_fused_post_pre.
    """
    gates = _Gates("post_pre", fn, hc_scale, hc_base, config, arithmetic)
    gates.check_optional(residual, None, norm_weight)
    new, (next_pre, next_post, next_comb) = gates.of_post(x, residual, post_mix, comb_mix)
    return new, next_post, next_comb, gates.layer_input(new, next_pre, norm_weight, "unrounded")


@torch.no_grad()
def post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    config: MhcConfig,
    pre_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    capture_aux: bool = False,
    arithmetic: Arithmetic = CONTRACT_1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cross a V4.1 boundary: return residual, post_mix, comb_mix, layer_input, next_pre_mix and aux.

    Arguments as in `post_pre`, and pre_mix as in `pre_delayed` (None copies stream 0 of the new residual).
    aux: bf16 [T, H], the stream mean of the new residual, when capture_aux is true; else empty, (0, H).
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device.
    Source: upstream mhc_fused_post_pre_delayed.
    """
    gates = _Gates("post_pre_delayed", fn, hc_scale, hc_base, config, arithmetic)
    gates.check_optional(residual, pre_mix, norm_weight)
    new, (next_pre, next_post, next_comb) = gates.of_post(x, residual, post_mix, comb_mix)
    layer_input = gates.layer_input(new, pre_mix, norm_weight, "rounded")
    aux = stream_mean(new, arithmetic=arithmetic) if capture_aux else x.new_empty(0, x.shape[1])
    return new, next_post, next_comb, layer_input, next_pre, aux
