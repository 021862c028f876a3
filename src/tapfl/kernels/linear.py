"""A frozen linear layer and its LoRA as one matrix product; see ``columns``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tapfl.kernels.columns import Columns


class FrozenLinear(torch.autograd.Function):
    """``[h | low | 1] [W | B | bias]^T``: a frozen layer and its LoRA, in one matrix product."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, b: Tensor) -> Tensor:
        """Take ``h (S, rows, K)``, ``weight (out, W)``, ``bias (out)``, ``b (S, n * out, used)``.

        Where B is for several branches, W and the bias are repeated for each.
        """
        streams, outputs, used = b.shape
        repeats = outputs // len(weight)
        if repeats > 1:
            weight, bias = weight.repeat(repeats, 1), bias.repeat(repeats)
        zeros = b.new_zeros(1, 1, 1).expand(streams, outputs, Columns(used).total - used - 1)
        full = torch.cat([weight.expand(streams, -1, -1), b,
                          bias.view(1, -1, 1).expand(streams, -1, -1), zeros], dim=2)
        ctx.save_for_backward(h, full)
        ctx.used, ctx.width = used, weight.shape[1]
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
