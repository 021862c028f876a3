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


def sampled_tests(client: Client, config: Config) -> list[TaskData]:
    """Return a sample of the client's test data, task by task: the same in every round."""
    chosen = ((data, sample_rows(rows, config.evaluation.sample, config.seed, task))
              for task, (data, rows) in client.tests.items())
    return [data.take(rows) for data, rows in chosen if len(rows)]


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
