"""The backbone between encoders and decoders: routed (MoTE, MoME) or standard.

It holds no parameters: frozen layers come from the foundation, LoRA from the network's blocks.
All paths share the frozen layers, so they run as one batch of streams.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tapfl.blocks import STANDARD_BACKBONE, Route, attention_block, expert_block, paths
from tapfl.model.layer import TransformerLayer
from tapfl.model.lora import AttentionLoRA, ExpertLoRA, Routing

Adapter = Callable[[str, int, Tensor], Tensor]


@dataclass(frozen=True)
class Tokens:
    """A sequence: the tokens of one or more modalities, side by side.

    ``mask`` is true on real tokens; None means that nothing is padded.
    """

    values: Tensor
    mask: Tensor | None
    lengths: Mapping[str, int]

    @classmethod
    def join(cls, parts: Mapping[str, Tensor], masks: Mapping[str, Tensor | None]) -> Tokens:
        """Put the modalities' tokens next to each other."""
        values = torch.cat(list(parts.values()), dim=1)
        mask = None
        if any(m is not None for m in masks.values()):
            mask = torch.cat([
                parts[name].new_ones(parts[name].shape[:2], dtype=torch.bool) if m is None else m
                for name, m in masks.items()], dim=1)
        return cls(values, mask, {name: part.shape[1] for name, part in parts.items()})

    def pool(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over real tokens."""
        return masked_mean(values, self.mask)

    def pool_segment(self, values: Tensor, modality: str) -> Tensor:
        """Return the mean of ``values`` over the real tokens of one modality."""
        start = 0
        for name, length in self.lengths.items():
            if name == modality:
                mask = None if self.mask is None else self.mask[:, start:start + length]
                return masked_mean(values[:, start:start + length], mask)
            start += length
        raise KeyError(modality)

    def may_attend(self) -> Tensor | None:
        """Every token to every real token, ``(1, batch, 1, 1, tokens)``."""
        return None if self.mask is None else self.mask[None, :, None, None, :]

    def may_attend_privately(self) -> Tensor | None:
        """As ``may_attend``, but only within a modality; ``(1, batch or 1, 1, tokens, tokens)``."""
        everything = self.may_attend()
        if len(self.lengths) == 1:
            return everything
        # Which modality a position belongs to, counted without a copy from the host.
        position = torch.arange(self.values.shape[1], device=self.values.device)
        cuts = itertools.accumulate(list(self.lengths.values())[:-1])
        modality = torch.stack([position >= cut for cut in cuts]).sum(dim=0)
        own = (modality[:, None] == modality[None, :])[None, None, None]
        return own if everything is None else own & everything


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the token axis, padding left out."""
    if mask is None:
        return values.mean(dim=1)
    weights = mask.unsqueeze(-1).to(values.dtype)
    return (values * weights).sum(dim=1) / weights.sum(dim=1)


def backbone_blocks(
    names: Sequence[str], layers: Sequence[TransformerLayer], attention_rank: int, expert_rank: int,
) -> dict[str, Callable[[], nn.Module]]:
    """Return how to build each named backbone block; a stage block has one LoRA per layer."""
    width, hidden, stage = layers[0].width, layers[0].hidden, len(layers) // 2

    def attention(count: int) -> nn.Module:
        return nn.ModuleList(AttentionLoRA(width, attention_rank) for _ in range(count))

    def expert(count: int) -> nn.Module:
        return nn.ModuleList(ExpertLoRA(width, hidden, expert_rank) for _ in range(count))

    def standard() -> nn.Module:
        return nn.ModuleDict({"attention": attention(2 * stage), "expert": expert(2 * stage)})

    builders: dict[str, Callable[[], nn.Module]] = {}
    for name in names:
        if name == STANDARD_BACKBONE:
            builders[name] = standard
        elif name.startswith(("mote/", "mome/")):
            builders[name] = (lambda: attention(stage)) if name.endswith("/attention") else (
                lambda: expert(stage))
    return builders


@dataclass(frozen=True)
class RoutedBackbone:
    """Two stages, four paths through them, and the mean of the four.

    Stage 1 routes by modality: a modality's stack sees that modality's tokens alone, the shared
    stack sees them all. Stage 2 routes by task kind and sees all tokens. The experts follow the
    other axis. Two paths of one stack share its first attention, which is computed once.
    """

    layers: Sequence[TransformerLayer]
    blocks: Any  # the network's ModuleDict
    dropout: float
    adapter: Adapter | None

    def __call__(self, tokens: Tokens, kind: str) -> tuple[Tensor, Tensor]:
        """Return the output and, for DisentAFL, the private path after stage 1."""
        routes = {m: paths(m, kind) for m in tokens.lengths}
        stage = len(self.layers) // 2
        x = tokens.values.unsqueeze(0)
        private, everything = tokens.may_attend_privately(), tokens.may_attend()
        for depth in range(stage):
            # The first layer's input has not split into paths yet: one stream per stack will do.
            every = 2 if depth == 0 else 1
            count = 4 // every
            mask = everything
            if private is not everything and private is not None:
                mask = _per_stream(private, everything, count)
            x = self._attend(x, "mote", depth, self.layers[depth], mask, tokens,
                             {m: [r.mote_stack for r in rs[::every]] for m, rs in routes.items()})
            x = self._experts(x, "mote", depth, self.layers[depth], tokens, routes)
        latent = x[0]
        for depth in range(stage):
            layer = self.layers[stage + depth]
            x = self._attend(x, "mome", depth, layer, everything, tokens,
                             {m: [r.mome_stack for r in rs] for m, rs in routes.items()})
            x = self._experts(x, "mome", depth, layer, tokens, routes)
        return x.mean(dim=0), latent

    def _routing(self, names: Mapping[str, Sequence[str]], depth: int, tokens: Tokens) -> Routing:
        blocks = [[self.blocks[n][depth] for n in names[m]] for m in tokens.lengths]
        if all(group == blocks[0] for group in blocks):  # the same for all modalities
            return Routing(blocks[:1], [tokens.values.shape[1]], self.dropout)
        return Routing(blocks, list(tokens.lengths.values()), self.dropout)

    def _attend(self, x: Tensor, stage: str, depth: int, layer: TransformerLayer,
                mask: Tensor | None, tokens: Tokens, stacks: Mapping[str, list[str]]) -> Tensor:
        names = {m: [attention_block(stage, s) for s in each] for m, each in stacks.items()}
        return layer.attend(x, mask, self._routing(names, depth, tokens))

    def _experts(self, x: Tensor, stage: str, depth: int, layer: TransformerLayer,
                 tokens: Tokens, routes: Mapping[str, Sequence[Route]]) -> Tensor:
        names = {m: [expert_block(stage, route) for route in each] for m, each in routes.items()}
        routing = self._routing(names, depth, tokens)
        return layer.feed_forward(
            x, routing, routing, self.adapter and functools.partial(self.adapter, stage, depth))


@dataclass(frozen=True)
class StandardBackbone:
    """The same frozen layers without routing: one LoRA for everyone, one block."""

    layers: Sequence[TransformerLayer]
    blocks: Any  # the network's ModuleDict
    dropout: float
    adapter: Adapter | None

    def __call__(self, tokens: Tokens, kind: str) -> tuple[Tensor, Tensor]:
        """Return the output and the state after the first half of the layers."""
        block, length = self.blocks[STANDARD_BACKBONE], [tokens.values.shape[1]]
        x = latent = tokens.values.unsqueeze(0)
        for depth, layer in enumerate(self.layers):
            x = layer.attend(x, tokens.may_attend(),
                             Routing([[block["attention"][depth]]], length, self.dropout))
            expert = Routing([[block["expert"][depth]]], length, self.dropout)
            x = layer.feed_forward(
                x, expert, expert,
                self.adapter and functools.partial(self.adapter, STANDARD_BACKBONE, depth))
            if depth == len(self.layers) // 2 - 1:
                latent = x
        return x[0], latent[0]


def _per_stream(private: Tensor, everything: Tensor | None, count: int) -> Tensor:
    """Stack masks: the first half of the streams is private, the second sees everything."""
    if everything is None:
        everything = torch.ones_like(private)
    everything = everything.expand_as(private)
    return torch.cat([private.expand(count // 2, *private.shape[1:]),
                      everything.expand(count // 2, *private.shape[1:])])


