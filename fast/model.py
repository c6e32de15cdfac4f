"""The fused schedule of an mHC decoder and its draft, as one rank of one pipeline stage runs it.

A sublayer's output is not mapped back to the streams at once: it is carried (`Deferred`) to the next boundary, whose
kernel does post and pre together and hands out the stream mean that a draft wants. A post by itself is left at an
Engram injection, which needs the streams between post and pre, and after a stage's last layer.

Kernels come through a look-up by op name, so the same schedule runs with any backend. Sources: vLLM's DeepSeek-V4 and
V4.1 decoders, their DSpark drafts, and the relay of aux states between pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fast.interfaces import Boundary, Projection, Shape, Stack, Sublayers, Tokens, Weights
from fast.registry import Config
from fast.rows import Group, Parallel, Rows
from fast.stages import AuxStates, MtpBuffer, Stage, slot

Kernels = Callable[[str], Callable[..., Any]]
Observe = Callable[[str, Tensor, bool], None]
Tail = Literal["collapse_first", "gather_first"]

WHOLE = Parallel()


@dataclass(frozen=True)
class Streams:
    """Streams [T, n, H] that are mapped back, and V4.1's carried pre_mix [T, n].

    embedded: the row [T, H] that all streams equal, at the entry of a model and nowhere else.
    """

    residual: Tensor
    pre_mix: Tensor | None = None
    embedded: Tensor | None = None


@dataclass(frozen=True)
class Mixes:
    """A boundary's result: the new streams, the coefficients that map the sublayer's output back, its input."""

    residual: Tensor
    post_mix: Tensor
    comb_mix: Tensor
    layer_input: Tensor
    pre_mix: Tensor | None
    aux: Tensor | None = None


@dataclass(frozen=True)
class Deferred:
    """A sublayer's output x [T, H] whose post is still to be done, with all that it needs."""

    x: Tensor
    residual: Tensor
    post_mix: Tensor
    comb_mix: Tensor
    pre_mix: Tensor | None


class Boundaries:
    """The boundary kernels of one version behind one face: V4 uses its own pre-mix, V4.1 the carried one.

    Raises ValueError for another version.
    """

    def __init__(self, version: str, config: Config, kernels: Kernels) -> None:
        if version not in ("v4", "v4.1"):
            raise ValueError(f"Boundaries: version must be 'v4' or 'v4.1', got {version!r}")
        self.delayed = version == "v4.1"
        self.config = config
        self.kernels = kernels

    def pre(self, w: Boundary, streams: Streams) -> Mixes:
        """Enter a sublayer from mapped streams."""
        fn = w.fn if streams.embedded is None else self.kernels("fn_broadcast")(w.fn, self.config.hc_mult)
        keywords = {"config": self.config, "x": streams.embedded, "norm_weight": w.norm_weight}
        if self.delayed:
            post_mix, comb_mix, layer_input, pre_mix = self.kernels("pre_delayed")(
                streams.residual, fn, w.hc_scale, w.hc_base, pre_mix=streams.pre_mix, **keywords
            )
            return Mixes(streams.residual, post_mix, comb_mix, layer_input, pre_mix)
        post_mix, comb_mix, layer_input = self.kernels("pre")(streams.residual, fn, w.hc_scale, w.hc_base, **keywords)
        return Mixes(streams.residual, post_mix, comb_mix, layer_input, None)

    def post_pre(self, w: Boundary, d: Deferred, capture: bool) -> Mixes:
        """Finish the sublayer before and enter the next; with `capture`, also the mean of the new streams."""
        arguments = (d.x, d.residual, d.post_mix, d.comb_mix, w.fn, w.hc_scale, w.hc_base)
        keywords = {"config": self.config, "norm_weight": w.norm_weight}
        if self.delayed:
            residual, post_mix, comb_mix, layer_input, pre_mix, aux = self.kernels("post_pre_delayed")(
                *arguments, pre_mix=d.pre_mix, capture_aux=capture, **keywords
            )
            return Mixes(residual, post_mix, comb_mix, layer_input, pre_mix, aux if capture else None)
        residual, post_mix, comb_mix, layer_input = self.kernels("post_pre")(*arguments, **keywords)
        mean = self.kernels("stream_mean")(residual) if capture else None
        return Mixes(residual, post_mix, comb_mix, layer_input, None, mean)

    def post(self, d: Deferred) -> Streams:
        """Finish the sublayer before, by itself."""
        return Streams(self.kernels("post")(d.x, d.residual, d.post_mix, d.comb_mix), d.pre_mix)

    def collapse(self, w: Projection, streams: Streams) -> Tensor:
        """End a stack, without a norm: the learned head of V4, the carried pre-mix of V4.1."""
        if self.delayed:
            collapsed: Tensor = self.kernels("collapse")(streams.residual, streams.pre_mix)
            return collapsed
        hidden: Tensor = self.kernels("head")(streams.residual, w.fn, w.hc_scale, w.hc_base, config=self.config)
        return hidden


