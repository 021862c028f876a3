"""Blocks as bytes: a safetensors buffer with one flat tensor a block, so that any type survives."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

from tapfl.blocks import BlockState
from tapfl.engine.flower.frames import FrameError
from tapfl.engine.flower.headers import SLACK, Compression


def packed(blocks: BlockState, compression: Compression) -> bytes:
    """Return blocks as a body."""
    body = bytes_of({name: value.detach().cpu().contiguous() for name, value in blocks.items()})
    return zlib.compress(body, 1) if compression == "zlib" else body


def blocks_of(body: bytes, initial: BlockState, expected: Sequence[str],
            compression: Compression) -> BlockState:
    """Return the blocks of a body, which must be exactly the expected ones."""
    limit = sum(initial[name].nbytes for name in expected) + SLACK
    if compression == "zlib":
        body = _inflated(body, limit)
    if len(body) > limit:
        raise FrameError(f"{len(body)} bytes of blocks, at most {limit} are expected")
    try:
        found = tensors_of(body)
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FrameError(f"its blocks cannot be read ({error})") from None
    for name in sorted(set(found) ^ set(expected)):
        raise FrameError(f"block {name[:100]!r} is " + ("missing" if name in expected
                                                        else "none that this client exchanges"))
    state = BlockState(found, {name: initial.shapes[name] for name in found})
    fault = state.misfit(initial)
    if fault is not None:
        raise FrameError(fault)
    return state


def _inflated(body: bytes, limit: int) -> bytes:
    """Decompress, but no more than could be right."""
    engine = zlib.decompressobj()
    try:
        data = engine.decompress(body, limit + 1)
    except zlib.error as error:
        raise FrameError(f"its blocks cannot be decompressed ({error})") from None
    if not engine.eof or engine.unused_data:
        raise FrameError(f"its blocks are compressed, but not in one piece of at most {limit} "
                         "bytes")
    return data
