"""Everything before a frozen linear layer, in one pass: residual, norm or GELU, dropout, LoRA's A.

The layer that follows computes ``W h + B A dropout(h) + bias``. The kernels write ``h`` and, in the
next columns, ``A dropout(h)`` and a column of ones, so that one matrix product with
``[W | B | bias]`` does it all. In the backward pass one kernel goes from the gradient of that row
to the gradient of the input, dropout drawn again from its seed.

Rows are tokens, streams are the paths of the backbone. A column of A belongs to one segment of the
tokens (one modality); for rows of the other segment it is zero.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@dataclass(frozen=True)
class Columns:
    """The columns after ``h``: ``used`` columns of LoRA, one of ones, zeros up to ``total``.

    Rows are tokens of sequences that are ``tokens`` long; columns from ``second`` on belong to the
    tokens from ``cut`` on, the others to those before. ``branches`` of a stream have ``used /
    branches`` columns each, in which the two segments repeat.
    """

    used: int
    branches: int = 1
    tokens: int = 1
    cut: int = 1
    second: int = 0

    @property
    def total(self) -> int:
        """Their number, a multiple of 16: matrix products are faster with it."""
        return -(-(self.used + 1) // 16) * 16


FEW: tl.constexpr = tl.constexpr(32)
# Sizes that change from batch to batch: kernels must not be recompiled for each.
SIZES = ("rows", "per_x", "branches", "steps", "tokens", "cut", "second", "per_branch", "threshold")


@triton.jit
def in_segment(low, row, column, tokens, cut, second, per_branch):
    """Zero the columns that do not belong to a row's segment."""
    late_row = (row % tokens) >= cut
    late_column = (column % per_branch) >= second
    return tl.where(late_row[:, None] == late_column[None, :], low, 0.0)


@triton.jit
def add_few(extra, dlow, a, row, column, rows, tokens, cut, second, per_branch, W: tl.constexpr,
            USED: tl.constexpr, SEGMENTS: tl.constexpr):
    """Add ``dlow A``, column by column: for a few, faster than moving all to the matrix units."""
    for r in tl.static_range(USED):
        d = tl.load(dlow + r, row < rows, other=0.0).to(tl.float32)
        if SEGMENTS:
            d = tl.where(((row % tokens) >= cut) == ((r % per_branch) >= second), d, 0.0)
        f = tl.load(a + r * W + column, column < W, other=0.0).to(tl.float32)
        extra += d[:, None] * f[None, :]
    return extra


def power(n: int) -> int:
    """Return the next power of two, 16 at least: blocks of a kernel have no other sizes."""
    return max(16, 1 << (n - 1).bit_length())


def column_arguments(columns: Columns | None, most: int = 256) -> dict[str, Any]:
    """Return a kernel's arguments for the columns after ``h``.

    A kernel that holds whole rows takes ``most`` of the columns at a time.
    """
    if columns is None:
        return {"tokens": 1, "cut": 1, "second": 0, "per_branch": 1, "USED": 0, "BR": 16,
                "SEGMENTS": False}
    per_branch = columns.used // columns.branches
    return {"tokens": columns.tokens, "cut": columns.cut, "second": columns.second,
            "per_branch": per_branch, "USED": columns.used,
            "BR": min(most, power(columns.total)), "SEGMENTS": columns.cut < columns.tokens}
