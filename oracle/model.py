"""The plain schedule of a small mHC decoder and its draft: each op by itself, at the point where it is defined.

One device, all tokens, no pipeline, nothing fused and nothing deferred. `decode` is the whole definition: a fused,
sharded or staged schedule is right when it computes these bits. The sublayers are stand-ins, see `oracle.sublayers`.
Sources: the DeepSeek-V4 and V4.1 reference models and vLLM's decoders and DSpark drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from oracle.arith import bits, round_bf16
from oracle.boundary import pre, pre_delayed
from oracle.coefficients import fn_broadcast, project
from oracle.collapse import collapse
from oracle.compare import POISON
from oracle.config import MhcConfig
from oracle.head import head
from oracle.norm import norm
from oracle.streams import expand, post, stream_mean
from oracle.sublayers import Boundary, Stack, StandIns, Weights

Carried = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Model:
    """What is computed; how it is spread over ranks and stages is a schedule's affair.

    aux_ids: layers whose streams the draft reads, in the order in which it reads them. V4 takes the streams *after*
    layer i (0 <= i < layers), V4.1 those *entering* layer i (0 <= i <= layers), before an Engram injection there.
    engram: layers that inject a memory of the token ids into the streams before their attention boundary.
    mtp_rows: rows of the buffer that hands the final streams to an MTP draft, 0 for no buffer. It is filled only when
    no aux state exists. Raises ValueError for another version, for no layers, and for ids that are out of range or
    given twice.
    """

    version: Literal["v4", "v4.1"]
    layers: int
    hidden_size: int
    config: MhcConfig
    aux_ids: tuple[int, ...] = ()
    engram: tuple[int, ...] = ()
    mtp_rows: int = 0
    draft_layers: int = 3

    def __post_init__(self) -> None:
        if self.version not in ("v4", "v4.1"):
            raise ValueError(f"Model: version must be 'v4' or 'v4.1', got {self.version!r}")
        for name, count in (("layers", self.layers), ("draft_layers", self.draft_layers)):
            if count < 1:
                raise ValueError(f"Model: {name} must be at least 1, got {count}")
        last = self.layers - 1 if self.version == "v4" else self.layers
        _check_layers(f"aux_ids of {self.version}", self.aux_ids, last)
        _check_layers("engram", self.engram, self.layers - 1)


def _check_layers(name: str, ids: tuple[int, ...], last: int) -> None:
    wrong = [layer for layer in ids if not 0 <= layer <= last]
    if wrong or len(set(ids)) != len(ids):
        raise ValueError(f"Model: {name} must be different layers in 0..{last}, got {ids}")


@dataclass(frozen=True)
class Batch:
    """One step's tokens: ids and draft_ids int64 [T], padding bool [T] (True for a slot without a request)."""

    ids: Tensor
    draft_ids: Tensor
    padding: Tensor


@dataclass
class Trace:
    """Every value of a run by name, in the order of computation, and the aux states in the configured order.

    `lookalikes` are values that no schedule should show, kept so that a report can name what a wrong one shows.
    """

    states: dict[str, Tensor] = field(default_factory=dict)
    aux: list[Tensor] = field(default_factory=list)
    lookalikes: dict[str, Tensor] = field(default_factory=dict)

    def note(self, name: str, value: Tensor) -> Tensor:
        """Record one value and return it."""
        self.states[name] = value
        return value


