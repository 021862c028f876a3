"""TAP, Two-Stage Adaptive Personalization: the paper's algorithm, line by line."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tapfl.blocks import BlockState
from tapfl.data.batches import TaskBatch
from tapfl.data.federation import Client
from tapfl.events import PersonalLosses, Replacement
from tapfl.federated.context import Context, Losses
from tapfl.federated.distill import divergence
from tapfl.federated.stepper import Objective
from tapfl.federated.training import (
    local_training,
    minimise,
    task_objective,
    validation_losses,
    weighted,
)
from tapfl.model.network import Network
from tapfl.personal.personalizer import Personalizer

History = dict[str, float]


class Tap(Personalizer):
    """X beside W: replaced task by task where W is better, trained alone, taught at the end."""

    preferred: ClassVar[bool] = True
    distills: ClassVar[bool] = True

    # Stage 1: adaptive replacement, in every round that the client takes part in.
    def after_training(self, client: Client, round_: int, received: BlockState,
                       trained: BlockState, losses: Losses) -> None:
        """Update h^(l), replace what W does better by the margin, train X, update h^(p)."""
        personal, federated_history, personal_history = self._load(client, round_)
        new = [task for task in losses if math.isinf(federated_history[task])]
        # 1. h^(l) = l^(l) for every task seen in W's training.
        federated_history |= self._criterion(client, trained, losses)
        # 2. R_i[o] = 1 where h^(l) + m < h^(p): X takes W's blocks of task o.
        for task in losses:
            if federated_history[task] + self._margin(task) < personal_history[task]:
                self._replace(client, round_, task, personal, trained, federated_history[task],
                              personal_history[task], initial=task in new)
                # X is W in this task now, and as good; its own training says more, if it sees it.
                personal_history[task] = federated_history[task]
        # 3. Train X on the client's data, at the same rate as W.
        end, seen = self._train(client, round_, personal)
        # 4. h^(p) = l^(p) for every task seen in X's training.
        if self.diverged(client, round_, end, seen):
            personal_history |= dict.fromkeys(seen, math.inf)  # W is better, whatever it is
        else:
            personal, personal_history = end, personal_history | self._criterion(client, end, seen)
        self.report(PersonalLosses(self.name, round_, client.id,
                                   {t: x for t, x in seen.items() if math.isfinite(x)}))
        self._save(client, round_, personal, federated_history, personal_history)

    def _train(self, client: Client, round_: int, start: BlockState) -> tuple[BlockState, Losses]:
        """Train X; variants of TAP that begin a round with the same X train it once."""
        train, network = self.context.config.train, self.method.network

        def work() -> tuple[BlockState, Losses]:
            start.load_into(network.blocks)
            losses = local_training(
                self.context, network, client, start, steps=train.local_steps,
                lr=train.rate(round_), round_=round_, role="personal",
                step=minimise(task_objective))
            return BlockState.extract(network.blocks, start), losses

        return self.context.memo.once(("personal", self._sharer, client.id, round_), start, work)

    @property
    def _sharer(self) -> str | None:
        """Who may share this object's work: all of tapfl's own kind, but nobody with a subclass.

        A user's subclass may compute something else, or change what it gets in place.
        """
        return None if type(self).__module__ == __name__ else self.name

    def current(self, client: Client, round_: int) -> BlockState | None:
        """Return X as stage 1 has left it."""
        kept = self.load(client, before=round_ + 1)
        return kept[0] if kept else None

    # Stage 2: knowledge distillation, once, after federation.
    def after_federation(self, client: Client, final: BlockState) -> BlockState:
        """Train W for P steps; then X for P steps with W as its teacher."""
        config, rounds = self.context.config, self.context.config.train.rounds
        personal, federated_history, history = self._load(client, rounds)
        for task in client.tasks:
            if math.isinf(history[task]):  # never seen, or diverged: a replacement is due
                self._replace(client, rounds, task, personal, final, None, math.inf,
                              initial=math.isinf(federated_history[task]))

        def work() -> tuple[BlockState, Losses]:
            objective = self._objective(client, final)
            personal.load_into(self.method.network.blocks)
            losses = local_training(
                self.context, self.method.network, client, personal, steps=config.post.steps,
                lr=config.post_lr, round_=rounds, role="distill", step=minimise(objective))
            return BlockState.extract(self.method.network.blocks, personal), losses

        # Variants that differ in nothing that stage 2 reads, and have the same X, train it once.
        settings = config.tap.model_dump_json(include={"distill_weights", "temperature"})
        end, losses = self.context.memo.once(
            ("distill", type(self), self._sharer, client.id, settings, config.post.steps,
             config.post_lr), personal, work)
        return personal if self.diverged(client, rounds, end, losses) else end

    def _objective(self, client: Client, final: BlockState) -> Objective:
        """Return the loss of stage 2; the teacher stands on the same frozen base as the student."""
        if not self.distills:
            return task_objective
        config = self.context.config
        teacher = self.post_train(client, final, config.post.steps)
        teacher.load_into(self.method.teacher.blocks)
        return self._distillation

    @functools.cached_property
    def _distillation(self) -> Distillation:
        return Distillation(self.method.teacher, self.context)

    def _replace(self, client: Client, round_: int, task: str, personal: BlockState,
                 source: BlockState, federated_loss: float | None, personal_loss: float,
                 initial: bool) -> None:
        blocks = self.method.blocks_of_task(task)
        personal.replace(source, blocks)
        self.report(Replacement(
            self.name, round_, client.id, task, federated_loss,
            None if math.isinf(personal_loss) else personal_loss, self._margin(task), initial,
            sorted(blocks)))

    def _margin(self, task: str) -> float:
        return self.context.config.tap.margins.of(self.context.tasks[task].kind)

    def _criterion(self, client: Client, state: BlockState, losses: Losses) -> Losses:
        """Return what histories hold: the training losses, or losses on held-out data.

        What is not finite counts as infinitely bad.
        """
        if self.context.config.tap.criterion == "validation":
            losses = self._validation_losses(client, state, losses)
        return {task: loss if math.isfinite(loss) else math.inf for task, loss in losses.items()}

    def _validation_losses(self, client: Client, state: BlockState, losses: Losses) -> Losses:
        def work() -> Losses:
            state.load_into(self.method.network.blocks)
            return validation_losses(self.context, self.method.network, client, losses)

        return self.context.memo.once(("validation", self._sharer, client.id, *losses), state,
                                      work)

    def _load(self, client: Client, round_: int) -> tuple[BlockState, History, History]:
        """Return X, h^(l) and h^(p); at first X is W's start and the histories are infinite."""
        kept = self.load(client, before=round_)
        if kept is None:
            nothing = dict.fromkeys(client.tasks, math.inf)
            start = self.method.initial.subset(self.method.owned(client))
            return start.clone(), dict(nothing), dict(nothing)
        state, notes = kept
        return (state.to(self.context.device), _from_json(notes["federated"]),
                _from_json(notes["personal"]))

    def _save(self, client: Client, round_: int, personal: BlockState, federated: History,
              history: History) -> None:
        self.save(client, round_, personal,
                  {"federated": _to_json(federated), "personal": _to_json(history)})


