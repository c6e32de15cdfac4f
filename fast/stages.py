"""Pipeline stages: which layers and aux states each owns, and the buffer of the last one for an MTP draft."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from fast.interfaces import Shape


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: layers start..end-1, and which aux states it owns.

    An aux state is known by the layer whose entering streams it is the mean of (0..layers). A stage owns those that
    its own layers produce, start+1..end, and the first one the embedding's. So the state at a stage border belongs to
    the stage before it: never to two, never to none.
    """

    start: int
    end: int
    layers: int
    wanted: tuple[int, ...]

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.end == self.layers

    def owns(self, entering: int) -> bool:
        """Whether this stage is the one that captures the mean of the streams entering a layer."""
        lowest = self.start if self.first else self.start + 1
        return entering in self.wanted and lowest <= entering <= self.end

    def upstream(self) -> list[int]:
        """The wanted states that earlier stages own, in layer order: the slots that this stage receives."""
        ordered = sorted(self.wanted)
        return [] if self.first else ordered[: bisect_right(ordered, self.start)]

    def downstream(self) -> list[int]:
        """The slots that this stage sends on: those it received, then its own."""
        return self.upstream() + [entering for entering in sorted(self.wanted) if self.owns(entering)]


def wanted_states(shape: Shape) -> tuple[int, ...]:
    """Translate a version's aux ids into entering-layer numbers, in the configured order.

    V4 names the layer after which it captures, V4.1 the layer that the streams enter. Raises ValueError for an id out
    of range or given twice, so that no state is silently missing.
    """
    after = 1 if shape.version == "v4" else 0
    wanted = tuple(layer + after for layer in shape.aux_ids)
    if len(set(wanted)) != len(wanted) or any(not after <= entering <= shape.layers for entering in wanted):
        raise ValueError(
            f"aux_ids of {shape.version} must be different layers in 0..{shape.layers - after}, got {shape.aux_ids}"
        )
    return wanted


def stages(shape: Shape, pp: int, borders: Sequence[int] | None = None) -> list[Stage]:
    """Cut the layers into `pp` stages, evenly unless the first layers of stages 1.. are given as `borders`.

    Raises ValueError when a stage would be empty.
    """
    even = [stage * shape.layers // pp for stage in range(1, pp)]
    cuts = [0, *(even if borders is None else borders), shape.layers]
    if len(cuts) != pp + 1 or any(low >= high for low, high in pairwise(cuts)):
        raise ValueError(f"stages: pp = {pp} needs {pp - 1} rising borders in 1..{shape.layers - 1}, got {cuts[1:-1]}")
    wanted = wanted_states(shape)
    return [Stage(low, high, shape.layers, wanted) for low, high in pairwise(cuts)]


class AuxStates:
    """The aux states that a stage captures: each that it owns exactly once, none that it does not."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._states: dict[int, Tensor] = {}

    def write(self, entering: int, mean: Tensor) -> None:
        """Keep one state. Raises ValueError when it is another stage's, or was captured before."""
        if not self._stage.owns(entering):
            raise ValueError(
                f"stage of layers {self._stage.start}..{self._stage.end - 1} must not capture the aux state entering "
                f"layer {entering}: another stage owns it, or no one asked for it"
            )
        if entering in self._states:
            raise ValueError(f"the aux state entering layer {entering} was captured twice")
        self._states[entering] = mean

    def collect(self) -> dict[int, Tensor]:
        """Return the states by layer. Raises ValueError when one that the stage owns was never captured."""
        missing = [entering for entering in sorted(self._stage.wanted) if self._stage.owns(entering)]
        missing = [entering for entering in missing if entering not in self._states]
        if missing:
            raise ValueError(f"the aux states entering layers {missing} were never captured")
        return {entering: self._states[entering] for entering in sorted(self._states)}


class MtpBuffer:
    """The buffer bf16 [rows, n * H] that hands the final streams to an MTP draft; allocated once, at one address."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.tokens: int | None = None

    def skip(self) -> None:
        """Mark a step that does not fill the buffer: what it holds is from another step."""
        self.tokens = None

    def fill(self, residual: Tensor) -> None:
        """Copy streams [T, n, H] into the first T rows. Raises ValueError when there are not as many rows."""
        if residual.shape[0] > self.tensor.shape[0]:
            raise ValueError(f"MTP buffer has {self.tensor.shape[0]} rows, got {residual.shape[0]} tokens")
        self.tokens = residual.shape[0]
        self.tensor[: self.tokens] = residual.flatten(1)

    def read(self, streams: int) -> Tensor:
        """Return the streams [T, n, H] of this step. Raises ValueError when the step did not fill the buffer."""
        if self.tokens is None:
            raise ValueError("the MTP buffer was not filled in this step, so it must not be read")
        return self.tensor[: self.tokens].view(self.tokens, streams, self.tensor.shape[1] // streams)


def slot(index: int) -> str:
    """Return the name under which an aux state travels to the next stage."""
    return f"aux_hidden_states_{index}"