def decode(model: Model, weights: Weights, sublayers: StandIns, batch: Batch, *, ranks: int = 1) -> Trace:
    """Run one step of the target and of its draft; return every value that a schedule must reproduce.

    ranks: how many partial sums attention is made of. They are added in rank order in fp32 from +0 and rounded once;
    stand-ins whose sums are exact give the same bits for any number.
    """
    trace, n = Trace(), model.config.hc_mult
    target = _Layers(model, weights.target, sublayers, trace, "", batch.ids, batch.padding, ranks)
    trace.note("token ids", batch.ids)
    trace.note("padding mask", batch.padding)
    embedded = sublayers.embed(batch.ids)
    carried: Carried = (expand(embedded, n), None)
    means = {}
    for layer in range(model.layers):
        means[f"entering layer {layer}"] = stream_mean(carried[0])
        carried = target.engram(layer, carried)
        carried = target.layer(layer, layer, carried, embedded if layer == 0 and 0 not in model.engram else None)
    means[f"entering layer {model.layers}"] = stream_mean(carried[0])
    trace.lookalikes |= {f"the mean {place}": mean for place, mean in means.items()}
    after = 1 if model.version == "v4" else 0
    trace.aux = [means[f"entering layer {layer + after}"] for layer in model.aux_ids]

    trace.note("final streams", carried[0])
    hidden = trace.note("final hidden", target.collapsed(carried))
    trace.note("final normed", target.normed(hidden))
    trace.note("logits", project(trace.states["final normed"], weights.lm_head)[0])
    if model.mtp_rows:
        trace.note("mtp buffer", mtp_buffer(model, carried[0]))
    if model.aux_ids or model.mtp_rows:
        _draft(model, weights, sublayers, batch, trace, ranks)
    return trace


def _draft(model: Model, weights: Weights, sublayers: StandIns, batch: Batch, trace: Trace, ranks: int) -> None:
    """Run the draft: on aux states when the model has them, else on the streams in the MTP buffer.

    Its output is not normed; the norm belongs to the logits alone, and the confidence head reads the output itself.
    """
    n, ids = model.config.hc_mult, batch.draft_ids
    draft = _Layers(model, weights.draft, sublayers, trace, "draft ", ids, batch.padding, ranks)
    trace.note("draft token ids", ids)
    embedded = sublayers.embed(ids)
    if model.aux_ids:
        joined = trace.note("draft joined aux", torch.cat(trace.aux, 1))
        projected = round_bf16(project(joined, weights.main_proj)[0])
        draft.context = trace.note("draft context", norm(projected, weights.main_norm, norm_eps=model.config.norm_eps))
        # Unlike the target, the draft enters at full width: its streams are equal, but nothing makes use of it.
        carried: Carried = (expand(embedded, n), None)
    else:
        rows = trace.states["mtp buffer"][: len(ids)]
        carried = (rows.reshape(len(ids), n, model.hidden_size), None)
    trace.note("draft entry streams", carried[0])
    for index in range(model.draft_layers if model.aux_ids else 1):
        carried = draft.layer(index, model.layers + index, carried)
    hidden = trace.note("draft hidden", draft.collapsed(carried))
    trace.lookalikes["the normed draft hidden"] = draft.normed(hidden)
    trace.note("draft logits", project(draft.normed(hidden), weights.lm_head)[0])
    trace.note("draft confidence", project(torch.cat([hidden, embedded], 1), weights.confidence)[0])