class TapWithoutDistillation(Tap):
    """Stage 2 without a teacher: X trains P steps on the tasks alone."""

    preferred: ClassVar[bool] = False
    distills: ClassVar[bool] = False


class Distillation:
    """The loss of stage 2 (paper eq. kd-loss): sum of lambda_o l_o plus sum of beta_o KD_o."""

    graph_safe = True

    def __init__(self, teacher: Network, context: Context) -> None:
        self.teacher, self.context = teacher, context

    def __call__(self, network: Network,
                 parts: Sequence[TaskBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch, and the tasks' own losses."""
        settings, tasks = self.context.config.tap, self.context.tasks
        losses, extra = {}, []
        for part in parts:
            outputs = network(part.task, part.batch)
            losses[part.task] = network.loss(part.task, outputs, part.batch)
            with torch.no_grad():
                taught = self.teacher(part.task, part.batch).prediction
            weight = settings.distill_weights.of(tasks[part.task].kind)
            extra.append(weight * divergence(taught, outputs.prediction, part.batch,
                                             settings.temperature))
        return weighted(losses, parts) + torch.stack(extra).sum(), losses


def _to_json(history: History) -> dict[str, float | None]:
    """Infinity has no place in JSON."""
    return {task: None if math.isinf(loss) else loss for task, loss in history.items()}


def _from_json(history: dict[str, float | None]) -> History:
    return {task: math.inf if loss is None else loss for task, loss in history.items()}
