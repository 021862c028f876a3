"""Low-rank adaptation of frozen layers.

Frozen weights are in the foundation, once per process. What trains is kept apart, in blocks, and
is passed to the frozen layer only at the call, so that any number of stacks, experts and networks
can use the same frozen layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = 256  # the width of a small layer
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


@dataclass
class Dropout:
    """Dropout on LoRA's input, for one forward pass.

    The kernels draw it from seeds, one for each use, so that the backward pass can draw it again.
    """

    p: float = 0.0
    _seeds: Tensor | None = field(default=None, repr=False)
    _used: int = 0

    def __call__(self, h: Tensor) -> Tensor:
        """Return the input as LoRA sees it in training."""
        return F.dropout(h, self.p) if self.p else h

    def seed(self, device: torch.device) -> Tensor:
        """Return a seed that was not used before: two words on the device."""
        if self._seeds is None or self._used == len(self._seeds):
            self._seeds, self._used = torch.randint(2**31, (64, 2), device=device), 0
        self._used += 1
        return self._seeds[self._used - 1]


@dataclass(frozen=True)
class Factors:
    """LoRA of one linear layer, for all streams: what a layer adds is ``B A dropout(h)``.

    ``a`` is ``(streams * branches, columns, in)`` and ``b`` is ``(streams * branches, out,
    columns)``, already scaled and in the type of the computation. Where the tokens fall into two
    segments, one per modality, the first half of the columns acts on the tokens before ``cut`` and
    the second half on the others.
    """

    a: Tensor
    b: Tensor
    dropout: Dropout
    cut: int | None = None

    @functools.cached_property
    def seed(self) -> Tensor:
        """The seed of this layer's dropout, the same however often it is computed."""
        return self.dropout.seed(self.a.device)

    def linear(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``W h + bias + B A dropout(h)`` for ``h (streams, batch, tokens, in)``."""
        streams, width = h.shape[0], h.shape[3]
        # W + B A as one weight saves the products with A and B but, in training, costs its own
        # gradient; worth it for small layers, where each product costs more than its arithmetic.
        if (len(self.a) == streams and self.cut is None and not self.dropout.p
                and (width <= SMALL or not torch.is_grad_enabled())):
            merged = torch.baddbmm(weight.expand(streams, -1, -1), self.b, self.a)
            if streams == 1:
                return F.linear(h, merged[0], bias)
            out = h.reshape(streams, -1, width) @ merged.transpose(1, 2)
            return (out if bias is None else out + bias).view(*h.shape[:3], -1)
        return self._add(F.linear(h, weight, bias), h)

    def _add(self, base: Tensor, h: Tensor) -> Tensor:
        """Return ``base + B A dropout(h)``.

        The frozen layer's output is computed once per stream, for all branches.
        """
        streams, batch, tokens, width = h.shape
        count, columns, _ = self.a.shape
        branches = count // streams
        # Branches of a stream read the same input: their A are side by side in one product.
        low = self.dropout(h).reshape(streams, -1, width) @ self.a.reshape(
            streams, branches * columns, width).transpose(1, 2)
        if branches > 1:
            low = low.view(streams, -1, branches, columns).transpose(1, 2)
        low = low.reshape(count, batch, tokens, columns)
        if self.cut is not None:
            low = low * self._pattern(tokens, self.cut, h)
        base = branch(base, branches).reshape(count, batch * tokens, -1)
        out = torch.baddbmm(base, low.view(count, -1, columns), self.b.transpose(1, 2))
        return out.view(count, batch, tokens, -1)

    def _pattern(self, tokens: int, cut: int, like: Tensor) -> Tensor:
        """Return one where a token and a column belong together, ``(tokens, columns)``."""
        columns = self.a.shape[1]
        late_token = torch.arange(tokens, device=like.device) >= cut
        late_column = torch.arange(columns, device=like.device) >= columns // 2
        return (~(late_token[:, None] ^ late_column[None, :])).to(like.dtype)


def branch(x: Tensor, branches: int) -> Tensor:
    """Repeat every stream ``branches`` times, side by side."""
    if branches == 1:
        return x
    return x.unsqueeze(1).expand(-1, branches, *x.shape[1:]).flatten(0, 1)


Modules = Sequence[Sequence[Any]]  # [stream][segment]


def attention_factors(modules: Modules, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A and B of the packed query, key and value, for every stream.

    Columns go segment by segment, query before value; the key's rows of B are zero.
    """
    segments = len(modules[0])
    a = _stack([m for stream in modules for s in stream for m in (s.query.a, s.value.a)], dtype)
    a = a.view(len(modules), -1, a.shape[2])
    each = _stack([m for stream in modules for s in stream for m in (s.query.b, s.value.b)], dtype,
                  ALPHA_PER_RANK)
    width, rank = each.shape[1:]
    # (streams, segments, query or value, width, rank) -> (streams, 3 width, segments 2 rank)
    query, value = each.view(len(modules), segments, 2, width, rank).permute(2, 0, 3, 1, 4)
    zero = torch.zeros_like(query)
    rows = [torch.stack(pair, dim=3) for pair in ((query, zero), (zero, zero), (zero, value))]
    b = torch.stack(rows, dim=1)
    return a, b.reshape(len(modules), 3 * width, segments * 2 * rank)


def expert_factors(modules: Modules, role: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A and B of an expert's ``up`` or ``down``, for every stream."""
    count = len(modules)
    loras = [getattr(s, role) for stream in modules for s in stream]
    a = _stack([m.a for m in loras], dtype)
    b = _stack([m.b for m in loras], dtype, ALPHA_PER_RANK)
    outputs = b.shape[1]
    b = b.view(count, -1, *b.shape[1:]).transpose(1, 2)
    return a.view(count, -1, a.shape[2]), b.reshape(count, outputs, -1)


def _stack(parameters: Sequence[Tensor], dtype: torch.dtype, scale: float = 1) -> Tensor:
    stacked = torch.stack([*parameters])
    return (stacked if scale == 1 else stacked * scale).to(dtype)
