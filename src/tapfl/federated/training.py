"""Local training: tau steps of AdamW on a client's minibatches, and the losses it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tapfl.data.batches import TaskBatch
from tapfl.data.federation import Client
from tapfl.federated.context import Context, Losses, randomness
from tapfl.federated.stepper import Objective, Stepper, graph_safe
from tapfl.model.network import Network

Minibatch = Sequence[TaskBatch]


@graph_safe
def task_objective(network: Network,
                   parts: Sequence[TaskBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the paper's local loss: the sum of lambda_o times the loss of task o."""
    losses = {part.task: network.loss(part.task, network(part.task, part.batch, counted=True),
                                      part.batch) for part in parts}
    return weighted(losses, parts), losses


def weighted(losses: dict[str, Tensor], parts: Sequence[TaskBatch]) -> Tensor:
    """Return the sum of the tasks' losses, each weighted by its share of the minibatch."""
    return torch.stack([part.weight * losses[part.task] for part in parts]).sum()


def task_gradients(network: Network, stepper: Stepper,
                   minibatch: Minibatch) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the tasks' losses on a minibatch, which may go in pieces, and the gradients."""
    total: list[Tensor] = []

    def work(piece: Minibatch) -> dict[str, Tensor]:
        loss, losses = task_objective(network, piece)
        found = gradients(loss, stepper.parameters)
        if total:
            torch._foreach_add_(total, found)
        else:
            total.extend(found)
        return {task: value.detach() for task, value in losses.items()}

    return stepper.gather(work, minibatch, begin=total.clear), total


def gradients(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradients; zero for what the minibatch did not touch."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g
            for p, g in zip(parameters, found, strict=True)]


# A step takes as many minibatches as it needs; it returns the one that its losses are of, and them.
Step = Callable[[Stepper, Iterator[Minibatch]], tuple[Minibatch, dict[str, Tensor]]]


def minimise(objective: Objective) -> Step:
    """Return the usual step: one minibatch, one step of the optimizer on the objective."""
    def step(stepper: Stepper, stream: Iterator[Minibatch]) -> tuple[Minibatch, dict[str, Tensor]]:
        minibatch = next(stream)
        return minibatch, stepper.step(objective, minibatch)

    return step


def local_training(
    context: Context, network: Network, client: Client, blocks: Iterable[str], *, steps: int,
    lr: float, round_: int, role: str, step: Step, batches_per_step: int = 1,
) -> Losses:
    """Train the named blocks, in place; return each seen task's mean loss over its samples.

    Nothing in it waits for the device: the losses stay there until the end.
    """
    stepper = context.stepper(network)
    stepper.restart(blocks, lr)
    tally = Tally()
    with randomness(context, client, round_, role) as rng:
        network.train()
        stream = client.data.minibatches(batches_per_step * steps,
                                         context.config.train.batch_size, rng)
        for _ in range(steps):
            tally.add(*step(stepper, stream))
    return tally.means()


class Tally:
    """Sums of losses and samples by task; they stay on the device until the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._samples: dict[str, int] = {}

    def add(self, parts: Sequence[TaskBatch], losses: dict[str, Tensor]) -> None:
        """Count a minibatch in."""
        for part in parts:
            loss = losses[part.task].detach() * part.samples
            self._sums[part.task] = (self._sums[part.task] + loss if part.task in self._sums
                                     else loss)
            self._samples[part.task] = self._samples.get(part.task, 0) + part.samples

    def means(self) -> Losses:
        """Return the mean loss per sample of every task that was seen."""
        tasks = sorted(self._sums)
        sums = torch.stack([self._sums[task] for task in tasks]).tolist() if tasks else []
        return {task: total / self._samples[task]
                for task, total in zip(tasks, sums, strict=True)}


@torch.no_grad()
def validation_losses(context: Context, network: Network, client: Client,
                      tasks: Iterable[str]) -> Losses:
    """Return the mean loss of each task on the client's held-out samples."""
    tally = Tally()
    network.eval()
    for part in _held_out(context, client, tasks):
        tally.add([part], task_objective(network, [part])[1])
    return tally.means()


@torch.no_grad()
def sample_losses(context: Context, network: Network, client: Client,
                  tasks: Iterable[str]) -> dict[str, NDArray[np.float64]]:
    """Return the loss of each of the client's held-out samples, by task."""
    found: dict[str, list[Tensor]] = {}
    network.eval()
    for part in _held_out(context, client, tasks):
        outputs = network(part.task, part.batch)
        found.setdefault(part.task, []).append(
            network.sample_losses(part.task, outputs, part.batch))
    return {task: torch.cat(pieces).double().cpu().numpy() for task, pieces in found.items()}


def _held_out(context: Context, client: Client, tasks: Iterable[str]) -> Iterator[TaskBatch]:
    wanted, size = set(tasks), context.config.train.batch_size
    for data, rows in client.data.holdout:
        for start in range(0, len(rows) if data.task.name in wanted else 0, size):
            chosen = rows[start:start + size]
            yield TaskBatch(data.task.name, data.batch(chosen), 1.0, len(chosen))
