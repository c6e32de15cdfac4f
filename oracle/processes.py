"""Ranks as real processes through torch.distributed: gloo for CPU tensors, NCCL for CUDA ones.

A rank's code is that of `oracle.ranks`. No call waits longer than the connection's timeout, and its `RankError` says
which rank is missing and what that one did last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from oracle.ranks import DTYPES, KINDS, MOST_DIMENSIONS, Call, Ranked, RankError, check_agreement, check_call, given


class LostRank(RankError):
    """A process did not come, or is gone: whoever raises this only waited."""


@dataclass(frozen=True)
class Place:
    """Where a process stands: `rank` of `tp` in pipeline stage `stage` of `pp`, and the device of its tensors.

    Raises ValueError for a place that does not exist.
    """

    rank: int
    tp: int
    stage: int = 0
    pp: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, value, size, count in (("rank", self.rank, "tp", self.tp), ("stage", self.stage, "pp", self.pp)):
            if not 0 <= value < count:
                raise ValueError(f"Place: {name} must be in 0..{size} - 1, got {value} with {size} = {count}")

    @property
    def world_rank(self) -> int:
        """The process's number among all tp * pp, stage after stage."""
        return self.stage * self.tp + self.rank

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    def named(self, world_rank: int) -> str:
        """Any process's name: its rank, and its stage where there are several."""
        stage, rank = divmod(world_rank, self.tp)
        return f"rank {rank}" if self.pp == 1 else f"rank {rank} of stage {stage}"


class DistributedGroup(Ranked):
    """One rank of a group of processes; made by `connect`.

    Every call is announced to the other ranks, and compared, before its data moves; the announcement is on the CPU, so
    a disagreement or a lost rank never reaches a GPU collective, which could not be stopped.
    """

    def __init__(self, place: Place, process_group: ProcessGroup, store: Store, timeout: float) -> None:
        self.rank = place.rank
        self.size = place.tp
        self.device = place.device
        self.number = 0
        self._place = place
        self._process_group = process_group
        self._store = store
        self._timeout = timeout

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send named tensors to the same rank of the next stage. Raises ValueError when there is none."""
        to = self._neighbour(1)
        with self._named(f"send to {self._place.named(to)}", to):
            form = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
            dist.send_object_list([form], dst=to, device=torch.device("cpu"))
            for tensor in tensors.values():
                if tensor.numel():
                    dist.send(_bytes(tensor), dst=to)

    def receive(self) -> dict[str, Tensor]:
        """Receive what the same rank of the stage before sends, in its order. Raises ValueError when there is none."""
        source = self._neighbour(-1)
        with self._named(f"receive from {self._place.named(source)}", source):
            forms: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
            dist.recv_object_list(forms, src=source, device=torch.device("cpu"))
            received = {}
            for name, shape, dtype in forms[0]:
                received[name] = torch.empty(shape, dtype=dtype, device=self.device)
                if received[name].numel():
                    dist.recv(_bytes(received[name]), src=source)
            return received

    def _neighbour(self, step: int) -> int:
        """The process of this rank one stage on (1) or before (-1)."""
        stage, stages = self._place.stage + step, self._place.pp
        if not 0 <= stage < stages:
            side = "after" if step > 0 else "before"
            raise ValueError(f"stage {self._place.stage} of {stages} has no stage {side} it")
        return stage * self.size + self.rank

    def finish(self) -> None:
        """Announce the end; raises RankError when another rank still has a collective to come."""
        self._announce(Call("end"))

    def _exchange(self, kind: str, tensor: Tensor) -> list[Tensor]:
        call = check_call(kind, tensor, self.size)
        self._announce(call)
        with self._named(str(call)):
            parts = self._moved(call, tensor)
        self.number += 1
        return parts

    def _moved(self, call: Call, tensor: Tensor) -> list[Tensor]:
        if tensor.numel() == 0:
            return [given(call, tensor, self.rank, self.size)] * self.size
        return self._scattered(tensor) if call.kind == "reduce_scatter" else self._gathered(tensor)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather([_bytes(part) for part in parts], _bytes(tensor), group=self._process_group)
        return parts

    def _scattered(self, tensor: Tensor) -> list[Tensor]:
        exchanged = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(_bytes(exchanged), _bytes(tensor), group=self._process_group)
        return list(exchanged.chunk(self.size))

    def _announce(self, call: Call) -> None:
        """Tell the other ranks what comes next and check that they say the same."""
        own = _encoded(call, self.number)
        said = [torch.empty_like(own) for _ in range(self.size)]
        with self._named(str(call)):
            dist.all_gather(said, own, group=self._process_group)
        check_agreement([_decoded(line) for line in said], self.number)

    @contextmanager
    def _named(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Say where this process is, and make a failure of the transport say who is missing."""
        started = time.monotonic()
        self._store.set(_key("at", self._place.world_rank), f"{self.number} {what}")
        try:
            yield
        except RuntimeError as error:
            waited = f"{time.monotonic() - started:.1f} s (timeout {self._timeout:g} s)"
            raise LostRank(
                f"{self._place.named(self._place.world_rank)}: collective {self.number} ({what}) got no answer after "
                f"{waited}: {Whereabouts(self._store, self._place).missing(peer)} ({str(error).splitlines()[0]})"
            ) from error


