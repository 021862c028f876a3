"""Files of blocks, written behind the caller's back and kept in memory as far as they fit.

What was put is there at once for whoever gets it, and on disk once ``flush`` has returned. Nothing
leaves memory before it is on disk: a file that waits for its turn is not in the cache that evicts.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tapfl.blocks import BlockState
from tapfl.engine.files import Label

Write = Callable[[Path, Label, BlockState, Mapping[str, Any]], None]


@dataclass(frozen=True, eq=False)
class _Entry:
    """A file's content."""

    label: Label
    state: BlockState
    notes: str  # JSON, so that memory gives back exactly what the disk would
    ready: torch.cuda.Event | None  # when the device has computed the state; None on a CPU


class _Shelf(OrderedDict[Path, _Entry]):
    """Entries in order, and how many bytes they hold."""

    nbytes = 0

    def add(self, path: Path, entry: _Entry) -> None:
        self.drop(path)
        self[path] = entry
        self.nbytes += entry.state.nbytes

    def drop(self, path: Path) -> None:
        entry = self.pop(path, None)
        if entry is not None:
            self.nbytes -= entry.state.nbytes


class WriteBehind:
    """At most ``limit`` bytes of state in memory (one state at least), and a thread that writes.

    The thread lives while there is something to write. An error ends it and is raised in the
    caller's thread by the next ``put``, ``flush`` or ``close``; what could not be written still
    waits, and the call after that tries again. A state on a GPU stays there until it is written;
    whoever gets it, gets it on ``device``.
    """

    def __init__(self, limit: int, write: Write, device: str = "cpu") -> None:
        self._limit, self._write, self._device = limit, write, torch.device(device)
        self._waiting, self._written = _Shelf(), _Shelf()
        # Always entered as the bare lock: Ctrl-C cannot fall between its acquisition and the body.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._busy = False
        self._error: BaseException | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, path: Path, label: Label, state: BlockState, notes: Mapping[str, Any]) -> None:
        """Keep a copy and have it written. Blocks while all is full."""
        copy = state.clone()
        entry = _Entry(label, copy, json.dumps(notes), _ready(copy))
        room = self._limit - copy.nbytes
        with self._lock:
            self._wait(lambda: self._waiting.nbytes <= room)
            self._written.drop(path)
            self._waiting.add(path, entry)
            self._evict()
            self._start()

    def get(self, path: Path) -> tuple[BlockState, dict[str, Any]] | None:
        """Return a copy of a file's content, if it is in memory; if it is not, it is on disk."""
        with self._lock:
            entry = self._waiting.get(path)
            if entry is None and path in self._written:
                self._written.move_to_end(path)
                entry = self._written[path]
        if entry is None:
            return None
        there = all(value.device.type == self._device.type for value in entry.state.values())
        state = entry.state.clone() if there else entry.state.to(self._device)
        return state, json.loads(entry.notes)

    def forget(self, paths: Iterable[Path]) -> None:
        """Make room in memory: nobody will ask for these files soon."""
        with self._lock:
            for path in paths:
                self._written.drop(path)

    def flush(self) -> None:
        """Return when everything is on disk."""
        with self._lock:
            self._wait(lambda: not self._waiting)

    def close(self) -> None:
        """Write everything and give the memory back."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Finish the file under way and forget the rest, whatever happens."""
        with self._lock:
            self._waiting, self._written, self._error = _Shelf(), _Shelf(), None
            while self._busy:
                self._changed.wait()
            self._error = None

    # The caller's side, with the lock held

    def _wait(self, done: Callable[[], bool]) -> None:
        """Let the thread write until ``done``, or until nothing is left that could change it."""
        if self._error is None:
            self._start()
        while self._error is None and self._waiting and not done():
            self._changed.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _start(self) -> None:
        # A daemon, so that it never keeps a process alive that is about to end.
        if self._waiting and not self._busy:
            threading.Thread(target=self._work, name="tapfl-writer", daemon=True).start()

    def _evict(self) -> None:
        while self._written and self._waiting.nbytes + self._written.nbytes > self._limit:
            self._written.drop(next(iter(self._written)))

    # The thread's side

    def _work(self) -> None:
        with self._lock:
            if self._busy:  # another one was started before this one had its turn
                return
            self._busy = True
        while (job := self._next()) is not None:
            path, entry = job
            try:
                state = self._on_cpu(entry)
                self._write(path, entry.label, state, json.loads(entry.notes))
            except BaseException as error:  # whatever it is, the caller must hear of it
                self._stop(error)
                return
            self._settle(path, entry, state)

    def _next(self) -> tuple[Path, _Entry] | None:
        with self._lock:
            if self._waiting:
                return next(iter(self._waiting.items()))
            self._stop(None)
            return None

    def _stop(self, error: BaseException | None) -> None:
        with self._lock:
            self._busy, self._error = False, error
            self._changed.notify_all()

    def _settle(self, path: Path, entry: _Entry, state: BlockState) -> None:
        with self._lock:
            if self._waiting.get(path) is entry:  # else it was put again and is still to be written
                self._waiting.drop(path)
                # What is written stays in the host's memory: the GPU's is for computing.
                self._written.add(path, dataclasses.replace(entry, state=state, ready=None))
                self._evict()
            self._changed.notify_all()

    def _on_cpu(self, entry: _Entry) -> BlockState:
        """Copy from the device on a stream of our own: the caller's never has to wait for it."""
        device = _device(entry.state)
        if device is None or entry.ready is None:
            return entry.state
        if device not in self._streams:
            # The high-priority pool: a stream of the other one may be capturing a graph just now.
            self._streams[device] = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                device, priority=-1)
        with torch.cuda.stream(self._streams[device]):
            self._streams[device].wait_event(entry.ready)
            return entry.state.to("cpu")  # complete when it returns


def _device(state: BlockState) -> torch.device | None:
    """Return the GPU that holds a state, if one does."""
    return next((value.device for value in state.values() if value.is_cuda), None)


def _ready(state: BlockState) -> torch.cuda.Event | None:
    """Mark the moment at which the GPU will have computed the state."""
    device = _device(state)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
