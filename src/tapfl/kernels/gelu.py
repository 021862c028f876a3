"""GELU, dropout and LoRA's A in one pass; see ``columns``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tapfl.kernels.chance import dropout_arguments, keeps
from tapfl.kernels.columns import SIZES, Columns, add_few, column_arguments, in_segment, power

# Columns at a time and warps: the fastest of those tried on an H200.
FORWARD = {"plain": (1024, 4), "adapted": (128, 2)}
BACKWARD = {"plain": (1024, 4), "adapted": (64, 2)}
STEPS = 16  # blocks of rows that one program of the backward pass goes through, to sum up A's part


@triton.jit
def _normal(v):
    """Return the normal distribution function and exp(-v^2/2), to 1e-7 (Abramowitz and Stegun)."""
    z = tl.abs(v) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    bell = tl.exp(-z * z)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741
                + t * (-1.453152027 + t * 1.061405429))))
    tail *= 0.5 * bell
    return tl.where(v < 0, tail, 1.0 - tail), bell


@triton.jit(do_not_specialize=SIZES)
def _gelu_forward(u, h, a, seed, rows, branches, threshold, scale, tokens, cut, second, per_branch,
                  W: tl.constexpr, K: tl.constexpr, USED: tl.constexpr, BC: tl.constexpr,
                  BM: tl.constexpr, BR: tl.constexpr, DROP: tl.constexpr, SEGMENTS: tl.constexpr):
    stream = tl.program_id(1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    start = stream.to(tl.int64) * rows
    source = u + ((stream // branches).to(tl.int64) * rows * branches + stream % branches) * W
    source += row[:, None].to(tl.int64) * branches * W
    base = h + start * K + row[:, None].to(tl.int64) * K
    beside = tl.arange(0, BR)
    low = tl.zeros((BM, BR), tl.float32)
    for first in range(0, W, BC):
        column = first + tl.arange(0, BC)
        inside = (row < rows)[:, None] & (column < W)[None, :]
        v = tl.load(source + column[None, :], inside, other=0.0).to(tl.float32)
        below, _ = _normal(v)
        g = (v * below).to(h.dtype.element_ty)
        tl.store(base + column[None, :], g, inside)
        if USED:
            if DROP:
                kept = keeps(seed, start.to(tl.int32) + row, first, threshold, BC)
                g = tl.where(kept, g * scale, 0.0).to(h.dtype.element_ty)
            part = (beside < USED)[None, :] & (column < W)[:, None]
            factor = tl.load(a + stream * USED * W + beside[None, :] * W + column[:, None], part,
                             other=0.0)
            low = tl.dot(g, factor, low, input_precision="ieee")
    if USED:
        if SEGMENTS:
            low = in_segment(low, row, beside, tokens, cut, second, per_branch)
        low = tl.where((beside == USED)[None, :], 1.0, low)
        tl.store(base + W + beside[None, :], low.to(h.dtype.element_ty),
                 (row < rows)[:, None] & (beside < K - W)[None, :])


@triton.jit(do_not_specialize=SIZES)
def _gelu_backward(dh, u, a, seed, du, da, rows, branches, steps, threshold, scale, tokens, cut,
                   second, per_branch, W: tl.constexpr, K: tl.constexpr, USED: tl.constexpr,
                   BC: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, DROP: tl.constexpr,
                   SEGMENTS: tl.constexpr):
    stream, group = tl.program_id(2), tl.program_id(0)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    beside = tl.arange(0, BR)
    start = stream.to(tl.int64) * rows
    source = ((stream // branches).to(tl.int64) * rows * branches + stream % branches) * W
    total = tl.zeros((BR, BC), tl.float32)
    for step in range(steps):
        row = (group * steps + step) * BM + tl.arange(0, BM)
        inside = (row < rows)[:, None] & (column < W)[None, :]
        base = dh + (start + row[:, None]) * K
        grad = tl.load(base + column[None, :], inside, other=0.0).to(tl.float32)
        place = source + row[:, None].to(tl.int64) * branches * W + column[None, :]
        v = tl.load(u + place, inside, other=0.0).to(tl.float32)
        below, bell = _normal(v)
        if USED:
            dlow = tl.load(base + W + beside[None, :],
                           (row < rows)[:, None] & (beside < USED)[None, :], other=0.0)
            if SEGMENTS:
                dlow = in_segment(dlow, row, beside, tokens, cut, second, per_branch)
            extra = add_few(tl.zeros((BM, BC), tl.float32), dh + (start + row) * K + W,
                         a + stream * USED * W, row, column, rows, tokens, cut, second, per_branch,
                         W, USED, SEGMENTS)
            dropped = (v * below).to(dh.dtype.element_ty)
            if DROP:
                kept = keeps(seed, start.to(tl.int32) + row, tl.program_id(1) * BC, threshold, BC)
                extra = tl.where(kept, extra * scale, 0.0)
                dropped = tl.where(kept, dropped * scale, 0.0).to(dh.dtype.element_ty)
            grad += extra
            total = tl.dot(tl.trans(dlow.to(dropped.dtype)), dropped, total,
                           input_precision="ieee")
        slope = below + v * bell * 0.3989422804014327
        tl.store(du + place, (grad * slope).to(du.dtype.element_ty), inside)
    if USED:
        at = (stream * tl.num_programs(0) + group).to(tl.int64) * USED + beside[:, None]
        tl.store(da + at * W + column[None, :], total,
                 (beside < USED)[:, None] & (column < W)[None, :])


class GeluPrologue(torch.autograd.Function):
    """``[GELU(u) | A dropout(GELU(u)) | 1]``."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, a: Tensor | None, columns: Columns | None, p: float,
                seed: Tensor) -> Tensor:
        """Take ``u (S, rows, branches, W)``; return ``(S * branches, rows, W + columns)``."""
        streams, rows, branches, width = u.shape
        count = streams * branches
        k = width + (columns.total if columns else 0)
        h = u.new_empty(count, rows, k)
        block, warps = FORWARD["plain" if columns is None else "adapted"]
        laid = _laid(u, k, columns, block)
        _gelu_forward[(triton.cdiv(laid["rows"], laid["BM"]), laid.pop("count"))](
            u, h, a if a is not None else u, seed, num_warps=warps, **laid,
            **column_arguments(columns), **dropout_arguments(p))
        ctx.save_for_backward(u, seed, a)
        ctx.columns, ctx.p = columns, p
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of u and a."""
        u, seed, a = ctx.saved_tensors
        dh = dh.contiguous()
        du = torch.empty_like(u)
        block, warps = BACKWARD["plain" if a is None else "adapted"]
        laid = _laid(u, dh.shape[2], ctx.columns, block)
        count, steps = laid.pop("count"), 1 if a is None else STEPS
        groups = triton.cdiv(laid["rows"], laid["BM"] * steps)
        parts = None if a is None else a.new_empty(count, groups, *a.shape[1:], dtype=torch.float32)
        _gelu_backward[(groups, triton.cdiv(laid["W"], laid["BC"]), count)](
            dh, u, dh if a is None else a, seed, du, dh if parts is None else parts, steps=steps,
            num_warps=warps, **laid, **column_arguments(ctx.columns), **dropout_arguments(ctx.p))
        return du, None if parts is None else parts.sum(dim=1).to(a.dtype), None, None, None


def _laid(u: Tensor, k: int, columns: Columns | None, block: int) -> dict[str, Any]:
    """Return how a kernel goes over ``u``; with nothing beside it, it is one long row."""
    streams, rows, branches, width = u.shape
    if columns is None and branches == 1 and u.numel() % block == 0:
        return {"rows": u.numel() // block, "branches": 1, "count": 1, "W": block, "K": block,
                "BC": block, "BM": 4}
    return {"rows": rows, "branches": branches, "count": streams * branches, "W": width, "K": k,
            "BC": min(block, 256, power(width)), "BM": 16}
