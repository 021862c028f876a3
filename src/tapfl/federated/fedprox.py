"""FedProx (Li et al., 2020): local training that is pulled towards the W it began with."""

from __future__ import annotations

import functools
from typing import ClassVar

from tapfl.blocks import BlockState
from tapfl.data.federation import Client
from tapfl.federated.context import Losses
from tapfl.federated.method import FederatedMethod
from tapfl.federated.proximal import Proximal
from tapfl.federated.training import local_training, minimise


class FedProx(FederatedMethod):
    """FedAvg with mu/2 ||w - w_t||^2 in local training; post-training is plain."""

    name: ClassVar[str] = "fedprox"

    @functools.cached_property
    def proximal(self) -> Proximal:
        """The loss of local training; one for all rounds, as captured steps know it."""
        return Proximal(self.network, self.context.config.fedprox.mu)

    def train(self, client: Client, round_: int) -> Losses:
        """Train W's blocks, pulled towards their values as received."""
        train, owned = self.context.config.train, self.owned(client)
        self.proximal.towards(BlockState.extract(self.network.blocks, owned))
        return local_training(self.context, self.network, client, owned, steps=train.local_steps,
                              lr=train.rate(round_), round_=round_, role="federated",
                              step=minimise(self.proximal))
