"""How the updates of a round become the server's blocks: a mean, or something that withstands more.

A robust rule looks at each coordinate by itself, so that no single client decides where it goes.
It needs three contributors to a block; with fewer it takes the mean, and what limits a client there
is ``federation.max_update_norm``. A private mean bounds what a client can add to each block, and
hides it in noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from tapfl.blocks import BlockAverage, BlockState
from tapfl.config import Config
from tapfl.privacy.mechanism import Normal, clipped
from tapfl.privacy.noise import secure_normal

ENOUGH = 3  # contributors that a robust rule needs


class Aggregation(Protocol):
    """The updates of one round."""

    def add(self, update: BlockState, samples: int, before: BlockState) -> None:
        """Count an update in; ``before`` are the server's blocks."""

    def result(self, before: BlockState, asked: Mapping[str, int]) -> BlockState:
        """Return the new value of every block that changes.

        ``asked`` is how many clients of the cohort each block was sent to.
        """


class Mean:
    """FedAvg: the mean over a block's contributors, weighted by their samples."""

    def __init__(self) -> None:
        self._mean = BlockAverage()

    def add(self, update: BlockState, samples: int, before: BlockState) -> None:
        """Add to a running mean: memory does not grow with the cohort."""
        self._mean.add(update, samples)

    def result(self, before: BlockState, asked: Mapping[str, int]) -> BlockState:
        """Return the mean."""
        return self._mean.result()


class Robust:
    """Coordinate by coordinate, the mean of the middle values. All updates of a round are held.

    ``cut`` says how many values go at each end, of how many. Clients count alike: whoever may claim
    a number of samples could outvote the others.
    """

    def __init__(self, cut: Callable[[int], int]) -> None:
        self._cut = cut
        self._mean = BlockAverage()
        self._found: dict[str, list[Tensor]] = {}

    def add(self, update: BlockState, samples: int, before: BlockState) -> None:
        """Keep an update."""
        self._mean.add(update, samples)
        for name, value in update.items():
            self._found.setdefault(name, []).append(value)

    @torch.no_grad()
    def result(self, before: BlockState, asked: Mapping[str, int]) -> BlockState:
        """Return the middle of every block with enough contributors, the mean of the others."""
        mean = self._mean.result()
        middle = {name: _middle(values, self._cut(len(values)))
                  for name, values in self._found.items() if len(values) >= ENOUGH}
        return BlockState({**mean, **middle}, mean.shapes)


def _middle(values: list[Tensor], cut: int) -> Tensor:
    ordered = torch.stack(values).sort(dim=0).values
    return ordered[cut:len(values) - cut].mean(dim=0)


def median_cut(count: int) -> int:
    """Return how many values at each end are not the median."""
    return (count - 1) // 2


def trimmed_cut(share: float) -> Callable[[int], int]:
    """Return how a trimmed mean cuts: a share of the values at each end, one at least."""
    return lambda count: min(max(1, int(share * count)), median_cut(count))


class PrivateMean:
    """Clients count alike, each adds to a block at most ``clip``, and the sum gets noise.

    It is divided by the clients that the block was sent to, whatever they answered. Where the
    cohort is secret, ``expected`` are the clients that a block is sent to on average: that number
    divides, and every block gets noise in every round, so that neither tells who took part.
    """

    def __init__(self, clip: float, noise: float, expected: Mapping[str, float] | None = None,
                 normal: Normal = secure_normal) -> None:
        self.clip, self.noise, self.expected, self._normal = clip, noise, expected, normal
        self._sums: dict[str, Tensor] = {}

    def add(self, update: BlockState, samples: int, before: BlockState) -> None:
        """Add what is left of an update within the bound.

        The sum is in float64: with many clients, what float32 rounds off grows with each of them.
        """
        for name, value in clipped(update, before, self.clip).items():
            self._sums[name] = self._sums.get(name, 0) + value.double()

    @torch.no_grad()
    def result(self, before: BlockState, asked: Mapping[str, int]) -> BlockState:
        """Return the private mean of every block that was sent."""
        counts = asked if self.expected is None else self.expected
        found = {}
        for name, count in counts.items():
            total = self._sums.get(name, torch.zeros_like(before[name], dtype=torch.float64))
            noise = self.noise * self.clip * self._normal(total)
            found[name] = before[name] + ((total + noise) / count).to(before[name].dtype)
        return BlockState(found, {name: before.shapes[name] for name in found})


def find_aggregation(config: Config, expected: Mapping[str, float]) -> Callable[[], Aggregation]:
    """Return what makes each round's aggregation; ``expected`` is for a secret cohort."""
    privacy, aggregation = config.privacy, config.aggregation
    if privacy.mode == "central":
        counts = expected if privacy.secret_cohort else None
        return lambda: PrivateMean(privacy.clip, privacy.noise, counts)
    if aggregation.rule == "mean":
        return Mean
    cut = median_cut if aggregation.rule == "median" else trimmed_cut(aggregation.trim)
    return lambda: Robust(cut)
