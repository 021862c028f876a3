"""What a client adds to each block, bounded and hidden in noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tapfl.blocks import BlockState
from tapfl.privacy.noise import secure_normal

Normal = Callable[[Tensor], Tensor]  # standard normal numbers in the form of a tensor
ROUNDING = 1 - 1e-6  # a value may round up when it becomes float32 again


@torch.no_grad()
def clipped(update: BlockState, received: BlockState, clip: float) -> BlockState:
    """Return what an update adds to each received block, with a Euclidean norm of at most clip.

    A block that is not finite adds nothing. All is computed in float64: in float32, a large
    update's scale loses the digits that keep the bound.
    """
    found = {}
    for name, value in update.items():
        added = value.double() - received[name].double()
        norm = added.norm()
        scale = torch.clamp(clip * ROUNDING / norm.clamp_min(1e-300), max=1.0)
        bounded = torch.where(norm.isfinite(), added * scale, 0.0)
        found[name] = bounded.to(value.dtype)
    return BlockState(found, {name: update.shapes[name] for name in found})


@torch.no_grad()
def private_update(update: BlockState, received: BlockState, clip: float, noise: float,
                   normal: Normal = secure_normal) -> BlockState:
    """Return an update as a client may send it: each block clipped, with noise of its own.

    The noise comes before anything is rounded to the received values, which a server chooses:
    beside large ones, small differences would grow.
    """
    added = clipped(update, received, clip)
    return BlockState({name: received[name] + (value + noise * clip * normal(value))
                       for name, value in added.items()}, added.shapes)
