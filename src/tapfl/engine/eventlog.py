"""events.jsonl: one JSON object a line.

Each federated run has a segment of its own, which counts after a crash: the run's file is put
together again from the segments.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tapfl.engine.files import on_disk
from tapfl.events import Event, Logged, RoundEnded

Position = tuple[int, str]  # how long a segment is, and the checksum of what it holds


class EventLog:
    """Writes logged events to the run's file and to the segment of one federated run."""

    def __init__(self, path: Path, segment: Path) -> None:
        segment.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._segment_path = path, segment
        self._file = path.open("a", encoding="utf-8")
        self._start = self._file.tell()  # where this federated run begins
        self._segment = segment.open("a", encoding="utf-8")
        self._hash = hashlib.sha256()
        self._length = 0

    def __call__(self, event: Event) -> None:
        """Write an event, if it is one that a run keeps."""
        if not isinstance(event, Logged):
            return
        line = json.dumps(event.record(), allow_nan=False) + "\n"
        for path, file in ((self._segment_path, self._segment), (self._path, self._file)):
            with on_disk(path):
                file.write(line)
                file.flush()
        self._hash.update(line.encode())
        self._length += len(line.encode())

    def replay(self, records: Iterable[dict[str, Any]]) -> None:
        """Write events to the run's file that are recorded elsewhere."""
        with on_disk(self._path):
            self._file.writelines(json.dumps(record) + "\n" for record in records)
            self._file.flush()

    def arrange(self, late: Iterable[dict[str, Any]]) -> None:
        """Put every event of the run's file in its place, where reports came late.

        The order is that of a run whose clients report at once: round by round, the cohort's
        clients in their order, then the round itself. ``late`` came after the last round.
        """
        with self._segment_path.open(encoding="utf-8") as file:
            there = list(map(json.loads, file))
        records = [*there, *late]
        cohorts = {record["round"]: record["cohort"] for record in records
                   if record["event"] == RoundEnded.kind}

        def place(record: dict[str, Any]) -> tuple[int, int]:
            cohort = cohorts.get(record["round"], [])
            client = record.get("client")
            return record["round"], cohort.index(client) if client in cohort else len(cohort)

        ordered = sorted(records, key=place)  # stable: a client's events stay as they came
        if ordered != there:
            with on_disk(self._path):
                self._file.truncate(self._start)
            self.replay(ordered)

    def position(self) -> Position:
        """Return where the segment stands: what a checkpoint refers to."""
        return self._length, self._hash.hexdigest()

    def seconds(self) -> float:
        """Return how long the rounds of the segment took together."""
        with self._segment_path.open(encoding="utf-8") as file:
            return math.fsum(record["seconds"] for record in map(json.loads, file)
                             if record["event"] == RoundEnded.kind)

    def check(self, position: Position) -> str | None:
        """Say what is wrong with the segment up to a checkpoint, if anything is."""
        length, digest = position
        with contextlib.suppress(OSError):
            held = self._segment_path.read_bytes()[:length]
            if len(held) == length and hashlib.sha256(held).hexdigest() == digest:
                return None
        return f"{self._segment_path}: damaged (it is not what the checkpoint refers to)"

    def rewind(self, length: int) -> None:
        """Forget what came after a checkpoint; give the run's file what came before."""
        held = self._segment_path.read_bytes()[:length]
        with on_disk(self._segment_path):
            self._segment.truncate(length)
            self._file.write(held.decode())
            self._file.flush()
        self._length, self._hash = len(held), hashlib.sha256(held)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._segment.close()
