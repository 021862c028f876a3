"""Training: rounds, what follows them, and how TAP takes W in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from tapfl.settings.base import MANY, WEIGHT, WIDE, Section

HOLDOUT = "holdout"  # a share that is chosen on held-out data
LOSSES = "losses"  # a share that follows from the losses of X and W, by their ratio
GAP = "gap"  # the same, by their difference


def warm_up(initial: float, final: float, rounds: int, round_: int) -> float:
    """Return a rate that rises linearly over the first rounds, then stays."""
    return final if round_ >= rounds else initial + (final - initial) * round_ / rounds


class TrainConfig(Section):
    """Federated training: rounds of a sampled cohort, local steps with AdamW each.

    The learning rate rises linearly from ``lr_initial`` to ``lr`` over ``warmup_rounds``.
    """

    rounds: int = Field(200, ge=0, le=MANY)
    """How many rounds there are (the paper's T)."""
    cohort: int = Field(2, ge=1, le=MANY)
    """How many clients take part in a round."""
    local_steps: int = Field(20, ge=1, le=MANY)
    """Steps that a client trains in a round (the paper's tau)."""
    batch_size: int = Field(128, ge=1, le=WIDE)
    """Samples of a minibatch."""
    lr_initial: float = Field(1e-4, gt=0, le=100)
    """The learning rate of the first round."""
    lr: float = Field(3e-4, gt=0, le=100)
    """The learning rate after the warm-up."""
    warmup_rounds: int = Field(20, ge=0, le=MANY)
    """Rounds over which the learning rate rises."""
    weight_decay: float = Field(0.01, ge=0, le=100)
    """AdamW's weight decay."""
    clip: float = Field(1.0, gt=0, le=WEIGHT)
    """Gradients are scaled down to this Euclidean norm at most."""

    def rate(self, round_: int) -> float:
        """Return eta_t."""
        return warm_up(self.lr_initial, self.lr, self.warmup_rounds, round_)


class PostConfig(Section):
    """Training after federation, on the client's own data."""

    steps: int = Field(50, ge=0, le=MANY)
    """How many steps (the paper's P)."""
    lr: float | None = Field(None, gt=0, le=100)
    """Their learning rate; ``train.lr_initial`` by default."""
    use_holdout: bool = False
    """Give the held-out samples back: personalizers train on them, too, after federation."""


class PerKind(Section):
    """One value for each kind of task."""

    image_classification: float = Field(ge=-WEIGHT, le=WEIGHT)
    """For tasks that put pictures into classes."""
    image_generation: float = Field(ge=-WEIGHT, le=WEIGHT)
    """For tasks that reconstruct pictures."""
    text_classification: float = Field(ge=-WEIGHT, le=WEIGHT)
    """For tasks that put texts into classes."""
    text_generation: float = Field(ge=-WEIGHT, le=WEIGHT)
    """For tasks that write text."""

    def of(self, kind: str) -> float:
        """Return the value of a kind."""
        return float(getattr(self, kind))


Share = Annotated[float, Field(ge=0, le=1)]


class TapConfig(Section):
    """TAP: when a client's X takes W's blocks in, how much of them, and how X ends.

    In every round ``criterion`` says when and ``share`` how much. After federation X first moves
    ``final_share`` of the way to the final W, then trains as ``end`` says.
    """

    margins: PerKind = PerKind(image_classification=0.01, image_generation=0.005,
                               text_classification=0.005, text_generation=0.01)
    """By how much W's loss must be smaller than X's (the paper's m), by kind of task. A kind that
    is not named keeps its default.
    """
    distill_weights: PerKind = PerKind(image_classification=2e-3, image_generation=2e-3,
                                       text_classification=2e-3, text_generation=1.0)
    """Weights of the distillation loss (the paper's beta), by kind of task, likewise."""
    temperature: float = Field(1.0, ge=1e-3, le=1000)
    """The temperature of distillation."""
    criterion: Literal["training", "validation", "paired", "gradient", "always"] = "training"
    """When X takes W in: W's ``training`` or ``validation`` (held-out) loss is smaller by the
    margin, a ``paired`` test on held-out samples says so, ``gradient`` (the way from X to W leads
    downhill on the client's data), or ``always``.
    """
    confidence: float = Field(0.95, ge=0.5, lt=1)
    """The confidence of the ``paired`` test."""
    share: Annotated[float, Field(gt=0, le=1)] | Literal["losses", "gap", "holdout"] = 1.0
    """How much X takes in: 1 is all of it; less moves X that part of the way to W; ``losses`` and
    ``gap`` follow the losses of the two (``sharpness``); ``holdout`` chooses on held-out data.
    """
    sharpness: float = Field(1.0, gt=0, le=100)
    """The k in shares that follow the losses x of X and w of W: ``losses`` is x^k / (x^k + w^k),
    ``gap`` is 1 / (1 + e^(k (w - x))). Both are a half where x and w are equal; the higher k, the
    less X takes from a W that is worse.
    """
    unit: Literal["task", "block"] = "task"
    """By ``task``, a block goes as far as one of its tasks asks for; by ``block``, it is decided
    for itself.
    """
    final_share: Share | Literal["losses", "gap", "holdout"] = 0.0
    """How far X moves to the final W after federation. ``losses`` and ``gap`` take the losses of
    the client's last round; ``holdout`` chooses on held-out data.
    """
    end: Literal["distill", "plain", "plain2", "mix"] = "distill"
    """What follows: ``distill`` (the paper's stage 2), P steps without a teacher (``plain``), 2P
    such steps (``plain2``), or a ``mix`` of X and of W after P steps, chosen on held-out data,
    which trains P steps more.
    """

    @field_validator("margins", "distill_weights", mode="before")
    @classmethod
    def _over_the_defaults(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        return cls.model_fields[str(info.field_name)].default.model_dump() | value

    @property
    def reads_holdout(self) -> str | None:
        """The setting that needs held-out data, if one does."""
        for key, values in (("criterion", ("validation", "paired")), ("share", (HOLDOUT,)),
                            ("final_share", (HOLDOUT,)), ("end", ("mix",))):
            if getattr(self, key) in values:
                return f"tap.{key}: {getattr(self, key)}"
        return None