class Whereabouts:
    """What each process last said of itself, from which follows who holds up the others."""

    def __init__(self, store: Store, place: Place) -> None:
        everyone = range(place.world_size)
        self._place = place
        self._failed = {process: _said(store, _key("failed", process)) for process in everyone}
        self._at = {process: _said(store, _key("at", process)) for process in everyone}

    def missing(self, peer: int | None) -> str:
        """Name the cause: an error that is not about waiting, else who is behind in a stage, the nearest one first.

        peer: the process of another stage that was waited for; None where it was this stage.
        """
        errors = {error: process for process, error in self._failed.items() if self._is_cause(error)}
        culprits = list(errors.values())
        for stage in self._stages(peer):
            culprits = culprits or self._behind(stage)
        if not culprits and peer is not None:
            culprits = [peer]
        return "; ".join(map(self._told, culprits)) or "no process is behind the others, so the link is at fault"

    def _stages(self, peer: int | None) -> list[int]:
        """The stages to look at in turn; this one's ranks cannot hold up one that waits for another stage."""
        own = self._place.stage
        near = own if peer is None else peer // self._place.tp
        stages = [stage for stage in range(self._place.pp) if peer is None or stage != own]
        return sorted(stages, key=lambda stage: (abs(stage - near), stage))

    def _is_cause(self, error: str) -> bool:
        return bool(error) and not error.startswith(LostRank.__name__)

    def _behind(self, stage: int) -> list[int]:
        """The processes of a stage that are not as far as its foremost, without this one and those that gave up."""
        everyone = range(stage * self._place.tp, (stage + 1) * self._place.tp)
        foremost = max(map(self._number, everyone))
        asked = [process for process in everyone if process != self._place.world_rank and not self._failed[process]]
        return [process for process in asked if self._number(process) < foremost]

    def _number(self, process: int) -> int:
        """A process's last collective, -1 before its first."""
        return int(self._at[process].split(" ", 1)[0]) if self._at[process] else -1

    def _told(self, process: int) -> str:
        if self._failed[process]:
            return f"{self._place.named(process)} failed: {self._failed[process]}"
        if not self._at[process]:
            return f"{self._place.named(process)} has made no call"
        number, call = self._at[process].split(" ", 1)
        return f"{self._place.named(process)} went no further than collective {number} ({call})"


def _said(store: Store, key: str) -> str:
    """What is kept under a key, empty if nothing is."""
    return store.get(key).decode() if store.check([key]) else ""


@contextmanager
def connect(place: Place, meeting: Path, *, timeout: float = 60.0) -> Iterator[DistributedGroup]:
    """Join the other processes and yield this rank's group; leave it on exit, at the same collective as the others.

    meeting: a file that all processes name and that none has used before. timeout: seconds that any call waits for
    the others. Gloo carries CPU tensors, NCCL those of a CUDA device. Raises RankError when a process does not come,
    disagrees, or is lost, ValueError for a file that this process has used before. At most one connection a process
    at a time.
    """
    store = FileStore(str(meeting), place.world_size)
    _await_all(store, place, timeout)
    try:
        group = DistributedGroup(place, _joined(place, store, timeout), store, timeout)
        yield group
        group.finish()
    except BaseException as error:
        store.set(_key("failed", place.world_rank), f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _await_all(store: Store, place: Place, timeout: float) -> None:
    """Wait until every process has said that it is there, so that one which is not can be named."""
    own = _key("here", place.world_rank)
    if store.check([own]):
        raise ValueError(f"connect: {place.named(place.world_rank)} has used this meeting file before; name a new one")
    store.set(own, "")
    everyone = [_key("here", rank) for rank in range(place.world_size)]
    try:
        store.wait(everyone, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = ", ".join(place.named(process) for process, key in enumerate(everyone) if not store.check([key]))
        raise LostRank(f"{place.named(place.world_rank)}: {absent} did not come within {timeout:g} s") from error


def _joined(place: Place, store: Store, timeout: float) -> ProcessGroup:
    """Connect the processes, all of which are there, and return the process group of this rank's stage."""
    backend = "cpu:gloo,cuda:nccl" if place.device.startswith("cuda") else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("torch", store),
            rank=place.world_rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
        )
        return _own_group(place, timeout)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LostRank(
            f"{place.named(place.world_rank)}: a process came and was lost before all were connected ({reason})"
        ) from error


def _own_group(place: Place, timeout: float) -> ProcessGroup:
    """Return the process group of this rank's stage; every process makes all stages' groups, in order."""
    wait = timedelta(seconds=timeout)
    groups: list[ProcessGroup] = [
        dist.new_group([stage * place.tp + rank for rank in range(place.tp)], timeout=wait) for stage in range(place.pp)
    ]
    return groups[place.stage]


def _key(what: str, world_rank: int) -> str:
    return f"ranks/{what}/{world_rank}"


def _encoded(call: Call, number: int) -> Tensor:
    """A call as int64 numbers, to announce it."""
    shape = [*call.shape, *[-1] * (MOST_DIMENSIONS - len(call.shape))]
    dtype = [str(dtype) for dtype in DTYPES].index(call.dtype) if call.dtype else -1
    return torch.tensor([number, KINDS.index(call.kind), dtype, *shape])


def _decoded(line: Tensor) -> Call:
    _, kind, dtype, *shape = line.tolist()
    return Call(KINDS[kind], tuple(size for size in shape if size >= 0), str(DTYPES[dtype]) if dtype >= 0 else "")


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes: every dtype travels, and no transport computes."""
    return tensor.contiguous().view(-1).view(torch.uint8)
