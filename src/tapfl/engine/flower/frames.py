"""Messages as bytes, and a Unix socket that carries them. Only the standard library is needed.

A frame is a small header, plain JSON, and a body of bytes. Whoever reads one from a peer checks
both lengths before it takes the memory for them. Numbers are finite, texts can be written down.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from pathlib import Path
from typing import Any

HEADER_LIMIT = 16 << 20
LINE = 500  # characters of a peer's words that are shown
PIECE = 1 << 20  # bytes that are read at a time
WHOLE = 1 << 63  # whole numbers are below it
LARGE = 1e100  # no number is larger: sums of them are finite
ABSENT, PAUSE = 120.0, 0.5  # seconds for a process to come back, and between two looks
_LENGTHS = struct.Struct("!IQ")  # of the header, of the body

Frame = tuple[dict[str, Any], bytes]


class FrameError(Exception):
    """What came is no frame, or not the one that was expected; said in one line."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


def one_line(text: str) -> str:
    """Return a peer's words as a terminal and a log can take them."""
    return "".join(c if c.isprintable() else " " for c in text[:LINE])


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    try:
        text = json.dumps(header, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"its header cannot be written ({error})") from None
    if len(text) > HEADER_LIMIT:
        raise FrameError(f"a header of {len(text)} bytes, at most {HEADER_LIMIT} are allowed")
    return _LENGTHS.pack(len(text), len(body)) + text + body


def unpack(data: bytes | memoryview, limit: int | None = None) -> Frame:
    """Return what ``pack`` was given; a body of more than ``limit`` bytes is refused."""
    view = memoryview(data)
    if len(view) < _LENGTHS.size:
        raise FrameError(f"{len(view)} bytes, too few for a message")
    header, body = _LENGTHS.unpack(view[:_LENGTHS.size])
    _check(header, body, limit)
    if len(view) != _LENGTHS.size + header + body:
        raise FrameError(f"{len(view)} bytes, the message says {_LENGTHS.size + header + body}")
    start = _LENGTHS.size + header
    return _parsed(bytes(view[_LENGTHS.size:start])), bytes(view[start:])


def send(connection: socket.socket, data: bytes) -> None:
    """Write a frame."""
    connection.sendall(data)


def receive(connection: socket.socket, limit: int | None = None) -> bytes:
    """Read one whole frame."""
    head = _exactly(connection, _LENGTHS.size)
    header, body = _LENGTHS.unpack(head)
    _check(header, body, limit)
    return head + _exactly(connection, header + body)


def request(path: Path | str, data: bytes, timeout: float) -> bytes:
    """Send a frame to a process that listens at a Unix socket; return its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        send(connection, data)
        return receive(connection)


def request_again(path: Path | str, data: bytes, timeout: float, absent: float = ABSENT,
                  pause: float = PAUSE) -> bytes:
    """Send a frame; one who is not there is waited for, one who dies over it is asked once more.

    Whoever keeps its state in files does the same thing again.
    """
    until, died = time.monotonic() + timeout, False
    there = min(until, time.monotonic() + absent)
    while True:
        try:
            return request(path, data, max(until - time.monotonic(), pause))
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() + pause > there:
                raise
        except (ConnectionError, FrameError):
            if died:
                raise
            died, there = True, min(until, time.monotonic() + absent)
        time.sleep(pause)


def _check(header: int, body: int, limit: int | None) -> None:
    if header > HEADER_LIMIT:
        raise FrameError(f"a header of {header} bytes, at most {HEADER_LIMIT} are allowed")
    if limit is not None and body > limit:
        raise FrameError(f"a message of {body} bytes, at most {limit} are expected")


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode(), parse_float=_finite, parse_int=_whole,
                            parse_constant=_finite)
        if b"\\ud" in text.lower():  # half a character has an escape, but is no text
            json.dumps(header, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise FrameError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise FrameError("its header is no JSON object")
    return header


def _finite(text: str) -> float:
    value = float(text)
    if not abs(value) <= LARGE:  # NaN is not, either
        raise ValueError(text)
    return value


def _whole(text: str) -> int:
    value = int(text)
    if not -WHOLE < value < WHOLE:
        raise ValueError(text)
    return value


def _exactly(connection: socket.socket, count: int) -> bytes:
    held = bytearray()  # it grows with what comes: a length is only a claim
    while len(held) < count:
        piece = connection.recv(min(count - len(held), PIECE))
        if not piece:
            raise FrameError(f"the connection ended after {len(held)} of {count} bytes")
        held += piece
    return bytes(held)
