"""Samples as tensors, and minibatches of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfl.tasks import Batch, Task

Rows = NDArray[np.int64]


@dataclass
class Texts:
    """Texts of different lengths, padded to the longest; batches are padded to their own."""

    ids: Tensor  # int32 (N, longest)
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Any, limit: int) -> Texts:
        """Tokenize once; what is longer than ``limit`` is cut."""
        found = tokenizer(list(texts), truncation=True, max_length=limit)["input_ids"]
        lengths = np.array([len(ids) for ids in found], dtype=np.int64)
        ids = np.full((len(found), int(lengths.max())), tokenizer.pad_token_id, dtype=np.int32)
        for row, tokens in zip(ids, found, strict=True):
            row[:len(tokens)] = tokens
        return cls(torch.from_numpy(ids), lengths)

    def rows(self, rows: Rows, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the ids of some rows and where they are real (None: everywhere)."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        ids = self.ids[index, :longest].long()
        if int(lengths.min()) == longest:
            return ids, None
        mask = torch.arange(longest) < torch.from_numpy(lengths)[:, None]
        return ids, mask.to(ids.device)


@dataclass
class TaskData:
    """One split of a task's data set, resident on the device."""

    task: Task
    images: Tensor | None = None  # uint8 (N, 3, 64, 64)
    text: Texts | None = None
    labels: Tensor | None = None
    answers: Texts | None = None
    references: list[str] | None = None  # the answers as written, for metrics

    def __len__(self) -> int:
        if self.images is not None:
            return len(self.images)
        return 0 if self.text is None else len(self.text.lengths)

    def to(self, device: torch.device | str) -> TaskData:
        """Move the tensors to a device."""
        for tokens in (self.text, self.answers):
            if tokens is not None:
                tokens.ids = tokens.ids.to(device)
        self.images = None if self.images is None else self.images.to(device)
        self.labels = None if self.labels is None else self.labels.to(device)
        return self

    def batch(self, rows: Rows) -> Batch:
        """Return some samples as a batch."""
        batch = Batch()
        index = torch.from_numpy(rows).to(self._device())
        if self.images is not None:
            batch.image = self.images[index]
        if self.text is not None:
            batch.text, batch.text_mask = self.text.rows(rows, index)
        if self.labels is not None:
            batch.label = self.labels[index]
        if self.answers is not None:
            batch.answer, batch.answer_mask = self.answers.rows(rows, index)
        return batch

    def in_order(self, size: int) -> Iterator[tuple[Rows, Batch]]:
        """Go through all samples once."""
        for start in range(0, len(self), size):
            rows = np.arange(start, min(start + size, len(self)))
            yield rows, self.batch(rows)

    def _device(self) -> torch.device:
        if self.images is not None:
            return self.images.device
        assert self.text is not None
        return self.text.ids.device


@dataclass(frozen=True)
class Part:
    """A task's share of a minibatch; ``weight`` is the paper's lambda_o."""

    task: str
    batch: Batch
    weight: float
    samples: int


@dataclass(frozen=True)
class ClientData:
    """What a client holds: some rows of its tasks' training data, and of it a hold-out."""

    parts: Sequence[tuple[TaskData, Rows]]
    holdout: Sequence[tuple[TaskData, Rows]]

    @property
    def samples(self) -> int:
        """|D_i|: the number of samples that are trained on."""
        return sum(len(rows) for _, rows in self.parts)

    def minibatches(self, steps: int, size: int, rng: np.random.Generator) -> Iterator[list[Part]]:
        """Yield minibatches drawn uniformly from the whole data, so that tasks mix.

        Samples come without replacement until all have been seen, then again. A longer stream
        begins with the shorter one from the same generator.
        """
        total = self.samples
        size = min(size, total)
        epochs = math.ceil(steps * size / total)
        order = np.concatenate([np.arange(0), *(rng.permutation(total) for _ in range(epochs))])
        bounds = np.cumsum([0, *(len(rows) for _, rows in self.parts)])
        for step in range(steps):
            drawn = order[step * size:(step + 1) * size]
            parts = []
            for (data, rows), low, high in zip(self.parts, bounds, bounds[1:], strict=False):
                own = drawn[(drawn >= low) & (drawn < high)] - low
                if len(own):
                    parts.append(Part(data.task.name, data.batch(rows[own]), len(own) / size,
                                      len(own)))
            yield parts
