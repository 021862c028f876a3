"""Samples as tensors, and minibatches of them.

On a GPU the data sets stay there where they fit; a local training sends the rows it will use once,
and then never synchronises with the device. Shapes are rounded up, so that few different ones occur
and captured steps can be replayed; what is added does not count.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfl.tasks import Batch, Task

Rows = NDArray[np.int64]
T = TypeVar("T")
ROW_STEP = 16  # a task's share of a mixed minibatch is rounded up to so many rows


def bucket_length(length: int) -> int:
    """Return the next of some lengths whose differences grow: few shapes, little padding."""
    step = 8 if length <= 32 else 16 if length <= 96 else 32
    return -(-length // step) * step


@dataclass
class Texts:
    """Texts of different lengths, padded to the longest; batches are padded to their own."""

    ids: Tensor  # int32 (N, longest)
    lengths: NDArray[np.int64]

    def __post_init__(self) -> None:
        self.sizes = torch.from_numpy(self.lengths).to(self.ids.device)  # where the ids are

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Any, limit: int) -> Texts:
        """Tokenize once; what is longer than ``limit`` is cut."""
        found = tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        lengths = np.array([len(ids) for ids in found], dtype=np.int64)
        ids = np.full((len(found), int(lengths.max())), tokenizer.pad_token_id, dtype=np.int32)
        for row, tokens in zip(ids, found, strict=True):
            row[:len(tokens)] = tokens
        return cls(torch.from_numpy(ids), lengths)

    def to(self, device: torch.device | str) -> None:
        """Move the tensors to a device."""
        self.ids, self.sizes = self.ids.to(device), self.sizes.to(device)

    def rows(self, rows: Rows, index: Tensor,
             rounded: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the ids of some rows and where they are real (None: everywhere)."""
        lengths = self.lengths[rows]
        longest = self._rounded(lengths) if rounded else int(lengths.max())
        ids = self.ids[index, :longest].long()
        if not rounded and int(lengths.min()) == longest:
            return ids, None
        return ids, torch.arange(longest, device=ids.device) < self.sizes[index][:, None]

    def places(self, rows: Rows, count: int) -> Rows | None:
        """Return ``Batch.places`` of some rows, rounded; all but the first ``count`` only pad.

        How many they are is rounded up to quarters of all; None if that is all of them.
        """
        lengths = self.lengths[rows]
        targets = np.arange(1, self._rounded(lengths)) < lengths[:, None]
        targets[count:] = False
        quarter = -(-targets.size // 4)
        wanted = -(-int(targets.sum()) // quarter) * quarter
        if wanted >= targets.size:
            return None
        return np.argsort(~targets.ravel(), kind="stable")[:wanted]

    def _rounded(self, lengths: Rows) -> int:
        return min(bucket_length(int(lengths.max())), self.ids.shape[1])


@dataclass
class TaskData:
    """One split of a task's data set, resident on the device.

    Images that do not fit there stay in page-locked memory on the host.
    """

    task: Task
    images: Tensor | None = None  # uint8 (N, 3, 64, 64)
    text: Texts | None = None
    labels: Tensor | None = None
    answers: Texts | None = None
    references: list[str] | None = None  # the answers as written, for metrics
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    classes: tuple[str, ...] = ()  # the labels' names, where they have names

    def __len__(self) -> int:
        if self.images is not None:
            return len(self.images)
        return 0 if self.text is None else len(self.text.lengths)

    def take(self, rows: Rows) -> TaskData:
        """Return some samples, in this order, as a data set of their own."""
        index = torch.from_numpy(rows)

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index.to(values.device)]

        def texts(of: Texts | None) -> Texts | None:
            return None if of is None else Texts(of.ids[index.to(of.ids.device)], of.lengths[rows])

        references = None if self.references is None else [self.references[i] for i in rows]
        return TaskData(self.task, some(self.images), texts(self.text), some(self.labels),
                        texts(self.answers), references, self.device, self.classes)

    def to(self, device: torch.device | str, images_too: bool = True) -> TaskData:
        """Move the tensors to a device; large image sets may stay on the host."""
        self.device = torch.device(device)
        for tokens in (self.text, self.answers):
            if tokens is not None:
                tokens.to(device)
        if self.images is not None:
            self.images = self.images.to(device) if images_too else self.images.cpu().pin_memory()
        self.labels = None if self.labels is None else self.labels.to(device)
        return self

    def digest(self) -> str:
        """Return a checksum of the samples; how far texts are padded is not part of it."""
        whole = hashlib.blake2b(digest_size=16)

        def add(name: str, values: NDArray[Any]) -> None:
            whole.update(f"{name} {values.dtype} {values.shape}\n".encode())
            whole.update(np.ascontiguousarray(values).data)

        for name, part in (("labels", self.labels), ("images", self.images)):
            # In pieces: images on a GPU may be more than the host's memory holds.
            for start in range(0, 0 if part is None else len(part), 4096):
                assert part is not None
                add(name, part[start:start + 4096].cpu().numpy())
        for name, texts in (("text", self.text), ("answers", self.answers)):
            if texts is not None:
                ids = texts.ids.cpu().numpy()
                add(f"{name} lengths", texts.lengths)
                add(name, ids[np.arange(ids.shape[1]) < texts.lengths[:, None]])
        whole.update(json.dumps([self.references, self.classes]).encode())
        return whole.hexdigest()

    @property
    def image_bytes(self) -> int:
        """What the images take on the device."""
        return 0 if self.images is None else self.images.nbytes

    @property
    def resident(self) -> bool:
        """Whether everything is where it is computed with."""
        return self.images is None or self.images.device.type == self.device.type

    def batch(self, rows: Rows, index: Tensor | None = None, rounded: bool = False) -> Batch:
        """Return some samples as a batch; ``index`` holds the same rows on the device."""
        batch = Batch()
        if index is None:
            index = torch.from_numpy(rows).to(self.device)
        if self.images is not None:
            batch.image = self.images[index] if self.resident else self._fetch(rows)
        if self.text is not None:
            batch.text, batch.text_mask = self.text.rows(rows, index, rounded)
        if self.labels is not None:
            batch.label = self.labels[index]
        if self.answers is not None:
            batch.answer, batch.answer_mask = self.answers.rows(rows, index, rounded)
        return batch

    def _fetch(self, rows: Rows) -> Tensor:
        """Copy images from the host to the device, without waiting for them."""
        assert self.images is not None
        chosen = torch.empty(len(rows), *self.images.shape[1:], dtype=torch.uint8, pin_memory=True)
        torch.index_select(self.images, 0, torch.from_numpy(rows), out=chosen)
        return chosen.to(self.device, non_blocking=True)

    def in_batches(self, size: int, work: Callable[[Rows, Batch], T]) -> list[T]:
        """Do some work on all samples, in order; return what it gave for each batch.

        Where a batch does not fit into a GPU's memory, it is done again in halves, and the rest in
        batches of that size: a long training should not end with its evaluation.
        """
        found: list[T] = []
        start = 0
        while start < len(self):
            rows = np.arange(start, min(start + size, len(self)))
            try:
                found.append(work(rows, self.batch(rows)))
            except torch.cuda.OutOfMemoryError:
                if len(rows) == 1:
                    raise
                size = (len(rows) + 1) // 2
            else:
                start += len(rows)
        return found


@dataclass(frozen=True)
class TaskBatch:
    """A task's share of a minibatch; ``weight`` is the paper's lambda_o.

    Where a minibatch goes in pieces, ``start`` is the share's row that this piece begins with.
    """

    task: str
    batch: Batch
    weight: float | Tensor
    samples: int
    start: int = 0

    @property
    def rows(self) -> slice:
        """Which rows of the task's share these are."""
        return slice(self.start, self.start + len(self.batch))


Draw = list[tuple[TaskData, Rows]]  # the rows of every task in one minibatch


@dataclass(frozen=True)
class ClientData:
    """What a client holds: some rows of its tasks' training data, and a held-out part of them."""

    holdings: Sequence[tuple[TaskData, Rows]]
    holdout: Sequence[tuple[TaskData, Rows]]

    @property
    def samples(self) -> int:
        """|D_i|: the number of samples that are trained on."""
        return sum(len(rows) for _, rows in self.holdings)

    def whole(self) -> ClientData:
        """Return the same data with nothing held out."""
        held = {data.task.name: rows for data, rows in self.holdout}
        return ClientData([(data, np.concatenate([rows, held.get(data.task.name, rows[:0])]))
                           for data, rows in self.holdings], [])

    def minibatches(self, steps: int, size: int,
                    rng: np.random.Generator) -> Iterator[list[TaskBatch]]:
        """Yield minibatches drawn uniformly from the whole data, so that tasks mix.

        Samples come without replacement until all have been seen, then again. A longer stream
        begins with the shorter one from the same generator.
        """
        total = self.samples
        size = min(size, total)
        epochs = math.ceil(steps * size / total)
        order = np.concatenate([np.arange(0), *(rng.permutation(total) for _ in range(epochs))])
        draws = [self._split_by_task(order[step * size:(step + 1) * size]) for step in range(steps)]
        if self.holdings[0][0].device.type == "cpu":
            return ([TaskBatch(data.task.name, data.batch(rows), len(rows) / size, len(rows))
                     for data, rows in draw] for draw in draws)
        batches = self._on_device(draws, size)
        return batches if all(data.resident for data, _ in self.holdings) else prefetch(batches)

    def _split_by_task(self, drawn: Rows) -> Draw:
        """Sort what was drawn by task."""
        bounds = np.cumsum([0, *(len(rows) for _, rows in self.holdings)])
        dealt = []
        for (data, rows), low, high in zip(self.holdings, bounds, bounds[1:], strict=False):
            own = drawn[(drawn >= low) & (drawn < high)] - low
            if len(own):
                dealt.append((data, rows[own]))
        return dealt

    def _on_device(self, draws: Sequence[Draw], size: int) -> Iterator[list[TaskBatch]]:
        """Send all numbers of rows and places at once; then make minibatches of rounded shapes."""
        mixed = len(self.holdings) > 1
        shares = [[_Share.of(data, rows, mixed) for data, rows in draw] for draw in draws]
        flat = [numbers for draw in shares for share in draw
                for numbers in (share.rows, share.places) if numbers is not None]
        device = self.holdings[0][0].device
        host = torch.from_numpy(np.concatenate([np.arange(0), *flat]))
        if device.type == "cuda":
            host = host.pin_memory()
        sent = iter(torch.split(host.to(device, non_blocking=True),
                                [len(numbers) for numbers in flat]))
        for draw in shares:
            parts = []
            for share in draw:
                batch = share.data.batch(share.rows, next(sent), rounded=True)
                batch.places = None if share.places is None else next(sent)
                weight: float | Tensor = 1.0
                if mixed:
                    batch.real = torch.arange(len(share.rows), device=device) < share.samples
                    weight = torch.full((), share.samples / size, device=device)
                parts.append(TaskBatch(share.data.task.name, batch, weight, share.samples))
            yield parts


class _Share(NamedTuple):
    """A task's share of a minibatch of rounded shape: its samples, then rows that only pad."""

    data: TaskData
    rows: Rows
    samples: int
    places: Rows | None

    @classmethod
    def of(cls, data: TaskData, rows: Rows, mixed: bool) -> _Share:
        wide = _pad(rows) if mixed else rows
        places = None if data.answers is None else data.answers.places(wide, len(rows))
        return cls(data, wide, len(rows), places)


def _pad(rows: Rows) -> Rows:
    """Repeat a row until their number is round."""
    return np.concatenate([rows, np.repeat(rows[:1], -len(rows) % ROW_STEP)])


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Make the next item while the last one is used: the host gathers while the GPU computes."""
    end = object()
    with ThreadPoolExecutor(1) as worker:
        coming = worker.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = worker.submit(next, items, end)
            yield item  # type: ignore[misc]
