"""Faults of the public TAP code, to be switched on one by one: what did they do to its tables?

Nobody should use these methods for anything else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from tapfl.blocks import STANDARD_BACKBONE
from tapfl.data.federation import Member
from tapfl.federated.method import FedAvg
from tapfl.personal.tap import Distillation, Tap
from tapfl.tasks import Batch, at_least_fp32, mean_of_real

BACKBONE = ("mote/", "mome/", STANDARD_BACKBONE)
MICRO = 4  # minibatches of 128 came in micro-batches of 32, and P counted these


class UnsentBackbone(FedAvg):
    """The averaged backbone never reaches the clients: each goes on with its own."""

    name: ClassVar[str] = "fedavg-unsent-backbone"
    shares_final_model: ClassVar[bool] = False

    def exchanged(self, client: Member) -> tuple[str, ...]:
        """Return encoders and decoders."""
        return tuple(b for b in self.owned(client) if not b.startswith(BACKBONE))

    def private(self, client: Member) -> tuple[str, ...]:
        """Return the backbone's blocks."""
        return tuple(b for b in self.owned(client) if b.startswith(BACKBONE))


class SummedDivergence(Tap):
    """Stage 2 sums the KL over the tokens of a text and the rows of an image, padding included."""

    @functools.cached_property
    def _distillation(self) -> Distillation:
        return _Summed(self.method.teacher, self.context)


class _Summed(Distillation):
    counted: ClassVar[bool] = False

    def divergence(self, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        """Return the KL of a sample, summed over all its distributions; the mean over samples."""
        p, q = (F.log_softmax(at_least_fp32(x), dim=-1) for x in (teacher, student))
        kl = F.kl_div(q, p, log_target=True, reduction="none")
        return mean_of_real(kl.flatten(1).sum(dim=1), batch.real, batch.whole)


_UNSENT = f"{__name__}:UnsentBackbone"
_SUMMED = f"{__name__}:SummedDivergence"

Variants = Mapping[str, Mapping[str, Any]]


def fault_variants(post_steps: int) -> dict[str, Variants]:
    """Return each fault's variants by its title: of FedAvg, of post-training and of TAP.

    A fault that leaves a method as it is has no variant of it. ``post_steps`` is P.
    """
    few = {"post": {"steps": max(1, post_steps // MICRO)}}
    return {
        "The averaged backbone is never sent": {
            "unsent-fedavg": {"of": _UNSENT}, "unsent-post": {"of": f"{_UNSENT}+post"},
            "unsent-tap": {"of": f"{_UNSENT}+tap"}},
        "P counts micro-batches": {"micro-post": {"of": "fedavg+post", **few},
                                   "micro-tap": {"of": "tap", **few}},
        "The KL is summed, not averaged": {"summed-tap": {"of": f"fedavg+{_SUMMED}"}},
        "All three": {"all-fedavg": {"of": _UNSENT},
                      "all-post": {"of": f"{_UNSENT}+post", **few},
                      "all-tap": {"of": f"{_UNSENT}+{_SUMMED}", **few}}}
