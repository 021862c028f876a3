"""Models that train beside W: what Ditto and APFL have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tapfl.blocks import BlockState
from tapfl.data.federation import Client
from tapfl.events import PersonalLosses
from tapfl.federated.context import Losses
from tapfl.federated.training import Step, local_training
from tapfl.personal.personalizer import Personalizer

Notes = Mapping[str, Any]


class Beside(Personalizer):
    """Blocks of the client's own, trained in every round it takes part in, and after the last.

    They begin as W began; those of a client that never took part begin as the final W. A training
    that diverged is dropped.
    """

    @property
    def finish(self) -> int:
        """How many times P steps follow the last round."""
        raise NotImplementedError

    def step(self, received: BlockState, trained: BlockState, notes: Notes) -> Step:
        """Return how the blocks train beside a W, received and trained, given notes kept so far."""
        raise NotImplementedError

    def notes(self) -> Notes:
        """Return what is kept beside the blocks after a training."""
        return {}

    def model(self, own: BlockState, notes: Notes, w: BlockState) -> BlockState:
        """Return the model that predicts."""
        return own

    def after_training(self, client: Client, round_: int, received: BlockState,
                       trained: BlockState, losses: Losses) -> None:
        """Train one round."""
        train = self.context.config.train
        own, notes = self._kept(client, round_, self.first(client, received))
        own, notes, seen = self._train(client, own, self.step(received, trained, notes),
                                       train.local_steps, train.rate(round_), round_, "personal")
        if not self.diverged(client, round_, self.model(own, notes, trained), seen):
            self.save(client, round_, own, notes)
        self.report(PersonalLosses(self.name, round_, client.id,
                                   {t: x for t, x in seen.items() if math.isfinite(x)}))

    def after_federation(self, client: Client, final: BlockState) -> BlockState:
        """Train ``finish`` times P steps more, on the minibatches of post-training."""
        config, rounds = self.context.config, self.context.config.train.rounds
        w = final.subset(self.method.owned(client))
        own, notes = self._kept(client, rounds, w)
        end, after, seen = self._train(self.after(client), own, self.step(w, w, notes),
                                       self.finish * config.post.steps, config.post_lr, rounds,
                                       "post")
        model = self.model(end, after, w)
        return self.model(own, notes, w) if self.diverged(client, rounds, model, seen) else model

    def _kept(self, client: Client, before: int, start: BlockState) -> tuple[BlockState, Notes]:
        kept = self.load(client, before)
        if kept is None:
            return start, {}
        own = kept[0].to(self.context.device)
        if len(own) < len(start):  # the client has got a task since
            own = BlockState({**start, **own}, start.shapes)
        return own, kept[1]

    def _train(self, client: Client, own: BlockState, step: Step, steps: int, lr: float,
               round_: int, role: str) -> tuple[BlockState, Notes, Losses]:
        network = self.method.network
        own.load_into(network.blocks)
        losses = local_training(self.context, network, client, own, steps=steps, lr=lr,
                                round_=round_, role=role, step=step)
        return BlockState.extract(network.blocks, own), self.notes(), losses
