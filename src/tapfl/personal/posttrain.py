"""Post-training: the final W trains on, on the client's own data."""

from __future__ import annotations

from typing import ClassVar

from tapfl.blocks import BlockState
from tapfl.data.federation import Client
from tapfl.personal.personalizer import Personalizer


class PostTrain(Personalizer):
    """P steps more."""

    times: ClassVar[int] = 1

    def after_federation(self, client: Client, final: BlockState) -> BlockState:
        """Return W after P local steps; W itself if these went astray."""
        config = self.context.config
        trained = self.post_train(self.after(client), final, self.times * config.post.steps)
        return final if self.diverged(client, config.train.rounds, trained, {}) else trained


class PostTrainTwice(PostTrain):
    """2P steps more: as many as TAP's teacher and student take together."""

    times: ClassVar[int] = 2
