"""Residual sum and LayerNorm before a frozen layer with LoRA; see ``columns``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tapfl.kernels.columns import FEW, SIZES, Columns, add_few, column_arguments, in_segment, power
from tapfl.kernels.dropout import dropout_arguments, keeps
from tapfl.kernels.project import factor_gradient, project

# Rows at a time and warps: the fastest of those tried on an H200.
FORWARD = (4, 4)
BACKWARD = {"few": (2, 2), "many": (16, 8)}


@triton.jit(do_not_specialize=SIZES)
def _norm_forward(x, y, s, h, mean, rstd, gamma, beta, rows, per_x, x_row, eps, W: tl.constexpr,
                  K: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr, HAS_Y: tl.constexpr,
                  KEEP: tl.constexpr, HAS_NORM: tl.constexpr):
    stream = tl.program_id(1)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.arange(0, BW)
    inside = (row < rows)[:, None] & (column < W)[None, :]
    at = row[:, None] * W + column[None, :]
    start = stream.to(tl.int64) * rows
    own = (stream // per_x).to(tl.int64) * rows + row[:, None]
    value = tl.load(x + own * x_row + column[None, :], inside, other=0.0)
    if HAS_Y:
        value += tl.load(y + start * W + at, inside, other=0.0)
        if KEEP:
            tl.store(s + start * W + at, value, inside)
    if HAS_NORM:
        v = value.to(tl.float32)
        m = tl.sum(v, 1) / W
        centred = tl.where(inside, v - m[:, None], 0.0)
        r = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / W + eps)
        tl.store(mean + start + row, m, row < rows)
        tl.store(rstd + start + row, r, row < rows)
        g = tl.load(gamma + column, column < W, other=0.0).to(tl.float32)
        b = tl.load(beta + column, column < W, other=0.0).to(tl.float32)
        value = (centred * r[:, None] * g[None, :] + b[None, :]).to(h.dtype.element_ty)
    tl.store(h + (start + row[:, None]) * K + column[None, :], value, inside)


@triton.jit(do_not_specialize=SIZES)
def _norm_backward(dh, dres, s, mean, rstd, gamma, a, seed, ds, rows, threshold, scale, tokens,
                   cut, second, per_branch, W: tl.constexpr, K: tl.constexpr,
                   USED: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
                   HAS_NORM: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
                   DROP: tl.constexpr, SEGMENTS: tl.constexpr):
    stream = tl.program_id(1)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.arange(0, BW)
    inside = (row < rows)[:, None] & (column < W)[None, :]
    at = row[:, None] * W + column[None, :]
    start = stream.to(tl.int64) * rows
    base = dh + start * K + row[:, None] * K
    grad = tl.load(base + column[None, :], inside, other=0.0).to(tl.float32)
    if USED:
        extra = tl.zeros((BM, BW), tl.float32)
        if USED <= FEW:
            extra = add_few(extra, dh + (start + row) * K + W, a + stream * USED * W, row, column,
                            rows, tokens, cut, second, per_branch, W, USED, SEGMENTS)
        else:
            for first in range(0, USED, BR):
                beside = first + tl.arange(0, BR)
                dlow = tl.load(base + W + beside[None, :],
                               (row < rows)[:, None] & (beside < USED)[None, :], other=0.0)
                if SEGMENTS:
                    dlow = in_segment(dlow, row, beside, tokens, cut, second, per_branch)
                part = (beside < USED)[:, None] & (column < W)[None, :]
                factor = tl.load(a + stream * USED * W + beside[:, None] * W + column[None, :],
                                 part, other=0.0)
                extra = tl.dot(dlow.to(factor.dtype), factor, extra, input_precision="ieee")
        if DROP:
            kept = keeps(seed, start.to(tl.int32) + row, 0, threshold, BW)
            extra = tl.where(kept, extra * scale, 0.0)
        grad += extra
    if BEFORE:  # what goes on is the norm's output
        grad += tl.load(dres + start * W + at, inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        v = tl.load(s + start * W + at, inside, other=0.0)
        m = tl.load(mean + start + row, row < rows, other=0.0)
        r = tl.load(rstd + start + row, row < rows, other=0.0)
        unit = tl.where(inside, (v.to(tl.float32) - m[:, None]) * r[:, None], 0.0)
        grad *= tl.load(gamma + column, column < W, other=0.0).to(tl.float32)[None, :]
        along = tl.sum(grad * unit, 1) / W
        level = tl.sum(grad, 1) / W
        grad = (grad - level[:, None] - unit * along[:, None]) * r[:, None]
    if AFTER:  # what goes on is its input
        grad += tl.load(dres + start * W + at, inside, other=0.0).to(tl.float32)
    tl.store(ds + start * W + at, grad.to(ds.dtype.element_ty), inside)


class NormPrologue(torch.autograd.Function):
    """``s = x + y``, ``n = LayerNorm(s)`` and ``h = [n | A dropout(n) | 1]``.

    Also returns what goes on as the residual: ``s`` where the norm comes before a layer, and
    ``n`` (``post``) where it comes after the sum. Without ``gamma`` there is no norm: ``n = s``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, a: Tensor | None, gamma: Tensor | None,
                beta: Tensor | None, eps: float, columns: Columns | None, p: float, seed: Tensor,
                post: bool) -> tuple[Tensor, Tensor]:
        """Take ``x (Sx, rows, W)``, ``y (S, rows, W)``, ``a (S, used, W)``."""
        x, y = _by_rows(x, y is None), None if y is None else y.contiguous()
        like = x if y is None else y
        streams, rows, width = like.shape
        k = width + (columns.total if columns else 0)
        h = x.new_empty(streams, rows, k)
        # After the sum, s is for the backward pass alone; the residual is in h already.
        keep = y is not None and (not post or any(ctx.needs_input_grad[:2]))
        s = torch.empty_like(like) if keep else like
        mean, rstd = (torch.empty(streams, rows, device=x.device) for _ in range(2))
        per_x = streams // x.shape[0]
        block, warps = FORWARD
        _norm_forward[(triton.cdiv(rows, block), streams)](
            x, like, s, h, mean, rstd, h if gamma is None else gamma, h if beta is None else beta,
            rows, per_x, x.stride(1), eps, W=width, K=k, BW=power(width), BM=block,
            HAS_Y=y is not None, KEEP=keep, HAS_NORM=gamma is not None, num_warps=warps)
        if columns is not None:
            project(h, a, columns, p, seed)
        ctx.save_for_backward(s, h, mean, rstd, gamma, seed, a)
        ctx.columns, ctx.p, ctx.per_x, ctx.post = columns, p, per_x, post
        ctx.has_y, ctx.width = y is not None, width
        ctx.set_materialize_grads(False)
        return h[:, :, :width] if post else s.view_as(s), h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor | None, dh: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, y and a."""
        s, h, mean, rstd, gamma, seed, a = ctx.saved_tensors
        streams, rows, k = h.shape
        width = ctx.width
        dh = dh.contiguous()
        out = torch.empty(streams, rows, width, device=h.device, dtype=h.dtype)
        settings = column_arguments(ctx.columns, most=16) | dropout_arguments(ctx.p)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            many = ctx.columns is not None and ctx.columns.used > FEW.value
            block, warps = BACKWARD["many" if many else "few"]
            _norm_backward[(triton.cdiv(rows, block), streams)](
                dh, ds.contiguous() if ds is not None else out, s, mean, rstd,
                h if gamma is None else gamma, a if a is not None else h, seed, out, rows, W=width,
                K=k, BW=power(width), BM=block, HAS_NORM=gamma is not None,
                BEFORE=ds is not None and ctx.post, AFTER=ds is not None and not ctx.post,
                num_warps=warps, **settings)
        da = None
        if ctx.needs_input_grad[2]:
            da = factor_gradient(dh, h, seed, ctx.columns, ctx.p, width).to(a.dtype)
        # A few additions, in place of torch's general reduction.
        dx = functools.reduce(torch.add, out.view(-1, ctx.per_x, rows, width).unbind(1))
        return dx, (out if ctx.has_y else None), da, *(None,) * 7


def _by_rows(x: Tensor, dense: bool) -> Tensor:
    """Return ``x`` as rows of equal distance: what goes on from a layer is a part of its ``h``."""
    even = x.stride(2) == 1 and (len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if even and not dense else x.contiguous()
