"""Which test samples a run keeps for people to look at, and of which clients."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Self

import numpy as np

from tapfl.data.batches import Rows, TaskData
from tapfl.data.federation import Federation

CLIENTS = 4  # of each task keep samples: the first ones of the roster


class SampleChoice:
    """Which test samples are kept, and of which clients. It draws from generators of its own.

    The choice depends on the seed, the client and the task alone, never on predictions: samples
    chosen where one method errs would make that method look worse than the others.
    """

    def __init__(self) -> None:
        self._own: dict[str, dict[str, Rows]] = {}
        self._of_data: dict[int, tuple[TaskData, list[Rows]]] = {}

    @classmethod
    def among(cls, federation: Federation, size: int, seed: int) -> Self:
        """Choose ``size`` samples of each task for the first clients that have it."""
        choice, held = cls(), Counter[str]()
        for index in range(len(federation) if size else 0):
            if all(held[task] >= CLIENTS for task in federation.tasks):
                break
            client = federation[index]
            for task, (data, rows) in client.tests.items():
                if len(rows) and held[task] < CLIENTS:
                    held[task] += 1
                    choice._add(client.id, data, _drawn(rows, size, seed, client.id, task))
        return choice

    def _add(self, client: str, data: TaskData, rows: Rows) -> None:
        self._own.setdefault(client, {})[data.task.name] = rows
        # The data are held, so that no other can take their place in memory.
        self._of_data.setdefault(id(data), (data, []))[1].append(rows)

    def of_client(self, client: str) -> Mapping[str, Rows]:
        """Return the rows that are kept of each of a client's tasks."""
        return self._own.get(client, {})

    def of_data(self, data: TaskData) -> Rows:
        """Return the rows of a data set that any client keeps."""
        _, rows = self._of_data.get(id(data), (data, []))
        return np.concatenate(rows) if rows else np.arange(0)


def _drawn(rows: Rows, size: int, seed: int, client: str, task: str) -> Rows:
    order = np.random.default_rng([seed, zlib.crc32(f"samples/{task}/{client}".encode())])
    return np.sort(rows[order.permutation(len(rows))[:size]])