@dataclass
class _Layers:
    """A stack of layers: what one layer does, and what ends the stack."""

    model: Model
    stack: Stack
    sublayers: StandIns
    trace: Trace
    prefix: str
    ids: Tensor
    padding: Tensor
    ranks: int
    context: Tensor | None = None
    attention_pre_mix: Tensor | None = None

    def engram(self, layer: int, carried: Carried) -> Carried:
        """Inject a memory of the token ids into the streams, at the layers that do so."""
        self.trace.note(f"layer {layer} entry streams", carried[0])
        if layer not in self.model.engram:
            return carried
        injected = self.sublayers.engram(layer, carried[0], self.ids)
        self.trace.lookalikes[f"the mean after the injection at layer {layer}"] = stream_mean(injected)
        return self.trace.note(f"layer {layer} injected streams", injected), carried[1]

    def layer(self, index: int, layer: int, carried: Carried, embedded: Tensor | None = None) -> Carried:
        """Run attention, then the FFN; `index` counts in the stack, `layer` in the whole model.

        embedded: the row that all streams equal, at the entry of the model; the projection then reads it once.
        """

        def attention(x: Tensor) -> Tensor:
            parts = (self.sublayers.attention(layer, x, r, self.ranks, self.context) for r in range(self.ranks))
            return _added(list(parts))

        def ffn(x: Tensor) -> Tensor:
            return _added([self.sublayers.ffn(layer, x, self.ids, self.padding, 0, 1)])

        name = f"{self.prefix}layer {index}"
        carried = self.sublayer(f"{name} attention", self.stack.attention[index], carried, embedded, attention)
        self.attention_pre_mix = carried[1]
        self.trace.note(f"{name} ffn streams", carried[0])
        return self.sublayer(f"{name} ffn", self.stack.ffn[index], carried, None, ffn)

    def sublayer(
        self, name: str, w: Boundary, carried: Carried, embedded: Tensor | None, run: Callable[[Tensor], Tensor]
    ) -> Carried:
        """Collapse the streams, run the sublayer, map its output back: one step of mHC."""
        (residual, pre_mix), next_pre_mix, note = carried, None, self.trace.note
        fn = w.fn if embedded is None else fn_broadcast(w.fn, self.model.config.hc_mult)
        if self.model.version == "v4":
            post_mix, comb_mix, x = pre(
                residual, fn, w.hc_scale, w.hc_base, config=self.model.config, x=embedded, norm_weight=w.norm_weight
            )
        else:
            post_mix, comb_mix, x, next_pre_mix = pre_delayed(
                residual,
                fn,
                w.hc_scale,
                w.hc_base,
                config=self.model.config,
                pre_mix=pre_mix,
                x=embedded,
                norm_weight=w.norm_weight,
            )
            note(f"{name} next_pre_mix", next_pre_mix)
        note(f"{name} post_mix", post_mix)
        note(f"{name} comb_mix", comb_mix)
        output = note(f"{name} output", run(note(f"{name} input", x)))
        return post(output, residual, post_mix, comb_mix), next_pre_mix

    def collapsed(self, carried: Carried) -> Tensor:
        """Return the stack's output, not normed: V4's learned head, V4.1's collapse with the last FFN's pre-mix."""
        residual, pre_mix = carried
        name = f"{self.prefix}final streams"
        if pre_mix is None or self.attention_pre_mix is None:
            w = self.stack.head
            return head(residual, w.fn, w.hc_scale, w.hc_base, config=self.model.config)
        wrong = collapse(residual, self.attention_pre_mix)
        self.trace.lookalikes[f"the collapse of the {name} with the pre-mix of the last attention"] = wrong
        return collapse(residual, pre_mix)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the RMS norm of the stack's output, which the logits are made of."""
        return norm(hidden, self.stack.norm_weight, norm_eps=self.model.config.norm_eps)


def _added(partials: list[Tensor]) -> Tensor:
    """Add partial sums in rank order, in fp32 from +0, rounded once."""
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial in partials:
        total = total + partial.to(torch.float32)
    return round_bf16(total)


def mtp_buffer(model: Model, residual: Tensor) -> Tensor:
    """Return the MTP buffer, bf16 [mtp_rows, n * H], after a step.

    It holds the final streams, stream after stream, in its first T rows, and poison elsewhere; with aux states it is
    not filled at all. Raises ValueError for a buffer of fewer than T rows. Source: vLLM keeps the allocation and skips
    the copy.
    """
    tokens = residual.shape[0]
    if tokens > model.mtp_rows:
        raise ValueError(f"mtp_buffer: mtp_rows must be at least the tokens, got {model.mtp_rows} rows for {tokens}")
    buffer = poisoned((model.mtp_rows, model.config.hc_mult * model.hidden_size), residual.device)
    if not model.aux_ids:
        buffer[:tokens] = residual.flatten(1)
    return buffer


def poisoned(shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Return bf16 of this shape that holds nothing but a signalling NaN, which no computation makes."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    bits(tensor).fill_(POISON[torch.bfloat16])
    return tensor
