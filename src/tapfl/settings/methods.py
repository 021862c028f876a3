"""The other methods: one section each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tapfl.settings.base import MANY, WEIGHT, Section


class PerFedAvgConfig(Section):
    """Per-FedAvg; its inner rate warms up as the outer one does."""

    variant: Literal["fo", "hf"] = "fo"
    """First-order (``fo``) or Hessian-free (``hf``)."""
    inner_lr_initial: float = Field(1e-4, gt=0, le=100)
    """The learning rate of the inner step in the first round."""
    inner_lr: float = Field(3e-4, gt=0, le=100)
    """The learning rate of the inner step after the warm-up."""
    delta: float = Field(1e-3, gt=0, le=100)
    """The step of the finite difference that replaces the Hessian (``hf``). In bf16 rounding
    hides the difference: use ``precision: fp32``.
    """
    adapt_steps: int = Field(1, ge=0, le=MANY)
    """Inner steps on a client's training data before its final model is evaluated."""


class DisentAFLConfig(Section):
    """DisentAFL."""

    weight: float = Field(0.5, ge=0, le=WEIGHT)
    """The weight of its disentanglement loss."""


class FedDATConfig(Section):
    """FedDAT."""

    bottleneck: int = Field(32, ge=1, le=4096)
    """The width of the adapters' bottleneck."""
    kl_weight: float = Field(2e-3, ge=0, le=WEIGHT)
    """The weight of mutual distillation."""


class FedProxConfig(Section):
    """FedProx."""

    mu: float = Field(0.01, ge=0, le=WEIGHT)
    """How strongly local training is pulled towards the W that was received."""


class FedRepConfig(Section):
    """FedRep."""

    head_share: float = Field(0.5, gt=0, lt=1)
    """The share of a round's local steps that train the decoders; the others train the body."""


class FedALAConfig(Section):
    """FedALA: steps that learn how much of W to take in."""

    lr: float = Field(1.0, gt=0, le=WEIGHT)
    """The rate of these steps."""
    steps: int = Field(5, ge=0, le=MANY)
    """How many there are in a later round of the client."""
    first_steps: int = Field(20, ge=0, le=MANY)
    """How many there are the first time."""


class DittoConfig(Section):
    """Ditto: a personal model that trains beside W."""

    pull: float = Field(0.1, ge=0, le=WEIGHT)
    """Its lambda: how strongly X is pulled towards the W that was received."""
    finish: int = Field(2, ge=0, le=1000)
    """After federation X trains this many times P steps more; with 2, as many as ``post2`` takes.
    """


class ApflConfig(Section):
    """APFL: a mixture of W and a model of the client's own."""

    alpha: float = Field(0.5, ge=0, le=1)
    """The share of the client's own model at first."""
    rate: float = Field(0.01, ge=0, le=WEIGHT)
    """The learning rate of that share."""
    finish: int = Field(2, ge=0, le=1000)
    """After federation it trains this many times P steps more; with 2, as many as ``post2`` takes.
    """
