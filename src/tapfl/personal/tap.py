"""TAP, Two-Stage Adaptive Personalization: the paper's algorithm, line by line."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tapfl.blocks import BlockState
from tapfl.data.batches import TaskBatch
from tapfl.data.federation import Client
from tapfl.federated.context import Context, Losses
from tapfl.federated.distill import divergence
from tapfl.federated.stepper import Objective
from tapfl.federated.training import (
    local_training,
    task_objective,
    validation_losses,
    weighted,
)
from tapfl.model.network import Network
from tapfl.personal.personalizer import Personalizer

History = dict[str, float]


class Tap(Personalizer):
    """X beside W: replaced task by task where W is better, trained alone, taught at the end."""

    distills: ClassVar[bool] = True

    # Stage 1: adaptive replacement, in every round that the client takes part in.
    def after_training(self, client: Client, round_: int, trained: BlockState,
                       losses: Losses) -> None:
        """Update h^(l), replace what W does better by the margin, train X, update h^(p)."""
        personal, federated_history, personal_history = self._load(client)
        # 1. h^(l) = l^(l) for every task seen in W's training.
        federated_history |= self._criterion(client, trained, losses)
        # 2. R_i[o] = 1 where h^(l) + m < h^(p): X takes W's blocks of task o.
        for task in losses:
            if federated_history[task] + self._margin(task) < personal_history[task]:
                self._replace(client, round_, task, personal, trained, federated_history[task],
                              personal_history[task])
                # X is W in this task now, and as good; its own training tells more, if it sees it.
                personal_history[task] = federated_history[task]
        # 3. Train X on the client's data, at the same rate as W.
        personal, losses = self._train(client, round_, personal)
        # 4. h^(p) = l^(p) for every task seen in X's training.
        personal_history |= self._criterion(client, personal, losses)
        self.context.emit("personal", method=self.name, round=round_, client=client.id,
                          losses={t: x for t, x in losses.items() if math.isfinite(x)})
        self._save(client, round_, personal, federated_history, personal_history)

    def _train(self, client: Client, round_: int, start: BlockState) -> tuple[BlockState, Losses]:
        """Train X; variants of TAP that begin a round with the same X train it once."""
        last = self.method.last_personal
        if last and last[0] == (client.id, round_) and last[1].equals(start):
            return last[2], dict(last[3])
        train = self.context.config.train
        start.load_into(self.method.network.blocks)
        losses = local_training(
            self.context, self.method.network, client, start, steps=train.local_steps,
            lr=train.rate(round_), round_=round_, role="personal")
        end = BlockState.extract(self.method.network.blocks, start)
        self.method.last_personal = ((client.id, round_), start, end, losses)
        return end, dict(losses)

    # Stage 2: knowledge distillation, once, after federation.
    def after_federation(self, client: Client, final: BlockState) -> BlockState:
        """Train W for P steps; then X for P steps with W as its teacher."""
        config = self.context.config
        personal, _, history = self._load(client)
        for task in client.tasks:
            if math.isinf(history[task]):  # never seen: the first replacement is still due
                self._replace(client, config.train.rounds, task, personal, final, None, math.inf)
        teacher = self.method.post_train(client, final, config.post.steps)
        personal.load_into(self.method.network.blocks)
        local_training(
            self.context, self.method.network, client, personal, steps=config.post.steps,
            lr=config.post_lr, round_=config.train.rounds,
            role="distill", objective=self._objective(teacher))
        return BlockState.extract(self.method.network.blocks, personal)

    def _objective(self, teacher: BlockState) -> Objective:
        """Return the loss of stage 2; the teacher stands on the same frozen base as the student."""
        if not self.distills:
            return task_objective
        teacher.load_into(self.method.teacher.blocks)
        return self._distillation

    @functools.cached_property
    def _distillation(self) -> Distillation:
        return Distillation(self.method.teacher, self.context)

    def _replace(self, client: Client, round_: int, task: str, personal: BlockState,
                 source: BlockState, federated_loss: float | None, personal_loss: float) -> None:
        blocks = self.method.blocks_of_task(task)
        personal.replace(source, blocks)
        self.context.emit(
            "replacement", method=self.name, round=round_, client=client.id, task=task,
            federated_loss=federated_loss,
            personal_loss=None if math.isinf(personal_loss) else personal_loss,
            margin=self._margin(task), initial=math.isinf(personal_loss), blocks=sorted(blocks))

    def _margin(self, task: str) -> float:
        return self.context.config.tap.margins.of(self.context.federation.tasks[task].kind)

    def _criterion(self, client: Client, state: BlockState, losses: Losses) -> Losses:
        """Return what histories hold: the training losses, or losses on held-out data."""
        if self.context.config.tap.criterion == "training":
            return losses
        state.load_into(self.method.network.blocks)
        return validation_losses(self.context, self.method.network, client, losses)

    def _load(self, client: Client) -> tuple[BlockState, History, History]:
        """Return X, h^(l) and h^(p); at first X is W's start and the histories are infinite."""
        kept = self.context.states.load(self.name, client.id)
        if kept is None:
            nothing = dict.fromkeys(client.tasks, math.inf)
            start = self.method.initial.subset(self.method.owned(client))
            return start.clone(), dict(nothing), dict(nothing)
        state, notes = kept
        return state.to(self.context.device), _open(notes["federated"]), _open(notes["personal"])

    def _save(self, client: Client, round_: int, personal: BlockState, federated: History,
              history: History) -> None:
        notes: dict[str, Any] = {"federated": _plain(federated), "personal": _plain(history)}
        self.context.states.save(self.name, client.id, round_, personal, notes)


class TapWithoutDistillation(Tap):
    """Stage 2 without a teacher: X trains P steps on the tasks alone."""

    distills: ClassVar[bool] = False


class Distillation:
    """The loss of stage 2 (paper eq. kd-loss): sum of lambda_o l_o plus sum of beta_o KD_o."""

    graph_safe = True

    def __init__(self, teacher: Network, context: Context) -> None:
        self.teacher, self.context = teacher, context

    def __call__(self, network: Network,
                 parts: Sequence[TaskBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch, and the tasks' own losses."""
        settings, tasks = self.context.config.tap, self.context.federation.tasks
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


def _plain(history: History) -> dict[str, float | None]:
    """Infinity has no place in JSON."""
    return {task: None if math.isinf(loss) else loss for task, loss in history.items()}


def _open(history: dict[str, float | None]) -> History:
    return {task: math.inf if loss is None else loss for task, loss in history.items()}
