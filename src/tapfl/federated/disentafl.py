"""DisentAFL (Chen and Zhang, 2024): different modality-task pairs are pushed to be orthogonal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tapfl.data.batches import TaskBatch
from tapfl.federated.method import FederatedMethod
from tapfl.federated.stepper import Objective, graph_safe
from tapfl.federated.training import weighted
from tapfl.model.network import Network
from tapfl.tasks import at_least_fp32, mean_of_real


class DisentAFL(FederatedMethod):
    """FedAvg's blocks and averaging, with one more loss in training and post-training."""

    name: ClassVar[str] = "disentafl"
    splits_batches: ClassVar[bool] = False  # its loss compares samples with each other

    @property
    def objective(self) -> Objective:
        """The tasks' losses and the disentanglement of their latents."""
        return self._objective

    @graph_safe
    def _objective(self, network: Network,
                   parts: Sequence[TaskBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        losses, latents, real = {}, [], []
        for part in parts:
            outputs = network(part.task, part.batch, latents=True, counted=True)
            losses[part.task] = network.loss(part.task, outputs, part.batch)
            latents += list(outputs.latents.values())
            real += [part.batch.real] * len(outputs.latents)
        extra = disentanglement(latents, real)
        return weighted(losses, parts) + self.context.config.disentafl.weight * extra, losses


def disentanglement(groups: Sequence[Tensor], real: Sequence[Tensor | None] = ()) -> Tensor:
    """Return the mean squared cosine between samples of different (modality, task) groups.

    Averaged over the pairs of groups; zero when there is one group only. ``real`` says which of
    each group's samples count.
    """
    unit = [F.normalize(at_least_fp32(group), dim=-1) for group in groups]
    counted = list(zip(unit, real or [None] * len(unit), strict=True))
    pairs = [_squared_cosine(*a, *b) for a, b in combinations(counted, 2)]
    return torch.stack(pairs).mean() if pairs else groups[0].new_zeros(())


def _squared_cosine(a: Tensor, a_real: Tensor | None, b: Tensor, b_real: Tensor | None) -> Tensor:
    squared = (a @ b.T).square()
    return mean_of_real(squared if b_real is None else squared * (b_real / b_real.sum())
                        * b.shape[0], a_real)
