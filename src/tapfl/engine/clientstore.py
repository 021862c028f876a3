"""The state that clients keep between their rounds: X, histories, private blocks.

A client's state is a new file for every round that changes it. Whoever reads says as of which round
(``load(as_of=...)``), and whoever knows which rounds somebody may go back to drops the rest
(``prune(kept=...)``). So the store works on a machine that never sees the server's checkpoints: a
message names these rounds. However seldom checkpoints are written, a client has a few files.

Files are written in the background, and recent ones are kept in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tapfl.blocks import BlockState
from tapfl.engine.cache import WriteBehind
from tapfl.engine.files import Label, read_state, replacing, write_state
from tapfl.errors import TapflError
from tapfl.federated.context import Kept
from tapfl.methods import folder_name
from tapfl.tasks import check_name

# The files that belong to a round: owner, client -> version, checksum. A checkpoint lists them.
Listing = list[tuple[str, str, int, str]]
Key = tuple[str, str]
Files = Mapping[str, tuple[int, str]]  # of a client: by owner, the version and its checksum


class ClientStore:
    """What clients keep, below ``folder``: ``owner/client/round.safetensors``.

    At most ``cache_bytes`` of it is in memory, written or waiting to be. As a context manager it
    closes itself; after an error it drops what was not flushed.
    """

    def __init__(self, folder: Path, cache_bytes: int = 4 << 30, device: str = "cpu") -> None:
        self.folder, self._device = folder, device
        # The versions of a client's state and their checksums, once looked up or written.
        self._known: dict[Key, dict[int, str]] = {}
        self._complete = False  # whether there is nothing to look up any more
        self._files = WriteBehind(cache_bytes, self._write, device)

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

    def load(self, owner: str, client: str, as_of: int) -> Kept | None:
        """Return the state of a client when a round was over: a copy."""
        key = (owner, client)
        versions = [v for v in self._versions(key) if v <= as_of]
        if not versions:
            return None
        label = Label(owner, client, max(versions))
        path = self._path(label)
        found = self._files.get(path)
        if found is None:
            state, notes, _ = read_state(path, label)
            found = state.to(self._device), notes
        return found

    def save(self, owner: str, client: str, round_: int, state: BlockState,
             notes: Mapping[str, Any]) -> None:
        """Keep a copy of a client's state as of a round; it is on disk after the next ``flush``.

        A disk that did not take an earlier state is an error here, and then this one is not kept.
        """
        key, label = (owner, client), Label(owner, client, round_)
        before = list(self._versions(key))
        self._files.put(self._path(label), label, state, notes)
        self._known[key][round_] = ""  # its checksum is known when it is written
        # The next load takes the new version; older ones need no place in memory.
        self._files.forget(self._path(Label(owner, client, v)) for v in before if v != round_)

    def prune(self, owner: str, client: str, as_of: int, kept: Iterable[int]) -> None:
        """Drop what nobody goes back to; ``kept`` are the rounds that have a checkpoint.

        The two newest stay: the next checkpoint may be of the round before one that was cut short.
        What is newer than ``as_of`` is of rounds that the server has undone.
        """
        versions = self._versions((owner, client))
        needed = set(sorted(v for v in versions if v <= as_of)[-2:])
        needed |= {max((v for v in versions if v <= round_), default=-1) for round_ in kept}
        for version in set(versions) - needed:
            path = self._path(Label(owner, client, version))
            if path.is_file():  # else it waits to be written, and goes the next time
                path.unlink()
                del versions[version]

    def flush(self) -> None:
        """Return when all that was saved is on disk."""
        self._files.flush()

    # What another run's clients kept

    def kept(self, owner: str, client: str) -> Listing:
        """Return all that is on disk of a client's state."""
        labels = [Label(owner, client, v) for v in sorted(self._versions((owner, client)))]
        return [(owner, client, label.round, read_state(self._path(label), label)[2])
                for label in labels]

    def take(self, other: Path, listed: Iterable[Sequence[Any]]) -> Listing:
        """Copy the listed files of another store's folder, bit for bit; return the listing."""
        source, taken = ClientStore(other), []
        for owner, client, version, digest in listed:
            label = Label(owner, client, version)
            fault = source._fault(label, digest)
            if fault is not None:
                raise TapflError(f"start: {fault}")
            with replacing(self._path(label)) as temporary:
                shutil.copyfile(source._path(label), temporary)
            taken.append((owner, client, version, digest))
        return taken

    # What a checkpoint lists

    def listing(self, as_of: int) -> Listing:
        """Return the files that a round's state consists of; all of them are on disk."""
        found = []
        for (owner, client), versions in sorted(self._known.items()):
            past = [v for v in versions if v <= as_of]
            if past:
                label = Label(owner, client, max(past))
                # A file that another process wrote has not been read yet.
                digest = versions[label.round] or read_state(self._path(label), label)[2]
                found.append((owner, client, label.round, digest))
        return found

    def check(self, listing: Iterable[tuple[str, str, int, str]]) -> str | None:
        """Say what is wrong with the listed files, if anything is; else go on from them."""
        listed = [(Label(owner, client, version), digest)
                  for owner, client, version, digest in listing]
        with ThreadPoolExecutor() as pool:
            for fault in pool.map(self._fault, *zip(*listed, strict=True)) if listed else ():
                if fault is not None:
                    return fault
        self._adopt(listed)
        return None

    def _adopt(self, listed: list[tuple[Label, str]]) -> None:
        """Take the listed files for the truth: what a later round left behind does not count."""
        self._known = {}
        for label, digest in listed:
            key = (label.method, label.client)
            older = {v: "" for v in self._versions(key) if v < label.round}
            self._known[key] = {**older, label.round: digest}
        self._complete = True

    def _fault(self, label: Label, digest: str) -> str | None:
        path = self._path(label)
        if not path.is_file():
            return f"{path}: missing"
        try:
            found = read_state(path, label)[2]
        except TapflError as error:
            return str(error)
        return None if found == digest else f"{path}: not the file that the checkpoint lists"

    # Several processes at work in one folder: each is told which files count

    def newest(self, client: str, owners: Iterable[str], as_of: int) -> Files:
        """Return the newest files of a client, by owner; they have been written, or adopted."""
        found = {}
        for owner in owners:
            versions = self._known.get((owner, client), {})
            past = [version for version in versions if version <= as_of]
            if past:
                found[owner] = (max(past), versions[max(past)])
        return found

    def adopt(self, client: str, owners: Iterable[str], files: Files) -> None:
        """Take these files of a client for the truth, whatever else lies there."""
        for owner in owners:
            versions: dict[int, str] = {}
            if owner in files:
                version, digest = files[owner]
                versions = {v: "" for v in self._there((owner, client)) if v < version}
                versions[version] = digest
            self._known[owner, client] = versions

    def note(self, client: str, files: Files) -> None:
        """Remember that another process wrote these; a client's two newest versions count."""
        for owner, (version, digest) in files.items():
            versions = self._known.setdefault((owner, client), {})
            versions[version] = digest
            for old in sorted(versions)[:-2]:
                del versions[old]

    def release(self, client: str, owners: Iterable[str]) -> None:
        """Forget a client, in memory too: another process may serve it next."""
        for owner in owners:
            versions = self._known.pop((owner, client), {})
            self._files.forget(self._path(Label(owner, client, v)) for v in versions)

    # Files

    def _write(self, path: Path, label: Label, state: BlockState,
               notes: Mapping[str, Any]) -> None:
        digest = write_state(path, label, state, notes)
        self._known[label.method, label.client][label.round] = digest

    def _path(self, label: Label) -> Path:
        return self._folder((label.method, label.client)) / f"{label.round:06d}.safetensors"

    def _folder(self, key: Key) -> Path:
        return self.folder / folder_name(key[0]) / check_name(key[1], "client")

    def _versions(self, key: Key) -> dict[int, str]:
        if key not in self._known:
            self._known[key] = {} if self._complete else dict.fromkeys(self._there(key), "")
        return self._known[key]

    def _there(self, key: Key) -> list[int]:
        """Return the versions that are on disk."""
        return [int(path.stem) for path in self._folder(key).glob("*.safetensors")
                if path.stem.isdigit()]
