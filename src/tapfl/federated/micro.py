"""Minibatches in pieces: the gradient of the whole, with the memory of a part.

A piece knows what the whole minibatch counts (``Batch.whole``), so the losses of all pieces add up
to the loss of the whole, and their gradients to its gradient. That holds for losses that are sums
over samples and tasks; methods say so with ``splits_batches``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tapfl.data.batches import TaskBatch
from tapfl.tasks import Batch

AUTO = "auto"


class MicroBatches:
    """How minibatches are split, as ``speed.micro_batch`` says.

    A number is the most samples of a piece. With ``auto`` a minibatch is whole until it does not
    fit into memory; then its pieces are halved, and minibatches of the same tasks stay that small.
    """

    def __init__(self, setting: int | str | None = None,
                 report: Callable[[str], None] = lambda text: None) -> None:
        self.auto, self.report = setting == AUTO, report
        self.most = setting if isinstance(setting, int) else None
        self.sizes: dict[tuple[str, ...], int] = {}  # what was found by trying, by tasks

    def pieces(self, parts: Sequence[TaskBatch]) -> list[Sequence[TaskBatch]]:
        """Return a minibatch in pieces of one task each, or whole if it is small enough."""
        most = self.sizes.get(_tasks(parts), self.most)
        if most is None or _samples(parts) <= most:
            return [parts]
        return [[piece] for part in parts for piece in split(part, most)]

    def shrink(self, parts: Sequence[TaskBatch]) -> bool:
        """Make the pieces of such minibatches smaller; return False where they cannot be."""
        now = min(_samples(parts), self.sizes.get(_tasks(parts), _samples(parts)))
        if not self.auto or now <= 1:
            return False
        size = self.sizes[_tasks(parts)] = (now + 1) // 2
        self.report(f"speed.micro_batch: minibatches of {' and '.join(_tasks(parts))} do not fit "
                    f"into memory; trying pieces of {size} samples")
        return True


def split(part: TaskBatch, most: int) -> list[TaskBatch]:
    """Return a task's share of a minibatch in pieces of nearly the same size."""
    rows = len(part.batch)
    count = -(-rows // most)
    if count == 1:
        return [part]
    size = -(-rows // count)
    counts = counted(part.batch)
    pieces = []
    for start in range(0, rows, size):
        batch = Batch(**{f.name: None if (v := getattr(part.batch, f.name)) is None
                         else v[start:start + size] for f in dataclasses.fields(Batch)})
        batch.whole, batch.places = counts, None  # places are those of the whole
        samples = max(0, min(len(batch), part.samples - start))
        pieces.append(dataclasses.replace(part, batch=batch, samples=samples, start=start))
    return pieces


def counted(batch: Batch) -> Tensor:
    """Return how many samples of a batch count, and how many tokens of answers."""
    device = next(v.device for v in (batch.image, batch.text) if v is not None)
    real = batch.real
    if real is None:
        real = torch.ones(len(batch), dtype=torch.bool, device=device)
    tokens = batch.real_targets()
    if tokens is None:  # no answers, or none is padded
        tokens = real * (0 if batch.answer is None else batch.answer.shape[1] - 1)
    return torch.stack([real.sum(), tokens.sum()])


def add_up(pieces: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tasks' losses of a minibatch from those of its pieces."""
    total: dict[str, Tensor] = {}
    for losses in pieces:
        for task, loss in losses.items():
            total[task] = total[task] + loss if task in total else loss
    return total


def _tasks(parts: Sequence[TaskBatch]) -> tuple[str, ...]:
    return tuple(part.task for part in parts)


def _samples(parts: Sequence[TaskBatch]) -> int:
    return sum(len(part.batch) for part in parts)
