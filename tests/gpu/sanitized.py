"""Runs every op of one backend, small, for `compute-sanitizer` to watch: `python -m tests.gpu.sanitized BACKEND`."""

from __future__ import annotations

import sys

import torch

import fast
from fast.registry import ops
from tests.inputs import inputs
from tests.static.launches import CHOSEN, Call


def main(backend: str) -> None:
    """Run every op for one token, and for a full tile and one more, at a width that leaves a tail."""
    for op in ops(backend):
        for tokens in (1, 33):
            call = Call(op, tokens, 616, 4, CHOSEN.get(op, ((),))[-1])
            tensors = inputs(call, "cuda")
            call.run(fast.kernel(op, backend), tensors)
            torch.cuda.synchronize()
    print("ran", len(ops(backend)), "ops")


if __name__ == "__main__":
    main(sys.argv[1])
