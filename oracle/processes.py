"""Ranks as real processes through torch.distributed: gloo for CPU tensors, NCCL for CUDA ones.

A rank's code is that of `oracle.ranks`. No call waits longer than the connection's timeout, and its `RankError` says
which rank is missing and what that one did last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from oracle.ranks import DTYPES, KINDS, Call, Ranked, RankError, check_agreement, check_call, given, some_ranks

MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Place:
    """Where a process stands: `rank` of `tp` in pipeline stage `stage` of `pp`, and the device of its tensors."""

    rank: int
    tp: int
    stage: int = 0
    pp: int = 1
    device: str = "cpu"

    @property
    def world_rank(self) -> int:
        """The process's number among all tp * pp, stage after stage."""
        return self.stage * self.tp + self.rank

    @property
    def world_size(self) -> int:
        return self.tp * self.pp


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
        """Send named tensors to the same rank of the next stage."""
        to = self._place.world_rank + self.size
        with self._named(f"send to the rank of stage {self._place.stage + 1}"):
            form = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
            dist.send_object_list([form], dst=to, device=torch.device("cpu"))
            for tensor in tensors.values():
                if tensor.numel():
                    dist.send(_bytes(tensor), dst=to)

    def receive(self) -> dict[str, Tensor]:
        """Receive what the same rank of the stage before sends, in its order."""
        source = self._place.world_rank - self.size
        with self._named(f"receive from the rank of stage {self._place.stage - 1}"):
            forms: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
            dist.recv_object_list(forms, src=source, device=torch.device("cpu"))
            received = {}
            for name, shape, dtype in forms[0]:
                received[name] = torch.empty(shape, dtype=dtype, device=self.device)
                if received[name].numel():
                    dist.recv(_bytes(received[name]), src=source)
            return received

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
        self._store.set(_key("at", self._place.world_rank), f"{self.number} {call}")
        own = _encoded(call, self.number)
        said = [torch.empty_like(own) for _ in range(self.size)]
        with self._named(str(call)):
            dist.all_gather(said, own, group=self._process_group)
        check_agreement([_decoded(line) for line in said], self.number)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Turn a failure of the transport into a RankError that says who is missing."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size}: collective {self.number} ({what}) got no answer within "
                f"{self._timeout:g} s: {self._absent()} ({str(error).splitlines()[0]})"
            ) from error

    def _absent(self) -> str:
        """Say of each other rank of the stage that is not at this rank's call what it did last."""
        first = self._place.world_rank - self.rank
        said = [f"rank {r} {self._last(first + r)}" for r in range(self.size) if r != self.rank]
        behind = [line for line in said if not line.endswith(f"at collective {self.number}")]
        return "; ".join(behind) or "all ranks of the stage are there, so the link or another stage is at fault"

    def _last(self, world_rank: int) -> str:
        failed, at = _key("failed", world_rank), _key("at", world_rank)
        if self._store.check([failed]):
            return f"failed: {self._store.get(failed).decode()}"
        if not self._store.check([at]):
            return "has made no call"
        number, call = self._store.get(at).decode().split(" ", 1)
        there = int(number) == self.number
        return f"is at collective {number}" if there else f"went no further than collective {number} ({call})"


@contextmanager
def connect(place: Place, meeting: Path, *, timeout: float = 60.0) -> Iterator[DistributedGroup]:
    """Join the other processes and yield this rank's group; leave it on exit, at the same collective as the others.

    meeting: a file that all processes name and that none has used before. timeout: seconds that any call waits for
    the others. Gloo carries CPU tensors, NCCL those of a CUDA device. Raises RankError when a process does not come,
    disagrees, or is lost. At most one connection a process at a time.
    """
    store = FileStore(str(meeting), place.world_size)
    _await_all(store, place, timeout)
    backend = "cpu:gloo,cuda:nccl" if place.device.startswith("cuda") else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("torch", store),
            rank=place.world_rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
        )
        group = DistributedGroup(place, _own_group(place, timeout), store, timeout)
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
    store.set(_key("here", place.world_rank), "")
    everyone = [_key("here", rank) for rank in range(place.world_size)]
    try:
        store.wait(everyone, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = [rank for rank, key in enumerate(everyone) if not store.check([key])]
        raise RankError(
            f"process {place.world_rank} of {place.world_size}: {some_ranks(absent)} did not come within {timeout:g} s"
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
