"""Foundations: pre-trained models cut into frozen encoders and frozen backbone layers.

Every foundation is built from a model of the transformers library: with weights from its hub, from
a local folder, or random ones from its configuration. The parts that are not used are dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tapfl.config import FoundationConfig
from tapfl.errors import TapflError, nearest
from tapfl.model.encoder import Encoder, ImageEmbedding, TextEmbedding
from tapfl.model.layer import TransformerLayer
from tapfl.tasks import MODALITIES

RANDOM = "random"
RANDOM_SEED = 20250926  # a random base is the same in every process, as a downloaded one is

MINI_SIZES = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 512,
}


class Foundation(nn.Module):
    """Frozen encoders and backbone layers, and what is needed to feed them.

    ``layers`` holds the ``2 * layers_per_stage`` backbone layers; ``norm`` is the model's final
    normalisation, read through by the decoders. ``head`` names the paper's variant of
    classification heads.
    """

    def __init__(
        self, name: str, encoders: dict[str, Encoder], layers: Sequence[TransformerLayer],
        norm: nn.Module | None, *, head: str, max_text: int, vocabulary: int, weights: str,
    ) -> None:
        super().__init__()
        self.name, self.head, self.weights = name, head, weights
        self.max_text, self.vocabulary = max_text, vocabulary
        self.encoders: Any = nn.ModuleDict(encoders)
        self.layers: Any = nn.ModuleList(layers)
        self.norm = norm
        self.requires_grad_(False)
        self.eval()

    @property
    def width(self) -> int:
        """Size of a token in the backbone."""
        return int(self.layers[0].width)

    @property
    def dtype(self) -> torch.dtype:
        """The type that frozen layers compute in."""
        dtype: torch.dtype = self.layers[0].out.weight.dtype
        return dtype

    @property
    def is_random(self) -> bool:
        """Whether any part of the base is random: results made with it must say so."""
        return RANDOM in self.weights.split(" + ")

    @property
    def trained_encoders(self) -> tuple[str, ...]:
        """The modalities whose encoder has a block."""
        return tuple(m for m, encoder in self.encoders.items() if encoder.is_trained)

    def train(self, mode: bool = True) -> Foundation:
        """Stay in evaluation mode: a frozen base has no dropout of its own."""
        return super().train(False)


@dataclass(frozen=True)
class _Request:
    """What to build: the configuration, and which modalities the owner has."""

    config: FoundationConfig
    modalities: tuple[str, ...]
    depth: int  # backbone layers: twice layers_per_stage
    device: str = "cpu"
    used: list[str] = field(default_factory=list)  # where each loaded weight file came from

    def load(self, model_class: Any, config: Any, weights: str, wanted: Sequence[str] = ()) -> Any:
        """Return a library model with weights; tensors under ``wanted`` (all) must be there."""
        self.used.append(weights)
        if self.device == "meta":
            with torch.device("meta"):
                return _build(model_class, config)
        if weights == RANDOM:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(RANDOM_SEED)
                return _build(model_class, config)
        return _read(model_class, weights, wanted)

    def configuration(self, config_class: Any, weights: str, **random: Any) -> Any:
        """Return the library's configuration: the weights' own, or ``random``'s fields."""
        # The published FLAVA and ViLT have their classes' defaults: counting needs no download.
        published = weights in ("facebook/flava-full", "dandelin/vilt-b32-mlm")
        if weights == RANDOM or (self.device == "meta" and published):
            return config_class(**random)
        with _one_line(weights, "config.json"):
            return config_class.from_pretrained(weights)


def build_foundation(
    config: FoundationConfig, modalities: Sequence[str] = MODALITIES, layers_per_stage: int = 1,
    device: str = "cpu",
) -> Foundation:
    """Build the frozen base for these modalities; ``device="meta"`` loads and allocates nothing."""
    if config.name not in _BUILDERS:
        raise TapflError(f"foundation.name: unknown foundation '{config.name}'"
                         + nearest(config.name, _BUILDERS))
    request = _Request(config, tuple(m for m in MODALITIES if m in modalities),
                       2 * layers_per_stage, "meta" if device == "meta" else "cpu")
    return _BUILDERS[config.name](request).to(device)


