"""Dropout that is drawn twice instead of stored: a hash of seed, row and column."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(v):
    """Scramble 32 bits (the finalizer of MurmurHash3)."""
    v ^= v >> 16
    v *= 0x85EBCA6B
    v ^= v >> 13
    v *= 0xC2B2AE35
    v ^= v >> 16
    return v


@triton.jit
def keeps(seed, row, first, threshold, COLUMNS: tl.constexpr):
    """Return which elements of some columns, from ``first`` on, survive; 16 bits decide on each.

    The same in the forward and in the backward pass.
    """
    low = tl.load(seed).to(tl.uint32)
    high = tl.load(seed + 1).to(tl.uint32)
    key = _mix(row.to(tl.uint32) * 0x9E3779B1 + low) ^ high
    pair = (first // 2 + tl.arange(0, COLUMNS // 2)).to(tl.uint32)
    drawn = _mix(key[:, None] + pair[None, :] * 0x27D4EB2F)
    return tl.interleave(drawn & 0xFFFF, drawn >> 16) >= threshold


def dropout_arguments(p: float) -> dict[str, object]:
    """Return a kernel's arguments for dropout with probability ``p``."""
    threshold = round(p * 2**16)
    return {"threshold": threshold, "scale": 1 / (1 - threshold / 2**16), "DROP": p > 0}
