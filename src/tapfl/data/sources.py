"""Load the data set of every task: training and test split, as tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tapfl.config import Config, DataConfig
from tapfl.data import custom, hub, miniature, synthetic
from tapfl.data.batches import TaskData, Texts
from tapfl.data.custom import OwnData
from tapfl.data.prepare import Preparation, at_most
from tapfl.data.samples import Samples
from tapfl.errors import TapflError
from tapfl.events import Subscriber, nobody
from tapfl.tasks import Task

Pair = tuple[TaskData, TaskData]


class Splits(dict[str, Pair]):
    """Training and test data of the tasks whose clients hold shares of one data set.

    ``brought`` are the tasks whose clients have data of their own: ``of_client`` loads one
    client's files, and no other's, when they are first needed.
    """

    brought: frozenset[str] = frozenset()

    def of_client(self, task: str, client: str) -> Pair:
        """Return both splits of a client's own data of a task."""
        raise KeyError(task)


class _Loaded(Splits):
    """Splits that know where a client's own files are."""

    def __init__(self, load: _Loader) -> None:
        super().__init__()
        self._load, self.brought = load, frozenset(load.own.clients)
        self._of_client: dict[tuple[str, str], Pair] = {}

    def of_client(self, task: str, client: str) -> Pair:
        key = (task, client)
        if key not in self._of_client:
            self._of_client[key] = self._load.of_client(task, client)
        return self._of_client[key]


def load_data(config: Config, tasks: Mapping[str, Task], tokenizer: Any, max_text: int,
              device: str = "cpu", resident_bytes: float = float("inf"),
              own: OwnData | None = None, notify: Subscriber = nobody) -> Splits:
    """Return the splits of every task, tokenized with the foundation's tokenizer.

    Images go to the device as long as they take no more than ``resident_bytes`` there.
    """
    load = _Loader(config.data, tasks, tokenizer, max_text, own or OwnData(), notify,
                   _Placement(device, resident_bytes))
    splits = _Loaded(load)
    for name, task in tasks.items():
        if name not in splits.brought:
            splits[name] = load.shared(task)
    return splits


@dataclasses.dataclass
class _Placement:
    """Moves data to the device; images only while there is space for them."""

    device: str
    room: float

    def __call__(self, pair: Pair) -> Pair:
        for data in pair:
            self.room -= data.image_bytes
            data.to(self.device, images_too=self.room >= 0)
            if not data.resident:
                self.room += data.image_bytes
        return pair


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Finds the samples of a task: the clients' own, the file's own, or the source's."""

    config: DataConfig
    tasks: Mapping[str, Task]
    tokenizer: Any
    max_text: int
    own: OwnData
    notify: Subscriber
    place: _Placement

    @property
    def device(self) -> str:
        """Where the samples go."""
        return self.place.device

    def shared(self, task: Task) -> Pair:
        """Return the one data set of a task."""
        if task.name in self.own.tasks:
            return self.place(self._entry(task, self.own.tasks[task.name]))
        return self.place(SOURCES[self.config.source](self, task))

    def of_client(self, task: str, client: str) -> Pair:
        """Return a client's own data of a task: only its own files are read."""
        return self.place(self._entry(self.tasks[task], self.own.clients[task][client]))

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
        return Preparation(self.tokenizer, self.max_text, self.notify)


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
