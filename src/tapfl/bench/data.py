"""How long data sets take to make, at first and again, and minibatches to draw."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from tapfl.bench.measure import Report, changed, once, timed
from tapfl.config import Config
from tapfl.data.batches import ClientData, TaskData
from tapfl.data.checksums import forget_checksums
from tapfl.data.participants import load_federation, taking_part
from tapfl.data.sources import load_data
from tapfl.engine.build import own_data
from tapfl.model.foundation import build_foundation, load_tokenizer

COLUMNS = ["data set", "samples", "load s", "samples/s", "again s", "minibatch ms"]


def run(config: Config, device: str, quick: bool = False) -> Report:
    """Load every task's data set, then draw minibatches of its training data, training nothing."""
    if quick:
        config = changed(config, {"data.train": 32, "data.test": 8})
    file = taking_part(load_federation(config.federation), config.federation)
    tokenizer = load_tokenizer(config.foundation)
    limit = build_foundation(config.foundation, layers_per_stage=config.backbone.layers_per_stage,
                             device="meta").max_text
    torch.zeros(1, device=device)  # a GPU's start must not count for the first data set
    rows, own = [], own_data(config, file)
    with _empty_cache():
        for name, task in file.task_table().items():
            load = partial(load_data, config, {name: task}, tokenizer, limit, device,
                           own=own)
            splits, seconds = once(load, device)
            forget_checksums()
            _, again = once(load, device)
            pairs = [splits[name]] if name in splits else [
                splits.of_client(name, client) for client in own.clients[name]]
            train, count = pairs[0][0], sum(len(part) for pair in pairs for part in pair)
            rows.append({"data set": name, "samples": count, "load s": seconds,
                         "samples/s": count / seconds, "again s": again,
                         "minibatch ms": 1e3 * _draw(train, config, device, 3 if quick else 50)})
    return Report("data: loading data sets and drawing minibatches",
                  {"source": config.data.source, "batch size": config.train.batch_size},
                  COLUMNS, rows, "Samples of both splits, and a second time: real data are "
                  "prepared once. Minibatches from one client that holds all training data.")


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Begin without anything prepared, and leave the user's cache alone."""
    before = os.environ.get("TAPFL_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TAPFL_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("TAPFL_CACHE")
            if before is not None:
                os.environ["TAPFL_CACHE"] = before


def _draw(train: TaskData, config: Config, device: str, steps: int) -> float:
    """Return the seconds that one minibatch takes."""
    data = ClientData([(train, np.arange(len(train)))], [])

    def draw() -> None:
        for _ in data.minibatches(steps, config.train.batch_size, np.random.default_rng(0)):
            pass

    return timed(draw, device, repeats=3) / steps
