"""Load the data set of every task: training and test split, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tapfl.config import Config, DataConfig
from tapfl.data import miniature, synthetic
from tapfl.data.batches import TaskData, Texts
from tapfl.errors import TapflError
from tapfl.tasks import Task

Splits = dict[str, tuple[TaskData, TaskData]]


def load_data(config: Config, tasks: Mapping[str, Task], tokenizer: Any, max_text: int,
              device: str = "cpu", resident_bytes: float = float("inf")) -> Splits:
    """Return ``{task: (train, test)}``, tokenized with the foundation's tokenizer.

    Images go to the device as long as they take no more than ``resident_bytes`` there.
    """
    load = SOURCES[config.data.source]
    splits: Splits = {}
    for name, task in tasks.items():
        splits[name] = load(config.data, task, tokenizer, max_text, device)
        for data in splits[name]:
            resident_bytes -= data.image_bytes
            data.to(device, images_too=resident_bytes >= 0)
            if not data.resident:
                resident_bytes += data.image_bytes
    return splits


def _miniature(config: DataConfig, task: Task, tokenizer: Any, max_text: int,
               device: str) -> tuple[TaskData, TaskData]:
    made = miniature.generate(task.name, config.train or 1200, config.test or 120, config.seed)
    _check(task, made[0])
    train, test = (_tensors(task, part, tokenizer, max_text) for part in made)
    return train, test


# From a data configuration, a task, a tokenizer, the longest text and a device to both splits.
SOURCES: dict[str, Callable[[DataConfig, Task, Any, int, str], tuple[TaskData, TaskData]]] = {
    "miniature": _miniature, "synthetic": synthetic.generate}


def _tensors(task: Task, samples: miniature.Samples, tokenizer: Any, max_text: int) -> TaskData:
    data = TaskData(task)
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


def _check(task: Task, samples: miniature.Samples) -> None:
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
