"""Foundations: pre-trained models cut into frozen encoders and frozen backbone layers.

Every foundation is built from a model of the transformers library: with weights from its hub, from
a local folder, or random ones from its configuration. The parts that are not used are dropped.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tapfl.config import FoundationConfig, SpeedConfig
from tapfl.errors import TapflError, as_tapfl_error, nearest
from tapfl.model.encoder import Encoder, TextEmbedding
from tapfl.model.layer import TransformerLayer
from tapfl.model.packages import resolve
from tapfl.model.parts import (
    find_stack,
    first_layers,
    image_embedding,
    layers_of,
    renormalize,
    verify,
)
from tapfl.model.weights import RANDOM, SHIPPED, Request, Source, flava_fields
from tapfl.tasks import MODALITIES

AMPERE = (8, 0)  # the first GPUs that compute in bf16

MINI_SIZES = {
    "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 384,
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

    def speed_up(self, config: SpeedConfig, compiled: bool = False) -> Foundation:
        """Set how the layers compute; for a base that is on a GPU already."""
        for layer in self.modules():
            if isinstance(layer, TransformerLayer):
                layer.fast = config.kernels and self.dtype.itemsize < 4 and _suits_kernels(layer)
                layer.compiled = compiled
                layer.checkpointing = config.checkpointing
        return self

    @property
    def uses_kernels(self) -> bool:
        """Whether the backbone's layers go through kernels."""
        return bool(self.layers[0].fast)

    @property
    def execution_modes(self) -> dict[str, int]:
        """How many layers go through kernels, are compiled, or run as they are."""
        layers = [m for m in self.modules() if isinstance(m, TransformerLayer)]
        fast, compiled = sum(m.fast for m in layers), sum(m.compiled and not m.fast for m in layers)
        return {"kernels": fast, "compiled": compiled, "plain": len(layers) - fast - compiled}

    def train(self, mode: bool = True) -> Foundation:
        """Stay in evaluation mode: a frozen base has no dropout of its own."""
        return super().train(False)


def _suits_kernels(layer: TransformerLayer) -> bool:
    """Return whether there are kernels here for a layer; they need Triton and bf16 units."""
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < AMPERE:
        return False
    from tapfl.model import fast

    return fast.suits(layer)


def build_foundation(
    config: FoundationConfig, modalities: Sequence[str] = MODALITIES, layers_per_stage: int = 1,
    device: str = "cpu",
) -> Foundation:
    """Build the frozen base for these modalities; ``device="meta"`` loads and allocates nothing."""
    if config.name not in _BUILDERS:
        raise TapflError(f"foundation.name: unknown foundation '{config.name}'"
                         + nearest(config.name, _BUILDERS))
    for modality in modalities:
        if modality not in MODALITIES:
            raise TapflError(f"unknown modality '{modality}'" + nearest(modality, MODALITIES))
    request = Request(config, tuple(m for m in MODALITIES if m in modalities),
                       2 * layers_per_stage, device == "meta")
    return _BUILDERS[config.name](request).to(device)


def load_tokenizer(config: FoundationConfig) -> Any:
    """Return the foundation's tokenizer: its weights' own, or the one shipped with tapfl."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = config.weights_of("text")
    if config.name == "mini" or source == RANDOM:
        asset = resources.files("tapfl") / "assets" / "tokenizer.json"
        return PreTrainedTokenizerFast(
            tokenizer_file=str(asset), unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
            sep_token="[SEP]", mask_token="[MASK]",
        )
    with as_tapfl_error(f"{source}: cannot read the tokenizer"):
        return AutoTokenizer.from_pretrained(resolve(source), trust_remote_code=False)


def _flava(request: Request, **sizes: Any) -> Foundation:
    """FLAVA's encoders; the first layers of its multimodal encoder as backbone."""
    weights = request.config.single_weights
    source = Source("FlavaModel", "flava", "facebook/flava-full", flava_fields)
    parts = [f"{m}_{part}" for m in request.modalities for part in ("model", "to_mm_projection")]
    model = request.model(source, weights, sizes, [*parts, "multimodal_model"])
    config, multimodal = model.config, model.multimodal_model
    encoders = {}
    for modality in request.modalities:
        part = getattr(model, f"{modality}_model")
        embedding = (image_embedding(part.embeddings, request.config.image_size)
                     if modality == "image" else TextEmbedding(part.embeddings))
        # FLAVA's multimodal encoder reads the last hidden state, before the final norm.
        encoders[modality] = Encoder(
            embedding, layers_of(part.encoder.layer, part.config, "encoder.layer"),
            part.config.hidden_size, config.multimodal_config.hidden_size,
            projection=getattr(model, f"{modality}_to_mm_projection"))
    layers = first_layers(multimodal.encoder.layer, request.depth, "FLAVA's multimodal encoder")
    return Foundation(
        request.config.name, encoders, layers_of(layers, multimodal.config, "encoder.layer"),
        multimodal.layernorm, head="flava",
        max_text=min(256, config.text_config.max_position_embeddings),
        vocabulary=config.text_config.vocab_size, weights=weights)


