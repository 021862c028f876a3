"""The server's checkpoints: a round that is complete, and everything that belongs to it.

A checkpoint holds the server's blocks and lists what goes with them: how long the events are, which
files the clients keep, each with its checksum. One that is not whole, or whose company is not, is
passed over in favour of the one before it. The two newest are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tapfl.blocks import BlockState
from tapfl.engine.files import (
    Label,
    read_checked_json,
    read_state,
    write_checked_json,
    write_state,
)
from tapfl.errors import TapflError

KEPT = 2
SERVER = ""  # the client's place in a label


class Checkpoints:
    """The checkpoints of one federated run, in ``folder``."""

    def __init__(self, folder: Path, method: str) -> None:
        self.folder, self.method = folder, method
        self._rounds = sorted(int(p.stem) for p in folder.glob("*.json") if p.stem.isdigit())

    @property
    def newest(self) -> int:
        """The last round that is written down, or -1."""
        return self._rounds[-1] if self._rounds else -1

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds that the server may go back to."""
        return tuple(self._rounds)

    def write(self, round_: int, blocks: BlockState, notes: Mapping[str, Any]) -> None:
        """Write down that a round is complete; ``notes`` is what belongs with it, plain JSON."""
        path = self._path(round_)
        digest = write_state(path, Label(self.method, SERVER, round_), blocks, {})
        write_checked_json(path.with_suffix(".json"), {"round": round_, "blocks": digest, **notes})
        self._rounds = sorted({*self._rounds, round_})
        for old in self._rounds[:-KEPT]:
            self._path(old).with_suffix(".json").unlink(missing_ok=True)
            self._path(old).unlink(missing_ok=True)
        self._rounds = self._rounds[-KEPT:]

    def newest_first(self) -> Iterator[tuple[int, BlockState, dict[str, Any]] | str]:
        """Go through the checkpoints: each one, or what is wrong with it."""
        for round_ in reversed(self._rounds):
            path = self._path(round_)
            notes = read_checked_json(path.with_suffix(".json"))
            if notes is None:
                yield f"{path.with_suffix('.json')}: damaged (not readable)"
            elif not path.is_file():
                yield f"{path}: missing"
            else:
                try:
                    blocks, _, digest = read_state(path, Label(self.method, SERVER, round_))
                except TapflError as error:
                    yield str(error)
                    continue
                if digest != notes.get("blocks"):
                    yield f"{path}: not the file that the checkpoint lists"
                else:
                    yield round_, blocks, notes

    def forget_after(self, round_: int) -> None:
        """Forget checkpoints that were found to be damaged: their rounds will run again."""
        self._rounds = [r for r in self._rounds if r <= round_]

    def _path(self, round_: int) -> Path:
        return self.folder / f"{round_:06d}.safetensors"
