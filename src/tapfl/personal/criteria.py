"""When X takes W in, and how much of it: the rules of replacement.

For every task seen in a round a rule gives a *share*: 0 keeps X's blocks, 1 is the paper's
replacement, and between the two X moves that part of the way to W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfl.blocks import BlockState
from tapfl.config import GAP, HOLDOUT, LOSSES, TapConfig
from tapfl.data.federation import Client
from tapfl.federated.context import Context, Losses, randomness
from tapfl.federated.method import FederatedMethod
from tapfl.federated.stepper import backward, parameters_of
from tapfl.federated.training import sample_losses, task_objective, validation_losses

T = TypeVar("T")
CHOICES = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares that are tried on held-out data
GRADIENT_BATCHES = 4  # minibatches that a client's own gradient is the mean of


@dataclass(frozen=True)
class Case:
    """A client in a round: its two models, and the loss history of each, h^(l) and h^(p)."""

    client: Client
    round_: int
    federated: BlockState
    personal: BlockState
    federated_history: Mapping[str, float]
    personal_history: Mapping[str, float]


class Rule:
    """The rule that the ``tap`` settings describe: ``criterion`` says when, ``share`` how much."""

    def __init__(self, settings: TapConfig, context: Context, method: FederatedMethod) -> None:
        self.settings, self.context, self.method = settings, context, method

    def margin(self, task: str) -> float:
        """Return m_{i,o}, by which W's loss must be smaller; other criteria than losses have 0."""
        if self.settings.criterion not in ("training", "validation"):
            return 0.0
        return self.settings.margins.of(self.context.tasks[task].kind)

    def shares(self, case: Case, tasks: Iterable[str]) -> dict[str, float]:
        """Return the share of each of these tasks that moves; one without a history moves whole."""
        fresh, others = _by_history(case, tasks)
        return self._moving(case, fresh, self._when(case, others), self.settings.share)

    def final_shares(self, case: Case) -> dict[str, float]:
        """Return how far each task moves to the final W; one never seen, or diverged, whole."""
        fresh, others = _by_history(case, case.client.tasks)
        return self._moving(case, fresh, others, self.settings.final_share)

    def _moving(self, case: Case, fresh: list[str], others: list[str],
                share: float | str) -> dict[str, float]:
        found = self._how_much(case, others, share)
        return dict.fromkeys(fresh, 1.0) | {task: part for task, part in found.items() if part}

    def by_block(self, case: Case, shares: Mapping[str, float]) -> dict[str, float]:
        """Return how far each block moves, given the tasks' shares. A block moves once.

        By task: as far as the task that asks for most. By block: the mean over the client's tasks
        that use it; with the gradient criterion each block is asked for its own agreement. Blocks
        of a task without a history move whole, in any case.
        """
        by_task = {block: [shares.get(task, 0.0) for task in case.client.tasks
                           if block in self.method.blocks_of_task(task)]
                   for block in case.personal}
        if self.settings.unit == "task":
            return {block: max(found) for block, found in by_task.items()}
        fresh = {block for task in shares if math.isinf(case.personal_history[task])
                 for block in self.method.blocks_of_task(task)}
        if self.settings.criterion == "gradient":
            agrees = self._agreement(case, case.client.tasks)
            found = {block: max(asked) if agrees[block] > 0 else 0.0
                     for block, asked in by_task.items()}
        else:
            found = {block: sum(asked) / len(asked) for block, asked in by_task.items()}
        return found | dict.fromkeys(fresh, 1.0)

    # When

    def _when(self, case: Case, tasks: list[str]) -> list[str]:
        if self.settings.criterion == "always" or not tasks:
            return tasks
        if self.settings.criterion == "paired":
            return self._paired(case, tasks)
        if self.settings.criterion == "gradient":
            return self._agreeing(case, tasks)
        return [task for task in tasks if case.federated_history[task] + self.margin(task)
                < case.personal_history[task]]

    def _paired(self, case: Case, tasks: list[str]) -> list[str]:
        """W is better on the same held-out samples, at the stated confidence (one-sided)."""
        found = [self._on_samples(case.client, state, tasks)
                 for state in (case.personal, case.federated)]
        # The normal quantile in place of Student's t: slightly bolder below 30 samples.
        wanted = NormalDist().inv_cdf(self.settings.confidence)
        return [task for task in tasks
                if _statistic(found[0][task] - found[1][task]) > wanted]

    def _agreeing(self, case: Case, tasks: list[str]) -> list[str]:
        """From X, the way to W leads downhill on the task's own loss."""
        return [task for task in tasks
                if sum(self._agreement(case, [task])[block]
                       for block in self.method.blocks_of_task(task)) > 0]

    def _agreement(self, case: Case, tasks: Iterable[str]) -> dict[str, float]:
        """Return, block by block, <W - X, minus the gradient of the tasks' losses at X>."""
        tasks = list(tasks)

        def work() -> dict[str, float]:
            gradient = self._gradient(case, tasks)
            along = [((case.personal[name] - case.federated[name]) * gradient[name]).sum()
                     for name in case.personal]
            return dict(zip(case.personal, torch.stack(along).tolist(), strict=True))

        key = ("agreement", case.client.id, case.round_, *tasks)
        return self.context.memo.once(key, _both(case), work)

    def _gradient(self, case: Case, tasks: list[str]) -> dict[str, Tensor]:
        """Return the client's own gradient at X, flat by block, over a few of its minibatches."""
        network, config = self.method.network, self.context.config
        case.personal.load_into(network.blocks)
        parameters = parameters_of(network, case.personal)
        for parameter in parameters:
            parameter.grad = None
        with randomness(self.context, case.client, case.round_, "agreement") as rng:
            network.eval()
            for parts in case.client.data.minibatches(GRADIENT_BATCHES, config.train.batch_size,
                                                      rng):
                seen = [part for part in parts if part.task in tasks]
                for piece in self.context.stepper(network).micro.pieces(seen) if seen else ():
                    backward(*task_objective(network, piece))
        # Flat as BlockState lays a block out: its parameters in alphabetical order.
        flat = {name: torch.cat([
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
            for _, p in sorted(network.blocks[name].named_parameters())])
            for name in case.personal}
        for parameter in parameters:
            parameter.grad = None
        return flat

    # How much

    def _how_much(self, case: Case, tasks: list[str], share: float | str) -> dict[str, float]:
        if share == HOLDOUT:
            return self.chosen(case.client, case.personal, case.federated, tasks)
        if share in FOLLOWING:
            return {task: FOLLOWING[share](case.federated_history[task],
                                           case.personal_history[task], self.settings.sharpness)
                    for task in tasks}
        return dict.fromkeys(tasks, float(share))

    def chosen(self, client: Client, start: BlockState, end: BlockState,
               tasks: Iterable[str]) -> dict[str, float]:
        """Return for each task the share of the way that loses least on held-out data."""
        tasks = list(tasks)
        if not tasks:
            return {}
        tried = {share: self.held_out(client, moved(start, end, dict.fromkeys(start, share)), tasks)
                 for share in CHOICES}
        return {task: min(CHOICES, key=lambda share: _or_infinity(tried[share][task]))
                for task in tasks}

    # On held-out data; what two rules ask alike is computed once

    def held_out(self, client: Client, state: BlockState, tasks: Iterable[str]) -> Losses:
        """Return a model's mean loss of each task on the client's held-out samples."""
        return self._with(state, ("validation", client.id, *tasks), lambda: validation_losses(
            self.context, self.method.network, client, tasks))

    def _on_samples(self, client: Client, state: BlockState,
                    tasks: Iterable[str]) -> dict[str, NDArray[np.float64]]:
        return self._with(state, ("samples", client.id, *tasks), lambda: sample_losses(
            self.context, self.method.network, client, tasks))

    def _with(self, state: BlockState, key: tuple[str, ...], work: Callable[[], T]) -> T:
        def loaded() -> T:
            state.load_into(self.method.network.blocks)
            return work()

        return self.context.memo.once(key, state, loaded)


