"""Models of the transformers library: configured, built at random, or read from safetensors.

Only safetensors are read and no code that comes with weights is run.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tapfl.config import FoundationConfig
from tapfl.errors import TapflError, as_tapfl_error, nearest
from tapfl.model.packages import resolve

RANDOM = "random"
RANDOM_SEED = 20250926  # a random base is the same in every process, as a downloaded one is
SHIPPED = "shipped"  # the mini foundation's weights, which come with the package
_FLAVA_PARTS = {"image_size": "image", "patch_size": "image", "vocab_size": "text",
                "max_position_embeddings": "text"}
# The encoders of a random pair whose architecture is not given: a small ViT, and MiniLM's size.
# They are here and not in the preset, where they would conflict with real weights.
_PAIR = {
    "image": {"model_type": "vit", "hidden_size": 384, "num_hidden_layers": 12,
              "num_attention_heads": 6, "intermediate_size": 1536, "patch_size": 16,
              "image_size": 224},
    "text": {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6,
             "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": 30522},
}


def flava_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Spread plain sizes over FLAVA's three configurations; ``multimodal_layers`` is its own."""
    parts: dict[str, dict[str, Any]] = {"image": {}, "text": {}, "multimodal": {}}
    for key, value in fields.items():
        for part, values in parts.items():
            if _FLAVA_PARTS.get(key, part) == part and key != "multimodal_layers":
                values[key] = value
    if "multimodal_layers" in fields:
        parts["multimodal"]["num_hidden_layers"] = fields["multimodal_layers"]
    return {f"{part}_config": values for part, values in parts.items()}


@dataclass(frozen=True)
class Source:
    """A model class of the library, and the hub id whose configuration is the class's default.

    ``default`` are the fields of a random model for which none are given.
    """

    model_class: str
    model_type: str
    published: str = ""
    spread: Callable[[dict[str, Any]], dict[str, Any]] = dict
    default: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def auto(cls, modality: str) -> Source:
        """Return any model of the library, as one part of a pair."""
        default = _PAIR[modality]
        return cls("AutoModel", str(default["model_type"]), default=default)

    def configure(self, fields: dict[str, Any]) -> Any:
        """Return a configuration with these fields."""
        from transformers import AutoConfig

        fields = dict(fields or self.default)
        kind = fields.pop("model_type", self.model_type)
        with as_tapfl_error("foundation.architecture: no such configuration"):
            plain = AutoConfig.for_model(kind)
            known = set(plain.to_dict()) | set(getattr(plain, "attribute_map", {}))
            for part in ("image_config", "text_config", "multimodal_config"):
                known |= set(getattr(plain, part, plain).to_dict()) | {"multimodal_layers"}
            for key in fields:
                if key not in known:
                    raise TapflError(f"foundation.architecture: unknown field '{key}' of {kind}"
                                     + nearest(key, known))
            return AutoConfig.for_model(kind, **self.spread(fields))

    def read_config(self, weights: str) -> Any:
        """Return the configuration that comes with weights, of the right kind of model."""
        from transformers import AutoConfig

        with as_tapfl_error(f"{weights}: cannot read config.json, expected a local folder or a "
                            "hub id that can be reached"):
            config = AutoConfig.from_pretrained(resolve(weights), trust_remote_code=False)
        if self.model_class != "AutoModel" and config.model_type != self.model_type:
            raise TapflError(f"{weights}: config.json describes a {config.model_type} model, "
                             f"expected {self.model_type}")
        return config

    def build(self, config: Any) -> Any:
        """Return a model without weights of its own."""
        with as_tapfl_error("foundation.architecture: cannot build this model"):
            library = self._library()
            return (library.from_config(config) if self.model_class == "AutoModel"
                    else library(config))

    def read(self, weights: str, wanted: Sequence[str]) -> Any:
        """Load strictly: everything ``wanted`` must be there and must fit."""
        only_safetensors(Path(resolve(weights)))
        with as_tapfl_error(f"{weights}: cannot read safetensors weights"), _quiet():
            model, info = self._library().from_pretrained(
                resolve(weights), use_safetensors=True, output_loading_info=True,
                trust_remote_code=False, ignore_mismatched_sizes=True, dtype=torch.float32)

        def used(key: str) -> bool:
            # A pooler or a contrastive head may be absent: it is not used here.
            words = key.split(".")
            return not {"pooler", "mask_token"} & {*words} and (not wanted or words[0] in wanted)

        for name, found, expected in sorted(info["mismatched_keys"]):
            if used(name):
                raise TapflError(f"{weights}: tensor '{name}' has shape {tuple(found)}, "
                                 f"expected {tuple(expected)}")
        missing = sorted(filter(used, info["missing_keys"]))
        if missing:
            raise TapflError(f"{weights}: tensor '{missing[0]}' is missing"
                             + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""))
        for name, value in model.state_dict().items():
            if used(name) and value.is_floating_point() and not value.isfinite().all():
                raise TapflError(f"{weights}: tensor '{name}' holds values that are not finite")
        return model

    def _library(self) -> Any:
        import transformers

        return getattr(transformers, self.model_class)


@dataclass(frozen=True)
class Request:
    """What to build: the configuration, which modalities the owner has, how many layers."""

    config: FoundationConfig
    modalities: tuple[str, ...]
    depth: int  # backbone layers: twice layers_per_stage
    meta: bool

    def model(self, source: Source, weights: str, fields: dict[str, Any] | None,
              wanted: Sequence[str] = ()) -> Any:
        """Return a model of the library; tensors under ``wanted`` (all) must be there."""
        if weights == RANDOM or (self.meta and weights == source.published):
            config = source.configure(fields or {})
        else:
            config = source.read_config(weights)
        if self.meta:
            with torch.device("meta"):
                return source.build(config)
        if weights == RANDOM:
            with seeded(RANDOM_SEED):
                return source.build(config)
        return source.read(weights, wanted)


def preprocessing(weights: str) -> dict[str, Any] | None:
    """Return what comes with weights about the images they were trained on, if anything does."""
    from transformers.utils import cached_file

    with as_tapfl_error(f"{weights}: cannot read preprocessor_config.json"):
        path = cached_file(resolve(weights), "preprocessor_config.json",
                           _raise_exceptions_for_gated_repo=False,
                           _raise_exceptions_for_missing_entries=False,
                           _raise_exceptions_for_connection_errors=False)
        return None if path is None else dict(json.loads(Path(path).read_text()))


def only_safetensors(folder: Path) -> None:
    """Refuse a folder whose weights, or whose index of weights, are anything else."""
    if not folder.is_dir():
        return
    if not list(folder.glob("*.safetensors")):
        raise TapflError(f"{folder}: no .safetensors file in this weights folder (other formats "
                         "can run code when loaded and are not read)")
    for index in folder.glob("*.index.json"):
        with as_tapfl_error(f"{index}: not a readable index of weights"):
            names = set(json.loads(index.read_text())["weight_map"].values())
        for name in names:
            if not str(name).endswith(".safetensors") or Path(name).name != name:
                raise TapflError(f"{index}: '{name}' is no safetensors file in this folder")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator inside the context, and no other."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's report on unused tensors, most of a checkpoint here, and its bar."""
    from transformers.utils import logging as library

    logger = logging.getLogger("transformers")
    level, bar = logger.level, library.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    library.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bar:
            library.enable_progress_bar()
