"""The backbone between encoders and decoders: routed (MoTE, MoME) or standard.

It holds no parameters: frozen layers come from the foundation, LoRA from the network's blocks.
All paths share the frozen layers, so they run as one batch of streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tapfl.blocks import STANDARD_BACKBONE, Route, attention_block, expert_block, paths
from tapfl.model.layer import Keys, Residual, TransformerLayer
from tapfl.model.lora import (
    AttentionLoRA,
    Dropout,
    ExpertLoRA,
    Factors,
    attention_factors,
    expert_factors,
)

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

    def keys(self, privates: int = 0) -> Keys:
        """Every token to every real token; ``privates`` streams only within a modality."""
        if len(self.lengths) == 1:
            return Keys(self.mask)
        return Keys(self.mask, self.cut or 0, privates)

    @property
    def cut(self) -> int | None:
        """Where the second modality begins, if there are two."""
        return next(iter(self.lengths.values())) if len(self.lengths) > 1 else None


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the token axis, without padding."""
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

    Stage 1 routes by modality: in a modality's stack attention is masked to that modality's tokens;
    the shared stack sees all tokens. Stage 2 routes by task kind and sees all tokens. The experts
    follow the other axis. Two paths of one stack share its first attention, which is computed once.
    """

    layers: Sequence[TransformerLayer]
    blocks: Any  # the network's ModuleDict
    dropout: Dropout
    adapter: Adapter | None

    def __call__(self, tokens: Tokens, kind: str) -> tuple[Tensor, Residual]:
        """Return the output and, for DisentAFL, the state after stage 1, private paths first."""
        routes = {m: paths(m, kind) for m in tokens.lengths}
        stage = len(self.layers) // 2
        x = Residual(tokens.values.unsqueeze(0))
        for depth in range(stage):
            # The first layer's input has not split into paths yet: one stream per stack is enough.
            every = 2 if depth == 0 else 1
            stacks = {m: [r.mote_stack for r in rs[::every]] for m, rs in routes.items()}
            # In half of the streams attention stays within a modality.
            x = self._attend(x, "mote", depth, tokens.keys(privates=2 // every), tokens, stacks)
            x = self._experts(x, "mote", depth, tokens, routes)
        after = x
        for depth in range(stage):
            stacks = {m: [r.mome_stack for r in rs] for m, rs in routes.items()}
            x = self._attend(x, "mome", depth, tokens.keys(), tokens, stacks)
            x = self._experts(x, "mome", depth, tokens, routes)
        return x.total().mean(dim=0), after

    def _modules(self, names: Mapping[str, Sequence[str]], depth: int,
                 tokens: Tokens) -> tuple[list[list[nn.Module]], int | None]:
        """Return the LoRA modules by stream and segment, and where the segments are cut."""
        groups = [[self.blocks[n][depth] for n in names[m]] for m in tokens.lengths]
        if all(group == groups[0] for group in groups):  # the same for all modalities
            groups = groups[:1]
        return [list(stream) for stream in zip(*groups, strict=True)], (
            tokens.cut if len(groups) > 1 else None)

    def _attend(self, x: Residual, stage: str, depth: int, keys: Keys, tokens: Tokens,
                stacks: Mapping[str, list[str]]) -> Residual:
        names = {m: [attention_block(stage, s) for s in each] for m, each in stacks.items()}
        modules, cut = self._modules(names, depth, tokens)
        a, b = attention_factors(modules, x.x.dtype)
        return self._layer(stage, depth).attend(x, keys, Factors(a, b, self.dropout, cut))

    def _experts(self, x: Residual, stage: str, depth: int, tokens: Tokens,
                 routes: Mapping[str, Sequence[Route]]) -> Residual:
        names = {m: [expert_block(stage, route) for route in each] for m, each in routes.items()}
        modules, cut = self._modules(names, depth, tokens)
        up, down = (Factors(*expert_factors(modules, role, x.x.dtype), self.dropout, cut)
                    for role in ("up", "down"))
        return self._layer(stage, depth).feed_forward(
            x, up, down, self.adapter and functools.partial(self.adapter, stage, depth))

    def _layer(self, stage: str, depth: int) -> TransformerLayer:
        return self.layers[depth if stage == "mote" else len(self.layers) // 2 + depth]


@dataclass(frozen=True)
class StandardBackbone:
    """The same frozen layers without routing: one LoRA for all tasks, one block."""

    layers: Sequence[TransformerLayer]
    blocks: Any  # the network's ModuleDict
    dropout: Dropout
    adapter: Adapter | None

    def __call__(self, tokens: Tokens, kind: str) -> tuple[Tensor, Residual]:
        """Return the output and the state after the first half of the layers."""
        block, keys = self.blocks[STANDARD_BACKBONE], tokens.keys()
        x = after = Residual(tokens.values.unsqueeze(0))
        for depth, layer in enumerate(self.layers):
            a, b = attention_factors([[block["attention"][depth]]], x.x.dtype)
            x = layer.attend(x, keys, Factors(a, b, self.dropout))
            up, down = (
                Factors(*expert_factors([[block["expert"][depth]]], role, x.x.dtype), self.dropout)
                for role in ("up", "down"))
            x = layer.feed_forward(
                x, up, down,
                self.adapter and functools.partial(self.adapter, STANDARD_BACKBONE, depth))
            if depth == len(self.layers) // 2 - 1:
                after = x
        return x.total()[0], after
