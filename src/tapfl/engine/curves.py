"""Curves: how good W and the personal models are on the way, on a fixed sample of the test data."""

from __future__ import annotations

import math
import zlib

import numpy as np

from tapfl.config import Config
from tapfl.data.batches import Rows, TaskData
from tapfl.data.federation import Client
from tapfl.evaluation.evaluate import Scores
from tapfl.events import Curve


class CurveSamples:
    """Samples of clients' test data, the same in every round.

    Of data that clients share there is one sample for all, so that one W is scored on it once.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._shared: dict[int, tuple[TaskData, TaskData]] = {}  # by where the whole data are

    def of(self, client: Client) -> list[tuple[TaskData, bool]]:
        """Return a sample of each task's test data, and whether it is one for all clients."""
        return [(self._sample(task, data, rows), len(rows) == len(data))
                for task, (data, rows) in client.tests.items() if len(rows)]

    def _sample(self, task: str, data: TaskData, rows: Rows) -> TaskData:
        size, seed = self.config.evaluation.sample, self.config.seed
        if len(rows) < len(data):
            return data.take(sample_rows(rows, size, seed, task))
        if id(data) not in self._shared:
            self._shared[id(data)] = data, data.take(sample_rows(rows, size, seed, task))
        return self._shared[id(data)][1]


def sample_rows(rows: Rows, size: int, seed: int, task: str) -> Rows:
    """Return the first so many rows of a fixed permutation; a larger sample holds a smaller one.

    Clients that share a task's test data get the same sample.
    """
    order = np.random.default_rng([seed, zlib.crc32(f"curve/{task}".encode())])
    return rows[order.permutation(len(rows))[:size]]


def curve(method: str, round_: int, client: str, data: TaskData, scores: Scores) -> Curve:
    """Return the event: mean scores; JSON has no place for what is not finite."""
    means = {metric: float(values.mean()) for metric, values in scores.items()}
    return Curve(method, round_, client, data.task.name,
                 {metric: value for metric, value in means.items() if math.isfinite(value)},
                 len(data))
