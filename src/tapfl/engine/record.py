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
from tapfl.engine.store import replacing

COLUMNS = ("seed", "method", "client", "task", "dataset", "metric", "value", "samples")
Row = dict[str, Any]


class EventLog:
    """One JSON object a line. ``held`` events wait until what they tell of is on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        self._held: list[dict[str, Any]] | None = None

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event, or hold it."""
        record = {"event": event, **fields}
        if self._held is None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        else:
            self._held.append(record)

    def hold(self) -> None:
        """Keep events back from now on."""
        self._held = []

    def release(self) -> list[dict[str, Any]]:
        """Stop holding; return what was held."""
        held, self._held = self._held or [], None
        return held

    def replay(self, records: Iterable[dict[str, Any]]) -> None:
        """Write events that were held or recorded elsewhere."""
        for record in records:
            self.emit(**record)

    def offset(self) -> int:
        """Return how long the file is: what a checkpoint refers to."""
        return self._file.tell()

    def truncate(self, offset: int) -> None:
        """Forget everything after a checkpoint."""
        self._file.truncate(offset)
        self._file.seek(0, 2)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
