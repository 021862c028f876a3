"""Low-rank adaptation of frozen layers.

Frozen weights live in the foundation, once per process. What trains is held apart, in blocks, and
meets the frozen layer only at the call, so that any number of stacks, experts and networks can
stand on the same frozen layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHA_PER_RANK = 2  # alpha = 2 rank, so the product is scaled by 2 at every rank


class LoRA(nn.Module):
    """The update B A of one linear layer: A is ``(rank, in)``, B is ``(out, rank)`` and zero."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))


class ConvLoRA(nn.Module):
    """The update of a convolution: A is a convolution of the same kernel, B is 1x1 and zero."""

    def __init__(self, convolution: nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.stride = convolution.stride
        kernel = convolution.weight.shape[2:]
        self.a = nn.Parameter(torch.empty(rank, convolution.in_channels, *kernel))
        self.b = nn.Parameter(torch.zeros(convolution.out_channels, rank, 1, 1))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor, dropout: float) -> Tensor:
        """Return what is added to the frozen convolution's output."""
        low = F.conv2d(F.dropout(x, dropout), self.a.to(x.dtype), stride=self.stride)
        return F.conv2d(low, self.b.to(x.dtype)) * ALPHA_PER_RANK


class AttentionLoRA(nn.Module):
    """LoRA on the query and the value of one attention."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.query = LoRA(width, width, rank)
        self.value = LoRA(width, width, rank)


class ExpertLoRA(nn.Module):
    """LoRA on both linear layers of a feed-forward network: what makes it an expert."""

    def __init__(self, width: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.up = LoRA(width, hidden, rank)
        self.down = LoRA(hidden, width, rank)


@dataclass(frozen=True)
class Routing:
    """Which LoRA adapts which part of a layer's input.

    A layer's input is ``(streams, batch, tokens, width)``. Its tokens fall into segments, one per
    modality, of the given ``lengths``. ``modules[segment]`` lists the LoRA modules that adapt the
    segment, stream by stream; a multiple of the number of streams branches every stream.
    """

    modules: Sequence[Sequence[nn.Module]]
    lengths: Sequence[int]
    dropout: float = 0.0

    def drop(self, h: Tensor) -> Tensor:
        """Return the input as LoRA sees it in training."""
        return F.dropout(h, self.dropout) if self.dropout else h

    def add(self, base: Tensor, h: Tensor, role: str) -> Tensor:
        """Return ``base + B A h``, with ``(streams * branches, ...)`` streams.

        ``base`` is the frozen layer's output, computed once per stream whatever the branches.
        """
        streams = h.shape[0]
        pieces, start = [], 0
        for modules, length in zip(self.modules, self.lengths, strict=True):
            loras = [getattr(m, role) for m in modules]
            whole = length == h.shape[2]
            pieces.append(_low_rank(h if whole else h.narrow(2, start, length), loras))
            start += length
        delta = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return branch(base, delta.shape[0] // streams) + delta


def branch(x: Tensor, branches: int) -> Tensor:
    """Repeat every stream ``branches`` times, side by side."""
    if branches == 1:
        return x
    return x.unsqueeze(1).expand(-1, branches, *x.shape[1:]).flatten(0, 1)


def _low_rank(h: Tensor, loras: Sequence[LoRA]) -> Tensor:
    """Return every LoRA's ``B A h``; all streams in two batched products."""
    streams, batch, tokens, width = h.shape
    count = len(loras)
    a = torch.stack([m.a for m in loras]).to(h.dtype)
    b = torch.stack([m.b for m in loras]).to(h.dtype) * ALPHA_PER_RANK
    rank = a.shape[1]
    flat = h.reshape(streams, batch * tokens, width)
    # Branches of a stream read the same input: their A stand side by side in one product.
    low = flat @ a.view(streams, -1, width).transpose(1, 2)
    low = low.view(streams, batch * tokens, count // streams, rank).transpose(1, 2)
    return (low.reshape(count, batch * tokens, rank) @ b.transpose(1, 2)).view(
        count, batch, tokens, -1
    )
