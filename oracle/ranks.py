"""Ranks of one group, simulated in one process; `oracle.processes` has real ones with the same calls.

A rank's code is written once, against a group with ``rank``, ``size``, ``all_gather``, ``all_reduce`` and
``reduce_scatter``. Every call is compared with the other ranks' before data moves, so a collective that only some
ranks issue, other shapes, or a rank that ends early is a `RankError` that names ranks and calls. It is never a hang
and never mixed data.

Reductions add in rank order 0..size-1 in fp32 from +0 and round once. A library's own reduction would choose an order
by size and topology, so real ranks exchange rows and add them here, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from oracle.arith import round_bf16
from oracle.sp import Collective, CollectiveLog

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "end")
DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.bool)
MOST_DIMENSIONS = 4
# A compiler's passes recurse; where the main thread's stack is unlimited, a thread's default is 2 MiB.
RANK_STACK = 64 << 20

Result = TypeVar("Result")


class RankError(RuntimeError):
    """Ranks disagree about their collectives, or one is gone; the text names the ranks and what each one called."""


@dataclass(frozen=True)
class Call:
    """One collective as one rank issues it."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        if self.kind == "end":
            return "nothing more"
        return f"{self.kind} {list(self.shape)} {self.dtype.removeprefix('torch.')}"


def check_call(kind: str, tensor: Tensor, size: int) -> Call:
    """Return the call for a tensor. Raises TypeError or ValueError for one that the kind cannot take."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
        raise TypeError(f"{kind}: expected a tensor of {DTYPES}, got {getattr(tensor, 'dtype', type(tensor).__name__)}")
    if not 1 <= tensor.dim() <= MOST_DIMENSIONS:
        raise ValueError(f"{kind}: expected rows along dim 0 of 1 to {MOST_DIMENSIONS}, got {tensor.dim()} dimensions")
    if kind != "all_gather" and tensor.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{kind}: expected bfloat16 or float32 to add, got {tensor.dtype}")
    if kind == "reduce_scatter" and tensor.shape[0] % size:
        raise ValueError(f"reduce_scatter: rows must be a multiple of {size} ranks, got {list(tensor.shape)}")
    return Call(kind, tuple(tensor.shape), str(tensor.dtype))


def check_agreement(calls: Sequence[Call], number: int) -> None:
    """Raise RankError unless every rank issues the same call; `number` counts this group's calls from 0."""
    if len(set(calls)) > 1:
        ranks = {call: [r for r, other in enumerate(calls) if other == call] for call in dict.fromkeys(calls)}
        said = "; ".join(f"{some_ranks(who)}: {call}" for call, who in ranks.items())
        raise RankError(f"collective {number}: ranks disagree: {said}")


def some_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 0, 1, 3"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def added(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors of bf16 or fp32 in their order, in fp32 from +0, and round once to their dtype."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.to(torch.float32)
    return round_bf16(total) if parts[0].dtype == torch.bfloat16 else total


def received_bytes(call: Call, tensor: Tensor, size: int) -> int:
    """Return the payload that a rank receives: a gather brings the others' tensors, a scatter their parts."""
    whole = tensor.numel() * tensor.element_size() * (size - 1)
    return whole // size if call.kind == "reduce_scatter" else whole


class Ranked:
    """The calls of a rank; a subclass moves the data."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors [rows, ...] one after the other, [size * rows, ...]."""
        return torch.cat(self._exchange("all_gather", tensor))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, same shape."""
        return added(self._exchange("all_reduce", tensor))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks: [size * rows, ...] -> [rows, ...]."""
        return added(self._exchange("reduce_scatter", tensor))

    def _exchange(self, kind: str, tensor: Tensor) -> list[Tensor]:
        """Return what each rank gives to this one, in rank order."""
        raise NotImplementedError


def given(call: Call, tensor: Tensor, to: int, size: int) -> Tensor:
    """Return what a rank that issues a call with a tensor gives to rank `to`."""
    if call.kind != "reduce_scatter":
        return tensor
    rows = tensor.shape[0] // size
    return tensor[to * rows : (to + 1) * rows]


