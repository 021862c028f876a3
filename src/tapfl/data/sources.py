"""Load the data set of every task: training and test split, as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tapfl.config import Config
from tapfl.data import miniature
from tapfl.data.batches import TaskData, Texts
from tapfl.errors import TapflError
from tapfl.tasks import Task

Splits = dict[str, tuple[TaskData, TaskData]]


def load_data(config: Config, tasks: Mapping[str, Task], tokenizer: Any, max_text: int,
              device: str = "cpu") -> Splits:
    """Return ``{task: (train, test)}``, tokenized with the foundation's tokenizer."""
    splits: Splits = {}
    for name, task in tasks.items():
        made = miniature.generate(name, config.data.train, config.data.test, config.data.seed)
        _check(task, made[0])
        train, test = (_tensors(task, part, tokenizer, max_text).to(device) for part in made)
        splits[name] = (train, test)
    return splits


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