def _mini(request: Request) -> Foundation:
    """FLAVA's shape at a fraction of its size, pre-trained on the miniature world."""
    weights = request.config.single_weights
    plain = dataclasses.replace(
        request, config=request.config.model_copy(update={"weights": RANDOM}))
    foundation = _flava(plain, vocab_size=len(load_tokenizer(request.config)), image_size=32,
                        patch_size=8, multimodal_layers=4, **MINI_SIZES)
    foundation.weights = weights
    if weights != RANDOM and not request.meta:
        asset = resources.files("tapfl") / "assets" / "mini.safetensors"
        _restore(foundation, Path(str(asset)) if weights == SHIPPED else Path(weights))
    return foundation


def _restore(foundation: Foundation, path: Path) -> None:
    """Load what `tapfl pretrain` wrote; the file may hold more layers or encoders than these."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise TapflError(f"{path}: not a readable safetensors file ({error}); the mini foundation "
                         f"takes '{SHIPPED}', '{RANDOM}' or a file from 'tapfl pretrain'") from None
    for name, value in foundation.state_dict().items():
        if name not in tensors:
            raise TapflError(f"{path}: tensor '{name}' is missing")
        if tensors[name].shape != value.shape:
            raise TapflError(f"{path}: tensor '{name}' has shape {tuple(tensors[name].shape)}, "
                             f"expected {tuple(value.shape)}")
        value.copy_(tensors[name])


def _vilt(request: Request) -> Foundation:
    """ViLT: no encoder layers at all, only embeddings in front of the backbone."""
    weights = request.config.single_weights
    source = Source("ViltModel", "vilt", "dandelin/vilt-b32-mlm")
    model = request.model(source, weights, request.config.architecture,
                          ["embeddings", "encoder", "layernorm"])
    config, embeddings = model.config, model.embeddings
    kinds = embeddings.token_type_embeddings.weight.detach()
    encoders = {}
    if "image" in request.modalities:
        image = image_embedding(embeddings, request.config.image_size, offset=kinds[1])
        encoders["image"] = Encoder(image, [], config.hidden_size, config.hidden_size)
    if "text" in request.modalities:
        text = TextEmbedding(embeddings.text_embeddings, offset=kinds[0])
        encoders["text"] = Encoder(text, [], config.hidden_size, config.hidden_size)
    layers = first_layers(model.encoder.layer, request.depth, "ViLT's encoder")
    return Foundation(
        "vilt", encoders, layers_of(layers, config, "encoder.layer"), model.layernorm, head="vilt",
        max_text=min(40, config.max_position_embeddings), vocabulary=config.vocab_size,
        weights=weights)


def _pair(request: Request) -> Foundation:
    """Any ViT-like image encoder and any BERT-like text encoder, joined at the text's width."""
    parts, used = {}, []
    # The backbone's layers come from the text encoder, also where no text is owned.
    for modality in dict.fromkeys((*request.modalities, "text")):
        weights = request.config.part_weights(modality)
        used.append(weights)
        parts[modality] = request.model(Source.auto(modality), weights,
                                        request.config.part_architecture(modality))
    with as_tapfl_error("foundation: not a pair that can be joined, expected a ViT-like image "
                        "encoder and a BERT-like text encoder"):
        return _join(request, parts, " + ".join(used))


def _join(request: Request, parts: dict[str, Any], weights: str) -> Foundation:
    text = parts["text"]
    config = text.config
    name, stack = find_stack(text)
    layers = layers_of(stack, config, name)
    # RoBERTa's family spends the first positions on padding.
    reserved = getattr(text.embeddings, "padding_idx", None)
    positions = config.max_position_embeddings - (0 if reserved is None else reserved + 1)
    encoders = {}
    if "image" in parts:
        image = parts["image"]
        image_name, image_stack = find_stack(image)
        encoders["image"] = Encoder(
            image_embedding(image.embeddings, request.config.image_size),
            layers_of(image_stack, image.config, image_name), image.config.hidden_size,
            config.hidden_size, norm=image.layernorm, new_projection=True)
    encoders["text"] = Encoder(TextEmbedding(text.embeddings), layers, config.hidden_size,
                               config.hidden_size)
    if not request.meta:
        for modality, encoder in encoders.items():
            verify(encoder, parts[modality], modality)
    if "image" in encoders and not request.meta:
        renormalize(encoders["image"].embedding, request.config.part_weights("image"))
    if "text" not in request.modalities:
        del encoders["text"]
    if len(layers) < request.depth:
        raise TapflError(f"backbone.layers_per_stage: {request.depth // 2} needs {request.depth} "
                         f"layers, the text encoder has {len(layers)}")
    return Foundation(
        "pair", encoders, layers[-request.depth:], None, head="flava",
        max_text=min(256, positions), vocabulary=config.vocab_size, weights=weights)


_BUILDERS: dict[str, Callable[[Request], Foundation]] = {
    "flava": lambda request: _flava(request, **(request.config.architecture or {})),
    "vilt": _vilt, "pair": _pair, "mini": _mini,
}
