"""Wrong schedules around right kernels: what a decoder, its stages, its ranks or its draft can get wrong.

Each bug says under which combination it shows and what the report then names first: a state, and what it holds
instead; or the guard that stopped the schedule before any wrong bit was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fast.interfaces import Shape
from fast.model import Deferred, Draft, Mixes, Streams, Target
from fast.rows import Rows
from fast.stages import AuxStates, MtpBuffer, Stage, slot, stages
from oracle.arith import round_bf16
from oracle.ranks import added
from tests.stream_model import Combination, Schedule

V4, V41 = "v4", "v4.1"


class CapturesOneLayerEarly(Target):
    """Asks at layer idx for state idx + 1, as if the fused mean were of this layer's post, not the one's before."""

    def state_of(self, entering: int) -> int | None:
        return super().state_of(entering + 1)


class ForgetsTheLastLayer(Target):
    """Captures in fused calls only, and the last layer has no successor that could make one."""

    def state_of(self, entering: int) -> int | None:
        return None if entering == self.stage.end else super().state_of(entering)


class CapturesAfterTheInjection(Target):
    """Takes the mean of the streams that Engram has already changed."""

    def mapped(self, entering: int, deferred: Deferred) -> Streams:
        streams = self.boundaries.post(deferred)
        if entering in self.engine.shape.engram and entering < self.stage.end:
            self.capture(entering, self.engine.sublayers.engram(entering, streams.residual, self.ids))
        else:
            self.capture(entering, streams.residual)
        return streams


class DropsRemoteAux(Target):
    """Hands on what the last stage captured, and nothing of the stages before."""

    def all_aux(self) -> list[Tensor]:
        return list(self.local_aux().values())


class AppendsRemoteAux(Target):
    """Puts earlier stages' states behind its own."""

    def all_aux(self) -> list[Tensor]:
        return list((self.local_aux() | self.remote).values())


class LayerOrder(Target):
    """Returns the states in layer order, whatever order the draft was configured for."""

    def all_aux(self) -> list[Tensor]:
        states = self.remote | self.local_aux()
        return [states[entering] for entering in sorted(states)]


class EmbeddedBehindTheInjection(Target):
    """Still projects the one embedded row at the entry, although Engram has made the streams differ."""

    def injected(self, layer: int, streams: Streams) -> Streams:
        return replace(super().injected(layer, streams), embedded=streams.embedded)


class EntryCapturedAfterTheInjection(Target):
    """Takes the state entering layer 0 after an injection there, where no post tells the two apart."""

    def entry(self) -> Streams:
        streams = super().entry()
        if 0 in self.engine.shape.engram and self.stage.owns(0):
            self.captured = AuxStates(self.stage)
            self.capture(0, self.engine.sublayers.engram(0, streams.residual, self.ids))
        return streams


class StageStartSkipsTheInjection(Target):
    """Takes mapped streams for streams that are past everything, so that a later stage's first layer has no Engram."""

    def injected(self, layer: int, streams: Streams) -> Streams:
        return streams if layer == self.stage.start and layer > 0 else super().injected(layer, streams)


class SeamLosesThePreMix(Target):
    """Enters an Engram layer as if a model began there, with stream 0."""

    def injected(self, layer: int, streams: Streams) -> Streams:
        injected = super().injected(layer, streams)
        return replace(injected, pre_mix=None) if layer in self.engine.shape.engram else injected


class SendsThePreMixInBf16(Target):
    """Sends the pre-mix in the streams' dtype."""

    def send(self, streams: Streams) -> dict[str, Tensor]:
        packed = super().send(streams)
        return packed | {"pre_mix": packed["pre_mix"].to(torch.bfloat16)}


class RoundsThePreMixOnTheWire(SendsThePreMixInBf16):
    """The same, widened again on arrival: every form is right, the bits are not."""

    def send(self, streams: Streams) -> dict[str, Tensor]:
        packed = super().send(streams)
        return packed | {"pre_mix": packed["pre_mix"].to(torch.float32)}


class SendsTheAttentionsPreMix(Target):
    """A stage sends the pre-mix that its last attention boundary made, one sublayer too early."""

    def layer(self, index: int, layer: int, mixes: Mixes) -> Deferred:
        deferred = super().layer(index, layer, mixes)
        return deferred if self.stage.last or layer + 1 < self.stage.end else replace_pre_mix(deferred, mixes.pre_mix)


class SendsBeforeTheLastPost(Target):
    """A stage sends the streams that its last FFN was entered with."""

    def mapped(self, entering: int, deferred: Deferred) -> Streams:
        streams = super().mapped(entering, deferred)
        border = entering == self.stage.end and not self.stage.last
        return replace(streams, residual=deferred.residual) if border else streams


