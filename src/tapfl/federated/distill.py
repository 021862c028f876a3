"""The distillation loss between a teacher's and a student's outputs (paper eq. kd-eq)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tapfl.tasks import Batch, at_least_fp32, mean_of_real


def divergence(teacher: Tensor, student: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Return temperature^2 KL(teacher || student), the mean over distributions.

    A distribution is a softmax over the last axis: the classes of a sample, the vocabulary at a
    (real) token, a row of an image.
    """
    p = F.log_softmax(at_least_fp32(teacher) / temperature, dim=-1)
    q = F.log_softmax(at_least_fp32(student) / temperature, dim=-1)
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(dim=-1)
    real = batch.real_targets()
    if real is not None and batch.places is not None and kl.shape == batch.places.shape:
        real = real.flatten()[batch.places]
    if real is None or kl.shape != real.shape:
        return temperature**2 * mean_of_real(kl, batch.real, batch.whole)
    count = real.sum() if batch.whole is None else batch.whole[1]
    return temperature**2 * (kl * real).sum() / count
