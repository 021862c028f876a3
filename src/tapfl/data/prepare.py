"""From a table's rows to tensors: pictures decoded, texts tokenized, once and in parallel."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
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
from tapfl.errors import TapflError, one_line
from tapfl.events import DataPrepared, Message, RowsDropped, Subscriber, nobody
from tapfl.reading import SURROGATE, read_bytes
from tapfl.tasks import MAX_CLASSES, Task

VERSION = 3  # of what is made from the same rows; another one prepares everything again
SIDE = 64
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # decoders that only decode
NAMED = 3  # broken rows that a message names; it counts all
REASONS = 50  # different reasons that the notes list; they count all
EXAMPLES = 5  # rows that the notes name for each reason
EXPLAINED = 1000  # broken rows whose reasons the notes keep one by one
MAX_BYTES = 100_000_000  # of a picture as it is stored
MAX_PIXELS = 89_478_485  # where Pillow begins to suspect a decompression bomb


@dataclass(frozen=True)
class Recipe:
    """How a row becomes a sample. ``key`` distinguishes recipes that read the same table.

    ``image`` is the column with the picture. ``text``, ``answer`` and ``label`` read a row; what
    they raise makes the row a broken one. ``labels`` is the column that may have the classes'
    names; ``folder`` is what paths of pictures are relative to.
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
        """Return a table's samples, from the cache if they are there."""
        key = {"version": VERSION, "recipe": recipe.key, "table": table.digest, "side": SIDE,
               "kind": task.kind, "modalities": task.modalities, "classes": task.classes,
               "tokenizer": self.fingerprint, "max_text": self.max_text}
        tensors, notes = cached(key, _Maker(task, recipe, table, self).make,
                                lambda text: self.notify(Message(text)))
        if notes["broken"]:
            self.notify(RowsDropped(
                table.where, notes["dropped"]["count"], notes["rows"], notes["dropped"]["reasons"],
                [(number, why) for number, why in notes["broken"][:NAMED]]))
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
        with ThreadPoolExecutor(os.cpu_count()) as pool, _no_warnings():
            for start, rows in self.table.chunks():
                for number, found in enumerate(pool.map(self._sample, rows), start):
                    self._keep(number, found)
                self.setting.notify(DataPrepared(self.table.where, start + len(rows), total))
        if 2 * len(self.broken) > total:
            number, why = self.broken[0]
            raise TapflError(f"{self.table.where}: {len(self.broken)} of {total} rows are broken; "
                             f"row {number}: {why}")
        names = self.table.content.names.get(self.recipe.labels or "", ())
        if len(names) > MAX_CLASSES or any(map(SURROGATE.search, names)):
            raise TapflError(f"{self.table.where}: the classes of column '{self.recipe.labels}': "
                             f"expected at most {MAX_CLASSES} names without lone surrogates")
        explained = [(n, why if i < EXPLAINED else "") for i, (n, why) in enumerate(self.broken)]
        return self._tensors(), {"rows": total, "broken": explained,
                                 "dropped": dropped_rows(self.broken), "classes": names,
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
        except Exception as error:  # a decoder may raise anything; the row is reported and dropped
            return _reason(error)
        for name in ("text", "answer"):
            if not found.get(name, "x").strip():
                return f"its {name} is empty"
            if SURROGATE.search(found.get(name, "")):
                return f"its {name} holds half a character (a lone surrogate)"
        if recipe.label and not 0 <= found["label"] < self.task.classes:
            return f"label {found['label']}, expected 0 to {self.task.classes - 1}"
        return found

    def _keep(self, number: int, found: dict[str, Any] | str) -> None:
        if isinstance(found, str):
            self.broken.append((number, one_line(found, 200)))
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


def _no_warnings() -> warnings.catch_warnings[None]:
    """Keep Pillow's warnings off the screen: what it suspects becomes a broken row."""
    return warnings.catch_warnings(action="ignore")


def _reason(error: Exception) -> str:
    """Return the first line of an error, without addresses in memory, which always differ."""
    if isinstance(error, KeyError):
        return f"column {error} is missing"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r" *<[^<>]* at 0x[0-9a-f]+>", "", lines[0])


def dropped_rows(broken: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """Return how many rows are broken and, for each reason, how many and the first of them.

    Reasons beyond a number are counted together: there may be as many as rows.
    """
    reasons: dict[str, dict[str, Any]] = {}
    for number, why in broken:
        reason = why if why in reasons or len(reasons) < REASONS else "other reasons"
        found = reasons.setdefault(reason, {"reason": reason, "count": 0, "rows": []})
        found["count"] += 1
        if len(found["rows"]) < EXAMPLES:
            found["rows"].append(number)
    return {"count": len(broken), "reasons": list(reasons.values())}


def picture(value: Any, folder: Path | None = None) -> NDArray[np.uint8]:
    """Return a stored picture, one in a file, or one of PIL's, as RGB ``(3, 64, 64)``."""
    from PIL import Image, UnidentifiedImageError

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
    if isinstance(data, Path):
        data = read_bytes(data, MAX_BYTES)
    if not isinstance(data, bytes):
        raise ValueError(f"expected a picture, got a value of type {type(data).__name__}")
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, expected at most {MAX_BYTES}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _pixels(image)
    except UnidentifiedImageError:
        raise ValueError("cannot identify image; expected " + ", ".join(FORMATS)) from None


def _pixels(image: Any) -> NDArray[np.uint8]:
    from PIL import Image

    if image.width * image.height > MAX_PIXELS:  # the size is known before pixels are decoded
        raise ValueError(f"{image.width} x {image.height} pixels, expected at most {MAX_PIXELS}")
    if image.mode[0] in "IF":  # 16 and 32 bits, as scanners write them: PIL would clip
        values = np.asarray(image, dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("pixels that are not numbers (NaN or infinite)")
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
