"""results.csv: one row for a method, a client, a task and a metric."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from tapfl.engine.files import replacing
from tapfl.engine.messages import Row
from tapfl.errors import TapflError

COLUMNS = ("seed", "method", "client", "task", "dataset", "metric", "value", "samples")


def no_results(path: Path) -> TapflError:
    """Return what to say of a run that is complete and has no results."""
    return TapflError(f"{path}: no results: its clients keep their scores to themselves; each "
                      "node has those of its clients in its own folder")


def write_results(path: Path, rows: Iterable[Row]) -> None:
    """Write the tidy results."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_results(path: Path) -> list[Row]:
    """Read what ``write_results`` wrote, with numbers as numbers."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise TapflError(f"{path}: expected the columns {', '.join(COLUMNS)}")
            return [{**row, "seed": int(row["seed"]), "value": float(row["value"]),
                     "samples": int(row["samples"])} for row in reader]
    except (OSError, ValueError, TypeError, csv.Error) as error:
        if isinstance(error, TapflError):
            raise
        raise TapflError(f"{path}: not the results of a run ({error})") from None
