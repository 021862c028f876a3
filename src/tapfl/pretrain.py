"""Pre-train the mini foundation on the miniature world's unlabelled stream (`tapfl pretrain mini`).

Three losses, as in FLAVA: masked text, masked image patches, and whether a caption belongs to a
picture. Their heads are thrown away; the encoders and the multimodal layers are what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tapfl.config import FoundationConfig
from tapfl.data import miniature
from tapfl.model.encoder import ImageNormalizer
from tapfl.model.foundation import Foundation, build_foundation, load_tokenizer

MASKED_TEXT, MASKED_IMAGE = 0.3, 0.5
DEPTH = 4  # the mini foundation's multimodal layers


@dataclass
class Pool:
    """The stream, drawn once and sampled from: tensors on the device."""

    pair_images: Tensor
    captions: Tensor
    images: Tensor
    texts: Tensor

    @classmethod
    def draw(cls, tokenizer: Any, size: int, seed: int, device: str) -> Pool:
        """Draw a pool of ``size`` captioned pictures, pictures and texts each."""
        pairs, images, texts = miniature.unlabelled(np.random.default_rng(seed), size)

        def ids(lines: list[str] | None) -> Tensor:
            found: Tensor = tokenizer(lines, padding=True, return_tensors="pt")["input_ids"]
            return found.to(device)

        return cls(torch.as_tensor(pairs.images).to(device), ids(pairs.texts),
                   torch.as_tensor(images.images).to(device), ids(texts.texts))


class Pretrainer(nn.Module):
    """The foundation with the heads that pre-training needs."""

    def __init__(self, foundation: Foundation, mask_token: int) -> None:
        super().__init__()
        width = foundation.width
        self.foundation, self.mask_token = foundation.requires_grad_(True), mask_token
        self.normalize = ImageNormalizer()
        embedding = foundation.encoders["image"].embedding
        self.patch, self.size = embedding.projection.kernel_size[0], embedding.size
        self.words = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, foundation.vocabulary))
        self.pixels = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * self.patch**2))
        self.match = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2))

    def forward(self, images: Tensor, captions: Tensor, more_images: Tensor, texts: Tensor,
                depth: int) -> dict[str, Tensor]:
        """Return the losses of one batch; ``depth`` multimodal layers are used."""
        encoders = self.foundation.encoders
        pixels, target, hidden = self._mask_patches(more_images)
        losses = {"image": self._pixel_loss(encoders["image"](pixels), target, hidden)}
        masked, hidden = self._mask_words(texts)
        losses["text"] = self._word_loss(encoders["text"](masked, texts != 0), texts, hidden)
        # A picture and its caption, both with holes: filled by each encoder, then by both jointly.
        pixels, target, patches = self._mask_patches(images)
        masked, words = self._mask_words(captions)
        picture, text, joint = self._joint(pixels, masked, captions != 0, depth)
        for name, left, right in (("paired", picture, text), (
                "joint", joint[:, :picture.shape[1]], joint[:, picture.shape[1]:])):
            losses[f"{name} image"] = self._pixel_loss(left, target, patches)
            losses[f"{name} text"] = self._word_loss(right, captions, words)
        # Half of the captions move to another picture.
        wrong = torch.rand(len(images), device=images.device) < 0.5
        shifted = torch.where(wrong[:, None], captions.roll(1, 0), captions)
        *_, joint = self._joint(self.normalize(images), shifted, shifted != 0, depth)
        losses["match"] = F.cross_entropy(self.match(joint.mean(dim=1)), (~wrong).long())
        return losses

    def _joint(self, image: Tensor, ids: Tensor, real: Tensor,
               depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of the picture, of the text, and of both after ``depth`` layers."""
        picture = self.foundation.encoders["image"](image)
        text = self.foundation.encoders["text"](ids, real)
        mask = torch.cat([real.new_ones(picture.shape[:2]), real], dim=1)
        x = torch.cat([picture, text], dim=1)
        for layer in self.foundation.layers[:depth]:
            x = layer(x, mask)
        assert self.foundation.norm is not None
        return picture, text, self.foundation.norm(x)

    def _mask_patches(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the image with patches blanked, all patches' values, and which are blank."""
        pixels = F.interpolate(self.normalize(image), size=(self.size, self.size), mode="bilinear")
        side = self.size // self.patch
        hidden = torch.rand(len(image), side, side, device=image.device) < MASKED_IMAGE
        target = F.unfold(pixels, self.patch, stride=self.patch).transpose(1, 2)
        cover = hidden.repeat_interleave(self.patch, 1).repeat_interleave(self.patch, 2)
        return pixels.masked_fill(cover[:, None], 0.0), target, hidden.flatten(1)

    def _mask_words(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (torch.rand(ids.shape, device=ids.device) < MASKED_TEXT) & (ids > 4)
        return ids.masked_fill(hidden, self.mask_token), hidden

    def _pixel_loss(self, tokens: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
        error = (self.pixels(tokens[:, 1:]) - target).square().mean(dim=-1)
        loss: Tensor = (error * hidden).sum() / hidden.sum().clamp(min=1)
        return loss

    def _word_loss(self, tokens: Tensor, ids: Tensor, hidden: Tensor) -> Tensor:
        target = ids.masked_fill(~hidden, -100)
        return F.cross_entropy(self.words(tokens).flatten(0, 1), target.flatten())


def pretrain_mini(out: Path, *, steps: int = 3500, batch: int = 128, pool: int = 12000,
                  lr: float = 1e-3, seed: int = 0, device: str = "cpu",
                  progress: Callable[[int, dict[str, float]], None] | None = None) -> Path:
    """Train from random weights and write what the package ships."""
    torch.manual_seed(seed)
    config = FoundationConfig(name="mini", weights="random")
    tokenizer = load_tokenizer(config)
    foundation = build_foundation(config, layers_per_stage=DEPTH // 2)
    model = Pretrainer(foundation, tokenizer.mask_token_id).to(device)
    data = Pool.draw(tokenizer, pool, seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)

    def some(values: Tensor) -> Tensor:
        return values[torch.randint(len(values), (batch,), device=values.device)]

    for step in range(steps):
        chosen = torch.randint(len(data.captions), (batch,), device=data.captions.device)
        # Downstream models use the first layers alone: train every depth they can have.
        losses = model(data.pair_images[chosen], data.captions[chosen], some(data.images),
                       some(data.texts), depth=2 + 2 * (step % 2))
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None and (step % 200 == 0 or step == steps - 1):
            progress(step, {name: value.item() for name, value in losses.items()})
    return save_foundation(foundation, out)


def save_foundation(foundation: Foundation, out: Path) -> Path:
    """Write a foundation's own tensors; half precision is enough for a frozen base."""
    tensors = {name: value.detach().half().cpu().contiguous()
               for name, value in foundation.state_dict().items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(out), {"format": "pt", "foundation": foundation.name})
    return out
