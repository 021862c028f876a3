"""The steps of a frozen layer by kernels: the same function in fewer passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapfl.kernels.attention import HEAD_SIZES, Attention, max_tokens
from tapfl.kernels.columns import Columns
from tapfl.kernels.entropy import CrossEntropy
from tapfl.kernels.gelu import GeluPrologue
from tapfl.kernels.linear import FrozenLinear
from tapfl.kernels.norm import NormPrologue
from tapfl.model.layer import Keys, Packed, Residual, TransformerLayer, attend_packed
from tapfl.model.lora import Factors

MAX_WIDTH = 1024  # a row of tokens is normalised in registers


def suits(layer: TransformerLayer) -> bool:
    """Return whether the kernels can compute a layer."""
    return (layer.suits_kernels and layer.width <= MAX_WIDTH
            and layer.width // layer.heads in HEAD_SIZES)


def attend(layer: TransformerLayer, tokens: Residual, keys: Keys, lora: Factors | None,
           packed: Packed) -> Residual:
    """Self-attention: norm and LoRA's A in one pass, one product, attention, one product."""
    streams, batch, length, width = tokens.shape
    x, h, branches, b = _prologue(layer.norm1 if layer.pre_norm else None, tokens, lora)
    qkv = _linear(h, *packed, b).view(streams, batch, length, branches, 3 * width)
    if length <= max_tokens(width // layer.heads, qkv.device):
        out = _apply(Attention, qkv, keys.mask, layer.heads, keys.cut, keys.privates)
    else:
        plain = qkv.permute(0, 3, 1, 2, 4).reshape(-1, batch, length, 3 * width)
        out = attend_packed(plain, keys, layer.heads)
    return Residual(x, layer.out(out), None if layer.pre_norm else layer.norm1)


def feed_forward(layer: TransformerLayer, tokens: Residual, up: Factors | None,
                 down: Factors | None, adapter: Callable[[Tensor], Tensor] | None) -> Residual:
    """Feed-forward network: norm, product, GELU, product."""
    streams, batch, length, width = tokens.shape
    x, h, branches, b = _prologue(layer.norm2 if layer.pre_norm else None, tokens, up)
    u = _linear(h, layer.up.weight, layer.up.bias, b)
    u = u.view(streams, batch * length, branches, layer.hidden)
    a, b, columns, p, seed = _arranged(down, streams * branches, length, u.device)
    h = _apply(GeluPrologue, u, a, columns, p, seed)
    out = _linear(h, layer.down.weight, layer.down.bias, b)
    out = out.view(streams * branches, batch, length, width)
    return Residual(x, out if adapter is None else adapter(out),
                    None if layer.pre_norm else layer.norm2)


def entropies(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of every row; zero where the target is negative."""
    losses: Tensor = _apply(CrossEntropy, logits, target)
    return losses


def total(tokens: Residual) -> Tensor:
    """Return the norm of a sum, in one pass."""
    return _prologue(None, tokens, None)[1].view(tokens.shape)


def _prologue(norm: nn.LayerNorm | None, tokens: Residual,
              lora: Factors | None) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Return the residual that goes on, what the layer reads with LoRA's columns, branches, and B.

    With ``norm``, which comes before the layer, the sum goes on. Without it, the norm is the one
    that the sum still needs, if any, and the result both goes on and is read.
    """
    streams, _, length, width = tokens.shape
    post, norm = norm is None, norm or tokens.norm
    a, b, columns, p, seed = _arranged(lora, streams, length, tokens.x.device)
    added = None if tokens.added is None else tokens.added.reshape(streams, -1, width)
    x = tokens.x.reshape(tokens.x.shape[0], -1, width)
    if norm is None and added is None and columns is None:
        return tokens.x, x, 1, None
    weights = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    goes_on, h = _apply(NormPrologue, x, added, a, *weights, columns, p, seed, post)
    return goes_on.view(tokens.shape), h, columns.branches if columns else 1, b


Arranged = tuple[Tensor | None, Tensor | None, Columns | None, float, Tensor]


def _arranged(lora: Factors | None, streams: int, length: int, device: torch.device) -> Arranged:
    """Arrange LoRA's factors as the kernels need them: per stream, branches side by side."""
    if lora is None:
        return None, None, None, 0.0, torch.empty(0, dtype=torch.int64, device=device)
    count, each, width = lora.a.shape
    branches = count // streams
    a = lora.a.reshape(streams, branches * each, width)
    b = lora.b
    if branches > 1:  # a branch reads its own columns alone
        parts = b.view(streams, branches, -1, each).unbind(1)
        b = torch.stack([F.pad(part, (i * each, (branches - 1 - i) * each))
                         for i, part in enumerate(parts)], dim=1)
        b = b.view(streams, -1, branches * each)
    cut = length if lora.cut is None else lora.cut
    columns = Columns(branches * each, branches, length, cut, each // 2)
    return a, b, columns, lora.dropout.p, lora.seed


def _linear(h: Tensor, weight: Tensor, bias: Tensor | None, b: Tensor | None) -> Tensor:
    if b is None:
        return F.linear(h, weight, bias)
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    out: Tensor = _apply(FrozenLinear, h, weight, bias, b)
    return out


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]
