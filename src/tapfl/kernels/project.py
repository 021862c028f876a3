"""Dropout and LoRA's A in one pass, and the gradient of A; see ``columns``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapfl.kernels.columns import SIZES, Columns, column_arguments, in_segment, power
from tapfl.kernels.dropout import dropout_arguments, keeps
from tapfl.kernels.memory import stages


@triton.jit(do_not_specialize=SIZES)
def _project(h, a, seed, rows, threshold, scale, tokens, cut, second, per_branch, W: tl.constexpr,
             K: tl.constexpr, USED: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
             BR: tl.constexpr, DROP: tl.constexpr, SEGMENTS: tl.constexpr):
    """Write ``[A dropout(h) | 1 | 0]`` after ``h``."""
    stream = tl.program_id(1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    start = stream.to(tl.int64) * rows
    base = h + (start + row[:, None]) * K
    beside = tl.arange(0, BR)
    low = tl.zeros((BM, BR), tl.float32)
    for first in range(0, W, BC):
        column = first + tl.arange(0, BC)
        value = tl.load(base + column[None, :], (row < rows)[:, None] & (column < W)[None, :],
                        other=0.0)
        if DROP:
            kept = keeps(seed, start.to(tl.int32) + row, first, threshold, BC)
            value = tl.where(kept, value * scale, 0.0).to(h.dtype.element_ty)
        factor = tl.load(a + stream * USED * W + beside[None, :] * W + column[:, None],
                         (beside < USED)[None, :] & (column < W)[:, None], other=0.0)
        low = tl.dot(value, factor, low, input_precision="ieee")
    if SEGMENTS:
        low = in_segment(low, row, beside, tokens, cut, second, per_branch)
    low = tl.where((beside == USED)[None, :], 1.0, low)
    tl.store(base + W + beside[None, :], low.to(h.dtype.element_ty),
             (row < rows)[:, None] & (beside < K - W)[None, :])


def project(h: Tensor, a: Tensor | None, columns: Columns, p: float, seed: Tensor) -> None:
    """Fill the columns after ``h (streams, rows, W + columns)``."""
    assert a is not None
    streams, rows, k = h.shape
    width = a.shape[2]
    _project[(triton.cdiv(rows, 32), streams)](
        h, a, seed, rows, W=width, K=k, BC=min(128, power(width)), BM=32, num_warps=4,
        **column_arguments(columns), **dropout_arguments(p), **stages(h.device))


@triton.jit(do_not_specialize=SIZES)
def _factor_gradient(dh, h, da, seed, rows, steps, threshold, scale, tokens, cut, second,
                     per_branch, W: tl.constexpr, K: tl.constexpr, USED: tl.constexpr,
                     BC: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, DROP: tl.constexpr,
                     SEGMENTS: tl.constexpr):
    """Sum ``dlow^T dropout(h)`` over a part of the rows."""
    stream, split = tl.program_id(2), tl.program_id(1)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    beside = tl.arange(0, BR)
    start = stream.to(tl.int64) * rows
    total = tl.zeros((BR, BC), tl.float32)
    for step in range(steps):
        row = (split * steps + step) * BM + tl.arange(0, BM)
        real = (row < rows)[:, None]
        at = (start + row[:, None]) * K
        dlow = tl.load(dh + at + W + beside[None, :], real & (beside < USED)[None, :], other=0.0)
        if SEGMENTS:
            dlow = in_segment(dlow, row, beside, tokens, cut, second, per_branch)
        value = tl.load(h + at + column[None, :], real & (column < W)[None, :], other=0.0)
        if DROP:
            kept = keeps(seed, start.to(tl.int32) + row, tl.program_id(0) * BC, threshold, BC)
            value = tl.where(kept, value * scale, 0.0).to(h.dtype.element_ty)
        total = tl.dot(tl.trans(dlow.to(value.dtype)), value, total, input_precision="ieee")
    place = da + ((stream * tl.num_programs(1) + split).to(tl.int64) * USED + beside[:, None]) * W
    tl.store(place + column[None, :], total,
             (beside < USED)[:, None] & (column < W)[None, :])


def factor_gradient(dh: Tensor, h: Tensor, seed: Tensor, columns: Columns, p: float,
                    width: int) -> Tensor:
    """Return the gradient of LoRA's A, ``(streams, used, width)``."""
    streams, rows, k = h.shape
    steps = 4 if rows > 4096 else 2
    splits = triton.cdiv(rows, 64 * steps)
    parts = torch.empty(streams, splits, columns.used, width, device=h.device)
    block, settings = min(64, power(width)), column_arguments(columns)
    warps = 8 if settings["BR"] > 128 else 4  # fewer would not hold the sums in their registers
    _factor_gradient[(triton.cdiv(width, block), splits, streams)](
        dh, h, parts, seed, rows, steps, W=width, K=k, BC=block, BM=64, num_warps=warps,
        num_stages=1, **settings, **dropout_arguments(p))
    return parts.sum(dim=1)
