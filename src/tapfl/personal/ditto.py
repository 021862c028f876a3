"""Ditto (Li et al., 2021): a model of one's own that is pulled towards W."""

from __future__ import annotations

import functools

from tapfl.blocks import BlockState
from tapfl.data.federation import Client
from tapfl.federated.proximal import Proximal
from tapfl.federated.training import Step, minimise
from tapfl.personal.beside import Beside, Notes


class Ditto(Beside):
    """X minimises the tasks' losses plus lambda/2 ||X - W||^2, W as it was received."""

    @property
    def finish(self) -> int:
        """As the configuration says."""
        return self.context.config.ditto.finish

    def current(self, client: Client, round_: int) -> BlockState | None:
        """Return X as its last training has left it."""
        kept = self.load(client, before=round_ + 1)
        return kept[0] if kept else None

    @functools.cached_property
    def proximal(self) -> Proximal:
        """The loss of X; one for all clients and rounds, as captured steps know it."""
        return Proximal(self.method.network, self.context.config.ditto.pull)

    def step(self, received: BlockState, trained: BlockState, notes: Notes) -> Step:
        """Pull towards what was received; after the last round this is the final W."""
        self.proximal.towards(received)
        return minimise(self.proximal)
