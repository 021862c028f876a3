"""What methods work with: the configuration, the tasks, one frozen base, the clients' own state."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Member
from tapfl.events import Event, Message
from tapfl.federated.memo import Memo
from tapfl.federated.micro import MicroBatches
from tapfl.federated.stepper import Stepper
from tapfl.model.foundation import Foundation
from tapfl.model.network import Network
from tapfl.model.weights import seeded
from tapfl.tasks import Task

Losses = dict[str, float]
Kept = tuple[BlockState, dict[str, Any]]  # blocks, and notes that JSON can hold


class ClientStates(Protocol):
    """State that never leaves a client, kept between the rounds it takes part in."""

    def load(self, owner: str, client: str, as_of: int) -> Kept | None:
        """Return what ``owner`` had last saved for a client when a round was over, if anything."""

    def save(self, owner: str, client: str, round_: int, state: BlockState,
             notes: Mapping[str, Any]) -> None:
        """Keep blocks and notes, as of a round."""


class NoStates:
    """The state of clients that have none: of a model that only predicts."""

    def load(self, owner: str, client: str, as_of: int) -> Kept | None:
        """Return nothing."""
        return None

    def save(self, owner: str, client: str, round_: int, state: BlockState,
             notes: Mapping[str, Any]) -> None:
        """Refuse: it would be lost."""
        raise AssertionError("nothing can be kept here")


@dataclass
class Context:
    """What a method is made with. Every federated method has a network of its own on one base.

    ``memo``, ``states`` and ``events`` belong to the Worker that made the method; ``events`` is
    where methods report what happened in the turn under way.
    """

    config: Config
    tasks: Mapping[str, Task]
    foundation: Foundation
    device: str = "cpu"
    memo: Memo = field(default_factory=Memo)
    states: ClientStates = field(default_factory=NoStates)
    events: list[Event] = field(default_factory=list)

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return self.config.seed

    def stepper(self, network: Network) -> Stepper:
        """Return what takes a network's training steps; each network has one."""
        found: Stepper | None = network.__dict__.get("_stepper")
        if found is None:
            micro = MicroBatches(self.config.speed.micro_batch,
                                 lambda text: self.events.append(Message(text)))
            found = Stepper(network, self.config.train, self.uses_cuda_graphs, micro)
            network.__dict__["_stepper"] = found
        return found

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        speed = self.config.speed
        # Who asks for checkpointing is short of memory, and graphs take some of their own.
        return speed.graphs and not speed.checkpointing and self.device.startswith("cuda")

    def network(self) -> Network:
        """Return a new network of all tasks on the shared base."""
        return Network(self.foundation, self.tasks, self.config, self.seed).to(self.device)


@contextlib.contextmanager
def randomness(context: Context, client: Member, round_: int,
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
