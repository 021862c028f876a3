"""The server: samples cohorts, hands out blocks, checks and averages what comes back."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from tapfl.blocks import BlockAverage, BlockState

MAX_SAMPLES = 10**9  # nobody's data set is larger; such a weight would silence all others


class Server:
    """Holds W. Memory does not grow with the cohort: updates go into one running mean."""

    def __init__(self, blocks: BlockState, clients: int, cohort: int, seed: int) -> None:
        self.blocks = blocks
        self.clients, self.cohort_size, self.seed = clients, min(cohort, clients), seed
        self._open()

    def _open(self) -> None:
        self._mean = BlockAverage()
        self.contributors: dict[str, list[str]] = {}
        self.bytes_up = self.bytes_down = 0

    def cohort(self, round_: int) -> list[int]:
        """Return the round's clients, in order; it depends on the seed and the round alone."""
        drawn = random.Random(f"{self.seed}/cohort/{round_}")
        return sorted(drawn.sample(range(self.clients), self.cohort_size))

    def send(self, names: Sequence[str]) -> BlockState:
        """Return the blocks that a client owns."""
        state = self.blocks.subset(names)
        self.bytes_down += state.nbytes
        return state

    def receive(self, client: str, owned: Sequence[str], update: BlockState,
                samples: int) -> str | None:
        """Count a client's update in, weighted by its data; return why it was refused, if it was.

        An update counts whole or not at all.
        """
        self.bytes_up += update.nbytes
        fault = self._fault(owned, update, samples)
        if fault is None:
            self._mean.add(update, samples)
            for name in update:
                self.contributors.setdefault(name, []).append(client)
        return fault

    def aggregate(self) -> Mapping[str, list[str]]:
        """Close the round: replace every block that somebody sent; tell who contributed."""
        mean = self._mean.result()
        self.blocks = BlockState({**self.blocks, **mean}, {**self.blocks.shapes, **mean.shapes})
        contributors = self.contributors
        self._open()
        return contributors

    def _fault(self, owned: Sequence[str], update: BlockState, samples: int) -> str | None:
        if isinstance(samples, bool) or not isinstance(samples, int) or not (
                1 <= samples <= MAX_SAMPLES):
            return f"a sample count of {samples!r}, expected a whole number from 1 to 1e9"
        if not len(update):
            return "no blocks"
        for name, value in update.items():
            if name not in self.blocks:
                return f"unknown block '{name}'"
            if name not in owned:
                return f"block '{name}' is not the client's"
            if update.shapes[name] != self.blocks.shapes[name]:
                return f"block '{name}' has other shapes than the server's"
            if value.shape != self.blocks[name].shape or value.dtype != self.blocks[name].dtype:
                return (f"block '{name}' is {value.dtype} {tuple(value.shape)}, expected "
                        f"{self.blocks[name].dtype} {tuple(self.blocks[name].shape)}")
        return not_finite(update)


def not_finite(state: BlockState) -> str | None:
    """Say which block holds values that are not finite, if one does."""
    if not len(state):
        return None
    # One synchronisation with the device for the whole state.
    finite = torch.stack([value.isfinite().all() for value in state.values()])
    if bool(finite.all()):
        return None
    bad = next(n for n, ok in zip(state, finite.tolist(), strict=True) if not ok)
    return f"block '{bad}' holds values that are not finite"
