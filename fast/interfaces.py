"""What the fused schedule needs of a model: its shape, sublayers and parameters, as plain attributes and calls.

Any object with these will do, so the schedule knows neither a model's class nor who made its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fast.registry import Config


class Shape(Protocol):
    """What is computed. `aux_ids` follow the version's rule: V4 after a layer, V4.1 entering it."""

    @property
    def version(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def config(self) -> Config: ...
    @property
    def aux_ids(self) -> tuple[int, ...]: ...
    @property
    def engram(self) -> tuple[int, ...]: ...
    @property
    def draft_layers(self) -> int: ...


class Sublayers(Protocol):
    """A model's sublayers; attention reads all T tokens, the others only the rows they are given."""

    def embed(self, ids: Tensor) -> Tensor: ...
    def engram(self, layer: int, residual: Tensor, ids: Tensor) -> Tensor: ...
    def attention(self, layer: int, x: Tensor, rank: int, ranks: int, context: Tensor | None = None) -> Tensor: ...
    def ffn(self, layer: int, x: Tensor, ids: Tensor, padding: Tensor, rank: int, ranks: int) -> Tensor: ...


class Projection(Protocol):
    """Parameters of a boundary, or of V4's head, which has no norm."""

    @property
    def fn(self) -> Tensor: ...
    @property
    def hc_scale(self) -> Tensor: ...
    @property
    def hc_base(self) -> Tensor: ...


class Boundary(Projection, Protocol):
    """Parameters of a boundary and of the norm behind its collapse."""

    @property
    def norm_weight(self) -> Tensor: ...


class Stack(Protocol):
    """Parameters of a stack of layers and of its end."""

    @property
    def attention(self) -> Sequence[Boundary]: ...
    @property
    def ffn(self) -> Sequence[Boundary]: ...
    @property
    def head(self) -> Projection: ...
    @property
    def norm_weight(self) -> Tensor: ...


class Weights(Protocol):
    """All parameters of a target and its draft."""

    @property
    def target(self) -> Stack: ...
    @property
    def draft(self) -> Stack: ...
    @property
    def lm_head(self) -> Tensor: ...
    @property
    def main_proj(self) -> Tensor: ...
    @property
    def main_norm(self) -> Tensor: ...
    @property
    def confidence(self) -> Tensor: ...


class Tokens(Protocol):
    """One step's tokens, whole: ids and draft_ids int64 [T], padding bool [T]."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def draft_ids(self) -> Tensor: ...
    @property
    def padding(self) -> Tensor: ...
