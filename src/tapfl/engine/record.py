"""What a run leaves behind: events.jsonl, results.csv, run.json."""

from __future__ import annotations

import csv
import json
import platform
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from tapfl import __version__
from tapfl.engine.store import on_disk, replacing

COLUMNS = ("seed", "method", "client", "task", "dataset", "metric", "value", "samples")
Row = dict[str, Any]


class EventLog:
    """One JSON object a line, in the run's file and in a segment that belongs to one method.

    The segments are what counts after a crash: the run's file is put together from them again.
    ``held`` events wait until what they tell of is on disk.
    """

    def __init__(self, path: Path, segment: Path) -> None:
        segment.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._segment = segment.open("a+", encoding="utf-8")
        self._held: list[dict[str, Any]] | None = None
        self.replacements = 0  # emitted so far, for progress displays

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event, or hold it."""
        record = {"event": event, **fields}
        self.replacements += event == "replacement"
        if self._held is not None:
            self._held.append(record)
            return
        line = json.dumps(record, allow_nan=False) + "\n"
        for file in (self._segment, self._file):
            with on_disk(Path(file.name)):
                file.write(line)
                file.flush()

    def hold(self) -> None:
        """Keep events back from now on."""
        self._held = []

    def release(self) -> list[dict[str, Any]]:
        """Stop holding; return what was held."""
        held, self._held = self._held or [], None
        return held

    def replay(self, records: Iterable[dict[str, Any]]) -> None:
        """Write events to the run's file that are recorded elsewhere."""
        with on_disk(Path(self._file.name)):
            for record in records:
                self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def offset(self) -> int:
        """Return how long the segment is: what a checkpoint refers to."""
        return self._segment.tell()

    def rewind(self, offset: int) -> None:
        """Forget what came after a checkpoint; tell the run's file what came before."""
        self._segment.seek(0, 2)
        self._segment.truncate(min(offset, self._segment.tell()))
        self._segment.seek(0)
        self._file.write(self._segment.read())
        self._file.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._segment.close()


def write_results(path: Path, rows: Iterable[Row]) -> None:
    """Write the tidy results."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_results(path: Path) -> list[Row]:
    """Read what ``write_results`` wrote, with numbers as numbers."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{**row, "seed": int(row["seed"]), "value": float(row["value"]),
                 "samples": int(row["samples"])} for row in csv.DictReader(file)]


def environment(device: str) -> dict[str, Any]:
    """Return the versions and the hardware that a run had."""
    facts = {"tapfl": __version__, "python": platform.python_version(),
             "torch": torch.__version__, "transformers": transformers.__version__,
             "numpy": numpy.__version__, "device": device, "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def memory(device: str) -> dict[str, int]:
    """Return the most memory the process has used so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    facts = {"peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.startswith("cuda"):
        facts["peak_cuda"] = torch.cuda.max_memory_allocated()
    return facts
