"""Frozen modality encoders: tokens of an image or a text, ready for the backbone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapfl.errors import TapflError
from tapfl.model.layer import Keys, Residual, TransformerLayer
from tapfl.model.lora import AttentionLoRA, ConvLoRA, Dropout, Factors, attention_factors

IMAGE_SIZE = 64  # images are kept at this size and scaled to the encoder's on the device
# The paper's normalisation, for the encoders and for the targets of image generation.
MEAN = (0.5071, 0.4865, 0.4409)
STD = (0.2673, 0.2564, 0.2762)


class ImageNormalizer(nn.Module):
    """From stored bytes to the values that models read and generators are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.tensor(MEAN).view(3, 1, 1) * 255, persistent=False)
        self.std = nn.Buffer(torch.tensor(STD).view(3, 1, 1) * 255, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        """Return the normalised float image of a uint8 one, ``(B, 3, 64, 64)``."""
        if image.dim() != 4 or image.shape[1] != 3:
            raise TapflError("image: expected 3 channels, a (batch, 3, 64, 64) tensor, "
                             f"got {tuple(image.shape)}")
        if image.shape[2:] != (IMAGE_SIZE, IMAGE_SIZE):
            raise TapflError(f"image: expected {IMAGE_SIZE}x{IMAGE_SIZE} pixels, "
                             f"got {image.shape[2]}x{image.shape[3]}")
        if image.dtype != torch.uint8:
            raise TapflError(f"image: expected uint8 values 0..255, got {image.dtype}")
        return (image.float() - self.mean) / self.std


class ImageEmbedding(nn.Module):
    """Patches, special tokens and positions: the same sum in ViT, DeiT, DINOv2, FLAVA and ViLT."""

    def __init__(self, projection: nn.Conv2d, prefix: Tensor, positions: Tensor, size: int) -> None:
        super().__init__()
        self.projection = projection
        self.prefix = nn.Parameter(prefix, requires_grad=False)
        self.positions = nn.Parameter(positions, requires_grad=False)
        self.size = size

    def forward(self, image: Tensor, block: EncoderBlock | None, dropout: float) -> Tensor:
        """Return the tokens of a normalised image."""
        pixels = image.to(self.projection.weight.dtype)
        if pixels.shape[-1] != self.size:
            pixels = F.interpolate(pixels, size=(self.size, self.size), mode="bilinear",
                                   align_corners=False)
        patches = _patches(pixels, self.projection)
        if block is not None and block.patch is not None:
            patches = patches + block.patch(pixels, dropout).flatten(2).transpose(1, 2)
        prefix = self.prefix.expand(len(patches), -1, -1)
        return torch.cat([prefix, patches], dim=1) + self.positions


class TextEmbedding(nn.Module):
    """The library's own word embeddings, and a constant that ViLT adds to them."""

    def __init__(self, embeddings: nn.Module, offset: Tensor | None = None) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.offset = None if offset is None else nn.Parameter(offset, requires_grad=False)

    def forward(self, ids: Tensor, block: EncoderBlock | None, dropout: float) -> Tensor:
        """Return the tokens of a text."""
        tokens: Tensor = self.embeddings(ids)
        return tokens if self.offset is None else tokens + self.offset


class EncoderBlock(nn.Module):
    """What trains in an encoder: LoRA on its attention, or on ViLT's patches, and a projection.

    The projection exists where two encoders of different origin are joined; it is new, so it
    trains in full.
    """

    def __init__(self, encoder: Encoder, rank: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(AttentionLoRA(encoder.width, rank) for _ in encoder.layers)
        embedding = encoder.embedding
        self.patch = (ConvLoRA(embedding.projection, rank)
                      if not encoder.layers and isinstance(embedding, ImageEmbedding) else None)
        self.projection = (nn.Linear(encoder.width, encoder.output_width)
                           if encoder.new_projection else None)


class Encoder(nn.Module):
    """A frozen encoder of one modality.

    ``norm`` and ``projection`` are the pre-trained ones, where the foundation has them;
    ``new_projection`` asks for a trained one in the encoder's block, to ``output_width``.
    """

    def __init__(
        self, embedding: ImageEmbedding | TextEmbedding, layers: Sequence[TransformerLayer],
        width: int, output_width: int, norm: nn.Module | None = None,
        projection: nn.Module | None = None, new_projection: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers: Any = nn.ModuleList(layers)
        self.norm, self.projection = norm, projection
        self.width, self.output_width = width, output_width
        self.new_projection = new_projection

    @property
    def is_trained(self) -> bool:
        """Whether the encoder has trainable parameters: ViLT's word embeddings have none."""
        return bool(self.layers) or isinstance(self.embedding, ImageEmbedding)

    def forward(
        self, inputs: Tensor, mask: Tensor | None = None, block: EncoderBlock | None = None,
        dropout: Dropout | None = None,
        adapter: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return ``(batch, tokens, width)`` from a normalised image or token ids."""
        dropout = dropout or Dropout()
        x = Residual(self.embedding(inputs, block, dropout.p).unsqueeze(0))
        factors = _factors(block, x.x.dtype, dropout) if block else [None] * len(self.layers)
        for index, (layer, lora) in enumerate(zip(self.layers, factors, strict=True)):
            x = layer.attend(x, Keys(mask), lora)
            x = layer.feed_forward(x, adapter=adapter and functools.partial(adapter, index))
        tokens = x.first()
        for module in (self.norm, self.projection, block and block.projection):
            if module is not None:
                tokens = _linear(module, tokens)
        return tokens


def _patches(pixels: Tensor, projection: nn.Conv2d) -> Tensor:
    """Project every patch: a convolution whose windows do not overlap is a matrix product."""
    batch, channels, height, width = pixels.shape
    side = int(projection.kernel_size[0])
    cut = pixels.view(batch, channels, height // side, side, width // side, side)
    cut = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * side * side)
    return F.linear(cut, projection.weight.flatten(1), projection.bias)


def _factors(block: EncoderBlock, dtype: torch.dtype, dropout: Dropout) -> Sequence[Factors]:
    """Return every layer's LoRA; all layers are put together at once, a few large operations."""
    if not len(block.layers):
        return []
    a, b = attention_factors([[module] for module in block.layers], dtype)
    return [Factors(one.unsqueeze(0), other.unsqueeze(0), dropout)
            for one, other in zip(a.unbind(0), b.unbind(0), strict=True)]


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module whose parameters may be fp32 while the computation is bf16."""
    if isinstance(module, nn.Linear) and module.weight.dtype != x.dtype:
        return F.linear(x, module.weight.to(x.dtype), module.bias.to(x.dtype))
    result: Tensor = module(x)
    return result
