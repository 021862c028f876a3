"""The server: samples cohorts, hands out blocks, checks and averages what comes back."""

from __future__ import annotations

import random
import secrets
import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from tapfl.blocks import BlockState
from tapfl.config import SAMPLES
from tapfl.federated.aggregation import Aggregation, Mean

WINDOW = 20  # accepted updates of a block whose norms the bound remembers
ENOUGH = 3  # of these, before a median says anything
SHARE = 0.25  # of the largest number: a difference of two such values is finite


class Server:
    """Holds W.

    ``aggregation`` makes what puts a round's updates together. A ``secret`` cohort follows from
    nothing that anybody knows.
    """

    def __init__(self, blocks: BlockState, clients: int, cohort: int, seed: int, *,
                 max_update_norm: float | str | None = None,
                 max_samples: int = SAMPLES, aggregation: Callable[[], Aggregation] = Mean,
                 secret: bool = False) -> None:
        self.blocks, self._new_aggregation, self._secret = blocks, aggregation, secret
        self.clients, self.cohort_size, self.seed = clients, min(cohort, clients), seed
        self.bound, self.max_samples = NormBound(max_update_norm), max_samples
        self._open()

    def _open(self) -> None:
        self._updates = self._new_aggregation()
        self._asked = Counter[str]()
        self.contributors: dict[str, list[str]] = {}
        self.bytes_up = self.bytes_down = 0

    def cohort(self, round_: int, absent: Collection[int] = ()) -> list[int]:
        """Return the round's clients, in order.

        They depend on the seed, the round and who is absent alone, unless they are secret.
        """
        drawn = (secrets.SystemRandom() if self._secret
                 else random.Random(f"{self.seed}/cohort/{round_}"))
        there = [i for i in range(self.clients) if i not in absent] if absent else range(
            self.clients)
        return sorted(drawn.sample(there, min(self.cohort_size, len(there))))

    def send(self, names: Sequence[str]) -> BlockState:
        """Return the blocks that a client owns."""
        state = self.blocks.subset(names)
        self._asked.update(names)
        self.bytes_down += state.nbytes
        return state

    def receive(self, client: str, owned: Sequence[str], update: BlockState,
                samples: int) -> str | None:
        """Count a client's update in; return why it was refused, if it was.

        An update counts whole or not at all.
        """
        self.bytes_up += update.nbytes
        fault = self._fault(owned, update, samples)
        if fault is None:
            self._updates.add(update, samples, self.blocks)
            for name in update:
                self.contributors.setdefault(name, []).append(client)
        return fault

    def aggregate(self) -> Mapping[str, list[str]]:
        """Close the round: replace the blocks that change; return who contributed."""
        new = self._updates.result(self.blocks, self._asked)
        self.blocks = BlockState({**self.blocks, **new}, {**self.blocks.shapes, **new.shapes})
        contributors = self.contributors
        self._open()
        return contributors

    def _fault(self, owned: Sequence[str], update: BlockState, samples: int) -> str | None:
        if isinstance(samples, bool) or not isinstance(samples, int) or not (
                1 <= samples <= self.max_samples):
            return (f"a sample count of {samples!r}, expected a whole number from 1 to "
                    f"{self.max_samples}")
        if not len(update):
            return "no blocks"
        for name in update:
            if name in self.blocks and name not in owned:
                return f"block '{name}' is not the client's"
        return (update.misfit(self.blocks) or update.not_finite() or _too_large(update)
                or self.bound.refuses(update, self.blocks))


def _too_large(update: BlockState) -> str | None:
    """Say which block has values that are finite, but whose mean with others' might not be."""
    largest = torch.stack([value.abs().max().double() / torch.finfo(value.dtype).max
                           for value in update.values()]).tolist()
    for name, share in zip(update, largest, strict=True):
        if share > SHARE:
            return f"block '{name}' holds values that are too large to be averaged"
    return None


class NormBound:
    """How far an update may go: per block, the Euclidean norm of update minus what was sent.

    ``limit`` is a number, or a multiple such as ``3x`` of the median norm of the last accepted
    updates of the block; until there are a few of these, nothing is refused.
    """

    def __init__(self, limit: float | str | None) -> None:
        self.limit = limit
        self._accepted: dict[str, deque[float]] = {}

    def refuses(self, update: BlockState, sent: BlockState) -> str | None:
        """Say which block goes too far, if one does; else remember the norms."""
        if self.limit is None:
            return None
        norms = torch.stack([(value.double() - sent[name].double()).norm()
                             for name, value in update.items()]).tolist()
        for name, norm in zip(update, norms, strict=True):
            most = self._most(name)
            if norm > most:
                return f"block '{name}' moved by {norm:.3g}, expected at most {most:.3g}"
        for name, norm in zip(update, norms, strict=True):
            self._accepted.setdefault(name, deque(maxlen=WINDOW)).append(norm)
        return None

    def _most(self, name: str) -> float:
        if not isinstance(self.limit, str):
            return float(self.limit or 0)
        # A block that a minibatch does not touch may stay where it is: that says nothing.
        known = [norm for norm in self._accepted.get(name, ()) if norm > 0]
        if len(known) < ENOUGH:
            return float("inf")
        return float(self.limit.removesuffix("x")) * statistics.median(known)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold, as JSON."""
        return {name: list(norms) for name, norms in self._accepted.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self._accepted = {name: deque(norms, maxlen=WINDOW) for name, norms in state.items()}
