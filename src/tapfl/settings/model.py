"""The model: the frozen base, the backbone, LoRA, decoders."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tapfl.errors import TapflError, shown
from tapfl.settings.base import PathText, Section


class FoundationConfig(Section):
    """The frozen base: which pre-trained model everything stands on."""

    name: str = "mini"
    """Which base: ``flava``, ``vilt``, ``pair`` (an image and a text encoder) or ``mini``."""
    weights: PathText | dict[str, PathText] = "random"
    """A hub id, a local folder with safetensors, ``pip:PACKAGE`` or ``random``; for ``pair`` a
    mapping ``{image: ..., text: ...}`` of such; for ``mini`` also ``shipped``.
    """
    architecture: dict[str, Any] | None = None
    """Fields of the transformers library's configuration, for random weights; for ``pair``, by
    modality.
    """
    image_size: int | None = Field(None, ge=8, le=2048)
    """Images are scaled to this many pixels a side; by default the encoder's own size."""

    @field_validator("weights", mode="before")
    @classmethod
    def _a_name_or_two(cls, weights: Any) -> Any:
        parts = list(weights.values()) if isinstance(weights, dict) else [weights]
        if all(isinstance(part, str) for part in parts):
            return weights
        # YAML reads {image:a,text:b} as two keys without values.
        spaces = ", with a space after each colon" if None in parts else ""
        raise ValueError("expected a hub id, a folder or 'random', or for a pair "
                         f"{{image: a, text: b}}{spaces}; got {shown(weights)}")

    @model_validator(mode="after")
    def _one_or_two(self) -> FoundationConfig:
        if isinstance(self.weights, dict):
            if self.name != "pair":
                raise ValueError("a mapping of weights is for the foundation 'pair'")
            if set(self.weights) != {"image", "text"}:
                raise ValueError("weights of a pair: expected the two keys image and text, "
                                 f"got {sorted(self.weights)}")
        if self.architecture and (self.name == "mini" or self.weights != "random"):
            raise ValueError("an architecture is for random weights; other weights, and the mini "
                             "foundation, bring their own")
        if self.name == "pair":
            for key in self.architecture or {}:
                if key not in ("image", "text"):
                    raise ValueError(f"architecture of a pair: unknown key '{key}', "
                                     "expected image and text")
        return self

    @property
    def single_weights(self) -> str:
        """The weights of a foundation that is one model."""
        assert isinstance(self.weights, str)
        return self.weights

    def part_weights(self, modality: str) -> str:
        """Return the weights of one encoder of a pair."""
        if isinstance(self.weights, str):
            if self.weights != "random":
                raise TapflError("foundation.weights: a pair takes {image: ..., text: ...} or "
                                 f"'random', got '{self.weights}'")
            return self.weights
        return self.weights[modality]

    def part_architecture(self, modality: str) -> dict[str, Any]:
        """Return the configuration fields of one encoder of a pair."""
        fields = (self.architecture or {}).get(modality, {})
        if not isinstance(fields, dict):
            raise TapflError(f"foundation.architecture.{modality}: expected fields, got {fields!r}")
        return fields

    def weights_of(self, modality: str) -> str:
        """Return where the weights of a modality's encoder come from."""
        return self.part_weights(modality) if self.name == "pair" else self.single_weights


class BackboneConfig(Section):
    """The transformer between encoders and decoders."""

    kind: Literal["routed", "standard"] = "routed"
    """``routed`` by modality and kind of task (MoTE and MoME), or ``standard``: no routing."""
    layers_per_stage: int = Field(1, ge=1, le=1000)
    """Layers in each of the two stages."""


class LoraConfig(Section):
    """LoRA, the small trainable matrices on frozen layers."""

    encoder_rank: int = Field(8, ge=1, le=4096)
    """Rank on the encoders' attention."""
    attention_rank: int = Field(16, ge=1, le=4096)
    """Rank on the backbone's attention."""
    expert_rank: int = Field(4, ge=1, le=4096)
    """Rank on the backbone's experts."""
    dropout: float = Field(0.3, ge=0, lt=1)
    """Dropout of LoRA's input in training."""


class DecoderConfig(Section):
    """The decoders: what turns the backbone's output into an answer."""

    tie_embeddings: bool = True
    """Whether the text generator's output layer is its token embedding, which saves memory."""
