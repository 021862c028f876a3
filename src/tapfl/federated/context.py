"""What methods work with: the experiment, its clients, one network, and the clients' own state."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Client, Federation
from tapfl.federated.stepper import Stepper
from tapfl.model.foundation import Foundation
from tapfl.model.network import Network
from tapfl.model.weights import seeded

Losses = dict[str, float]
Emit = Callable[..., None]


class ClientStates(Protocol):
    """State that never leaves a client, kept between the rounds it takes part in."""

    def load(self, owner: str, client: str) -> tuple[BlockState, dict[str, Any]] | None:
        """Return what ``owner`` last saved for a client, if anything."""

    def save(self, owner: str, client: str, round_: int, state: BlockState,
             notes: Mapping[str, Any]) -> None:
        """Keep blocks and notes, as of a round."""


@dataclass
class Context:
    """An experiment under way. Every federated method has a network of its own on one base.

    ``states`` and ``emit`` belong to the method that is running; the engine sets them.
    """

    config: Config
    federation: Federation
    foundation: Foundation
    device: str = "cpu"
    states: ClientStates = field(init=False)
    emit: Emit = field(init=False)

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return self.config.seed

    def stepper(self, network: Network) -> Stepper:
        """Return what takes a network's training steps; each network has one."""
        found: Stepper | None = network.__dict__.get("_stepper")
        if found is None:
            found = Stepper(network, self.config.train, self.uses_cuda_graphs)
            network.__dict__["_stepper"] = found
        return found

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether steps are recorded as CUDA graphs."""
        speed = self.config.speed
        # Who asks for checkpointing is short of memory, and recordings take some of their own.
        return speed.graphs and not speed.checkpointing and self.device.startswith("cuda")

    def network(self) -> Network:
        """Return a new network of all tasks on the shared base."""
        return Network(self.foundation, self.federation.tasks, self.config,
                       self.seed).to(self.device)


@contextlib.contextmanager
def randomness(context: Context, client: Client, round_: int,
               role: str) -> Iterator[np.random.Generator]:
    """Make all randomness in a training depend on (seed, client, round, role) alone.

    Yields the generator that draws minibatches; dropout follows from the same seed.
    """
    words = f"{context.seed}/{client.id}/{round_}/{role}"
    number = int.from_bytes(hashlib.sha256(words.encode()).digest()[:6], "big")
    with seeded(number):
        if context.device.startswith("cuda"):
            torch.cuda.manual_seed(number)
        yield np.random.default_rng(number)