class ReadsSlotsBackwards(Target):
    """Unpacks the slots of earlier stages from the last one down."""

    def receive(self, received: Mapping[str, Tensor]) -> Streams:
        upstream = self.stage.upstream()
        turned = {slot(i): received[slot(len(upstream) - 1 - i)] for i in range(len(upstream))}
        return super().receive({**received, **turned})


class AuxInFp32(Target):
    """Keeps the mean unrounded."""

    def local_aux(self) -> dict[int, Tensor]:
        return {entering: mean.to(torch.float32) for entering, mean in super().local_aux().items()}


class AuxNotGathered(Target):
    """Hands the draft each rank's own rows."""

    def local_aux(self) -> dict[int, Tensor]:
        return self.captured.collect()


class AuxNotTrimmed(Target):
    """Gathers the aux states and keeps the pad rows."""

    def local_aux(self) -> dict[int, Tensor]:
        return {k: self.engine.group.all_gather(mean) for k, mean in self.captured.collect().items()}


class MovesTheBuffer(Target):
    """Fills a new buffer, so that a captured graph reads the old one."""

    def finish_through_buffer(self, streams: Streams) -> Tensor:
        assert self.buffer is not None
        self.buffer.tensor = self.buffer.tensor.clone()
        return super().finish_through_buffer(streams)


class FillsThePadRows(Target):
    """Copies gathered streams with their pad rows, past the step's tokens."""

    def finish_through_buffer(self, streams: Streams) -> Tensor:
        normed = super().finish_through_buffer(streams)
        assert self.buffer is not None
        padded = self.engine.group.all_gather(streams.residual)
        self.buffer.tensor[: padded.shape[0]] = padded.flatten(1)
        return normed