def load_tokenizer(config: FoundationConfig) -> Any:
    """Return the foundation's tokenizer: its weights' own, or the one shipped with tapfl."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = config.text_weights
    if source == RANDOM or config.name == "mini":
        asset = resources.files("tapfl") / "assets" / "tokenizer.json"
        return PreTrainedTokenizerFast(
            tokenizer_file=str(asset), unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
            sep_token="[SEP]", mask_token="[MASK]",
        )
    with _one_line(source, "tokenizer files"):
        return AutoTokenizer.from_pretrained(source)


def _flava(request: _Request, **sizes: Any) -> Foundation:
    """FLAVA's encoders; the first layers of its multimodal encoder as backbone."""
    from transformers import FlavaConfig, FlavaModel

    weights = request.config.single_weights
    config = request.configuration(FlavaConfig, weights, **_flava_config(**sizes))
    parts = [f"{m}_{part}" for m in request.modalities for part in ("model", "to_mm_projection")]
    model = request.load(FlavaModel, config, weights, [*parts, "multimodal_model"])
    multimodal = model.multimodal_model
    encoders = {}
    for modality in request.modalities:
        part = getattr(model, f"{modality}_model")
        embedding = (_image_embedding(part.embeddings, request.config.image_size)
                     if modality == "image" else TextEmbedding(part.embeddings))
        # FLAVA's multimodal encoder reads the last hidden state, before the final norm.
        encoders[modality] = Encoder(
            embedding, _layers(part.encoder.layer, part.config, "encoder.layer"),
            part.config.hidden_size, config.multimodal_config.hidden_size,
            projection=getattr(model, f"{modality}_to_mm_projection"), source=type(part).__name__)
    layers = _first(multimodal.encoder.layer, request.depth, "FLAVA's multimodal encoder")
    return Foundation(
        request.config.name, encoders, _layers(layers, multimodal.config, "encoder.layer"),
        multimodal.layernorm, head="flava",
        max_text=min(256, config.text_config.max_position_embeddings),
        vocabulary=config.text_config.vocab_size, weights=weights)


def _flava_config(vocab_size: int | None = None, image_size: int | None = None,
                  patch_size: int | None = None, multimodal_layers: int | None = None,
                  **common: Any) -> dict[str, Any]:
    def given(**values: Any) -> dict[str, Any]:
        return common | {k: v for k, v in values.items() if v is not None}

    return {
        "image_config": given(image_size=image_size, patch_size=patch_size),
        "text_config": given(vocab_size=vocab_size),
        "multimodal_config": given(num_hidden_layers=multimodal_layers),
        # The image codebook belongs to FLAVA's pre-training and is never built here.
    }


def _mini(request: _Request) -> Foundation:
    """FLAVA's shape at a fraction of its size."""
    vocabulary = len(load_tokenizer(request.config))
    return _flava(request, vocab_size=vocabulary, image_size=32, patch_size=8,
                  multimodal_layers=6, **MINI_SIZES)


def _vilt(request: _Request) -> Foundation:
    """ViLT: no encoder layers at all, only embeddings in front of the backbone."""
    from transformers import ViltConfig, ViltModel

    weights = request.config.single_weights
    config = request.configuration(ViltConfig, weights, **(request.config.architecture or {}))
    model = request.load(ViltModel, config, weights, ["embeddings", "encoder", "layernorm"])
    embeddings = model.embeddings
    kinds = embeddings.token_type_embeddings.weight.detach()
    encoders = {}
    if "image" in request.modalities:
        image = _image_embedding(embeddings, request.config.image_size, offset=kinds[1])
        encoders["image"] = Encoder(image, [], config.hidden_size, config.hidden_size,
                                    source="ViltModel")
    if "text" in request.modalities:
        text = TextEmbedding(embeddings.text_embeddings, offset=kinds[0])
        encoders["text"] = Encoder(text, [], config.hidden_size, config.hidden_size,
                                   source="ViltModel")
    layers = _first(model.encoder.layer, request.depth, "ViLT's encoder")
    return Foundation(
        "vilt", encoders, _layers(layers, config, "encoder.layer"), model.layernorm, head="vilt",
        max_text=min(40, config.max_position_embeddings), vocabulary=config.vocab_size,
        weights=weights)


def _pair(request: _Request) -> Foundation:
    """Any ViT-like image encoder and any BERT-like text encoder, joined at the text's width."""
    from transformers import AutoModel

    parts = {}
    # The backbone's layers come from the text encoder, also where no text is owned.
    for modality in dict.fromkeys((*request.modalities, "text")):
        weights = request.config.part_weights(modality)
        config = request.configuration(_AutoConfig(modality), weights,
                                       **request.config.part_architecture(modality))
        parts[modality] = request.load(AutoModel, config, weights)
    text = parts["text"]
    if getattr(text, "embeddings_project", None) is not None:
        raise TapflError("text encoders with factorised embeddings are not supported "
                         f"(embedding_size {text.config.embedding_size}, "
                         f"hidden_size {text.config.hidden_size})")
    name, stack = _stack(text)
    layers = _layers(stack, text.config, name)
    width = text.config.hidden_size
    encoders = {}
    if "image" in parts:
        image = parts["image"]
        image_name, image_stack = _stack(image)
        encoders["image"] = Encoder(
            _image_embedding(image.embeddings, request.config.image_size),
            _layers(image_stack, image.config, image_name), image.config.hidden_size, width,
            norm=image.layernorm, new_projection=True, source=type(image).__name__)
    if "text" in request.modalities:
        encoders["text"] = Encoder(TextEmbedding(text.embeddings), layers, width, width,
                                   source=type(text).__name__)
    if len(layers) < request.depth:
        raise TapflError(f"backbone.layers_per_stage: {request.depth // 2} needs {request.depth} "
                         f"layers, the text encoder has {len(layers)}")
    positions = text.config.max_position_embeddings - 2  # RoBERTa spends two on padding
    return Foundation(
        "pair", encoders, layers[-request.depth:], None, head="flava",
        max_text=min(256, positions), vocabulary=text.config.vocab_size,
        weights=" + ".join(request.used))


