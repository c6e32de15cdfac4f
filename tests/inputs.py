"""Full-size inputs made where they are used, on data on which order and contraction show.

A case's values come from numpy, on a CPU, which takes longer than a GPU needs for a whole lane; these come from torch's
own generator on the device, so they may differ from release to release and no digest of them is kept.
"""

from __future__ import annotations

import torch

from cases.ops import OPS, Argument
from tests.static.launches import Call

STEP = 1e-6


def inputs(call: Call, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors for every argument of a call, by name, contiguous, on `device`; the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return {name: fill(OPS[call.op].argument(name), tensor, generator) for name, tensor in call.tensors(device).items()}


def fill(argument: Argument, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Write values that suit an argument's role into its tensor, in place; return it.

    Streams come in pairs of which one is the other's negative, and coefficients in pairs that nearly agree: the sum of
    such a pair is what rounding left of it, so it changes with every other order and with contraction.
    """
    tensor.normal_(generator=generator)
    if argument.role == "streams" and tensor.dim() == 3:
        pairs = tensor.shape[1] // 2
        tensor[:, 1 : 2 * pairs : 2] = -tensor[:, 0 : 2 * pairs : 2]
    elif argument.role in ("pre", "post", "comb"):
        tensor.abs_().add_(0.25)
        pairs = tensor.shape[1] // 2
        tensor[:, 1 : 2 * pairs : 2] = tensor[:, 0 : 2 * pairs : 2] * (1 + STEP)
    elif argument.role == "weight":
        tensor.mul_(0.125).add_(1)
    elif argument.role == "squares":
        tensor.abs_().add_(1)
    elif argument.role == "projection":
        tensor.mul_(0.02)
    return tensor
