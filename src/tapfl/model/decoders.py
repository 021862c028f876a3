"""Task decoders, trained in full: the paper's three decoder tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapfl.errors import TapflError
from tapfl.model.layer import attention

LOOK_EVERY = 8  # tokens


def classification_head(style: str, width: int, classes: int) -> nn.Sequential:
    """Return the head over a pooled token, in FLAVA's or in ViLT's variant."""
    if style == "vilt":
        return nn.Sequential(
            nn.Linear(width, 4 * width), nn.LayerNorm(4 * width), nn.GELU(), nn.Dropout(0.1),
            nn.Linear(4 * width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1),
            nn.Linear(width, classes))
    return nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Dropout(0.3),
                         nn.Linear(width // 2, classes))


class ImageHead(nn.Module):
    """From a pooled token to a 64x64 image by transposed convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 64 * 8 * 8)
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, pooled: Tensor) -> Tensor:
        """Return ``(batch, 3, 64, 64)`` in normalised pixel values."""
        image: Tensor = self.layers(self.projection(pooled).view(-1, 64, 8, 8))
        return image


@dataclass
class Cache:
    """Keys and values of decoding: of the condition, once, and of the tokens so far."""

    condition: tuple[Tensor, Tensor]
    mask: Tensor | None
    past: tuple[Tensor, Tensor] | None = None
    length: int = 0


class TextHead(nn.Module):
    """One GPT-2 layer that attends to the backbone's tokens, and predicts the next token.

    Self-attention, then attention to the condition, then the feed-forward network, each with
    GPT-2's preceding norm and residual. The output layer is the token embedding unless untied.
    """

    def __init__(self, width: int, vocabulary: int, max_length: int, *, tied: bool = True,
                 heads: int = 4, condition_heads: int = 8) -> None:
        super().__init__()
        if width % heads or width % condition_heads:
            raise TapflError(f"the text generator has {heads} and {condition_heads} heads: the "
                             f"foundation's width must be a multiple of both, it is {width}")
        self.heads, self.condition_heads = heads, condition_heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.key_value, self.condition_out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.output = None if tied else nn.Linear(width, vocabulary, bias=False)
        self.apply(_gpt2_init)
        for residual in (self.out, self.condition_out, self.down):
            nn.init.normal_(residual.weight, std=0.02 / math.sqrt(2))

    @property
    def max_length(self) -> int:
        """The longest sequence that can be written."""
        return self.positions.num_embeddings

    def start(self, condition: Tensor, mask: Tensor | None) -> Cache:
        """Prepare to write under a condition ``(batch, tokens, width)``."""
        key, value = self.key_value(condition).chunk(2, dim=-1)
        return Cache((key, value), None if mask is None else mask[:, None, None, :])

    def forward(self, ids: Tensor, cache: Cache, places: Tensor | None = None) -> Tensor:
        """Return next-token logits for ``ids``, which follow what the cache has seen.

        With ``places (N,)`` among all rows laid end to end, only for these: ``(N, words)``.
        """
        step = ids.shape[1]
        position = torch.arange(cache.length, cache.length + step, device=ids.device)
        x = self.tokens(ids) + self.positions(position)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        if cache.past is not None:
            k, v = (torch.cat([old, new], dim=1)
                    for old, new in zip(cache.past, (k, v), strict=True))
        cache.past, cache.length = (k, v), cache.length + step
        # One new token sees everything before it; a whole sequence is masked causally.
        causal = None
        if step > 1:
            seen = torch.arange(k.shape[1], device=ids.device)
            causal = (seen[None, :] <= position[:, None])[None, None]
        x = x + self.out(attention(q, k, v, causal, self.heads))
        x = x + self.condition_out(attention(self.query(self.norm2(x)), *cache.condition,
                                             cache.mask, self.condition_heads))
        x = x + self.down(F.gelu(self.up(self.norm3(x)), approximate="tanh"))
        if places is not None:
            x = x.flatten(0, 1).index_select(0, places)
        weight = self.tokens.weight if self.output is None else self.output.weight
        return F.linear(self.norm(x), weight)

    @torch.no_grad()
    def generate(self, condition: Tensor, mask: Tensor | None, *, start: int, end: int, pad: int,
                 max_new_tokens: int) -> Tensor:
        """Decode greedily until every sequence has ended; ``pad`` follows the end token."""
        cache = self.start(condition, mask)
        token = torch.full((len(condition), 1), start, device=condition.device)
        ended = torch.zeros_like(token, dtype=torch.bool)
        written = []
        # Asking a GPU whether all have ended is a synchronisation: not after every token.
        every = LOOK_EVERY if token.is_cuda else 1
        for count in range(1, min(max_new_tokens, self.max_length) + 1):
            token = self(token, cache)[:, -1:].argmax(dim=-1)
            token = token.masked_fill(ended, pad)
            written.append(token)
            ended = ended | (token == end)
            if count % every == 0 and ended.all():
                break
        return torch.cat(written, dim=1)


def _gpt2_init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
