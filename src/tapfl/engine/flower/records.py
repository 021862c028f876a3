"""A frame inside a Flower message: one array of bytes, whatever blocks it holds."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

NAME = "frame"
RAW = "tapfl.frame"  # how the array is to be read: as it is


def content_of(frame: bytes) -> RecordDict:
    """Return the content of a message."""
    return RecordDict({NAME: ArrayRecord({NAME: Array("uint8", (len(frame),), RAW, frame)})})


def frame_of(content: RecordDict) -> bytes:
    """Return the frame of a message; another kind of message is a ValueError."""
    record = content.array_records.get(NAME)
    array = None if record is None else record.get(NAME)
    if array is None or array.stype != RAW:
        raise ValueError("the message holds no frame of tapfl's")
    return bytes(array.data)