_BUILDERS: dict[str, Callable[[_Request], Foundation]] = {
    "flava": lambda request: _flava(request, **(request.config.architecture or {})),
    "vilt": _vilt, "pair": _pair, "mini": _mini,
}


class _AutoConfig:
    """AutoConfig as a configuration class: random weights name their ``model_type``."""

    def __init__(self, modality: str) -> None:
        self.modality = modality

    def __call__(self, **fields: Any) -> Any:
        from transformers import AutoConfig

        kind = fields.pop("model_type", "vit" if self.modality == "image" else "bert")
        try:
            return AutoConfig.for_model(kind, **fields)
        except (ValueError, TypeError) as error:
            raise TapflError(f"foundation.architecture.{self.modality}: no configuration "
                             f"'{kind}' ({_first_line(error)})") from None

    def from_pretrained(self, weights: str) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(weights)


def _build(model_class: Any, config: Any) -> Any:
    # AutoModel builds from a configuration with a method, the others with a call.
    return (model_class.from_config(config) if hasattr(model_class, "from_config")
            else model_class(config))


def _read(model_class: Any, weights: str, wanted: Sequence[str]) -> Any:
    """Load safetensors weights strictly: everything ``wanted`` must be there and must fit."""
    folder = Path(weights)
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        raise TapflError(f"{weights}: no .safetensors file in this weights folder (other formats "
                         "can run code when loaded and are not read)")
    with _one_line(weights, "safetensors weights"), _quiet():
        model, info = model_class.from_pretrained(
            weights, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
            dtype=torch.float32)
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise TapflError(f"{weights}: tensor '{name}' has shape {tuple(found)}, "
                         f"expected {tuple(expected)}")
    # A pooler or a contrastive head may be absent: it is not used here.
    unused = {"pooler", "mask_token"}
    missing = sorted(k for k in info["missing_keys"] if not unused & {*k.split(".")}
                     and (not wanted or k.split(".")[0] in wanted))
    if missing:
        raise TapflError(f"{weights}: tensor '{missing[0]}' is missing"
                         + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""))
    return model


def _image_embedding(source: Any, size: int | None, offset: Tensor | None = None) -> ImageEmbedding:
    """Cut a ViT-like embedding down to what its forward pass adds up, at the wanted size."""
    if getattr(source, "register_tokens", None) is not None:
        raise TapflError("image encoders with register tokens are not supported")
    projection = source.patch_embeddings.projection
    native = source.patch_embeddings.image_size
    native = int(native[0] if isinstance(native, Sequence) else native)
    size = size or native
    patch = int(projection.kernel_size[0])
    if size % patch:
        raise TapflError(f"foundation.image_size: {size} is no multiple of the patch size {patch}")
    extra = [getattr(source, t) for t in ("cls_token", "distillation_token")
             if getattr(source, t, None) is not None]
    prefix = torch.cat([t.detach() for t in extra], dim=1)
    positions = source.position_embeddings.detach()
    if size != native:
        positions = _resize_positions(positions, prefix.shape[1], size // patch)
    if offset is not None:
        positions = positions + offset
    return ImageEmbedding(projection, prefix, positions, size)


def _resize_positions(positions: Tensor, prefix: int, side: int) -> Tensor:
    """Interpolate a square grid of position embeddings once, as the library does per call."""
    grid = positions[:, prefix:].transpose(1, 2)
    old = int(grid.shape[-1] ** 0.5)
    grid = nn.functional.interpolate(grid.reshape(1, -1, old, old), size=(side, side),
                                     mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :prefix], grid.flatten(2).transpose(1, 2)], dim=1)


def _layers(source: Sequence[nn.Module], config: Any, prefix: str) -> list[TransformerLayer]:
    return [TransformerLayer(layer, config, f"{prefix}.{i}") for i, layer in enumerate(source)]


def _stack(model: Any) -> tuple[str, Any]:
    """Find the list of transformer layers in a library model."""
    for name in ("encoder.layer", "layers", "transformer.layer", "encoder.layers"):
        with contextlib.suppress(AttributeError):
            return name, model.get_submodule(name)
    raise TapflError(f"{model.config.model_type}: no list of transformer layers found; expected a "
                     "ViT-like image encoder or a BERT-like text encoder")


def _first(layers: Sequence[nn.Module], depth: int, what: str) -> Sequence[nn.Module]:
    if depth > len(layers):
        raise TapflError(f"backbone.layers_per_stage: {depth // 2} needs {depth} layers, "
                         f"{what} has {len(layers)}")
    return layers[:depth]


@contextlib.contextmanager
def _one_line(weights: str, what: str) -> Iterator[None]:
    """Turn whatever the library raises about unreadable weights into one clear line."""
    try:
        yield
    except TapflError:
        raise
    except Exception as error:
        raise TapflError(f"{weights}: cannot read {what}: expected a local folder or a hub id "
                         f"that can be reached ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's report on unused tensors: most of a checkpoint is unused here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
