"""GELU before a frozen layer with LoRA; see ``columns``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tapfl.kernels.columns import SIZES, Columns, add_few, column_arguments, power
from tapfl.kernels.dropout import dropout_arguments, keeps
from tapfl.kernels.project import factor_gradient, project

LONG = 1024  # columns that one program takes of a long row
# Rows at a time and warps: the fastest of those tried on an H200.
FORWARD = (4, 4)
BACKWARD = {"plain": (2, 4), "columns": (2, 2)}


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
def _gelu_forward(u, h, rows, branches, W: tl.constexpr, K: tl.constexpr, BC: tl.constexpr,
                  BM: tl.constexpr):
    stream = tl.program_id(2)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (row < rows)[:, None] & (column < W)[None, :]
    place = ((stream // branches).to(tl.int64) * rows * branches + stream % branches) * W
    place += row[:, None].to(tl.int64) * branches * W + column[None, :]
    v = tl.load(u + place, inside, other=0.0).to(tl.float32)
    below, _ = _normal(v)
    at = (stream.to(tl.int64) * rows + row[:, None]) * K + column[None, :]
    tl.store(h + at, (v * below).to(h.dtype.element_ty), inside)


@triton.jit(do_not_specialize=SIZES)
def _gelu_backward(dh, u, a, seed, du, rows, branches, threshold, scale, tokens, cut, second,
                   per_branch, W: tl.constexpr, K: tl.constexpr, USED: tl.constexpr,
                   BC: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, DROP: tl.constexpr,
                   SEGMENTS: tl.constexpr):
    stream = tl.program_id(2)
    first = tl.program_id(1) * BC
    row, column = tl.program_id(0) * BM + tl.arange(0, BM), first + tl.arange(0, BC)
    inside = (row < rows)[:, None] & (column < W)[None, :]
    start = stream.to(tl.int64) * rows
    grad = tl.load(dh + (start + row[:, None]) * K + column[None, :], inside, other=0.0)
    grad = grad.to(tl.float32)
    if USED:
        extra = add_few(tl.zeros((BM, BC), tl.float32), dh + (start + row) * K + W,
                        a + stream * USED * W, row, column, rows, tokens, cut, second, per_branch,
                        W, USED, SEGMENTS)
        if DROP:
            kept = keeps(seed, start.to(tl.int32) + row, first, threshold, BC)
            extra = tl.where(kept, extra * scale, 0.0)
        grad += extra
    place = ((stream // branches).to(tl.int64) * rows * branches + stream % branches) * W
    place += row[:, None].to(tl.int64) * branches * W + column[None, :]
    v = tl.load(u + place, inside, other=0.0).to(tl.float32)
    below, bell = _normal(v)
    slope = below + v * bell * 0.3989422804014327
    tl.store(du + place, (grad * slope).to(du.dtype.element_ty), inside)


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
        laid, (block, warps) = _laid(u, k, columns), FORWARD
        _gelu_forward[_grid(laid, h, block)](u, h, BM=block, num_warps=warps, **laid)
        if columns is not None:
            project(h, a, columns, p, seed)
        ctx.save_for_backward(u, seed, a, None if a is None else h)
        ctx.columns, ctx.p = columns, p
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of u and a."""
        u, seed, a, h = ctx.saved_tensors
        dh = dh.contiguous()
        du = torch.empty_like(u)
        laid = _laid(u, dh.shape[2], ctx.columns)
        block, warps = BACKWARD["plain" if ctx.columns is None else "columns"]
        _gelu_backward[_grid(laid, dh, block)](
            dh, u, dh if a is None else a, seed, du, BM=block, num_warps=warps, **laid,
            **column_arguments(ctx.columns), **dropout_arguments(ctx.p))
        da = None
        if ctx.needs_input_grad[1]:
            da = factor_gradient(dh, h, seed, ctx.columns, ctx.p, u.shape[3]).to(a.dtype)
        return du, da, None, None, None


def _laid(u: Tensor, k: int, columns: Columns | None) -> dict[str, int]:
    """Return how a kernel iterates over ``u``; without further columns, it is one long row."""
    _, rows, branches, width = u.shape
    if columns is None and branches == 1 and u.numel() % LONG == 0:
        return {"rows": u.numel() // LONG, "branches": 1, "W": LONG, "K": LONG, "BC": LONG}
    return {"rows": rows, "branches": branches, "W": width, "K": k,
            "BC": min(LONG // 2, power(width))}


def _grid(laid: dict[str, int], h: Tensor, block: int) -> tuple[int, int, int]:
    """Return the programs: blocks of rows, blocks of columns, streams (none of a long row)."""
    streams = h.numel() // (laid["rows"] * laid["K"])
    return triton.cdiv(laid["rows"], block), triton.cdiv(laid["W"], laid["BC"]), streams