@torch.no_grad()
def moved(start: BlockState, end: BlockState, shares: Mapping[str, float]) -> BlockState:
    """Return ``start`` with each block a share of the way to ``end``; a share of 1 copies."""
    return BlockState({name: torch.lerp(value, end[name], shares[name])
                       if 0 < shares[name] < 1 else (end if shares[name] else start)[name].clone()
                       for name, value in start.items()}, start.shapes)


def _by_history(case: Case, tasks: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the tasks that X has no loss of, and the others."""
    fresh = [task for task in tasks if math.isinf(case.personal_history[task])]
    return fresh, [task for task in tasks if task not in fresh]


def _from_losses(federated: float, personal: float, power: float) -> float:
    """Return X's part of the two losses: a half where they are equal, more where W is better."""
    larger = max(federated, personal)
    if not 0 < larger < math.inf:
        return 0.0 if larger else 0.5
    w, x = (math.pow(loss / larger, power) for loss in (federated, personal))  # none overflows
    return x / (w + x)


def _from_gap(federated: float, personal: float, k: float) -> float:
    """Return W's part of the weights, if each of the two models weighs e^(-k loss)."""
    return (1 - math.tanh(k * (federated - personal) / 2)) / 2  # 1 / (1 + e^gap), no overflow


# Shares that follow the losses of W and X.
FOLLOWING: dict[float | str, Callable[[float, float, float], float]] = {
    LOSSES: _from_losses, GAP: _from_gap}


def _statistic(difference: NDArray[np.float64]) -> float:
    """Return Student's t of the mean; without any spread, its sign decides."""
    if len(difference) < 2 or not np.isfinite(difference).all():
        return 0.0
    mean, spread = float(difference.mean()), float(difference.std(ddof=1))
    if spread == 0:
        return math.copysign(math.inf, mean) if mean else 0.0
    return mean / (spread / math.sqrt(len(difference)))


def _or_infinity(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _both(case: Case) -> BlockState:
    """Return both models as one state, to be compared bit for bit."""
    pairs = {"w": case.federated, "x": case.personal}
    return BlockState({f"{k}/{name}": state[name] for k, state in pairs.items() for name in state},
                      {f"{k}/{name}": state.shapes[name] for k, state in pairs.items()
                       for name in state})
