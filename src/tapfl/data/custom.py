"""A user's own data: where a task's or a client's samples are, as the federation file says."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from tapfl.config import DataConfig, PathText, Section
from tapfl.data.batches import TaskData
from tapfl.data.files import file_table
from tapfl.data.prepare import Preparation, Recipe
from tapfl.data.table import Row, Table, hub_table, mirror, whole_number
from tapfl.errors import TapflError, nearest, one_line, shown
from tapfl.reading import exists, is_file
from tapfl.tasks import TEXT_GENERATION, Task

FIELD = re.compile(r"\{([^{}]*)\}")


class DataEntry(Section):
    """Samples in local files or on the hub, and which columns they are in.

    ``path`` is a folder of pictures (one folder per class) or a CSV, JSON lines or parquet file,
    relative to the federation file; ``hub`` is an id there (with ``subset`` and ``split``).
    ``image`` and ``label`` name columns; ``text`` and ``answer`` name a column or are templates
    such as ``"Question: {question}"``. ``test`` is the share kept for the test, or another path or
    split. ``encoding`` is that of CSV and JSON lines (UTF-8).
    """

    path: PathText | None = None
    hub: str | None = None
    subset: str | None = None
    split: str = "train"
    image: str = "image"
    text: str = "text"
    label: str = "label"
    answer: str = "answer"
    test: float | PathText = Field(0.2)
    encoding: str | None = None

    @field_validator("encoding")
    @classmethod
    def _known(cls, encoding: str | None) -> str | None:
        try:
            "a".encode(encoding or "utf-8")
        except (LookupError, ValueError):
            raise ValueError("not a known encoding of text; expected one such as utf-8, latin-1, "
                             "cp1252 or utf-16") from None
        return encoding

    @model_validator(mode="after")
    def _one_place(self) -> DataEntry:
        if (self.path is None) == (self.hub is None):
            raise ValueError("expected either a path or a hub id")
        if self.encoding is not None and self.path is None:
            raise ValueError("encoding: that is for files (path), not for a hub id")
        if isinstance(self.test, float) and not 0 < self.test < 1:
            raise ValueError("test: expected a share between 0 and 1, or a path or split")
        return self


@dataclass(frozen=True)
class OwnData:
    """What a federation file says about data: by task, or by task and client.

    ``folder`` is what paths are relative to; ``names`` are the names of a task's classes, if any.
    """

    folder: Path = Path()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tasks: Mapping[str, DataEntry] = field(default_factory=dict)
    clients: Mapping[str, Mapping[str, DataEntry]] = field(default_factory=dict)


def load(entry: DataEntry, task: Task, own: OwnData, config: DataConfig,
         preparation: Preparation) -> tuple[TaskData, TaskData]:
    """Return both splits of an entry."""
    names, folder = own.names.get(task.name, ()), own.folder

    def table(path: str | None, split: str) -> Table:
        if entry.hub is not None:
            return hub_table(entry.hub, split, entry.subset, mirror(config.folder))
        assert path is not None
        return _file(folder / path, split, entry.encoding)

    train = table(entry.path, entry.split)

    def read(found: Table) -> TaskData:
        recipe = _recipe(entry, task, names, found)
        if recipe.folder and recipe.image:
            found.need([recipe.image])
            found = found.with_files(recipe.image, recipe.folder)
        return dataclasses.replace(preparation.prepare(task, recipe, found), classes=names)

    data = read(train)
    if isinstance(entry.test, str):
        if entry.path is not None and exists(folder / entry.test):
            return data, read(table(entry.test, "train"))
        return data, read(table(entry.path, entry.test))
    order = np.random.default_rng(config.seed).permutation(len(data))
    kept = max(1, round(len(order) * entry.test))
    if kept >= len(order):
        raise TapflError(f"{train.where}: {len(order)} sample(s) are too few for training and test")
    return data.take(order[kept:]), data.take(order[:kept])


def _file(place: Path, split: str, encoding: str | None) -> Table:
    if split != "train" and is_file(place):
        raise TapflError(f"{place}: a file has no split '{split}'; test: expected a share or "
                         "another file")
    return file_table(place, split, encoding)


def _recipe(entry: DataEntry, task: Task, names: tuple[str, ...], table: Table) -> Recipe:
    columns: list[str] = []

    def words(template: str) -> Callable[[Row], str]:
        fields = FIELD.findall(template) or [template]
        columns.extend(fields)
        if fields == [template]:
            return lambda row: _text(row, template)
        return lambda row: FIELD.sub(lambda found: _text(row, found[1]), template)

    text = words(entry.text) if "text" in task.modalities else None
    answer = words(entry.answer) if task.kind == TEXT_GENERATION else None
    image = entry.image if "image" in task.modalities else None
    label = None
    if task.is_classification:
        columns.append(entry.label)
        label = _labels(entry.label, names, table)
    if image:
        columns.append(image)
    key = "own " + entry.model_dump_json(include={"image", "text", "label", "answer"})
    place = Path(table.where) if entry.path else None  # a file may name pictures relative to it
    return Recipe(f"{key} {names}", tuple(dict.fromkeys(columns)), image, text, label, answer,
                  folder=place.parent if place and is_file(place) else None)


def _text(row: Row, column: str) -> str:
    if row[column] is None:
        raise ValueError(f"column '{column}' is empty")
    return str(row[column])


def _labels(column: str, names: tuple[str, ...], table: Table) -> Callable[[Row], int]:
    """Return how a label is read: its number, or its name among the classes."""
    place = {name: number for number, name in enumerate(names)}

    @functools.lru_cache(maxsize=1000)  # a wrong label tends to be in many rows
    def unknown(word: str) -> str:
        return f"label '{one_line(word, 60)}'" + nearest(word, names)

    def read(row: Row) -> int:
        value, written = row[column], table.content.names.get(column)
        if value is None or (written and not 0 <= value < len(written)):  # the hub writes -1
            raise ValueError("no label")
        if not names:
            return _number(value)
        word = written[value] if written else _word(value)
        if word not in place:
            raise ValueError(unknown(word))
        return place[word]

    return read


def _number(value: Any) -> int:
    try:
        return whole_number(value)
    except ValueError as error:
        more = "; give the classes by their names" if isinstance(value, str) else ""
        raise ValueError(f"{error}{more}") from None


def _word(value: Any) -> str:
    """Return a label as a class would be named: 1.0 of a column of floats is the class 1."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int) else shown(value)