def ignore(name: str, value: Tensor, sharded: bool) -> None:
    """Observe nothing."""


@dataclass
class Engine:
    """What a rank computes with, the same for target and draft.

    parallel: how the model is spread; it alone says whether tokens are sharded, and refuses where they must not be.
    observe: called with each value's name, the rank's rows, and whether these are a shard.
    tail: whether streams are collapsed before they are gathered; the bits are the same, the bytes a quarter at n = 4.
    Raises ValueError when the group has other ranks than `parallel` says.
    """

    shape: Shape
    weights: Weights
    sublayers: Sublayers
    kernels: Kernels
    group: Group
    parallel: Parallel = WHOLE
    tail: Tail = "collapse_first"
    observe: Observe = ignore
    rows_type: type[Rows] = Rows

    def __post_init__(self) -> None:
        if self.group.size != self.parallel.tp:
            raise ValueError(f"Engine: parallel.tp is {self.parallel.tp}, but the group has {self.group.size} ranks")


class Layers:
    """What target and draft share: sublayers between boundaries, on this rank's rows."""

    prefix = ""

    def __init__(self, engine: Engine, stack: Stack, ids: Tensor, padding: Tensor) -> None:
        """Begin a step; ids int64 [T] and padding bool [T] are whole and are sharded here, with the states."""
        self.engine = engine
        self.stack = stack
        self.boundaries = Boundaries(engine.shape.version, engine.shape.config, engine.kernels)
        self.rows = engine.rows_type(ids.shape[0], engine.group, engine.parallel.sequence_parallel)
        self.ids = self.rows.own(ids)
        self.padding = self.rows.padding(padding)
        self.context: Tensor | None = None

    def note(self, name: str, value: Tensor, sharded: bool | None = None) -> Tensor:
        """Show a value to the observer; it is the rank's rows unless `sharded` says otherwise."""
        self.engine.observe(self.prefix + name, value, self.rows.sharded if sharded is None else sharded)
        return value

    def note_mixes(self, name: str, mixes: Mixes) -> None:
        if mixes.pre_mix is not None:
            self.note(f"{name} next_pre_mix", mixes.pre_mix)
        self.note(f"{name} post_mix", mixes.post_mix)
        self.note(f"{name} comb_mix", mixes.comb_mix)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed the whole batch and keep this rank's rows; the pad rows that this adds are zero."""
        return self.rows.own(self.engine.sublayers.embed(ids))

    def attention(self, index: int, layer: int, mixes: Mixes) -> Deferred:
        """Run attention on all tokens, this rank's heads of it, and add the ranks' partial sums."""
        self.note_mixes(f"layer {index} attention", mixes)
        group = self.engine.group
        x = self.note(f"layer {index} attention input", self.rows.full(mixes.layer_input), False)
        partial = self.engine.sublayers.attention(layer, x, group.rank, group.size, self.context)
        output = self.note(f"layer {index} attention output", self.rows.added(partial))
        return Deferred(output, mixes.residual, mixes.post_mix, mixes.comb_mix, mixes.pre_mix)

    def ffn(self, index: int, layer: int, mixes: Mixes) -> Deferred:
        """Run the FFN on this rank's rows: all experts when they are a shard, else its share of the experts."""
        self.note(f"layer {index} ffn streams", mixes.residual)
        self.note_mixes(f"layer {index} ffn", mixes)
        self.note(f"layer {index} ffn input", mixes.layer_input)
        group, run = self.engine.group, self.engine.sublayers.ffn
        if self.rows.sharded:
            # The sum of one part, from +0 like every sum over ranks.
            output = run(layer, mixes.layer_input, self.ids, self.padding, 0, 1) + 0
        else:
            partial = run(layer, mixes.layer_input, self.ids, self.padding, group.rank, group.size)
            output = self.rows.added(partial)
        self.note(f"layer {index} ffn output", output)
        return Deferred(output, mixes.residual, mixes.post_mix, mixes.comb_mix, mixes.pre_mix)

    def layer(self, index: int, layer: int, mixes: Mixes) -> Deferred:
        """Run one layer from its attention boundary on; the FFN boundary is always fused and captures nothing."""
        after_attention = self.attention(index, layer, mixes)
        return self.ffn(index, layer, self.boundaries.post_pre(self.stack.ffn[index], after_attention, capture=False))

    def gathered(self, streams: Streams) -> Streams:
        """Gather streams and, in V4.1, the pre-mix that collapses them: two collectives, n rows a token."""
        residual = self.rows.full(streams.residual)
        return Streams(residual, None if streams.pre_mix is None else self.rows.full(streams.pre_mix))

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the norm of a stack's output, which only the logits are made of."""
        config = self.engine.shape.config
        normed: Tensor = self.engine.kernels("norm")(hidden, self.stack.norm_weight, norm_eps=config.norm_eps)
        return normed

    def project(self, x: Tensor, fn: Tensor) -> Tensor:
        """Return x @ fn.T in the pinned order, fp32."""
        sums: Tensor = self.engine.kernels("project")(x, fn)[0]
        return sums


