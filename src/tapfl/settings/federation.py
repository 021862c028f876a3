"""The federation: who holds what, how updates are put together, noise, data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tapfl.settings.base import MANY, SAMPLES, SEED, WEIGHT, PathText, Section


class FederationConfig(Section):
    """Who holds what: the clients, their tasks and their data."""

    layout: str = "flava"
    """A shipped layout of clients; a ``file`` takes its place."""
    file: PathText | None = None
    """A federation file of your own; it is looked for beside the configuration, too."""
    groups: int = Field(3, ge=1, le=1_000_000)
    """How many times the layout's clients are there; each group gets its part of every data set."""
    clients: tuple[str, ...] | None = Field(None, min_length=1, max_length=MANY)
    """Only these clients take part, by id (``g0-7``; the name alone where there is one group). Each
    holds what it would hold if all took part.
    """
    holdout: float = Field(0.0, ge=0, lt=1)
    """The share of every client's data that is kept back for validation losses: of each task one
    sample at least.
    """
    dirichlet: float | None = Field(None, ge=1e-6, le=WEIGHT)
    """Skew of the labels of classification data among the clients that hold them: the smaller,
    the more skewed; without it they are drawn alike.
    """
    max_update_norm: Annotated[float, Field(gt=0, le=1e30)] | Annotated[
        str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})?x$")] | None = None
    """Refuse updates that go too far: a number is the largest Euclidean norm of what a client adds
    to a block; ``3x`` is three times the median norm of the block's last accepted updates.
    """
    max_samples: int = Field(SAMPLES, ge=1, le=SAMPLES)
    """Refuse updates that claim more samples than this."""


class AggregationConfig(Section):
    """How the server puts updates together, block by block."""

    rule: Literal["mean", "median", "trimmed"] = "mean"
    """``mean``, weighted by samples; or, so that few clients cannot lead the others astray, the
    coordinate-wise ``median`` or ``trimmed`` mean, in which all count alike. These two need three
    contributors to a block, and take the mean of fewer: ``federation.max_update_norm`` limits them.
    """
    trim: float = Field(0.3, gt=0, lt=0.5)
    """The share of values that ``trimmed`` omits at each end; one value at least."""


class PrivacyConfig(Section):
    """Differential privacy of each client's whole contribution.

    A run with noise cannot be repeated: noise comes from the system's secure generator.
    """

    mode: Literal["none", "local", "central"] = "none"
    """Who adds noise: each client before it sends (``local``: the server need not be trusted), or
    the server to the sum (``central``: less noise, but the server sees every update).
    """
    clip: float = Field(1.0, gt=0, le=WEIGHT)
    """The largest Euclidean norm of what a client adds to a block; more is scaled down."""
    noise: float = Field(1.0, ge=0, le=WEIGHT)
    """The noise's standard deviation, as a multiple of ``clip``."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """The delta at which epsilon is stated."""
    secret_cohort: bool = False
    """Draw cohorts from a secret generator, not from the seed, so that epsilon may count on nobody
    knowing who took part (``central`` only).
    """


class DataConfig(Section):
    """Where samples come from, and how many each data set has.

    Data of your own are named in a federation file instead; ``train`` and ``test`` then make each
    client's data smaller.
    """

    source: Literal["miniature", "hub", "synthetic"] = "miniature"
    """``miniature`` is the small world; ``hub`` are the paper's eight data sets; ``synthetic`` is
    noise in their sizes, to measure speed.
    """
    folder: PathText | None = None
    """A folder that mirrors the hub's data sets; TAPFL_DATA by default, else the hub itself."""
    train: int | None = Field(None, ge=1, le=SAMPLES)
    """Training samples of each data set: 1200 of the miniature world; elsewhere all, or at most
    this.
    """
    test: int | None = Field(None, ge=1, le=SAMPLES)
    """Test samples of each data set: 120 of the miniature world; elsewhere all, or at most this."""
    seed: int = Field(0, ge=0, le=SEED)
    """The seed by which samples are made (miniature, synthetic) or chosen (``train``, ``test``)."""
