"""The network: frozen foundation, trainable blocks, and how a batch passes through them."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tapfl.blocks import Ownership, check_block, decoder_block
from tapfl.config import Config
from tapfl.errors import TapflError
from tapfl.model.backbone import (
    Adapter,
    RoutedBackbone,
    StandardBackbone,
    Tokens,
    backbone_blocks,
)
from tapfl.model.decoders import ImageHead, TextHead, classification_head
from tapfl.model.encoder import EncoderBlock, ImageNormalizer
from tapfl.model.foundation import Foundation, build_foundation
from tapfl.model.layer import Residual
from tapfl.model.lora import Dropout
from tapfl.model.weights import seeded
from tapfl.tasks import (
    IMAGE_GENERATION,
    MODALITIES,
    TEXT_GENERATION,
    Batch,
    Task,
    sample_losses,
    task_loss,
)


@dataclass
class Outputs:
    """The outputs of the network for a batch.

    ``prediction`` holds class logits, next-token logits (on request only at the batch's ``places``,
    where that is set) or images. ``latents`` (on request) are
    the private path's mean tokens after stage 1, by modality, for DisentAFL.
    """

    prediction: Tensor
    latents: dict[str, Tensor]


class Network(nn.Module):
    """The model of a server or of a client: the blocks of its tasks on a frozen foundation.

    One instance serves every client of a process, whose blocks are copied in before use. Several
    networks may share one foundation. A network for some tasks gives the same outputs as a
    larger one with the same values in its blocks.

    ``adapter``, if set, acts on the output of every feed-forward network: called with the place
    (``encoder/image``, ``mote``, ``mome``, ...), the layer's index there and the output.
    """

    def __init__(self, foundation: Foundation, tasks: Mapping[str, Task], config: Config,
                 seed: int = 0) -> None:
        super().__init__()
        self.foundation = foundation
        self.config = config
        self.ownership = Ownership(dict(tasks), config.backbone.kind, foundation.trained_encoders)
        self.adapter: Adapter | None = None
        self.blocks: Any = nn.ModuleDict()
        # On the meta device nothing is allocated, elsewhere the CPU draws the initial values.
        meta = next(foundation.parameters()).is_meta
        with torch.device("meta" if meta else "cpu"):
            self.normalize = ImageNormalizer()
            for name, build in self._builders().items():
                self.add_block(name, build, seed)

    def add_block(self, name: str, build: Callable[[], nn.Module], seed: int = 0) -> None:
        """Add a block whose initial values depend on its name and the seed alone."""
        with seeded(zlib.crc32(f"{seed}:{name}".encode())):
            self.blocks[check_block(name)] = build().to(self.normalize.mean.device)

    def _builders(self) -> dict[str, Callable[[], nn.Module]]:
        foundation, lora = self.foundation, self.config.lora
        names = self.ownership.all_blocks()
        builders = backbone_blocks(names, list(foundation.layers),
                                   lora.attention_rank, lora.expert_rank)
        for name in names:
            room, _, rest = name.partition("/")
            if room == "encoder":
                builders[name] = functools.partial(
                    EncoderBlock, foundation.encoders[rest], lora.encoder_rank)
            elif room == "decoder":
                builders[name] = functools.partial(self._decoder, rest)
        return builders

    def _decoder(self, name: str) -> nn.Module:
        width = self.foundation.width
        if name == IMAGE_GENERATION:
            return ImageHead(width)
        if name == TEXT_GENERATION:
            return TextHead(width, self.foundation.vocabulary, self.foundation.max_text,
                            tied=self.config.decoder.tie_embeddings)
        return classification_head(self.foundation.head, width, self.ownership.task(name).classes)

    def forward(self, task: str, batch: Batch, latents: bool = False,
                counted: bool = False) -> Outputs:
        """Return the outputs of a batch of one task; ``counted`` omits most tokens of padding."""
        spec = self.ownership.task(task)
        tokens, after = self.encode(spec, batch)
        with self._autocast(tokens.values):
            prediction = self._decode(spec, tokens, batch, batch.places if counted else None)
        if not latents:
            return Outputs(prediction, {})
        private = after.first()
        return Outputs(prediction, {m: tokens.pool_segment(private, m) for m in spec.modalities})

    def loss(self, task: str, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the task's loss, unweighted."""
        spec, prediction, real = self.ownership.task(task), outputs.prediction, batch.real
        target, mask = self._target(spec, batch)
        if spec.kind == TEXT_GENERATION and prediction.dim() == 2:  # of the places alone
            counts = batch.real_targets()
            assert counts is not None
            target, mask = (x.flatten()[batch.places] for x in (target, counts))
            real = None
        return task_loss(spec, prediction, target, mask, real, batch.whole, self._entropies())

    def sample_losses(self, task: str, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the loss of every sample."""
        spec = self.ownership.task(task)
        return sample_losses(spec, outputs.prediction, *self._target(spec, batch))

    def _target(self, task: Task, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return what the outputs should be, and for texts where that is no padding."""
        if task.is_classification:
            return _need(task, batch.label, "label"), None
        if task.kind == IMAGE_GENERATION:
            return self.normalize(_need(task, batch.image, "image")), None
        target = _need(task, batch.answer, "answer")[:, 1:]
        return target, None if batch.answer_mask is None else batch.answer_mask[:, 1:]

    def _entropies(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the kernel for the loss of tokens, where kernels are in use."""
        if not self.foundation.uses_kernels:
            return None
        from tapfl.model import fast

        return fast.entropies

    @torch.no_grad()
    def generate(self, task: str, batch: Batch, *, start: int, end: int, pad: int,
                 max_new_tokens: int = 64) -> Tensor:
        """Write an answer to every sample: token ids, padded after the end token."""
        spec = self.ownership.task(task)
        if spec.kind != TEXT_GENERATION:
            raise TapflError(f"task '{task}' is {spec.kind}: only text_generation writes text")
        if max_new_tokens < 1:
            raise TapflError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        tokens, _ = self.encode(spec, batch, dropout=0.0)
        head = self.blocks[decoder_block(spec)]
        with self._autocast(tokens.values):
            written: Tensor = head.generate(
                tokens.values, tokens.mask, start=start, end=end, pad=pad,
                max_new_tokens=max_new_tokens)
        return written

    def encode(self, task: Task, batch: Batch,
               dropout: float | None = None) -> tuple[Tokens, Residual]:
        """Run encoders and backbone: the output tokens, and the paths after stage 1."""
        if dropout is None:
            dropout = self.config.lora.dropout if self.training else 0.0
        dropout_masks = Dropout(dropout)
        _check_text(batch.text, batch.text_mask, "text")
        _check_text(batch.answer, batch.answer_mask, "answer")
        parts, masks = {}, {}
        for modality in task.modalities:
            masks[modality] = batch.text_mask if modality == "text" else None
            parts[modality] = self._modality(task, modality, batch, dropout_masks)
        tokens = Tokens.join(parts, masks)
        kind = RoutedBackbone if self.ownership.backbone == "routed" else StandardBackbone
        backbone = kind(list(self.foundation.layers), self.blocks, dropout_masks, self.adapter)
        values, after = backbone(tokens, task.kind)
        if self.foundation.norm is not None:
            values = self.foundation.norm(values)
        return Tokens(values, tokens.mask, tokens.lengths), after

    def _modality(self, task: Task, modality: str, batch: Batch, dropout: Dropout) -> Tensor:
        place = f"encoder/{modality}"
        adapter = self.adapter and functools.partial(self.adapter, place)
        if modality == "image":
            inputs, mask = self.normalize(_need(task, batch.image, "image")), None
        else:
            inputs, mask = _need(task, batch.text, "text"), batch.text_mask
            if inputs.shape[1] > self.foundation.max_text:
                raise TapflError(
                    f"text of {inputs.shape[1]} tokens is longer than the "
                    f"{self.foundation.max_text} that {self.foundation.name} allows")
        tokens: Tensor = self.foundation.encoders[modality](
            inputs, mask, self.blocks[place] if place in self.blocks else None, dropout,  # noqa: SIM401
            adapter)
        return tokens

    def _decode(self, task: Task, tokens: Tokens, batch: Batch, places: Tensor | None) -> Tensor:
        head = self.blocks[decoder_block(task)]
        if task.kind != TEXT_GENERATION:
            prediction: Tensor = head(tokens.pool(tokens.values))
            return prediction
        answer = _need(task, batch.answer, "answer")
        assert isinstance(head, TextHead)
        if answer.shape[1] - 1 > head.max_length:
            raise TapflError(f"answer of {answer.shape[1]} tokens is longer than the "
                             f"{head.max_length} that {self.foundation.name} allows")
        logits: Tensor = head(answer[:, :-1], head.start(tokens.values, tokens.mask), places)
        return logits

    def _autocast(self, like: Tensor) -> contextlib.AbstractContextManager[Any]:
        """Decoders keep fp32 parameters; they compute in the type of the frozen base."""
        if self.foundation.dtype.itemsize >= 4:
            return contextlib.nullcontext()
        return torch.autocast(like.device.type, self.foundation.dtype)


def build_network(
    config: Config, tasks: Mapping[str, Task], owned: Iterable[str] | None = None,
    device: str = "cpu", seed: int = 0, foundation: Foundation | None = None,
) -> Network:
    """Build the network of a server, or of a client that owns some of the tasks.

    Only the encoders and stacks that the tasks use are built. Pass ``foundation`` to use a
    frozen base that exists already.
    """
    names = list(tasks) if owned is None else list(owned)
    chosen = {name: Ownership(tasks).task(name) for name in names}
    if foundation is None:
        modalities = [m for m in MODALITIES if any(m in t.modalities for t in chosen.values())]
        foundation = build_foundation(config.foundation, modalities,
                                      config.backbone.layers_per_stage, device)
    network = Network(foundation, chosen, config, seed)
    return network if device == "meta" else network.to(device)


def _check_text(ids: Tensor | None, mask: Tensor | None, what: str) -> None:
    if ids is not None and (ids.dim() != 2 or ids.shape[1] < (2 if what == "answer" else 1)):
        raise TapflError(f"{what}: expected token ids of shape (batch, tokens), "
                         f"got {tuple(ids.shape)}")
    if mask is not None and (ids is None or mask.dtype != torch.bool or mask.shape != ids.shape):
        raise TapflError(f"{what}_mask: expected booleans in the shape of the ids, "
                         f"got {mask.dtype} {tuple(mask.shape)}")


def _need(task: Task, value: Tensor | None, what: str) -> Tensor:
    if value is None:
        raise TapflError(f"task '{task.name}' needs batch.{what}, which is missing")
    return value
