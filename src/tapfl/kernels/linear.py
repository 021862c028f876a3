"""A frozen linear layer and its LoRA as one matrix product; see ``columns``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tapfl.kernels.columns import Columns, power


@triton.jit
def _join(weight, b, bias, full, repeated, W: tl.constexpr, K: tl.constexpr, USED: tl.constexpr,
          BW: tl.constexpr, BR: tl.constexpr):
    """Write a row of ``[W | B | bias | 0]``."""
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    own = tl.program_id(0) % repeated
    column, beside = tl.arange(0, BW), tl.arange(0, BR)
    tl.store(full + row * K + column, tl.load(weight + own * W + column, column < W), column < W)
    low = tl.load(b + row * USED + beside, beside < USED, other=0.0)
    low = tl.where(beside == USED, tl.load(bias + own), low)
    tl.store(full + row * K + W + beside, low, beside < K - W)


def join(weight: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """Return ``[W | B | bias | 0]``: ``weight (out, W)``, ``bias (out)``, ``b (S, n * out, used)``.

    Where B is for several branches, W and the bias are repeated for each.
    """
    streams, outputs, used = b.shape
    total, width = Columns(used).total, weight.shape[1]
    full = weight.new_empty(streams, outputs, width + total)
    _join[(outputs, streams)](
        weight.contiguous(), b.contiguous(), bias.contiguous(), full, len(weight), W=width,
        K=width + total, USED=used, BW=power(width), BR=power(total), num_warps=4)
    return full


class FrozenLinear(torch.autograd.Function):
    """``[h | low | 1] [W | B | bias]^T``: a frozen layer and its LoRA, in one matrix product."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, b: Tensor) -> Tensor:
        """Take ``h (S, rows, K)``, the rest as in ``join``."""
        full = join(weight, b, bias)
        ctx.save_for_backward(h, full)
        ctx.used, ctx.width = b.shape[2], weight.shape[1]
        return torch.bmm(h, full.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of h and b."""
        h, full = ctx.saved_tensors
        dh = torch.bmm(dout, full) if ctx.needs_input_grad[0] else None
        db = None
        if ctx.needs_input_grad[3]:
            # All columns after h, used or not: a round number of them is faster.
            db = torch.bmm(dout.transpose(1, 2), h[:, :, ctx.width:])[:, :, :ctx.used]
        return dh, None, None, db
