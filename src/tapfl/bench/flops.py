"""How many floating-point operations a training step needs, counted from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from tapfl.config import Config
from tapfl.data.batches import TaskBatch
from tapfl.model.network import Network, build_network
from tapfl.tasks import Batch, Task


class StepFlops:
    """Counts matrix products, forward and backward, on a model that holds no memory.

    What paths share is counted once, even if a kernel computes it twice to be faster.
    """

    def __init__(self, config: Config, tasks: Mapping[str, Task]) -> None:
        self.network = build_network(config, tasks, device="meta").train()
        self._known: dict[object, tuple[int, int]] = {}

    def step(self, parts: Sequence[TaskBatch], distilled: bool = False) -> int:
        """Return the operations of a step; with distillation the teacher's forward pass, too."""
        total = 0
        for part in parts:
            forward, both = self._part(part)
            total += both + (forward if distilled else 0)
        return total

    def _part(self, part: TaskBatch) -> tuple[int, int]:
        """Return the operations of the forward pass, and of both."""
        batch = Batch(**{f.name: None if (v := getattr(part.batch, f.name)) is None
                         else torch.empty(v.shape, dtype=v.dtype, device="meta")
                         for f in dataclasses.fields(part.batch)})
        key = (part.task, *(None if v is None else v.shape for v in vars(batch).values()))
        if key not in self._known:
            self._known[key] = _count(self.network, part.task, batch)
        return self._known[key]


def _count(network: Network, task: str, batch: Batch) -> tuple[int, int]:
    network.zero_grad()
    with FlopCounterMode(display=False) as counter:
        loss = network.loss(task, network(task, batch, counted=True), batch)
        forward = counter.get_total_flops()
        loss.backward()  # type: ignore[no-untyped-call]
        return forward, counter.get_total_flops()
