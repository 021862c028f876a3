"""FedRep (Collins et al., 2021): the head trains first, then the body it stands on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from tapfl.config import Config, Section
from tapfl.data.federation import Client
from tapfl.errors import TapflError
from tapfl.federated.context import Losses
from tapfl.federated.fedper import FedPer
from tapfl.federated.training import local_training, minimise, task_objective


class FedRep(FedPer):
    """FedPer's blocks; in a round the decoders train with the rest fixed, then the rest alone."""

    name: ClassVar[str] = "fedrep"
    shares_final_model: ClassVar[bool] = False  # each client fits its own head

    @classmethod
    def read_settings(cls, config: Config) -> Section:
        """Refuse, before anything is built, rounds that are too short for two parts."""
        if config.train.local_steps < 2:
            raise TapflError("train.local_steps: fedrep needs at least 2, one for the head and "
                             f"one for the body; got {config.train.local_steps}")
        return super().read_settings(config)

    @property
    def head_steps(self) -> int:
        """How many of a round's steps train the head; at least one is left for the body."""
        steps = self.context.config.train.local_steps
        return min(max(1, round(self.context.config.fedrep.head_share * steps)), steps - 1)

    def train(self, client: Client, round_: int) -> Losses:
        """Train the head, then the body; return the losses of the second part where it has any."""
        train = self.context.config.train
        lr, body_steps = train.rate(round_), train.local_steps - self.head_steps
        head = self._fit(client, self.private(client), "head", self.head_steps, lr, round_)
        body = self._fit(client, self.exchanged(client), "body", body_steps, lr, round_)
        return head | body

    def adapt(self, client: Client) -> None:
        """Fit the client's head to the final body."""
        config = self.context.config
        self._fit(client, self.private(client), "adapt", self.head_steps, config.train.lr_initial,
                  config.train.rounds)

    def _fit(self, client: Client, blocks: Iterable[str], role: str, steps: int, lr: float,
             round_: int) -> Losses:
        return local_training(self.context, self.network, client, blocks, steps=steps, lr=lr,
                              round_=round_, role=role, step=minimise(task_objective))
