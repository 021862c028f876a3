"""Gaussian noise from the operating system's secure generator.

A generator with a seed would do for statistics, but whoever guesses its state can take the noise
away again. So these numbers cannot be repeated, and a run with noise cannot be either.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Bytes = Callable[[int], bytes]
PIECE = 1 << 20  # numbers that are made at a time


def secure_normal(like: Tensor, source: Bytes = os.urandom) -> Tensor:
    """Return independent standard normal numbers in the form of a tensor."""
    count = like.numel()
    pieces = [_normal(min(PIECE, count - start), source) for start in range(0, count, PIECE)]
    values = np.concatenate(pieces) if pieces else np.empty(0)
    return torch.from_numpy(values).to(like.device, like.dtype).reshape(like.shape)


def _normal(count: int, source: Bytes) -> np.ndarray:
    """Box and Muller: two uniform numbers make two normal ones."""
    pairs = -(-count // 2)
    whole = np.frombuffer(source(16 * pairs), dtype=np.uint64) >> np.uint64(11)
    uniform = (whole.astype(np.float64) + 0.5) * 2.0**-53  # neither 0 nor 1
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
