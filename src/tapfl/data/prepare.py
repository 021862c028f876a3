"""From a table's rows to tensors: pictures decoded, texts tokenized, once and in parallel."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from tapfl.data.batches import TaskData, Texts
from tapfl.data.cache import Entry, cached
from tapfl.data.table import Row, Table
from tapfl.errors import TapflError
from tapfl.events import DataPrepared, Message, RowsDropped, Subscriber, nobody
from tapfl.tasks import Task

VERSION = 2  # of what is made from the same rows; another one makes everything anew
SIDE = 64
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # decoders that only decode
NAMED = 3  # broken rows that a message names; it counts all


@dataclass(frozen=True)
class Recipe:
    """How a row becomes a sample. ``key`` tells recipes apart that read the same table.

    ``image`` is the column with the picture. ``text``, ``answer`` and ``label`` read a row; what
    they raise makes the row a broken one. ``labels`` is the column that may know the classes'
    names; ``folder`` is where paths of pictures begin.
    """

    key: str
    columns: tuple[str, ...]
    image: str | None = None
    text: Callable[[Row], str] | None = None
    label: Callable[[Row], int] | None = None
    answer: Callable[[Row], str] | None = None
    labels: str | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Preparation:
    """Prepares tables for one tokenizer, whose texts have at most so many tokens."""

    tokenizer: Any
    max_text: int
    notify: Subscriber = nobody

    @functools.cached_property
    def fingerprint(self) -> str:
        """A checksum of the tokenizer; how it was last used to cut or pad is not part of it."""
        settings = json.loads(self.tokenizer.backend_tokenizer.to_str())
        del settings["truncation"], settings["padding"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def prepare(self, task: Task, recipe: Recipe, table: Table) -> TaskData:
        """Return a table's samples, from the cache where they are there."""
        key = {"version": VERSION, "recipe": recipe.key, "table": table.digest, "side": SIDE,
               "kind": task.kind, "modalities": task.modalities, "classes": task.classes,
               "tokenizer": self.fingerprint, "max_text": self.max_text}
        tensors, notes = cached(key, _Maker(task, recipe, table, self).make,
                                lambda text: self.notify(Message(text)))
        if notes["broken"]:
            broken = [(number, why) for number, why in notes["broken"]]
            self.notify(RowsDropped(table.where, len(broken), notes["rows"],
                                    dict(Counter(why for _, why in broken)), broken[:NAMED]))
        return _task_data(task, tensors, notes)


