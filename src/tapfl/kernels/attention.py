"""Attention over short sequences, in small programs.

The library's kernels are made for long sequences; at 197 tokens they reach a tenth of what the
matrix units can do. In the forward pass a program takes a block of queries. In the backward pass
one program holds all keys and values of a head (up to 256 tokens, or 512 of a small head): five
products, nothing computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tapfl.kernels.columns import power
from tapfl.kernels.memory import plenty

HELD = 256 * 64  # elements of a head's keys: more do not fit into registers and shared memory
MAX_TOKENS = 512
FEW_TOKENS = 128
HOPPER = (9, 0)
HEAD_SIZES = (16, 32, 64)
# Sizes that change from batch to batch: kernels must not be recompiled for each.
SIZES = ("blocks", "batches", "tokens", "heads", "branches", "cut", "privates")
NEVER: tl.constexpr = tl.constexpr(-1e30)  # the score of a key that is not to be seen
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)  # powers of two are faster than those of e


@triton.jit
def _seen(mask, batch, query, key, tokens, cut, private, HAS_MASK: tl.constexpr,
          SEGMENTS: tl.constexpr):
    """Return which keys a query may attend to; one of the two is a column, the other a row."""
    may = (key < tokens) & (query < tokens)
    if HAS_MASK:
        may = may & (tl.load(mask + batch * tokens + key, key < tokens, other=0) != 0)
    if SEGMENTS:
        may = may & (((key >= cut) == (query >= cut)) | (private == 0))
    return may


@triton.jit(do_not_specialize=SIZES)
def _forward(qkv, mask, out, lse, batches, tokens, heads, branches, cut, privates, scale,
             W: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HAS_MASK: tl.constexpr,
             SEGMENTS: tl.constexpr):
    """Take a block of queries through the keys, block by block, with a running softmax."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    stream, batch = sequence // batches, sequence % batches
    row = branches * 3 * W  # from one token to the next
    base = qkv + ((stream // branches) * batches + batch).to(tl.int64) * tokens * row
    base += (stream % branches) * 3 * W + head * D
    feature = tl.arange(0, D)[None, :]
    query = tl.program_id(1) * B + tl.arange(0, B)
    q = tl.load(base + query[:, None] * row + feature, (query < tokens)[:, None], other=0.0)
    top = tl.full((B,), NEVER, tl.float32)
    total = tl.zeros((B,), tl.float32)
    o = tl.zeros((B, D), tl.float32)
    for first in range(0, tokens, B):
        key = first + tl.arange(0, B)
        at, real = base + key[:, None] * row + feature, (key < tokens)[:, None]
        k = tl.load(at + W, real, other=0.0)
        v = tl.load(at + 2 * W, real, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        may = _seen(mask, batch, query[:, None], key[None, :], tokens, cut, stream < privates,
                    HAS_MASK, SEGMENTS)
        score = tl.where(may, score, NEVER)
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.where(may, tl.exp2(score - higher[:, None]), 0.0)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        top = higher
    total = tl.maximum(total, 1e-30)
    place = out + (sequence.to(tl.int64) * tokens + query[:, None]) * W + head * D + feature
    tl.store(place, (o / total[:, None]).to(out.dtype.element_ty), (query < tokens)[:, None])
    tl.store(lse + tl.program_id(0).to(tl.int64) * tokens + query,
             (top + tl.log2(total)) / LOG2E, query < tokens)


@triton.jit(do_not_specialize=SIZES)
def _backward(qkv, mask, out, lse, dout, dqkv, blocks, batches, tokens, heads, branches, cut,
              privates, scale, W: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
              BM: tl.constexpr, HAS_MASK: tl.constexpr, SEGMENTS: tl.constexpr):
    """Take all keys of a head through its queries, block by block; scores are (keys, queries)."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    stream, batch = sequence // batches, sequence % batches
    key, feature = tl.arange(0, BN), tl.arange(0, D)
    row = branches * 3 * W
    start = ((stream // branches) * batches + batch).to(tl.int64) * tokens * row
    start += (stream % branches) * 3 * W + head * D
    keys = key[:, None] * row + feature[None, :]
    real = (key < tokens)[:, None]
    k = tl.load(qkv + start + W + keys, real, other=0.0)
    v = tl.load(qkv + start + 2 * W + keys, real, other=0.0)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for block in range(blocks):
        query = block * BM + tl.arange(0, BM)
        inside = (query < tokens)[:, None]
        queries = query[:, None] * row + feature[None, :]
        q = tl.load(qkv + start + queries, inside, other=0.0)
        place = (sequence.to(tl.int64) * tokens + query[:, None]) * W + head * D + feature[None, :]
        do = tl.load(dout + place, inside, other=0.0)
        o = tl.load(out + place, inside, other=0.0)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        level = tl.load(lse + tl.program_id(0).to(tl.int64) * tokens + query, query < tokens,
                        other=0.0)
        score = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
        may = _seen(mask, batch, query[None, :], key[:, None], tokens, cut, stream < privates,
                    HAS_MASK, SEGMENTS)
        p = tl.exp2(tl.where(may, score - level[None, :] * LOG2E, NEVER))
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = (p * (dp - delta[None, :]) * scale).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision="ieee")
        dq = tl.dot(tl.trans(ds), k, input_precision="ieee")
        tl.store(dqkv + start + queries, dq.to(dqkv.dtype.element_ty), inside)
    tl.store(dqkv + start + W + keys, dk.to(dqkv.dtype.element_ty), real)
    tl.store(dqkv + start + 2 * W + keys, dv.to(dqkv.dtype.element_ty), real)


FORWARD = {32: 2, 64: 4}  # warps, by the tokens of a block
# Queries at a time, warps and stages, by the number of keys; the fastest of those tried on an H200.
# For 512 keys so few queries that a program holds no more than for 256 (not tuned).
SMALL_HEAD = 32
BACKWARD = {32: (32, 1, 1), 64: (32, 4, 1), 128: (64, 4, 1), 256: (64, 8, 1), 512: (16, 8, 1)}
BACKWARD_LARGE = BACKWARD | {128: (64, 8, 1), 256: (32, 8, 3)}


def max_tokens(size: int, device: torch.device) -> int:
    """Return the longest sequence that the kernel takes, for heads of a size."""
    return min(MAX_TOKENS, (HELD if plenty(device) else HELD // 2) // size)


class Attention(torch.autograd.Function):
    """Multi-head attention from the packed ``(streams, batch, tokens, branches, 3 width)``."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, mask: Tensor | None, heads: int, cut: int,
                privates: int) -> Tensor:
        """Return ``(streams * branches, batch, tokens, width)``.

        ``mask (batch, tokens)`` is true on real tokens. Of the streams after branching, the first
        ``privates`` attend within a segment only: the tokens before ``cut``, or those after.
        """
        qkv = qkv.contiguous()
        streams, batches, tokens, branches, packed = qkv.shape
        width, count = packed // 3, streams * branches
        ctx.arguments = _arguments(qkv, mask, heads, cut, privates)
        if mask is None and not privates and branches == 1 and _library_has(qkv):
            out, lse = _by_library(qkv, heads)
            ctx.save_for_backward(qkv, mask, out, lse)
            return out
        out = qkv.new_empty(count, batches, tokens, width)
        lse = torch.empty(count * batches * heads, tokens, device=qkv.device)
        block = min(_keys(tokens), max(FORWARD))
        _forward[(len(lse), triton.cdiv(tokens, block))](
            qkv, _bytes(mask, qkv), out, lse, B=block, num_warps=FORWARD[block], **ctx.arguments)
        ctx.save_for_backward(qkv, mask, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the packed input."""
        qkv, mask, out, lse = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        tokens, small = qkv.shape[2], ctx.arguments["D"] <= SMALL_HEAD
        block, warps, stages = (BACKWARD if small else BACKWARD_LARGE)[_keys(tokens)]
        _backward[(len(lse),)](
            qkv, _bytes(mask, qkv), out, lse, dout.contiguous(), dqkv, triton.cdiv(tokens, block),
            BN=_keys(tokens), BM=block, num_warps=warps, num_stages=stages, **ctx.arguments)
        return dqkv, None, None, None, None


def _library_has(qkv: Tensor) -> bool:
    """Return whether cuDNN's forward pass is to be used: for many tokens nothing is faster."""
    return (qkv.is_cuda and qkv.dtype.itemsize == 2 and qkv.shape[2] > FEW_TOKENS
            and torch.cuda.get_device_capability(qkv.device) >= HOPPER)


def _by_library(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the output and, for our backward pass, the log of each query's sum."""
    streams, batches, tokens, _, packed = qkv.shape
    q, k, v = qkv.view(streams * batches, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, False, False)[:2]
    return (out.transpose(1, 2).reshape(streams, batches, tokens, packed // 3),
            lse.reshape(-1, tokens))


def _arguments(qkv: Tensor, mask: Tensor | None, heads: int, cut: int,
               privates: int) -> dict[str, Any]:
    _, batches, tokens, branches, packed = qkv.shape
    width = packed // 3
    size = width // heads
    return {"batches": batches, "tokens": tokens, "heads": heads, "branches": branches,
            "cut": cut, "privates": privates, "scale": size ** -0.5, "W": width, "D": size,
            "HAS_MASK": mask is not None, "SEGMENTS": privates > 0}


def _keys(tokens: int) -> int:
    """Return the size of a block that holds all tokens."""
    return max(32, power(tokens))


def _bytes(mask: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if mask is None else mask.contiguous().view(torch.uint8)
