"""A decoder whose states one can compute by head: no mixing, each FFN adds its layer's number plus one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import oracle
from fast.model import Engine, Step, run_stage
from fast.rows import Group, Parallel
from fast.stages import MtpBuffer, Stage
from oracle.model import Batch
from oracle.sublayers import Weights, make_weights
from oracle.trace import RankTrace

TWO_STREAMS = oracle.MhcConfig(hc_mult=2)


@dataclass(frozen=True)
class Toy:
    """The shape of a toy model: 2 streams of 4 values."""

    version: str
    layers: int
    aux_ids: tuple[int, ...] = ()
    engram: tuple[int, ...] = ()
    hidden_size: int = 4
    draft_layers: int = 1
    config: oracle.MhcConfig = TWO_STREAMS

    @property
    def weights(self) -> Weights:
        """Parameters of the right shapes; toy kernels use none of them."""
        return make_weights(
            layers=self.layers,
            draft_layers=1,
            hc_mult=self.config.hc_mult,
            hidden_size=self.hidden_size,
            vocabulary=2,
            aux=len(self.aux_ids),
        )


class ToySublayers:
    """Embeds everything as 0; attention adds nothing, the FFN of layer i adds i + 1, Engram adds 100."""

    def __init__(self, hidden_size: int = 4) -> None:
        self.hidden_size = hidden_size

    def embed(self, ids: Tensor) -> Tensor:
        return torch.zeros(ids.shape[0], self.hidden_size, dtype=torch.bfloat16)

    def engram(self, layer: int, residual: Tensor, ids: Tensor) -> Tensor:
        return residual + 100 * (ids[:, None, None] >= layer - layer)

    def attention(self, layer: int, x: Tensor, rank: int, ranks: int, context: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x) * (layer + rank + ranks) if context is None else torch.zeros_like(x)

    def ffn(self, layer: int, x: Tensor, ids: Tensor, padding: Tensor, rank: int, ranks: int) -> Tensor:
        del ids, padding, ranks
        return torch.full_like(x, (layer + 1) * (rank == 0))


def _pre(residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, n, _width = residual.shape
    return (torch.ones(tokens, n), torch.eye(n).expand(tokens, n, n), residual[:, 0], torch.ones(tokens, n))


def _post_pre(x: Tensor, residual: Tensor, *_: Any, capture_aux: bool = False, **__: Any) -> tuple[Tensor, ...]:
    new = residual + x[:, None]
    aux = oracle.stream_mean(new) if capture_aux else new.new_empty(0, new.shape[2])
    return (new, *_pre(new), aux)


TOY_KERNELS: dict[str, Callable[..., Any]] = {
    "expand": oracle.expand,
    "fn_broadcast": lambda fn, _: fn,
    "stream_mean": oracle.stream_mean,
    "pre": lambda *a, **k: _pre(*a, **k)[:3],
    "pre_delayed": _pre,
    "post_pre": lambda *a, **k: _post_pre(*a, **k)[:4],
    "post_pre_delayed": _post_pre,
    "post": lambda x, residual, *_: residual + x[:, None],
    "collapse": lambda residual, _: residual[:, 0],
    "head": lambda residual, *_, **__: residual[:, 0],
    "draft_tail": lambda x, residual, *_: residual[:, 0] + x,
    "norm": lambda hidden, *_, **__: hidden,
    "project": lambda x, fn: (torch.zeros(x.shape[0], fn.shape[0]), torch.zeros(x.shape[0])),
}


def run_toy(
    toy: Toy,
    group: Group,
    stage: Stage,
    *,
    received: dict[str, Tensor] | None = None,
    tokens: int = 3,
    buffer: MtpBuffer | None = None,
    kernels: dict[str, Callable[..., Any]] | None = None,
) -> tuple[Step, RankTrace]:
    """Run one stage of a toy model on one rank; return its step and what it showed."""
    trace = RankTrace()
    chosen = TOY_KERNELS | (kernels or {})
    engine = Engine(
        toy,
        toy.weights,
        ToySublayers(toy.hidden_size),
        chosen.__getitem__,
        group,
        Parallel(group.size),
        observe=trace.observe,
    )
    ids = torch.zeros(tokens, dtype=torch.int64)
    batch = Batch(ids, ids, torch.zeros(tokens, dtype=torch.bool))
    return run_stage(engine, stage, batch, received=received, buffer=buffer), trace