class Target(Layers):
    """One stage of the target on one rank."""

    def __init__(self, engine: Engine, stage: Stage, tokens: Tokens, buffer: MtpBuffer | None = None) -> None:
        """Begin a step; `buffer` is the last stage's, where there is one."""
        super().__init__(engine, engine.weights.target, tokens.ids, tokens.padding)
        self.stage = stage
        self.tokens = tokens
        self.buffer = buffer
        self.captured = AuxStates(stage)
        self.remote: dict[int, Tensor] = {}
        self.aux: list[Tensor] = []

    def run(self, received: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Run the stage; return what the next stage receives, or the outputs of the last one.

        received: the tensors that the stage before returned; None for the first stage. The last stage returns
        "normed" [T, H], and keeps the aux states, in the configured order, in `aux`.
        """
        carried: Streams | Deferred = self.entry() if received is None else self.receive(received)
        for layer in range(self.stage.start, self.stage.end):
            carried = self.layer(layer, layer, self.attention_boundary(layer, carried))
        assert isinstance(carried, Deferred)
        streams = self.mapped(self.stage.end, carried)
        return self.finish(streams) if self.stage.last else self.send(streams)

    def entry(self) -> Streams:
        """Return the streams of the model's entry, all equal to the embedding."""
        self.note("token ids", self.ids)
        self.note("padding mask", self.padding)
        hidden = self.embed(self.tokens.ids)
        streams = Streams(self.engine.kernels("expand")(hidden, self.engine.shape.config.hc_mult), None, hidden)
        self.capture(0, streams.residual)
        return streams

    def receive(self, received: Mapping[str, Tensor]) -> Streams:
        """Unpack what the stage before sent: streams, V4.1's pre-mix, and the aux states captured so far."""
        upstream = self.stage.upstream()
        self.remote = {entering: received[slot(i)] for i, entering in enumerate(upstream)}
        return Streams(received["hidden_states"], received.get("pre_mix"))

    def attention_boundary(self, layer: int, carried: Streams | Deferred) -> Mixes:
        """Cross into a layer: fused, unless the streams are already mapped or Engram needs them mapped."""
        if isinstance(carried, Deferred) and layer not in self.engine.shape.engram:
            key = self.state_of(layer)
            mixes = self.boundaries.post_pre(self.stack.attention[layer], carried, capture=key is not None)
            if key is not None and mixes.aux is not None:
                self.captured.write(key, mixes.aux)
            self.note(f"layer {layer} entry streams", mixes.residual)
            return mixes
        streams = self.mapped(layer, carried) if isinstance(carried, Deferred) else carried
        self.note(f"layer {layer} entry streams", streams.residual)
        return self.boundaries.pre(self.stack.attention[layer], self.injected(layer, streams))

    def injected(self, layer: int, streams: Streams) -> Streams:
        """Inject Engram's memory where the layer has one; the streams then differ, also at the entry."""
        if layer not in self.engine.shape.engram:
            return streams
        residual = self.engine.sublayers.engram(layer, streams.residual, self.ids)
        return Streams(self.note(f"layer {layer} injected streams", residual), streams.pre_mix)

    def mapped(self, entering: int, deferred: Deferred) -> Streams:
        """Map an output back by itself, where no boundary can do it, and capture the mean of the result."""
        streams = self.boundaries.post(deferred)
        self.capture(entering, streams.residual)
        return streams

    def state_of(self, entering: int) -> int | None:
        """Return which aux state the mean of the streams entering a layer is; None if it is not wanted of this stage.

        At layer idx the fused mean is that of layer idx - 1's post, which is the state entering idx: no + 1 here.
        """
        return entering if self.stage.owns(entering) else None

    def capture(self, entering: int, residual: Tensor) -> None:
        """Capture the mean of streams that are mapped, if it is wanted."""
        key = self.state_of(entering)
        if key is not None:
            self.captured.write(key, self.engine.kernels("stream_mean")(residual))

    def local_aux(self) -> dict[int, Tensor]:
        """Return this stage's aux states of all tokens: meaned on each rank, then gathered."""
        return {entering: self.rows.full(mean) for entering, mean in self.captured.collect().items()}

    def all_aux(self) -> list[Tensor]:
        """Return the aux states of all stages, earlier stages' first, then put in the configured order."""
        states = self.remote | self.local_aux()
        return [states[entering] for entering in self.stage.wanted]

    def send(self, streams: Streams) -> dict[str, Tensor]:
        """Pack what the next stage receives; a slot of an aux state holds what its owner captured."""
        packed = {"hidden_states": streams.residual}
        if streams.pre_mix is not None:
            packed["pre_mix"] = streams.pre_mix
        states = self.remote | self.local_aux()
        return packed | {slot(i): states[entering] for i, entering in enumerate(self.stage.downstream())}

    def finish(self, streams: Streams) -> dict[str, Tensor]:
        """End the model: aux states, MTP buffer, collapse, norm and logits."""
        self.note("final streams", streams.residual)
        self.aux = self.all_aux()
        for place, state in enumerate(self.aux):
            self.note(f"aux state {place}", state, False)
        if self.fills_buffer():
            normed = self.finish_through_buffer(streams)
        elif self.engine.tail == "collapse_first":
            normed = self.rows.full(self.ended(streams, self.rows.sharded))
        else:
            normed = self.ended(self.gathered(streams), False)
        self.note("final normed", normed, False)
        self.note("logits", self.project(normed, self.engine.weights.lm_head), False)
        return {"normed": normed}

    def ended(self, streams: Streams, sharded: bool) -> Tensor:
        """Collapse and norm streams, which are a shard or whole."""
        hidden = self.note("final hidden", self.boundaries.collapse(self.stack.head, streams), sharded)
        return self.normed(hidden)

    def fills_buffer(self) -> bool:
        """Whether an MTP draft will read the buffer: never when there is an aux state, this stage's or another's."""
        if self.buffer is None:
            return False
        self.buffer.skip()
        return not self.aux

    def finish_through_buffer(self, streams: Streams) -> Tensor:
        """Gather the streams, since the buffer needs all rows of them, fill it and end the model from there."""
        whole = self.gathered(streams)
        assert self.buffer is not None
        self.buffer.fill(whole.residual)
        return self.ended(whole, False)


class Draft(Layers):
    """A draft on one rank: on aux states, or on the streams that the target left in the MTP buffer."""

    prefix = "draft "

    def __init__(self, engine: Engine, tokens: Tokens) -> None:
        """Begin a step after the target's."""
        super().__init__(engine, engine.weights.draft, tokens.draft_ids, tokens.padding)
        self.draft_ids = tokens.draft_ids

    def run(self, aux: Sequence[Tensor], buffer: MtpBuffer | None) -> Tensor | None:
        """Draft from aux states when there are any, else from the buffer; None when there is neither.

        Returns the draft's output bf16 [T, H], not normed. The buffer is not touched when aux states exist.
        """
        if aux:
            self.context = self.combined(aux)
            hidden = self.embed(self.draft_ids)
            streams = Streams(self.engine.kernels("expand")(hidden, self.engine.shape.config.hc_mult))
            return self.drafted(streams, self.engine.shape.draft_layers)
        if buffer is None:
            return None
        return self.drafted(Streams(self.rows.own(self.buffered(buffer))), 1)

    def buffered(self, buffer: MtpBuffer) -> Tensor:
        """Return the whole streams that the target left."""
        return buffer.read(self.engine.shape.config.hc_mult)

    def combined(self, aux: Sequence[Tensor]) -> Tensor:
        """Join the aux states of all tokens in their order, project and norm them: what the draft's attention reads."""
        joined = self.note("joined aux", torch.cat(list(aux), 1), False)
        projected = self.project(joined, self.engine.weights.main_proj).to(torch.bfloat16)
        eps = self.engine.shape.config.norm_eps
        context: Tensor = self.engine.kernels("norm")(projected, self.engine.weights.main_norm, norm_eps=eps)
        return self.note("context", context, False)

    def drafted(self, streams: Streams, layers: int) -> Tensor:
        """Run the layers and the tail; logits and confidence read the whole output."""
        self.note("token ids", self.ids)
        self.note("entry streams", streams.residual)
        deferred: Deferred | None = None
        for index in range(layers):
            w = self.stack.attention[index]
            if deferred is None:
                mixes = self.boundaries.pre(w, streams)
            else:
                mixes = self.boundaries.post_pre(w, deferred, capture=False)
            deferred = self.layer(index, self.engine.shape.layers + index, mixes)
        assert deferred is not None
        hidden = self.note("hidden", self.tail(deferred), False)
        self.note("logits", self.logits(hidden), False)
        self.note("confidence", self.confidence(hidden), False)
        return hidden

    def tail(self, deferred: Deferred) -> Tensor:
        """Map back, collapse and gather, in the order that the engine names; no norm here."""
        if self.engine.tail == "gather_first":
            return self.boundaries.collapse(self.stack.head, self.gathered(self.boundaries.post(deferred)))
        if not self.boundaries.delayed:
            return self.rows.full(self.boundaries.collapse(self.stack.head, self.boundaries.post(deferred)))
        d = deferred
        collapsed = self.engine.kernels("draft_tail")(d.x, d.residual, d.post_mix, d.comb_mix, d.pre_mix)
        return self.rows.full(collapsed)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head of the normed output."""
        return self.project(self.normed(hidden), self.engine.weights.lm_head)

    def confidence(self, hidden: Tensor) -> Tensor:
        """Return the confidence head of the output itself, joined with the draft tokens' embedding, not normed."""
        joined = torch.cat([hidden, self.engine.sublayers.embed(self.draft_ids)], 1)
        return self.project(joined, self.engine.weights.confidence)


@dataclass(frozen=True)
class Step:
    """What one stage's step leaves: what the next stage receives, and on the last stage the draft's output."""

    sent: dict[str, Tensor]
    aux: list[Tensor]
    drafted: Tensor | None = None


def run_stage(
    engine: Engine,
    stage: Stage,
    tokens: Tokens,
    *,
    received: Mapping[str, Tensor] | None = None,
    buffer: MtpBuffer | None = None,
    target_type: type[Target] = Target,
    draft_type: type[Draft] = Draft,
) -> Step:
    """Run one step of one stage on one rank, and on the last stage the draft behind it.

    received: what the stage before sent, None on the first. buffer: the MTP buffer of the last stage, where there is
    one. Another `target_type` or `draft_type` is another schedule. Raises ValueError for a schedule that captures an
    aux state twice or never, or reads a buffer that the step did not fill, and for sharded tokens in one stage of
    several: it would hand on shards that the next one takes for whole tensors.
    """
    if engine.parallel.sequence_parallel and not (stage.first and stage.last):
        layers = f"layers {stage.start}..{stage.end - 1} of {stage.layers}"
        raise ValueError(f"run_stage: sequence_parallel needs pp = 1, got a stage of {layers}")
    target = target_type(engine, stage, tokens, buffer)
    sent = target.run(received)
    if not stage.last:
        return Step(sent, [])
    drafted = draft_type(engine, tokens).run(target.aux, buffer)
    return Step(sent, target.aux, drafted)
