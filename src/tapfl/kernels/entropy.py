"""Cross-entropy over a vocabulary, from half-precision logits.

Torch takes it from an fp32 copy of the logits, through two more tensors of that size. Here they are
read once forward, and once backward to write their gradient; fp32 is only in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK, WARPS = 2048, 4  # words that a program takes at a time; not tuned


@triton.jit
def _forward(logits, target, loss, level, words, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * words
    # Each place of the block keeps its own maximum and sum; they are put together at the end.
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        v = tl.load(base + word, word < words, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, v)
        total = total * tl.exp(top - new) + tl.exp(v - new)
        top = new
    peak = tl.max(top, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    wanted = tl.load(target + row)
    chosen = tl.load(base + wanted, wanted >= 0, other=0.0).to(tl.float32)
    tl.store(level + row, lse)
    tl.store(loss + row, tl.where(wanted >= 0, lse - chosen, 0.0))


@triton.jit
def _backward(logits, target, level, dloss, dlogits, words, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * words + word
    wanted = tl.load(target + row)
    v = tl.load(logits + at, word < words, other=0.0).to(tl.float32)
    p = tl.exp(v - tl.load(level + row)) - tl.where(word == wanted, 1.0, 0.0)
    grad = tl.where(wanted >= 0, p * tl.load(dloss + row), 0.0)
    tl.store(dlogits + at, grad.to(dlogits.dtype.element_ty), word < words)


class CrossEntropy(torch.autograd.Function):
    """The loss of every row of ``logits (N, words)``; zero where ``target (N)`` is negative."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Return ``(N,)`` in fp32."""
        logits, target = logits.contiguous(), target.contiguous()
        rows, words = logits.shape
        loss, level = (torch.empty(rows, device=logits.device) for _ in range(2))
        _forward[(rows,)](logits, target, loss, level, words, BLOCK=BLOCK, num_warps=WARPS)
        ctx.save_for_backward(logits, target, level)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits, in their type."""
        logits, target, level = ctx.saved_tensors
        rows, words = logits.shape
        dlogits = torch.empty_like(logits)
        _backward[(rows, triton.cdiv(words, BLOCK))](
            logits, target, level, dloss.contiguous(), dlogits, words, BLOCK=BLOCK,
            num_warps=WARPS)
        return dlogits, None
