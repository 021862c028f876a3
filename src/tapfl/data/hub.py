"""The paper's eight data sets, with the paper's conventions.

All rows that exist are used: the full sets of the hub, or a mirror that holds a part of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tapfl.config import DataConfig
from tapfl.data import templates
from tapfl.data.batches import TaskData
from tapfl.data.prepare import Preparation, Recipe, joined
from tapfl.data.table import Row, hub_table, mirror, whole_number
from tapfl.errors import TapflError, nearest, shown
from tapfl.tasks import IMAGE_GENERATION, TEXT_GENERATION, Task

TEST_SHARE = 5  # where there is one split, the last fifth of it, shuffled, is the test


@dataclass(frozen=True)
class HubSet:
    """A data set of the hub: its splits, and the columns of a sample.

    ``label`` is a column, counted from ``first_label``. ``words`` makes a row's text and answer
    from some ``columns``; a task without answers leaves them empty. ``typed`` is the one column
    that a person fills by typing a text, where there is such.
    """

    id: str
    train: str
    test: str | None
    subsets: tuple[str | None, ...] = (None,)
    image: str | None = None
    label: str | None = None
    first_label: int = 0
    columns: tuple[str, ...] = ()
    words: Callable[[Row], tuple[str, str]] | None = None
    typed: str | None = None

    def recipe(self, task: Task) -> Recipe:
        """Return how its rows become samples of a task."""
        image = self.image if "image" in task.modalities else None
        label = self.label if task.is_classification else None
        words = self.words and functools.partial(_full, self.columns, self.words)
        return Recipe(
            task.name, (*self.columns, *filter(None, (image, label))), image,
            (lambda row: words(row)[0]) if words and "text" in task.modalities else None,
            (lambda row: whole_number(row[label]) - self.first_label) if label else None,
            (lambda row: words(row)[1]) if words and task.kind == TEXT_GENERATION else None,
            labels=label)


def _full(columns: tuple[str, ...], words: Callable[[Row], tuple[str, str]],
          row: Row) -> tuple[str, str]:
    """Make a row's text and answer, if it has all that they need."""
    for column in columns:
        if row[column] is None or (isinstance(row[column], str) and not row[column].strip()):
            raise ValueError(f"column '{column}' is empty")
    return words(row)


def _mmlu(row: Row) -> tuple[str, str]:
    choices, answer = _words_of(row, "choices"), whole_number(row["answer"])
    if not 0 <= answer < len(choices):
        raise ValueError(f"answer {answer}, but {len(choices)} choices")
    return templates.mmlu(row["subject"], row["question"], choices, answer)


def _vqa(row: Row) -> tuple[str, str]:
    return templates.vqa(row["question"], row["multiple_choice_answer"])


def _commongen(row: Row) -> tuple[str, str]:
    return templates.commongen(_words_of(row, "concepts"), row["target"])


def _words_of(row: Row, column: str) -> list[str]:
    """Return a column that is a list: a text would be taken letter by letter."""
    values = row[column]
    if not isinstance(values, list) or None in values:
        raise ValueError(f"column '{column}': expected a list of texts, got {shown(values)}")
    return [str(value) for value in values]


def _news(row: Row) -> tuple[str, str]:
    return f"{row['title']} {row['description']}", ""


SETS = {
    "tiny-imagenet": HubSet("zh-plus/tiny-imagenet", "train", "valid", image="image",
                            label="label"),
    "cifar100": HubSet("uoft-cs/cifar100", "train", "test", image="img", label="fine_label"),
    "fmnist": HubSet("zalando-datasets/fashion_mnist", "train", "test", image="image"),
    "caltech256": HubSet("ilee0022/Caltech-256", "train", "test", image="image"),
    "agnews": HubSet("sh0416/ag_news", "train", "test", label="label", first_label=1,
                     columns=("title", "description"), words=_news),
    # MMLU's own training split is another collection: it trains on `test`.
    "mmlu": HubSet("cais/mmlu", "test", "validation",
                   ("professional_law", "professional_medicine", "moral_scenarios"),
                   columns=("subject", "question", "choices", "answer"), words=_mmlu),
    "vqa": HubSet("merve/vqav2-small", "validation", None, image="image",
                  columns=("question", "multiple_choice_answer"), words=_vqa, typed="question"),
    "commongen": HubSet("allenai/common_gen", "train", "validation",
                        columns=("concepts", "target"), words=_commongen, typed="concepts"),
}


def load(config: DataConfig, task: Task,
         preparation: Preparation) -> tuple[TaskData, TaskData]:
    """Return both splits of one of the eight."""
    if task.name not in SETS:
        raise TapflError(f"task '{task.name}': not one of the eight data sets"
                         + nearest(task.name, SETS)
                         + "; a task of your own has its data in the federation file")
    found = SETS[task.name]
    _check(task, found)
    folder = mirror(config.folder)

    def split(name: str) -> TaskData:
        tables = (hub_table(found.id, name, subset, folder) for subset in found.subsets)
        return joined((preparation.prepare(task, found.recipe(task), table) for table in tables),
                      preparation.tokenizer.pad_token_id)

    train = split(found.train)
    if task.is_classification and train.classes and len(train.classes) != task.classes:
        raise TapflError(f"task '{task.name}': {found.id} has {len(train.classes)} classes, "
                         f"the federation file says {task.classes}")
    if found.test is not None:
        test = split(found.test)
    else:
        order = np.random.default_rng(config.seed).permutation(len(train))
        cut = len(order) - len(order) // TEST_SHARE
        train, test = train.take(order[:cut]), train.take(order[cut:])
    return train, test


def _check(task: Task, found: HubSet) -> None:
    """Compare what the federation file says of a task with what its data set is."""
    has = {"image": found.image is not None, "text": found.words is not None}
    for modality in task.modalities:
        if not has[modality]:
            raise TapflError(f"task '{task.name}': {found.id} has no {modality}s")
    if task.is_classification and found.label is None:
        raise TapflError(f"task '{task.name}': {found.id} has no labels to classify by")
    writes = found.words is not None and found.label is None
    if not (task.is_classification or task.kind == IMAGE_GENERATION or writes):
        raise TapflError(f"task '{task.name}': {found.id} has no answers to learn to write")