@dataclass
class Run(Generic[Result]):
    """What simulated ranks returned, by rank, and the collectives that they issued."""

    results: list[Result]
    log: CollectiveLog


Meet = Callable[[int, Call, Tensor], list[Tensor]]


class SimulatedGroup(Ranked):
    """One rank of `simulate`."""

    def __init__(self, rank: int, size: int, meet: Meet) -> None:
        self.rank = rank
        self.size = size
        self._meet = meet

    def _exchange(self, kind: str, tensor: Tensor) -> list[Tensor]:
        return self._meet(self.rank, check_call(kind, tensor, self.size), tensor.clone())


def simulate(size: int, body: Callable[[SimulatedGroup], Result]) -> Run[Result]:
    """Run `body` once for each of `size` ranks in this process; return their results and the collective log.

    Deterministic: one rank runs at a time, in rank order, until its next collective. Raises RankError, with all ranks
    stopped, when the ranks' collectives differ or some ranks end before others, and whatever a rank raises, with a
    note that names it.
    """
    return _Simulation(size, body).run()


@dataclass
class _Seat(Generic[Result]):
    """One simulated rank between two turns; `call` is None once its code has ended."""

    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    call: Call | None = None
    tensor: Tensor | None = None
    error: BaseException | None = None
    results: list[Result] = field(default_factory=list)


class _Stopped(BaseException):
    """Unwinds a rank that waits for others which will not come."""


class _Simulation(Generic[Result]):
    """A baton that ranks pass on: threads serve as coroutines and never run side by side."""

    def __init__(self, size: int, body: Callable[[SimulatedGroup], Result]) -> None:
        self.size = size
        self.body = body
        self.seats: list[_Seat[Result]] = [_Seat() for _ in range(size)]
        self.log = CollectiveLog(size)
        self.back = threading.Semaphore(0)
        self.number = 0
        self.met: list[Tensor | None] = []
        self.stopping = False

    def run(self) -> Run[Result]:
        threads = self._started()
        try:
            while self._round():
                self.number += 1
        finally:
            self._stop()
            for thread in threads:
                thread.join()
        return Run([result for seat in self.seats for result in seat.results], self.log)

    def _started(self) -> list[threading.Thread]:
        """Start a thread for each rank, with a stack deep enough for a compiler that a rank's code may call."""
        before = threading.stack_size(RANK_STACK)
        try:
            threads = [threading.Thread(target=self._live, args=(rank,), daemon=True) for rank in range(self.size)]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        return threads

    def _round(self) -> bool:
        """Let each rank run to its next collective; return whether there is one, the same on all."""
        for rank, seat in enumerate(self.seats):
            seat.turn.release()
            self.back.acquire()
            if seat.error is not None:
                seat.error.add_note(f"raised by rank {rank} of {self.size} before its collective {self.number}")
                raise seat.error
        calls = [seat.call or Call("end") for seat in self.seats]
        check_agreement(calls, self.number)
        # Kept apart from the seats: a rank posts its next tensor before the ranks behind it have read this one.
        self.met = [seat.tensor for seat in self.seats]
        return calls[0].kind != "end"

    def _live(self, rank: int) -> None:
        seat = self.seats[rank]
        seat.turn.acquire()
        try:
            if not self.stopping:
                seat.results.append(self.body(SimulatedGroup(rank, self.size, self._meet)))
        except _Stopped:
            pass
        except BaseException as error:
            seat.error = error
        seat.call = None
        self.back.release()

    def _stop(self) -> None:
        """Unwind every rank that still waits."""
        self.stopping = True
        for seat in self.seats:
            seat.turn.release()

    def _meet(self, rank: int, call: Call, tensor: Tensor) -> list[Tensor]:
        """Post a rank's call, pass the baton, and return what the ranks gave once all have posted theirs."""
        seat = self.seats[rank]
        seat.call, seat.tensor = call, tensor
        received = received_bytes(call, tensor, self.size)
        self.log.per_rank[rank].append(Collective(call.kind, call.shape, call.dtype, received))
        self.back.release()
        seat.turn.acquire()
        if self.stopping:
            raise _Stopped
        return [given(call, other, rank, self.size) for other in self.met if other is not None]
