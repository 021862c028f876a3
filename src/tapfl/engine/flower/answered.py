"""What clients have sent with noise of their own: one answer a round, and never another.

Noise hides an update once. A server that had the same round answered again and again could average
the noise away. So a node keeps what it has sent: to the same blocks the same answer goes out again,
as a server needs that goes on from a checkpoint, and to others none does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from tapfl.blocks import BlockState
from tapfl.engine.files import Label, read_state, write_state
from tapfl.engine.flower.bodies import packed
from tapfl.engine.flower.frames import FrameError
from tapfl.tasks import check_name

FOLDER = "answered"  # beside the run's other state


class Answered:
    """What the clients of a federated run have sent, below ``folder``: ``client/round``."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run

    def answered(self, client: str, round_: int, received: BlockState) -> BlockState | None:
        """Return what was sent to these blocks; if it was to others, refuse to send more."""
        path = self._path(client, round_)
        if not path.exists():
            return None
        if path.stat().st_size:  # else it is too old to be asked for again
            sent, notes, _ = read_state(path, self._label(client, round_))
            if notes["received"] == _digest(received):
                return sent
        raise FrameError(f"round {round_} was answered before, to other blocks: with noise of the "
                         "client's own it is answered once")

    def keep(self, client: str, round_: int, received: BlockState, sent: BlockState) -> None:
        """Write down what will be sent: it is on disk before it leaves."""
        path = self._path(client, round_)
        write_state(path, self._label(client, round_), sent, {"received": _digest(received)})

    def forget(self, client: str, kept: Iterable[int]) -> None:
        """Drop what no server asks for that goes on from one of these rounds; not that it was."""
        oldest = min(kept, default=-1)
        for path in self._path(client, 0).parent.glob("*.safetensors"):
            if int(path.stem) <= oldest and path.stat().st_size:
                os.truncate(path, 0)

    def take(self, before: Path, client: str) -> None:
        """Note the rounds that the client has answered in a run that this one goes on from."""
        for path in Answered(before, self._run)._path(client, 0).parent.glob("*.safetensors"):
            mine = self._path(client, int(path.stem))
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.touch()

    def _label(self, client: str, round_: int) -> Label:
        return Label(self._run, client, round_)

    def _path(self, client: str, round_: int) -> Path:
        return self._folder / check_name(client, "client") / f"{round_:06d}.safetensors"


def _digest(blocks: BlockState) -> str:
    return hashlib.sha256(packed(blocks, "none")).hexdigest()