class _Maker:
    """Turns one table into tensors."""

    def __init__(self, task: Task, recipe: Recipe, table: Table, setting: Preparation) -> None:
        self.task, self.recipe, self.table, self.setting = task, recipe, table, setting
        self.images: list[NDArray[np.uint8]] = []
        self.values: dict[str, list[Any]] = {"text": [], "answer": [], "label": []}
        self.broken: list[tuple[int, str]] = []

    def make(self) -> Entry:
        self.table.need(self.recipe.columns)
        total = len(self.table)
        if not total:
            raise TapflError(f"{self.table.where}: no rows")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for start, rows in self.table.chunks():
                for number, found in enumerate(pool.map(self._sample, rows), start):
                    self._keep(number, found)
                self.setting.notify(DataPrepared(self.table.where, start + len(rows), total))
        if 2 * len(self.broken) > total:
            number, why = self.broken[0]
            raise TapflError(f"{self.table.where}: {len(self.broken)} of {total} rows are broken; "
                             f"row {number}: {why}")
        names = self.table.content.names.get(self.recipe.labels or "", ())
        return self._tensors(), {"rows": total, "broken": self.broken, "classes": names,
                                 "references": self.values["answer"]}

    def _sample(self, row: Row | str) -> dict[str, Any] | str:
        """Return a row's picture, text, label and answer, or what is wrong with it."""
        recipe = self.recipe
        if isinstance(row, str):
            return row
        try:
            found: dict[str, Any] = {name: read(row) for name, read in (
                ("text", recipe.text), ("label", recipe.label), ("answer", recipe.answer)) if read}
            if recipe.image:
                found["image"] = picture(row[recipe.image], recipe.folder)
        except Exception as error:  # a decoder may raise anything; the row is named, and left out
            return (str(error).splitlines() or [type(error).__name__])[0][:200]
        for name in ("text", "answer"):
            if not found.get(name, "x").strip():
                return f"its {name} is empty"
        if recipe.label and not 0 <= found["label"] < self.task.classes:
            return f"label {found['label']}, expected 0 to {self.task.classes - 1}"
        return found

    def _keep(self, number: int, found: dict[str, Any] | str) -> None:
        if isinstance(found, str):
            self.broken.append((number, found))
            return
        if "image" in found:
            self.images.append(found["image"])
        for name, values in self.values.items():
            if name in found:
                values.append(found[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        if self.images:
            tensors["images"] = torch.from_numpy(np.stack(self.images))
        for name in ("text", "answer"):
            if self.values[name]:
                texts = Texts.of(self.values[name], self.setting.tokenizer,
                                 self.setting.max_text)
                tensors |= {f"{name}_ids": texts.ids, f"{name}_lengths": texts.sizes}
        if self.values["label"]:
            tensors["labels"] = torch.tensor(self.values["label"])
        return tensors


def picture(value: Any, folder: Path | None = None) -> NDArray[np.uint8]:
    """Return a stored picture, one in a file, or one of PIL's, as RGB ``(3, 64, 64)``."""
    from PIL import Image

    if isinstance(value, Image.Image):
        return _pixels(value)
    data = value.get("bytes") if isinstance(value, dict) else value
    if not data:
        raise ValueError("no picture")
    if isinstance(data, str):
        # Only a file of the user's own may name others; a row from elsewhere may not.
        if folder is None:
            raise ValueError("names a file instead of holding a picture")
        data = folder / data
    with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data,
                    formats=FORMATS) as image:
        return _pixels(image)


def _pixels(image: Any) -> NDArray[np.uint8]:
    from PIL import Image

    if image.mode[0] in "IF":  # 16 and 32 bits, as scanners write them: PIL would clip
        values = np.asarray(image, dtype=np.float64)
        low, high = (0.0, 65535.0) if image.mode.startswith("I;16") else (values.min(),
                                                                          values.max())
        image = Image.fromarray(np.uint8(255 * (values - low) / max(high - low, 1e-12)))
    small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))


def _task_data(task: Task, tensors: dict[str, torch.Tensor], notes: dict[str, Any]) -> TaskData:
    def texts(name: str) -> Texts | None:
        if f"{name}_ids" not in tensors:
            return None
        return Texts(tensors[f"{name}_ids"], tensors[f"{name}_lengths"].numpy())

    return TaskData(task, tensors.get("images"), texts("text"), tensors.get("labels"),
                    texts("answer"), notes["references"] or None, classes=tuple(notes["classes"]))


def at_most(data: TaskData, limit: int | None, seed: int) -> TaskData:
    """Return all samples, or so many drawn from them."""
    if limit is None or limit >= len(data):
        return data
    drawn = np.random.default_rng([seed, len(data)]).permutation(len(data))[:limit]
    return data.take(np.sort(drawn))


def joined(parts: Iterable[TaskData], pad: int) -> TaskData:
    """Return the samples of several tables, one after the other; texts are padded with ``pad``."""
    found = list(parts)
    if len(found) == 1:
        return found[0]
    first = found[0]

    def texts(of: Callable[[TaskData], Texts | None]) -> Texts | None:
        each = [t for t in map(of, found) if t is not None]
        if not each:
            return None
        widest = max(t.ids.shape[1] for t in each)
        ids = [F.pad(t.ids, (0, widest - t.ids.shape[1]), value=pad) for t in each]
        return Texts(torch.cat(ids), np.concatenate([t.lengths for t in each]))

    def tensors(name: str) -> torch.Tensor | None:
        each = [getattr(p, name) for p in found]
        return None if each[0] is None else torch.cat(each)

    references = [r for p in found for r in p.references or ()]
    return TaskData(first.task, tensors("images"), texts(lambda p: p.text), tensors("labels"),
                    texts(lambda p: p.answers), references or None, classes=first.classes)
