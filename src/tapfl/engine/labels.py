"""labels.json: how many training samples of each label every client has, task by task.

Each client counts its own. The file explains results; no server reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from tapfl.data.federation import Client, Federation
from tapfl.engine.files import read_checked_json, write_checked_json
from tapfl.errors import TapflError
from tapfl.reading import check

FILE = "labels.json"
FORMAT = 1
_Labels = dict[int, NDArray[np.int64]]  # of a data set, by where it is


class TaskLabels(BaseModel):
    """A client's training samples of a task; ``counts`` by label where the task has labels."""

    model_config = ConfigDict(extra="forbid")

    samples: int = Field(ge=0)
    counts: list[int] = []


class LabelFile(BaseModel):
    """The labels of all clients, by client and task."""

    model_config = ConfigDict(extra="forbid")

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    clients: dict[str, dict[str, TaskLabels]]


def label_counts(client: Client, known: _Labels) -> dict[str, TaskLabels]:
    """Count a client's labels; ``known`` keeps a data set's labels for the next client."""
    found = {}
    for data, rows in client.data.holdings:
        counts: list[int] = []
        if data.labels is not None:
            if id(data) not in known:
                known[id(data)] = data.labels.cpu().numpy()
            counts = np.bincount(known[id(data)][rows], minlength=data.task.classes).tolist()
        found[data.task.name] = TaskLabels(samples=len(rows), counts=counts)
    return found


def write_labels(folder: Path, federation: Federation) -> None:
    """Write the labels of all clients of this process."""
    known: _Labels = {}
    whole = LabelFile(clients={client.id: label_counts(client, known) for client in federation})
    write_checked_json(folder / FILE, whole.model_dump(mode="json"))


def read_labels(folder: Path) -> Mapping[str, Mapping[str, TaskLabels]]:
    """Return the labels by client and task; a run whose data are elsewhere has none."""
    path = folder / FILE
    if not path.exists():
        return {}
    values = read_checked_json(path)
    if values is None:
        raise TapflError(f"{path}: damaged, or not the labels of a run (its checksum does not "
                         "match)")
    return check(LabelFile, values, str(path)).clients
