"""A few test samples of some clients, with what every method predicts for them, as files.

``samples/CLIENT/inputs.json`` lists the samples, ``samples/CLIENT/METHOD/predictions.json`` what a
method's final model made of them; pictures are beside them as ``TASK-NUMBER.png``. They are the
client's own files; no server asks for them.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from tapfl.data.batches import Rows, Texts
from tapfl.data.federation import Client
from tapfl.engine.files import (
    Label,
    json_digest,
    read_checked_json,
    replacing,
    write_checked_json,
)
from tapfl.errors import TapflError
from tapfl.evaluation.evaluate import Scores
from tapfl.evaluation.predictions import Predictions
from tapfl.methods import folder_name
from tapfl.reading import check, read_bytes
from tapfl.tasks import check_name

T = TypeVar("T", bound=BaseModel)
FOLDER = "samples"
INPUTS, PREDICTIONS = "inputs.json", "predictions.json"
FORMAT = 1
MAX_PICTURE = 1_000_000  # bytes
SIGNATURE = b"\x89PNG\r\n\x1a\n"


class _Kept(BaseModel):
    """Lists with an entry for each of ``rows``; those that a task has no use for are empty."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    rows: list[int]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for name, values in self.lists().items():
            if values and len(values) != len(self.rows):
                raise ValueError(f"{name} has {len(values)} entries, expected {len(self.rows)}")
        return self

    def lists(self) -> dict[str, Sequence[Any]]:
        """Return what has an entry for each row."""
        raise NotImplementedError


class TaskInputs(_Kept):
    """Samples of a task: what a model reads, and what is right. ``pictures`` are checksums.

    Texts are decoded from the tokens that the model reads. ``classes`` are the labels' names.
    """

    kind: str
    classes: list[str] = []
    texts: list[str] = []
    labels: list[int] = []
    answers: list[str] = []
    pictures: list[str] = []

    def lists(self) -> dict[str, Sequence[Any]]:
        """Return what has an entry for each row."""
        return {"texts": self.texts, "labels": self.labels, "answers": self.answers,
                "pictures": self.pictures}

    def name_of(self, label: int) -> str:
        """Return a label's name, or its number where it has none."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)


class TaskPredictions(_Kept):
    """Predictions for samples of a task: ``labels`` are the likeliest ones, best first.

    A probability or score that is not finite is None. ``scores`` are those of the results.
    """

    labels: list[list[int]] = []
    probabilities: list[list[float | None]] = []
    texts: list[str] = []
    pictures: list[str] = []
    scores: dict[str, list[float | None]] = {}

    def lists(self) -> dict[str, Sequence[Any]]:
        """Return what has an entry for each row."""
        return {"labels": self.labels, "probabilities": self.probabilities, "texts": self.texts,
                "pictures": self.pictures, **self.scores}


class Inputs(BaseModel):
    """The samples of a client."""

    model_config = ConfigDict(extra="forbid")

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    client: str
    tasks: dict[str, TaskInputs]


class Predicted(BaseModel):
    """What a method's final model predicts for a client's samples."""

    model_config = ConfigDict(extra="forbid")

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    method: str
    client: str
    round: int
    tasks: dict[str, TaskPredictions]


def samples_path(run: Path, client: str, method: str = "") -> Path:
    """Return the file that lists a client's samples, or a method's predictions for them."""
    folder = run / FOLDER / check_name(client, "client")
    return folder / folder_name(method) / PREDICTIONS if method else folder / INPUTS


def picture_path(listing: Path, task: str, number: int) -> Path:
    """Return where a picture is that a file lists."""
    return listing.parent / f"{check_name(task, 'task')}-{number}.png"


def write_inputs(path: Path, client: Client, chosen: Mapping[str, Rows], tokenizer: Any) -> str:
    """Write a client's samples; return the checksum of the file that lists them."""
    tasks = {}
    for task, rows in chosen.items():
        data = client.tests[task][0]
        few = data.take(rows)
        tasks[task] = TaskInputs(
            rows=rows.tolist(), kind=data.task.kind, classes=list(data.classes),
            texts=_decoded(few.text, tokenizer),
            labels=[] if few.labels is None else few.labels.tolist(),
            answers=few.references or _decoded(few.answers, tokenizer),
            pictures=_write_pictures(path, task, None if few.images is None
                                     else few.images.cpu().numpy()))
    return _write(path, Inputs(client=client.id, tasks=tasks))


