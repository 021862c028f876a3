"""A resident behind its Unix socket: one message at a time, X after the reply."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tapfl.engine.flower.frames import FrameError, receive, send
from tapfl.errors import TapflError

MESSAGE_LIMIT = 64 << 30  # bytes of a message from this machine's own Flower
PATIENCE = 600.0  # seconds for a message to arrive once its connection is there


class Answers(Protocol):
    """What answers messages."""

    def answer(self, data: bytes) -> tuple[bytes, Callable[[], None]]:
        """Return the answer, and what is to be done after it."""


def listen(path: Path) -> socket.socket:
    """Return a socket that only this user can reach; one that was left behind is replaced."""
    for folder in [each for each in reversed(path.parents) if not each.exists()]:
        folder.mkdir()
        folder.chmod(0o711)  # a group may pass through; the socket itself is closed to others
    if len(os.fsencode(path)) > 100:  # of at most 107 in Linux
        raise TapflError(f"{path}: too long for the path of a socket; expected at most 100 bytes")
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(before)
    server.listen(64)
    return server


def serve(resident: Answers, server: socket.socket, say: Callable[[str], None]) -> None:
    """Answer messages until the process is stopped."""
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(PATIENCE)
            try:
                reply, then = resident.answer(receive(connection, MESSAGE_LIMIT))
            except (FrameError, OSError) as error:
                say(f"a message could not be read: {error}")
                continue
            try:
                send(connection, reply)
            except OSError as error:  # the server will not count the update; X learns all the same
                say(f"an answer could not be sent: {error}")
        try:
            then()
        except TapflError as error:  # a full disk, say: the next turn starts from what is stored
            say(f"after a reply: {error}")
