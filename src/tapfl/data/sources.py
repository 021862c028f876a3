"""Load the data set of every task: training and test split, as tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tapfl.config import Config, DataConfig
from tapfl.data import custom, hub, miniature, synthetic
from tapfl.data.batches import Rows, TaskData, Texts
from tapfl.data.custom import OwnData
from tapfl.data.prepare import Listener, Preparation, Silent, at_most, joined
from tapfl.data.samples import Samples
from tapfl.errors import TapflError
from tapfl.tasks import Task

Pair = tuple[TaskData, TaskData]


class Splits(dict[str, Pair]):
    """Training and test data of every task.

    ``held`` tells which rows of the two belong to a client, for tasks whose clients bring data of
    their own.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: dict[str, dict[str, tuple[Rows, Rows]]] = {}


def load_data(config: Config, tasks: Mapping[str, Task], tokenizer: Any, max_text: int,
              device: str = "cpu", resident_bytes: float = float("inf"),
              own: OwnData | None = None, listener: Listener | None = None) -> Splits:
    """Return the splits of every task, tokenized with the foundation's tokenizer.

    Images go to the device as long as they take no more than ``resident_bytes`` there.
    """
    load = _Loader(config.data, tokenizer, max_text, device, own or OwnData(),
                   listener or Silent())
    splits = Splits()
    for name, task in tasks.items():
        splits[name], held = load(task)
        if held:
            splits.held[name] = held
        for data in splits[name]:
            resident_bytes -= data.image_bytes
            data.to(device, images_too=resident_bytes >= 0)
            if not data.resident:
                resident_bytes += data.image_bytes
    return splits


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Finds the samples of a task: the clients' own, the file's own, or the source's."""

    config: DataConfig
    tokenizer: Any
    max_text: int
    device: str
    own: OwnData
    listener: Listener

    def __call__(self, task: Task) -> tuple[Pair, dict[str, tuple[Rows, Rows]]]:
        own = self.own
        if task.name in own.clients:
            pairs = {client: self._entry(task, entry)
                     for client, entry in own.clients[task.name].items()}
            train, test = (joined((pair[i] for pair in pairs.values()),
                                  self.tokenizer.pad_token_id) for i in range(2))
            return (train, test), _held(pairs)
        if task.name in own.tasks:
            return self._entry(task, own.tasks[task.name]), {}
        return SOURCES[self.config.source](self, task), {}

    def _entry(self, task: Task, entry: custom.DataEntry) -> Pair:
        return self.limited(custom.load(entry, task, self.own, self.config, self.preparation))

    def limited(self, pair: Pair) -> Pair:
        """Return as many samples of real data as the configuration wants at most."""
        config = self.config
        return (at_most(pair[0], config.train, config.seed),
                at_most(pair[1], config.test, config.seed))

    @functools.cached_property
    def preparation(self) -> Preparation:
        """What turns tables into tensors."""
        return Preparation(self.tokenizer, self.max_text, self.listener)


def _held(pairs: Mapping[str, Pair]) -> dict[str, tuple[Rows, Rows]]:
    """Return every client's rows of the joined data."""
    held, starts = {}, [0, 0]
    for client, pair in pairs.items():
        rows = [np.arange(start, start + len(data))
                for start, data in zip(starts, pair, strict=True)]
        held[client] = (rows[0], rows[1])
        starts = [start + len(data) for start, data in zip(starts, pair, strict=True)]
    return held


def _miniature(load: _Loader, task: Task) -> Pair:
    config = load.config
    made = miniature.generate(task.name, config.train or 1200, config.test or 120, config.seed)
    _check(task, made[0])
    train, test = (_tensors(task, part, load.tokenizer, load.max_text) for part in made)
    return train, test


def _synthetic(load: _Loader, task: Task) -> Pair:
    return synthetic.generate(load.config, task, load.tokenizer, load.max_text, load.device)


def _hub(load: _Loader, task: Task) -> Pair:
    return load.limited(hub.load(load.config, task, load.preparation))


SOURCES: dict[str, Callable[[_Loader, Task], Pair]] = {
    "miniature": _miniature, "hub": _hub, "synthetic": _synthetic}


def _tensors(task: Task, samples: Samples, tokenizer: Any, max_text: int) -> TaskData:
    data = TaskData(task, classes=samples.classes)
    if "image" in task.modalities and samples.images is not None:
        data.images = torch.from_numpy(samples.images)
    if "text" in task.modalities and samples.texts is not None:
        data.text = Texts.of(samples.texts, tokenizer, max_text)
    if task.is_classification:
        data.labels = torch.tensor(samples.labels)
    if samples.answers is not None:
        data.answers = Texts.of(samples.answers, tokenizer, max_text)
        data.references = samples.answers
    return data


def _check(task: Task, samples: Samples) -> None:
    """Compare what the federation file says of a task with what its data set is."""
    if task.is_classification and samples.labels is None:
        raise TapflError(f"task '{task.name}': the miniature data set has no labels")
    if task.is_classification and task.classes != len(samples.classes):
        raise TapflError(f"task '{task.name}': the miniature data set has {len(samples.classes)} "
                         f"classes, the federation file says {task.classes}; "
                         "federation.layout: miniature fits")
    if task.kind == "text_generation" and samples.answers is None:
        raise TapflError(f"task '{task.name}': the miniature data set has no answers")
    for modality, values in (("image", samples.images), ("text", samples.texts)):
        if modality in task.modalities and values is None:
            raise TapflError(f"task '{task.name}': the miniature data set has no {modality}s")
