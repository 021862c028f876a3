"""The results of a run: results.csv, and the score of every test sample.

results.csv has one row for a method, a client, a task and a metric.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tapfl.engine.files import replacing
from tapfl.engine.messages import Row
from tapfl.errors import TapflError, as_tapfl_error
from tapfl.methods import folder_name

COLUMNS = ("seed", "method", "client", "task", "dataset", "metric", "value", "samples")
# Scores of test samples by method, client, task and metric, in the order of the client's test data.
SampleScores = dict[tuple[str, str, str, str], NDArray[np.float32]]


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


def read_sample_scores(run: Path, methods: Iterable[str]) -> SampleScores | None:
    """Return the scores of some methods' test samples; None where a run has kept none.

    They are in scores/METHOD/CLIENT.safetensors: float32 tensors named ``task|metric``.
    """
    from safetensors.numpy import load_file

    if not (run / "scores").is_dir():
        return None
    found: SampleScores = {}
    for method in methods:
        for path in sorted((run / "scores" / folder_name(method)).glob("*.safetensors")):
            with as_tapfl_error(f"{path}: not readable as scores of test samples"):
                tensors = load_file(path)
            for name, values in tensors.items():
                task, bar, metric = name.partition("|")
                if not bar or values.ndim != 1 or values.dtype != np.float32:
                    raise TapflError(f"{path}: '{name}' is no list of scores; expected float32 "
                                     "values named task|metric")
                found[method, path.stem, task, metric] = values
    return found
