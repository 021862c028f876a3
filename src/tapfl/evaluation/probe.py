"""Linear probes: how much a frozen encoder has learned, without training it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tapfl.data.batches import Rows, TaskData
from tapfl.model.backbone import masked_mean
from tapfl.model.encoder import ImageNormalizer
from tapfl.model.foundation import Foundation
from tapfl.tasks import Batch


@torch.no_grad()
def linear_probe(foundation: Foundation, train: TaskData, test: TaskData,
                 ridge: float = 1.0) -> float:
    """Return the test accuracy, in percent, of ridge regression on mean encoder tokens."""
    (modality,) = train.task.modalities
    x, y = _features(foundation, train, modality)
    mean, std = x.mean(0), x.std(0) + 1e-6
    x = (x - mean) / std
    onehot = F.one_hot(y, train.task.classes).double()
    eye = ridge * torch.eye(x.shape[1], dtype=x.dtype)
    weight = torch.linalg.solve(x.T @ x + eye, x.T @ (onehot - onehot.mean(0)))
    z, labels = _features(foundation, test, modality)
    guess = ((z - mean) / std @ weight + onehot.mean(0)).argmax(-1)
    return 100 * float((guess == labels).double().mean())


def _features(foundation: Foundation, data: TaskData, modality: str) -> tuple[Tensor, Tensor]:
    encoder, normalize = foundation.encoders[modality], ImageNormalizer()

    def features(_: Rows, batch: Batch) -> Tensor:
        if modality == "image":
            assert batch.image is not None
            return masked_mean(encoder(normalize(batch.image)), None).double()
        return masked_mean(encoder(batch.text, batch.text_mask), batch.text_mask).double()

    assert data.labels is not None
    return torch.cat(data.in_batches(256, features)), data.labels
