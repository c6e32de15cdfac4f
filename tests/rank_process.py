"""Ranks of the stream model as processes of their own: `python -m tests.rank_process PLAN`.

PLAN is a JSON file: how the ranks lie, what each runs and how one of them misbehaves. Torch is imported once and a
process forked for each rank. A rank writes what it showed, as digests, or the error that ended it, next to the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fast
from fast.model import Kernels
from fast.stages import stages
from oracle.processes import DistributedGroup, Place, connect
from oracle.ranks import Ranked, RankError, check_call, given
from oracle.trace import RankTrace
from tests.stream_model import Combination, Schedule, of_oracle, run_rank, weights_for


@dataclass(frozen=True)
class Plan:
    """What a set of processes does.

    combinations are run in turn over one connection, each in `pp` stages of `tp` ranks. fault: what process `culprit`
    does instead: "absent" never comes; at its third collective "dies" is killed, "skips" leaves it out, "sleeps"
    stays away from it, "raises" fails by itself. backend: whose kernels, and on which kind of device.
    """

    combinations: tuple[Combination, ...]
    tp: int
    pp: int = 1
    timeout: float = 60.0
    fault: str = ""
    culprit: int = -1
    backend: str = "oracle"
    device: str = "cpu"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        document: dict[str, Any] = json.loads(path.read_text())
        runs = tuple(_combination(one) for one in document.pop("combinations"))
        return cls(combinations=runs, **document)


def _combination(document: Mapping[str, Any]) -> Combination:
    """A combination from JSON, which has lists for tuples."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in document.items()}
    return Combination(**values)


def digest(trace: RankTrace) -> dict[str, str]:
    """A digest of each state that a rank showed, aux states by their place."""
    named = {name: value for name, (value, _) in trace.states.items()}
    named |= {f"aux state {place}": value for place, value in enumerate(trace.aux)}
    return {name: _digest(value) for name, value in named.items()}


def _digest(tensor: Tensor) -> str:
    raw = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr((tensor.dtype, tuple(tensor.shape))).encode() + raw).hexdigest()[:16]


def answer_path(plan: Path, world_rank: int) -> Path:
    """Where a rank writes its answer."""
    return plan.with_name(f"answer-{world_rank}.json")


def main(plan_path: Path) -> int:
    """Fork the ranks and wait for them; return 1 when one that should not have failed did."""
    plan = Plan.read(plan_path)
    ranks = {_forked(plan, plan_path, rank): rank for rank in range(plan.tp * plan.pp)}
    failed, waiting = False, set(ranks)
    while waiting - _guilty(plan, ranks):
        pid, status = os.wait()
        waiting.discard(pid)
        failed |= status != 0 and ranks[pid] != plan.culprit
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return int(failed)


def _guilty(plan: Plan, ranks: Mapping[int, int]) -> set[int]:
    return {pid for pid, rank in ranks.items() if rank == plan.culprit}


def _forked(plan: Plan, plan_path: Path, world_rank: int) -> int:
    """The process of one rank; it never returns from here."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        be(plan, plan_path, world_rank)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def be(plan: Plan, plan_path: Path, world_rank: int) -> None:
    """Be one rank and write the answer."""
    torch.set_num_threads(1)
    stage, rank = divmod(world_rank, plan.tp)
    device = f"cuda:{world_rank}" if plan.device == "cuda" else "cpu"
    if plan.device == "cuda":
        torch.cuda.set_device(world_rank)
    guilty = world_rank == plan.culprit
    if guilty and plan.fault == "absent":
        return
    started = time.monotonic()
    answer: dict[str, Any] = {}
    place, meeting = Place(rank, plan.tp, stage, plan.pp, device), plan_path.with_name("meeting")
    try:
        with connect(place, meeting, timeout=plan.timeout) as group:
            answer["states"] = _run(plan, group, stage, device, guilty)
    except RankError as error:
        answer["error"] = str(error)
    answer["seconds"] = time.monotonic() - started
    answer_path(plan_path, world_rank).write_text(json.dumps(answer))


def _run(plan: Plan, group: DistributedGroup, stage: int, device: str, guilty: bool) -> list[dict[str, str]]:
    shown = []
    for combination in plan.combinations:
        part = stages(combination.model, plan.pp, combination.borders)[stage]
        received = None if part.first else group.receive()
        trace = RankTrace()
        wrapped = Misbehaving(group, plan) if guilty else group
        weights = weights_for(combination, device)
        step = run_rank(combination, part, wrapped, trace, _kernels(plan), Schedule(), received, weights)
        if not part.last:
            group.send(step.sent)
        shown.append(digest(trace))
    return shown


def _kernels(plan: Plan) -> Kernels:
    if plan.backend == "oracle":
        return of_oracle
    return lambda op: fast.kernel(op, plan.backend)


class Misbehaving(Ranked):
    """A group whose rank does something wrong at its third collective, whichever it is."""

    def __init__(self, group: DistributedGroup, plan: Plan) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.fault = plan.fault
        # Longer than any other rank waits, and no longer: if the launcher is killed, nobody else ends this process.
        self.away = 4 * plan.timeout
        self.calls = 0

    def _exchange(self, kind: str, tensor: Tensor) -> list[Tensor]:
        self.calls += 1
        if self.calls != 3:
            return self.group._exchange(kind, tensor)
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "sleeps":
            time.sleep(self.away)
        if self.fault == "raises":
            raise ValueError("this rank has had enough")
        return [given(check_call(kind, tensor, self.size), tensor, self.rank, self.size)] * self.size


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