class WritesOverAWeight(Target):
    """Folds a factor into a weight in place, at every step again."""

    def run(self, received: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        self.stack.ffn[0].fn.mul_(2)
        return super().run(received)


class TrimsNoWholeStreams(Target):
    """Gathers streams and pre-mix for the end of the model and keeps the pad rows."""

    def gathered(self, streams: Streams) -> Streams:
        assert streams.pre_mix is not None
        group = self.engine.group
        return Streams(group.all_gather(streams.residual), group.all_gather(streams.pre_mix))


class LosesAPassingSlot(Target):
    """A middle stage sends its own states under the first slots, over those that it was to pass on."""

    def send(self, streams: Streams) -> dict[str, Tensor]:
        packed = {k: v for k, v in super().send(streams).items() if not k.startswith("aux")}
        return packed | {slot(i): mean for i, mean in enumerate(self.local_aux().values())}


class GuardForgetsRemoteAux(Target):
    """Fills the MTP buffer because this stage captured nothing."""

    def fills_buffer(self) -> bool:
        return self.buffer is not None and not self.local_aux()


class GuardForgetsAux(Target):
    """Always fills the MTP buffer."""

    def fills_buffer(self) -> bool:
        return self.buffer is not None


class NeverFillsTheBuffer(Target):
    """Skips the copy although an MTP draft will read it."""

    def fills_buffer(self) -> bool:
        return False


class FillsWithDeferredStreams(Target):
    """Copies the streams without the last FFN's output, whose post was deferred and never done for the buffer."""

    def run(self, received: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        self.before: Tensor | None = None
        return super().run(received)

    def mapped(self, entering: int, deferred: Deferred) -> Streams:
        self.before = deferred.residual
        return super().mapped(entering, deferred)

    def finish_through_buffer(self, streams: Streams) -> Tensor:
        normed = super().finish_through_buffer(streams)
        assert self.buffer is not None
        assert self.before is not None
        self.buffer.fill(self.rows.full(self.before))
        return normed


class ReadsTheSkippedBuffer(Draft):
    """Drafts from the MTP buffer although the step left it alone."""

    def run(self, aux: Sequence[Tensor], buffer: MtpBuffer | None) -> Tensor | None:
        if not aux or buffer is None:
            return super().run(aux, buffer)
        self.context = self.combined(aux)
        stale = buffer.tensor[: self.rows.tokens].view(self.rows.tokens, self.engine.shape.config.hc_mult, -1)
        return self.drafted(Streams(self.rows.own(stale)), self.engine.shape.draft_layers)


class AsksForTheSkippedBuffer(Draft):
    """The same through the buffer's own call, which refuses."""

    def run(self, aux: Sequence[Tensor], buffer: MtpBuffer | None) -> Tensor | None:
        return self.drafted(Streams(self.rows.own(self.buffered(buffer))), 1) if buffer else super().run(aux, buffer)


class EndsWithAttentionPreMix(Target):
    """Collapses the final streams with the pre-mix that the last attention boundary made, one sublayer too early."""

    def layer(self, index: int, layer: int, mixes: Mixes) -> Deferred:
        deferred = super().layer(index, layer, mixes)
        return deferred if layer + 1 < self.stage.layers else replace_pre_mix(deferred, mixes.pre_mix)


def replace_pre_mix(d: Deferred, pre_mix: Tensor | None) -> Deferred:
    """The same deferred output with another pre-mix."""
    return Deferred(d.x, d.residual, d.post_mix, d.comb_mix, pre_mix)


class StageStartCapturesAgain(Target):
    """Takes the mean of the streams that a stage receives, which the stage before has sent already."""

    def receive(self, received: Mapping[str, Tensor]) -> Streams:
        streams = super().receive(received)
        if self.stage.start in self.stage.wanted:
            self.captured.write(self.stage.start, self.engine.kernels("stream_mean")(streams.residual))
        return streams


class StageStartCapturesTwiceUnguarded(Target):
    """The same past the guard: the state is in the list twice."""

    def all_aux(self) -> list[Tensor]:
        aux = super().all_aux()
        return [aux[0], *aux] if self.stage.start in self.stage.wanted else aux


class StageForgetsThePreMix(Target):
    """A stage starts like a model, with stream 0, because the carried pre-mix was not sent along."""

    def send(self, streams: Streams) -> dict[str, Tensor]:
        return {name: value for name, value in super().send(streams).items() if name != "pre_mix"}


class EntersAtFullWidth(Target):
    """Projects all equal streams at the entry instead of the one row: mathematically equal, other bits."""

    def entry(self) -> Streams:
        return Streams(super().entry().residual)


class SkipsTheInjectionSeam(Target):
    """Fuses across an Engram layer, so that nothing is injected."""

    def injected(self, layer: int, streams: Streams) -> Streams:  # noqa: ARG002 - that is the fault
        return streams


class DraftEndsWithAttentionPreMix(Draft):
    """Collapses the draft's streams with the pre-mix of its last attention boundary."""

    def layer(self, index: int, layer: int, mixes: Mixes) -> Deferred:
        deferred = super().layer(index, layer, mixes)
        last = index + 1 == self.engine.shape.draft_layers
        return replace_pre_mix(deferred, mixes.pre_mix) if last else deferred


class DraftEntersWithAPreMix(Draft):
    """Starts the draft with the mean of the streams instead of stream 0."""

    def drafted(self, streams: Streams, layers: int) -> Tensor:
        return super().drafted(replace(streams, pre_mix=torch.full(streams.residual.shape[:2], 0.25)), layers)


class DraftEntersByItsEmbeddedRow(Draft):
    """Projects the one row that the draft's streams equal; the draft enters at full width."""

    def drafted(self, streams: Streams, layers: int) -> Tensor:
        return super().drafted(replace(streams, embedded=streams.residual[:, 0].contiguous()), layers)


class DraftLeavesALayerOut(Draft):
    """Ends the draft one layer early."""

    def drafted(self, streams: Streams, layers: int) -> Tensor:
        return super().drafted(streams, layers - 1)


class DraftLayersCountFromZero(Draft):
    """Numbers the draft's layers like the target's first ones."""

    def layer(self, index: int, layer: int, mixes: Mixes) -> Deferred:
        return super().layer(index, layer - self.engine.shape.layers, mixes)


class ContextOfTheFirstLayerOnly(Draft):
    """Lets only the draft's first layer see the target."""

    def layer(self, index: int, layer: int, mixes: Mixes) -> Deferred:
        deferred = super().layer(index, layer, mixes)
        self.context = None
        return deferred


class ContextWithoutNorm(Draft):
    """Leaves out the norm of the projected aux states."""

    def combined(self, aux: Sequence[Tensor]) -> Tensor:
        joined = self.note("joined aux", torch.cat(list(aux), 1), False)
        return self.note("context", self.project(joined, self.engine.weights.main_proj).to(torch.bfloat16), False)


class DraftTailUnrounded(Draft):
    """Collapses the post's fp32 values, not their bf16 rounding."""

    def tail(self, deferred: Deferred) -> Tensor:
        d, pre_mix = deferred, deferred.pre_mix
        assert pre_mix is not None
        value = d.post_mix[:, :, None] * d.x.float()[:, None]
        for i in range(d.residual.shape[1]):
            value = value + d.comb_mix[:, i, :, None] * d.residual[:, i, None].float()
        total = torch.zeros_like(value[:, 0])
        for i in range(d.residual.shape[1]):
            total = total + pre_mix[:, i, None] * value[:, i]
        return self.rows.full(total.to(torch.bfloat16))


class DraftReversesAux(Draft):
    """Joins the aux states in the opposite order."""

    def combined(self, aux: Sequence[Tensor]) -> Tensor:
        return super().combined(list(aux)[::-1])


class DraftEntersNormed(Draft):
    """Returns the draft's output after the norm, so that the logits norm it again."""

    def tail(self, deferred: Deferred) -> Tensor:
        return self.normed(super().tail(deferred))


class ConfidenceReadsTheNorm(Draft):
    """Feeds the confidence head what the logits are made of."""

    def confidence(self, hidden: Tensor) -> Tensor:
        return super().confidence(self.normed(hidden))


class LogitsWithoutNorm(Draft):
    """Takes the logits of the output as it is."""

    def logits(self, hidden: Tensor) -> Tensor:
        return self.project(hidden, self.engine.weights.lm_head)


class DraftIdsAreTheTargets(Draft):
    """Routes the draft's tokens by the target's ids."""

    def drafted(self, streams: Streams, layers: int) -> Tensor:
        self.ids = self.ids.roll(1)
        return super().drafted(streams, layers)


class Untrimmed(Rows):
    """Gathers and keeps the pad rows."""

    def full(self, tensor: Tensor) -> Tensor:
        return self.group.all_gather(tensor) if self.sharded else tensor


class PadsTheReduceWithRows(Rows):
    """Pads partial sums by repeating the last token instead of zeros, so that pad rows enter the reduction."""

    def added(self, partial: Tensor) -> Tensor:
        missing = self.group.size * self.per_rank - self.tokens
        if not self.sharded or not missing or not self.tokens:
            return super().added(partial)
        return self.group.reduce_scatter(torch.cat([partial, partial[-1:].expand(missing, -1)]))


class IdsNotSharded(Rows):
    """Hands every rank the first rows of the ids."""

    def own(self, tensor: Tensor, fill: float = 0) -> Tensor:
        if self.sharded and tensor.dtype == torch.int64:
            return self.padded(tensor)[: self.per_rank]
        return super().own(tensor, fill)


class MaskNotSharded(Rows):
    """Hands every rank the first rows of the padding mask."""

    def padding(self, padding: Tensor) -> Tensor:
        return self.padded(padding, fill=True)[: self.per_rank] if self.sharded else padding


class AddedRowsAreNoPadding(Rows):
    """Lets the FFN route the rows that sharding added."""

    def padding(self, padding: Tensor) -> Tensor:
        return self.own(padding, fill=False)


class ScaledByTp(Rows):
    """Multiplies gathered states by tp, as if they had been averaged."""

    def full(self, tensor: Tensor) -> Tensor:
        whole = super().full(tensor)
        return whole * self.group.size if self.sharded and tensor.dtype == torch.bfloat16 else whole


class ReducedTwice(Rows):
    """Adds up tensors that every rank already holds whole: tp times too large, hidden by the next norm."""

    def added(self, partial: Tensor) -> Tensor:
        total = super().added(partial)
        return self.group.all_reduce(total) if not self.sharded and self.group.size > 1 else total


class LayoutFromShape(Rows):
    """Takes a tensor with T rows for a whole one: true of every shard of one row at T = 1."""

    def full(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[0] == self.tokens else super().full(tensor)


class FloorShards(Rows):
    """Cuts T // tp rows a rank; the remainder is nobody's."""

    @property
    def per_rank(self) -> int:
        return self.tokens // self.group.size if self.sharded else self.tokens

    def padded(self, tensor: Tensor, fill: float = 0) -> Tensor:  # noqa: ARG002 - nothing is padded
        return tensor[: self.per_rank * self.group.size]


class PaddingRanksStayOut(Rows):
    """Saves a rank that holds padding only the reduction: it knows that its rows are +0."""

    def added(self, partial: Tensor) -> Tensor:
        if self.sharded and self.group.rank * self.per_rank >= self.tokens:
            return partial.new_zeros(self.per_rank, *partial.shape[1:])
        return super().added(partial)


class ReducesByGathering(Rows):
    """Gathers the partial sums and adds them itself, which is right or wrong by the order of `total`."""

    def added(self, partial: Tensor) -> Tensor:
        whole = self.padded(partial) if self.sharded else partial
        total = self.total(list(self.group.all_gather(whole[None])))
        first = self.group.rank * self.per_rank
        return total[first : first + self.per_rank] if self.sharded else total

    def total(self, parts: list[Tensor]) -> Tensor:
        return added(parts)


class ReducesFromTheLastRank(ReducesByGathering):
    """Adds the ranks' partial sums from the last one down."""

    def total(self, parts: list[Tensor]) -> Tensor:
        return added(parts[::-1])


class ReducesInARing(ReducesByGathering):
    """Adds from the rank behind its own on, as a ring does, so that every rank has another order."""

    def total(self, parts: list[Tensor]) -> Tensor:
        behind = self.group.rank + 1
        return added(parts[behind:] + parts[:behind])


class ReducesInATree(ReducesByGathering):
    """Adds pairs of ranks."""

    def total(self, parts: list[Tensor]) -> Tensor:
        wide = [part.to(torch.float32) for part in parts]
        while len(wide) > 1:
            wide = [left + right for left, right in zip(wide[::2], wide[1::2], strict=True)]
        return round_bf16(wide[0])


class ReducesFromTheFirstPart(ReducesByGathering):
    """Starts with the first rank's part instead of +0: a sum of -0 alone stays -0."""

    def total(self, parts: list[Tensor]) -> Tensor:
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total = total + part.to(torch.float32)
        return round_bf16(total)


class ReducesInBf16(ReducesByGathering):
    """Rounds after each addition, as a reduction in the tensors' own dtype does."""

    def total(self, parts: list[Tensor]) -> Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def stages_by_the_other_rule(shape: Shape, pp: int, borders: Sequence[int] | None = None) -> list[Stage]:
    """Reads V4.1's ids by V4's rule: after layer i instead of entering it."""
    return [
        replace(stage, wanted=tuple(entering + 1 for entering in stage.wanted)) for stage in stages(shape, pp, borders)
    ]


@dataclass(frozen=True)
class PlantedBug:
    """A wrong schedule, where it shows, and what the report must say of it.

    state: how the first finding's state begins. says: what its problem contains. public: the public report that such
    a bug is known from, where there is one.
    """

    name: str
    schedule: Schedule
    at: Combination
    state: str
    says: str
    public: str = ""


def sharded(tp: int, tokens: int, **more: Any) -> Combination:
    """A combination under sequence parallelism; T and tp are chosen so that the fault has rows to act on."""
    return Combination(V41, tp=tp, sharded=True, tokens=tokens, **more)


AUX = "aux states"
ENTRY = "layer 0 attention input"
BUGS = (
    PlantedBug(
        "aux idx+1",
        Schedule(target=CapturesOneLayerEarly),
        Combination(V41, aux_ids=(1, 3)),
        AUX,
        "[the mean entering layer 0, the mean entering layer 2]",
        "vllm-project/vllm pull 43671",
    ),
    PlantedBug(
        "V4.1 ids read by V4's rule",
        Schedule(stages=stages_by_the_other_rule),
        Combination(V41, aux_ids=(1, 3)),
        AUX,
        "[the mean entering layer 2, the mean entering layer 4]",
    ),
    PlantedBug(
        "last layer not captured",
        Schedule(target=ForgetsTheLastLayer),
        Combination(V4, aux_ids=(1, 3)),
        "schedule",
        "the aux states entering layers [4] were never captured",
        "vllm-project/vllm pull 46788",
    ),
    PlantedBug(
        "last layer of an earlier stage not captured",
        Schedule(target=ForgetsTheLastLayer),
        Combination(V41, aux_ids=(2, 3), pp=2),
        "schedule",
        "the aux states entering layers [2] were never captured",
        "vllm-project/vllm-ascend pull 16263",
    ),
    PlantedBug(
        "capture after the injection",
        Schedule(target=CapturesAfterTheInjection),
        Combination(V41, aux_ids=(1, 3), engram=(1,)),
        AUX,
        "[the mean after the injection at layer 1, state 1]",
    ),
    PlantedBug(
        "remote aux dropped",
        Schedule(target=DropsRemoteAux),
        Combination(V41, aux_ids=(1, 2, 4), pp=2),
        AUX,
        "are [state 2], expected states 0..2",
    ),
    PlantedBug(
        "remote aux appended after local",
        Schedule(target=AppendsRemoteAux),
        Combination(V4, aux_ids=(0, 1, 3), pp=2),
        AUX,
        "are [state 2, state 0, state 1]",
    ),
    PlantedBug(
        "aux in layer order",
        Schedule(target=LayerOrder),
        Combination(V41, aux_ids=(3, 1)),
        AUX,
        "are [state 1, state 0]",
    ),
    PlantedBug(
        "slots of earlier stages overwritten",
        Schedule(target=LosesAPassingSlot),
        Combination(V41, aux_ids=(1, 2, 4), pp=3),
        AUX,
        "are [state 1, poison, state 2]",
        "vllm-project/vllm-ascend pull 16263",
    ),
    PlantedBug(
        "the entry's state taken after an injection",
        Schedule(target=EntryCapturedAfterTheInjection),
        Combination(V41, aux_ids=(0, 2), engram=(0,)),
        AUX,
        "[the mean after the injection at layer 0, state 1]",
    ),
    PlantedBug(
        "slots read backwards",
        Schedule(target=ReadsSlotsBackwards),
        Combination(V41, aux_ids=(0, 1, 4), pp=2),
        AUX,
        "are [state 1, state 0, state 2]",
    ),
    PlantedBug(
        "aux in fp32",
        Schedule(target=AuxInFp32),
        Combination(V4, aux_ids=(1, 3)),
        AUX,
        "are [one that is torch.float32 [9, 8], expected torch.bfloat16 [9, 8], one",
    ),
    PlantedBug(
        "aux not gathered",
        Schedule(target=AuxNotGathered),
        sharded(4, 9, aux_ids=(1, 4)),
        AUX,
        "are [one that is torch.bfloat16 [3, 8], expected torch.bfloat16 [9, 8], one",
    ),
    PlantedBug(
        "aux gathered and not trimmed",
        Schedule(target=AuxNotTrimmed),
        sharded(4, 9, aux_ids=(1, 4)),
        AUX,
        "expected torch.bfloat16 [9, 8]: pad rows were not trimmed",
    ),
    PlantedBug(
        "stage start captured twice",
        Schedule(target=StageStartCapturesAgain),
        Combination(V41, aux_ids=(2, 3), pp=2),
        "schedule",
        "must not capture the aux state entering layer 2: another stage owns it",
        "vllm-project/vllm pull 53901",
    ),
    PlantedBug(
        "stage start captured twice, past the guard",
        Schedule(target=StageStartCapturesTwiceUnguarded),
        Combination(V41, aux_ids=(2, 3), pp=2),
        AUX,
        "are [state 0, state 0, state 1]",
        "vllm-project/vllm pull 53901",
    ),
    PlantedBug(
        "guard that forgets remote aux",
        Schedule(target=GuardForgetsRemoteAux),
        Combination(V4, aux_ids=(0, 1), pp=2, buffer=True),
        "mtp buffer",
        "values that this step must leave alone: holds final streams instead",
        "vllm-project/vllm pull 55575",
    ),
    PlantedBug(
        "guard that forgets all aux",
        Schedule(target=GuardForgetsAux),
        sharded(4, 9, aux_ids=(4,), buffer=True),
        "mtp buffer",
        "values that this step must leave alone: holds final streams instead",
        "vllm-project/vllm pull 55575",
    ),
    PlantedBug(
        "buffer never filled",
        Schedule(target=NeverFillsTheBuffer),
        Combination(V41, buffer=True),
        "schedule",
        "the MTP buffer was not filled in this step, so it must not be read",
    ),
    PlantedBug(
        "buffer filled before the last post",
        Schedule(target=FillsWithDeferredStreams),
        Combination(V4, buffer=True),
        "mtp buffer",
        "holds layer 3 ffn streams instead",
        "vllm-project/vllm pull 42320",
    ),
    PlantedBug(
        "buffer moved",
        Schedule(target=MovesTheBuffer),
        Combination(V4, buffer=True),
        "mtp buffer",
        "holds poison in 288 of 640 values",
    ),
    PlantedBug(
        "pad rows copied to the buffer",
        Schedule(target=FillsThePadRows),
        sharded(4, 9, buffer=True),
        "mtp buffer",
        "was written in 96 values that this step must leave alone",
        "alibaba/rtp-llm pull 1251",
    ),
    PlantedBug(
        "buffer read when every state is remote",
        Schedule(draft=ReadsTheSkippedBuffer),
        Combination(V4, aux_ids=(0, 1), pp=2, buffer=True),
        "draft entry streams (stage 1, rank 0)",
        "holds poison",
        "vllm-project/vllm pull 55575",
    ),
    PlantedBug(
        "buffer read when skipped",
        Schedule(draft=ReadsTheSkippedBuffer),
        Combination(V41, aux_ids=(1, 4), buffer=True),
        "draft entry streams",
        "holds poison",
        "vllm-project/vllm pull 55575",
    ),
    PlantedBug(
        "buffer read when skipped, through its call",
        Schedule(draft=AsksForTheSkippedBuffer),
        Combination(V41, aux_ids=(1, 4), buffer=True),
        "schedule",
        "the MTP buffer was not filled in this step, so it must not be read",
    ),
    PlantedBug(
        "attention's pre-mix used at the end",
        Schedule(target=EndsWithAttentionPreMix),
        Combination(V41),
        "final hidden",
        "holds the collapse of the final streams with the pre-mix of the last attention instead",
    ),
    PlantedBug(
        "pre-mix not sent to the next stage",
        Schedule(target=StageForgetsThePreMix),
        Combination(V41, pp=2),
        "layer 2 attention input",
        "differs in",
    ),
    PlantedBug(
        "pre-mix lost at an Engram layer",
        Schedule(target=SeamLosesThePreMix),
        Combination(V41, engram=(2,)),
        "layer 2 attention input",
        "differs in",
    ),
    PlantedBug(
        "pre-mix sent in bf16",
        Schedule(target=SendsThePreMixInBf16),
        Combination(V41, pp=2),
        "schedule",
        "TypeError: pre_delayed: pre_mix must be float32 [9, 4], got bfloat16 [9, 4]",
    ),
    PlantedBug(
        "pre-mix rounded on the way to the next stage",
        Schedule(target=RoundsThePreMixOnTheWire),
        Combination(V41, pp=2),
        "layer 2 attention input (stage 1, rank 0)",
        "differs in",
    ),
    PlantedBug(
        "attention's pre-mix sent to the next stage",
        Schedule(target=SendsTheAttentionsPreMix),
        Combination(V41, pp=2),
        "layer 2 attention input (stage 1, rank 0)",
        "differs in",
    ),
    PlantedBug(
        "streams sent before the last post",
        Schedule(target=SendsBeforeTheLastPost),
        Combination(V4, pp=2),
        "layer 2 entry streams (stage 1, rank 0)",
        "holds layer 1 ffn streams instead",
        "vllm-project/vllm pull 42320",
    ),
    PlantedBug(
        "a weight written over",
        Schedule(target=WritesOverAWeight),
        Combination(V41),
        "weights.target.ffn[0].fn",
        "was written over: weights are inputs",
    ),
    PlantedBug(
        "one embedded row projected behind an injection",
        Schedule(target=EmbeddedBehindTheInjection),
        Combination(V4, engram=(0,)),
        "layer 0 attention",
        "differs in",
    ),
    PlantedBug(
        "no injection at a stage's start",
        Schedule(target=StageStartSkipsTheInjection),
        Combination(V4, engram=(2,), pp=2),
        "layer 2 injected streams",
        "never computed",
    ),
    PlantedBug(
        "entry projected at full width",
        Schedule(target=EntersAtFullWidth),
        Combination(V41, hidden_size=16),
        "layer 0 attention",
        "differs in",
    ),
    PlantedBug(
        "fused across an Engram layer",
        Schedule(target=SkipsTheInjectionSeam),
        Combination(V41, engram=(2,)),
        "layer 2 injected streams",
        "never computed",
    ),
    PlantedBug(
        "attention's pre-mix used at the draft's end",
        Schedule(draft=DraftEndsWithAttentionPreMix),
        sharded(2, 7, aux_ids=(1, 4)),
        "draft hidden",
        "holds the collapse of the draft final streams with the pre-mix of the last attention instead",
    ),
    PlantedBug(
        "draft entered with a pre-mix",
        Schedule(draft=DraftEntersWithAPreMix),
        Combination(V41, buffer=True),
        "draft layer 0 attention input",
        "differs in",
    ),
    PlantedBug(
        "draft entered by its embedded row",
        Schedule(draft=DraftEntersByItsEmbeddedRow),
        Combination(V41, aux_ids=(1, 4), hidden_size=16),
        "draft layer 0 attention",
        "differs in",
    ),
    PlantedBug(
        "a draft layer left out",
        Schedule(draft=DraftLeavesALayerOut),
        Combination(V4, aux_ids=(1, 3)),
        "draft layer 2 attention post_mix",
        "never computed",
    ),
    PlantedBug(
        "draft layers numbered from 0",
        Schedule(draft=DraftLayersCountFromZero),
        Combination(V4, aux_ids=(1, 3)),
        "draft layer 0 attention output",
        "differs in",
    ),
    PlantedBug(
        "context dropped after the draft's first layer",
        Schedule(draft=ContextOfTheFirstLayerOnly),
        Combination(V41, aux_ids=(1, 4)),
        "draft layer 1 attention output",
        "differs in",
    ),
    PlantedBug(
        "aux states joined and not normed",
        Schedule(draft=ContextWithoutNorm),
        Combination(V41, aux_ids=(1, 4)),
        "draft context",
        "differs in",
    ),
    PlantedBug(
        "draft tail without the post's rounding",
        Schedule(draft=DraftTailUnrounded),
        sharded(2, 9, aux_ids=(1, 4)),
        "draft hidden",
        "differs in",
    ),
    PlantedBug(
        "draft joins the aux states in the opposite order",
        Schedule(draft=DraftReversesAux),
        Combination(V41, aux_ids=(1, 2, 4)),
        "draft joined aux",
        "differs in",
    ),
    PlantedBug(
        "draft returned after its norm",
        Schedule(draft=DraftEntersNormed),
        sharded(2, 7, aux_ids=(1, 4)),
        "draft hidden",
        "holds the normed draft hidden instead",
    ),
    PlantedBug(
        "confidence of the normed output",
        Schedule(draft=ConfidenceReadsTheNorm),
        Combination(V41, aux_ids=(1, 4)),
        "draft confidence",
        "differs in",
    ),
    PlantedBug(
        "logits of the output without its norm",
        Schedule(draft=LogitsWithoutNorm),
        Combination(V41, aux_ids=(1, 4)),
        "draft logits",
        "differs in",
    ),
    PlantedBug(
        "draft routed by other rows' ids",
        Schedule(draft=DraftIdsAreTheTargets),
        Combination(V41, aux_ids=(1, 4)),
        "draft token ids",
        "differs in",
        "local-inference-lab/vllm pull 623",
    ),
    PlantedBug(
        "trim forgotten",
        Schedule(rows=Untrimmed),
        sharded(4, 9),
        ENTRY,
        "pad rows were not trimmed",
        "ByteDance-Seed/VeOmni pull 1139",
    ),
    PlantedBug(
        "trim forgotten behind the gather of whole streams",
        Schedule(target=TrimsNoWholeStreams),
        sharded(8, 9, tail="gather_first"),
        "final hidden",
        "pad rows were not trimmed",
    ),
    PlantedBug(
        "pad rows entering the reduce",
        Schedule(rows=PadsTheReduceWithRows),
        sharded(4, 9),
        "layer 0 attention output",
        "pad rows hold values, expected +0",
        "sgl-project/sglang pull 30895",
    ),
    PlantedBug(
        "ids not sharded",
        Schedule(rows=IdsNotSharded),
        sharded(4, 9),
        "token ids (stage 0, ranks 1, 2)",
        "holds the rows of rank 0",
        "local-inference-lab/vllm pull 623",
    ),
    PlantedBug(
        "mask not sharded",
        Schedule(rows=MaskNotSharded),
        sharded(4, 8, padded_slots=3),
        "padding mask (stage 0, ranks 2, 3)",
        "holds the rows of rank 0",
    ),
    PlantedBug(
        "added rows not masked",
        Schedule(rows=AddedRowsAreNoPadding),
        sharded(4, 9),
        "layer 0 ffn output",
        "pad rows hold values, expected +0",
        "sgl-project/sglang pull 30895",
    ),
    PlantedBug(
        "scaled by tp behind a norm",
        Schedule(rows=ScaledByTp),
        sharded(4, 8),
        ENTRY,
        "is 4 times what it must be",
        "vllm-project/vllm pull 48763",
    ),
    PlantedBug(
        "summed twice where ranks hold whole tensors",
        Schedule(rows=ReducedTwice),
        Combination(V41, tp=2, pp=2),
        "layer 0 attention output",
        "is 2 times what it must be: scaled by tp, which a norm behind it would hide",
        "vllm-project/vllm pull 48763",
    ),
    PlantedBug(
        "layout guessed from a shape",
        Schedule(rows=LayoutFromShape),
        sharded(2, 1),
        f"{ENTRY} (stage 0, rank 1)",
        "differs in",
        "vllm-project/vllm pull 50691",
    ),
    PlantedBug(
        "floor division",
        Schedule(rows=FloorShards),
        sharded(2, 9),
        "token ids",
        "is torch.int64 [4], expected torch.int64 [5]",
        "ByteDance-Seed/VeOmni pull 1139",
    ),
    PlantedBug(
        "collective on ranks with tokens only",
        Schedule(rows=PaddingRanksStayOut),
        sharded(4, 3),
        "schedule",
        "ranks disagree: ranks 0, 1, 2: reduce_scatter [4, 8] bfloat16; rank 3: all_gather [1, 8] bfloat16",
        "deepseek-ai/DeepEP issue 604",
    ),
    PlantedBug(
        "ranks added from the last down",
        Schedule(rows=ReducesFromTheLastRank),
        sharded(4, 8, order_sensitive=True),
        "layer 0 attention output",
        "differs in",
    ),
    PlantedBug(
        "ranks added in a ring",
        Schedule(rows=ReducesInARing),
        sharded(8, 8, order_sensitive=True),
        "layer 0 attention output",
        "differs in",
    ),
    PlantedBug(
        "ranks added in a tree",
        Schedule(rows=ReducesInATree),
        Combination(V4, tp=8, order_sensitive=True),
        "layer 0 attention output",
        "differs in",
    ),
    PlantedBug(
        "ranks added from the first part on",
        Schedule(rows=ReducesFromTheFirstPart),
        sharded(2, 9),
        "layer 0 attention output",
        "-0.0, expected 0.0",
    ),
    PlantedBug(
        "ranks added in bf16",
        Schedule(rows=ReducesInBf16),
        Combination(V41, tp=4, order_sensitive=True),
        "layer 0 attention output",
        "differs in",
    ),
)
