"""State on disk: safetensors and JSON, written so that a crash at any moment loses nothing.

Every file appears whole or not at all. A client's state is a new file for every round that changes
it, so a checkpoint never has to rewrite the clients: it is a round number, and whoever reads takes
each client's newest file that is not younger. The two newest checkpoints are kept.

Clients' files are written in the background, and recent ones are kept in memory. A checkpoint waits
until all of them are on disk: only then is its round complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tapfl.blocks import BlockState
from tapfl.engine.cache import WriteBehind
from tapfl.errors import TapflError
from tapfl.tasks import check_name

KEPT = 2  # checkpoints


class Store:
    """The state of one federated method's run, below ``folder``.

    At most ``cache_bytes`` of the clients' state is in memory, written or waiting to be. As a
    context manager it closes itself; after an error it drops what no checkpoint refers to yet.
    """

    def __init__(self, folder: Path, cache_bytes: int = 4 << 30, device: str = "cpu") -> None:
        self.folder = folder
        self.round = -1  # the last completed round; client files of later rounds do not count
        self._committed = [c["round"] for c in self._checkpoints()]
        self._known: dict[Path, list[int]] = {}  # the versions in a client's folder, once looked up
        self._files = WriteBehind(cache_bytes, write_state, device)
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # what ended the run matters more, and those rounds will run again
            self._files.abandon()

    def close(self) -> None:
        """Have everything written, end the writing thread and free the memory."""
        self._files.close()

    # Client state

    def load(self, owner: str, client: str) -> tuple[BlockState, dict[str, Any]] | None:
        """Return the newest state of a client that belongs to this run's past: a copy."""
        folder = self._client(owner, client)
        versions = [v for v in self._versions(folder) if v <= self.round]
        if not versions:
            return None
        path = _file(folder, versions[-1])
        return self._files.get(path) or (BlockState.load(path).to(self._device),
                                         BlockState.read_notes(path))

    def save(self, owner: str, client: str, round_: int, state: BlockState,
             notes: Mapping[str, Any]) -> None:
        """Keep a copy of a client's state as of a round; forget what no kept checkpoint refers to.

        It is on disk after the next ``flush``. A disk that did not take an earlier state is an
        error here, and then this state is not kept.
        """
        folder = self._client(owner, client)
        before = self._versions(folder)
        versions = sorted({*before, round_})
        oldest = min(self._committed[-KEPT:], default=-1)
        doomed = [v for v in versions if v <= oldest][:-1]
        self._files.put(_file(folder, round_), state, notes, [_file(folder, v) for v in doomed])
        self._known[folder] = [v for v in versions if v not in doomed]
        # The next load takes the new version; older ones need no place in memory.
        self._files.forget(_file(folder, v) for v in before if v != round_)

    def flush(self) -> None:
        """Return when all that was saved is on disk."""
        self._files.flush()

    def _client(self, owner: str, client: str) -> Path:
        return self.folder / "clients" / slug(owner) / check_name(client, "client")

    def _versions(self, folder: Path) -> list[int]:
        if folder not in self._known:
            self._known[folder] = sorted(int(p.stem) for p in folder.glob("*.safetensors")
                                         if p.stem.isdigit())
        return self._known[folder]

    # Checkpoints

    def commit(self, server: BlockState, notes: Mapping[str, Any]) -> None:
        """Write down that ``self.round`` is complete: the server's blocks and some notes."""
        self.flush()
        folder = self.folder / "checkpoints"
        path = folder / f"{self.round:06d}.safetensors"
        write_state(path, server, {})
        record = {"round": self.round, "sha256": _digest(path), **notes}
        write_json(path.with_suffix(".json"), record)
        self._committed = sorted({*self._committed, self.round})
        for round_ in self._committed[:-KEPT]:
            for suffix in (".json", ".safetensors"):
                (folder / f"{round_:06d}{suffix}").unlink(missing_ok=True)
        self._committed = self._committed[-KEPT:]

    def is_committed(self) -> bool:
        """Return whether the current round is written down already."""
        return self.round in self._committed

    def restore(self) -> tuple[BlockState, dict[str, Any], list[str]] | None:
        """Return the newest checkpoint that is sound, and what is wrong with newer ones."""
        faults = [f"{path}: damaged (not readable)" for path in self._unreadable()]
        for record in reversed(self._checkpoints()):
            path = self.folder / "checkpoints" / f"{record['round']:06d}.safetensors"
            if not path.is_file():
                faults.append(f"{path}: missing")
            elif _digest(path) != record.get("sha256"):
                faults.append(f"{path}: damaged (its checksum does not match)")
            else:
                self.round = record["round"]
                self._committed = [r for r in self._committed if r <= self.round]
                return BlockState.load(path), record, faults
        if faults:
            raise TapflError("; ".join(faults) + ": no sound checkpoint is left to resume from")
        return None

    def _checkpoints(self) -> list[dict[str, Any]]:
        found = [_record(p) for p in (self.folder / "checkpoints").glob("*.json")]
        return sorted((r for r in found if r is not None), key=lambda r: int(r["round"]))

    def _unreadable(self) -> list[Path]:
        return [p for p in sorted((self.folder / "checkpoints").glob("*.json"))
                if _record(p) is None]


def _file(folder: Path, round_: int) -> Path:
    return folder / f"{round_:06d}.safetensors"


def _record(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint's record, if it is one."""
    with contextlib.suppress(ValueError, OSError):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and all(
                isinstance(record.get(key), int) for key in ("round", "events")):
            return record
    return None


def slug(method: str) -> str:
    """Return a method's name as a folder's name: ``module:Class+post`` has characters to lose."""
    return "".join(c if c.isalnum() or c in "+-_" else "_" for c in method)


def write_state(path: Path, state: BlockState, notes: Mapping[str, Any]) -> None:
    """Write blocks and notes as one safetensors file, whole or not at all."""
    with replacing(path) as temporary:
        state.to("cpu").save(temporary, {"notes": json.dumps(notes)})


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write; it takes the place of ``path`` when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.partial")
    with on_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Say plainly when the disk does not take what is written."""
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise _refused(path, error) from None


def _refused(path: Path, error: Exception) -> TapflError:
    return TapflError(f"{path}: cannot be written ({error}); what was written before is intact: "
                      "make room and continue with --resume")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