def write_predictions(path: Path, label: Label,
                      found: Mapping[str, tuple[Predictions, Scores]]) -> str:
    """Write the predictions for a client's samples; return the checksum of their file."""
    tasks = {}
    for task, (each, scores) in found.items():
        tasks[task] = TaskPredictions(
            rows=each.rows.tolist(), labels=[] if each.labels is None else each.labels.tolist(),
            probabilities=([] if each.probabilities is None else
                           [_finite(values, 4) for values in each.probabilities]),
            texts=list(each.texts or ()), pictures=_write_pictures(path, task, each.pictures),
            scores={metric: _finite(values, 6) for metric, values in scores.items()})
    return _write(path, Predicted(method=label.method, client=label.client, round=label.round,
                                  tasks=tasks))


def _write(path: Path, listing: BaseModel) -> str:
    return write_checked_json(path, listing.model_dump(mode="json"))


def _decoded(texts: Texts | None, tokenizer: Any) -> list[str]:
    if texts is None:
        return []
    ids = texts.ids.cpu().numpy()
    found: list[str] = tokenizer.batch_decode(
        [row[:length].tolist() for row, length in zip(ids, texts.lengths, strict=True)],
        skip_special_tokens=True)
    return found


def _finite(values: Iterable[Any], digits: int) -> list[float | None]:
    """Return numbers as JSON can hold them."""
    return [round(float(v), digits) if math.isfinite(v) else None for v in values]


def _write_pictures(listing: Path, task: str, pictures: NDArray[np.uint8] | None) -> list[str]:
    """Write pictures beside the file that will list them; return their checksums."""
    digests = []
    for number, pixels in enumerate(() if pictures is None else pictures):
        content = _png(pixels)
        with replacing(picture_path(listing, task, number)) as temporary:
            temporary.write_bytes(content)
        digests.append(hashlib.sha256(content).hexdigest())
    return digests


def _png(pixels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(out, "PNG",
                                                                          optimize=True)
    return out.getvalue()


def sampled_clients(run: Path) -> list[str]:
    """Return the clients of a run that have kept samples."""
    return sorted(path.parent.name for path in (run / FOLDER).glob(f"*/{INPUTS}"))


def read_inputs(run: Path, client: str) -> Inputs:
    """Read a client's samples; a damaged file is refused."""
    return _read(Inputs, samples_path(run, client))


def read_predictions(run: Path, client: str, method: str) -> Predicted | None:
    """Read a method's predictions for a client's samples; None where it has kept none."""
    path = samples_path(run, client, method)
    return _read(Predicted, path) if path.exists() else None


def read_picture(listing: Path, task: str, number: int, digest: str) -> bytes:
    """Return a picture, which is a PNG file, if it is the one that was listed."""
    path = picture_path(listing, task, number)
    try:
        content = read_bytes(path, MAX_PICTURE)
    except OSError as error:
        raise TapflError(f"{path}: not a readable picture ({error})") from None
    if not content.startswith(SIGNATURE) or hashlib.sha256(content).hexdigest() != digest:
        raise TapflError(f"{path}: damaged, or not the picture that {listing.name} lists")
    return content


def _read(model: type[T], path: Path) -> T:
    values = read_checked_json(path)
    if values is None:
        raise TapflError(f"{path}: damaged, or not the samples of a run (its checksum does not "
                         "match)")
    return check(model, values, str(path))


def samples_digest(path: Path) -> str | None:
    """Return the checksum of a file of samples if it is whole, and so are its pictures."""
    values = read_checked_json(path)
    try:
        for task, kept in (values or {}).get("tasks", {}).items():
            for number, digest in enumerate(kept["pictures"]):
                read_picture(path, task, number, digest)
    except (TapflError, AttributeError, KeyError, TypeError):
        return None
    return None if values is None else json_digest(values)
