"""Parts of library models: embeddings and layers, cut out, fitted and compared with the whole."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tapfl.errors import TapflError, as_tapfl_error
from tapfl.model.encoder import MEAN, STD, Encoder, ImageEmbedding
from tapfl.model.layer import TransformerLayer
from tapfl.model.weights import RANDOM, preprocessing, seeded


def image_embedding(source: Any, size: int | None, offset: Tensor | None = None) -> ImageEmbedding:
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


def layers_of(source: Sequence[nn.Module], config: Any, prefix: str) -> list[TransformerLayer]:
    """Return the library's layers as layers that take LoRA; ``prefix`` is their list's name."""
    return [TransformerLayer(layer, config, f"{prefix}.{i}") for i, layer in enumerate(source)]


def find_stack(model: Any) -> tuple[str, Any]:
    """Find the list of transformer layers in a library model."""
    for name in ("encoder.layer", "layers", "transformer.layer", "encoder.layers"):
        with contextlib.suppress(AttributeError):
            return name, model.get_submodule(name)
    raise TapflError(f"{model.config.model_type}: no list of transformer layers found; expected a "
                     "ViT-like image encoder or a BERT-like text encoder")


def first_layers(layers: Sequence[nn.Module], depth: int, what: str) -> Sequence[nn.Module]:
    """Return the first layers; ``what`` names whose they are, should they be too few."""
    if depth > len(layers):
        raise TapflError(f"backbone.layers_per_stage: {depth // 2} needs {depth} layers, "
                         f"{what} has {len(layers)}")
    return layers[:depth]


@torch.no_grad()
def renormalize(embedding: Any, weights: str) -> None:
    """Give an encoder the pixels of its pre-training, though they are normalised differently here.

    Where its folder has another mean and std, the difference goes into the projection of
    the patches, which is linear in them.
    """
    told = None if weights == RANDOM else preprocessing(weights)
    if told is None or not told.get("do_normalize", True) or "image_mean" not in told:
        return
    with as_tapfl_error(f"{weights}: preprocessor_config.json: cannot read image_mean and "
                        "image_std"):
        mean, std = (torch.tensor(told[key], dtype=torch.float32).view(3, 1, 1)
                     for key in ("image_mean", "image_std"))
    projection = embedding.projection
    shift = (torch.tensor(MEAN).view(3, 1, 1) - mean) / std
    if projection.bias is None:
        projection.bias = nn.Parameter(torch.zeros(projection.out_channels), requires_grad=False)
    projection.bias.add_((projection.weight * shift).sum(dim=(1, 2, 3)))
    projection.weight.mul_(torch.tensor(STD).view(3, 1, 1) / std)


@torch.no_grad()
def verify(encoder: Encoder, model: Any, modality: str) -> None:
    """Compare with the library's own forward pass: many models look alike and are not."""
    model.eval()
    with seeded(0):
        if modality == "image":
            assert isinstance(encoder.embedding, ImageEmbedding)
            size = encoder.embedding.size
            inputs = torch.randn(1, 3, size, size)
            resize = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
            theirs = model(inputs, **({"interpolate_pos_encoding": True} if resize else {}))[0]
        else:
            # Long enough for windows and relative positions to matter.
            length = min(40, model.config.max_position_embeddings - 4)
            inputs = torch.randint(5, model.config.vocab_size, (1, length))
            theirs = model(inputs)[0]
        ours = encoder(inputs)
    if ours.shape != theirs.shape or (ours - theirs).abs().max() > 3e-5 * max(
            1.0, float(theirs.abs().max())):
        raise TapflError(f"{model.config.model_type}: this {modality} encoder is not computed "
                         "as the transformers library computes it")
