"""TAP, Two-Stage Adaptive Personalization: the paper's algorithm, line by line."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tapfl.blocks import BlockState
from tapfl.data.batches import TaskBatch
from tapfl.data.federation import Client
from tapfl.events import PersonalLosses, Replacement
from tapfl.federated.context import Context, Losses
from tapfl.federated.distill import divergence
from tapfl.federated.method import FederatedMethod
from tapfl.federated.stepper import Objective
from tapfl.federated.training import local_training, minimise, task_objective, weighted
from tapfl.model.network import Network
from tapfl.personal.criteria import Case, Rule, moved
from tapfl.personal.personalizer import Personalizer
from tapfl.tasks import Batch

History = dict[str, float]


class Tap(Personalizer):
    """X beside W: replaced task by task where W is better, trained alone, taught at the end."""

    preferred: ClassVar[bool] = True

    def __init__(self, context: Context, method: FederatedMethod, name: str) -> None:
        super().__init__(context, method, name)
        self.rule = Rule(context.config.tap, context, method)

    # Stage 1: adaptive replacement, in every round that the client takes part in.
    def after_training(self, client: Client, round_: int, received: BlockState,
                       trained: BlockState, losses: Losses) -> None:
        """Update h^(l), replace what W does better by the margin, train X, update h^(p)."""
        personal, federated_history, personal_history = self._load(client, round_, received)
        new = [task for task in losses if math.isinf(federated_history[task])]
        # 1. h^(l) = l^(l) for every task seen in W's training.
        federated_history |= self._criterion(client, trained, losses)
        # 2. R_i[o] = 1 where h^(l) + m < h^(p): X takes W's blocks of task o.
        case = Case(client, round_, trained, personal, federated_history, personal_history)
        shares = self.rule.shares(case, losses)
        personal, taken = self._replace(case, shares, new)
        for task, share in taken.items():
            # X is W in this task now, and as good; its own training says more, if it sees it.
            personal_history[task] = federated_history[task] if share == 1 else (
                (1 - share) * personal_history[task] + share * federated_history[task])
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
        train = self.context.config.train
        return self._trained(client, start, "personal", train.local_steps, train.rate(round_),
                             round_)

    def _trained(self, client: Client, start: BlockState, role: str, steps: int, lr: float,
                 round_: int, objective: Objective = task_objective,
                 depends: Hashable = None) -> tuple[BlockState, Losses]:
        """Return X after so many steps; ``depends`` is what else the objective depends on."""
        network = self.method.network

        def work() -> tuple[BlockState, Losses]:
            start.load_into(network.blocks)
            losses = local_training(self.context, network, client, start, steps=steps, lr=lr,
                                    round_=round_, role=role, step=minimise(objective))
            return BlockState.extract(network.blocks, start), losses

        key = (role, self._sharer, client.id, client.data.samples, round_, steps, lr, depends)
        return self.context.memo.once(key, start, work)

    @property
    def _sharer(self) -> str | None:
        """Who may share this object's work: all of tapfl's own kind, but nobody with a user's.

        A user's subclass may compute something else, or change what it gets in place.
        """
        return None if type(self).__module__.startswith("tapfl.") else self.name

    def current(self, client: Client, round_: int) -> BlockState | None:
        """Return X as stage 1 has left it."""
        kept = self.load(client, before=round_ + 1)
        return kept[0] if kept else None

    # Stage 2: knowledge distillation, once, after federation.
    def after_federation(self, client: Client, final: BlockState) -> BlockState:
        """Train W for P steps; then X for P steps with W as its teacher, or as ``end`` says."""
        config, rounds = self.context.config, self.context.config.train.rounds
        personal, federated_history, history = self._load(client, rounds, final)
        case = Case(client, rounds, final, personal, federated_history, history)
        new = [task for task in client.tasks if math.isinf(federated_history[task])]
        personal, _ = self._replace(case, self.rule.final_shares(case), new)
        steps, all_data = config.post.steps, self.after(client)
        train = functools.partial(self._trained, role="distill", lr=config.post_lr, round_=rounds)
        if config.tap.end == "distill":
            teacher = self.post_train(all_data, final, steps)
            teacher.load_into(self.method.teacher.blocks)
            # What stage 2 reads: variants that differ in nothing else, and have the same X, share.
            settings = config.tap.model_dump_json(include={"distill_weights", "temperature"})
            end, losses = train(all_data, personal, steps=steps, objective=self._distillation,
                                depends=(type(self._distillation), settings))
        elif config.tap.end == "mix":
            teacher = self.post_train(client, final, steps)  # on data that the choice has not seen
            case = dataclasses.replace(case, federated=teacher, personal=personal)
            shares = self.rule.chosen(client, personal, teacher, client.tasks)
            mixed = moved(personal, teacher, self.rule.by_block(case, shares))
            end, losses = train(all_data, mixed, steps=steps)
        else:
            end, losses = train(all_data, personal,
                                steps=steps if config.tap.end == "plain" else 2 * steps)
        return personal if self.diverged(client, rounds, end, losses) else end

    @functools.cached_property
    def _distillation(self) -> Distillation:
        return Distillation(self.method.teacher, self.context)

    def _replace(self, case: Case, shares: Mapping[str, float],
                 new: Collection[str]) -> tuple[BlockState, dict[str, float]]:
        """Return X with the blocks of these tasks moved to W, and by how much of a task's; report.

        A block that several tasks use may move further, or less far, than one of them asks for.
        """
        if not shares:
            return case.personal, {}
        by_block = self.rule.by_block(case, shares)
        known = case.round_ < self.context.config.train.rounds  # the final W has no loss yet
        taken = {}
        for task, share in shares.items():
            w, x = case.federated_history[task], case.personal_history[task]
            own = sorted(self.method.blocks_of_task(task))
            blocks = [block for block in own if by_block[block]]
            taken[task] = statistics.fmean(by_block[block] for block in own)
            self.report(Replacement(
                self.name, case.round_, case.client.id, task,
                w if known and math.isfinite(w) else None, x if math.isfinite(x) else None,
                self.rule.margin(task), task in new, blocks, share))
        return moved(case.personal, case.federated, by_block), taken

    def _criterion(self, client: Client, state: BlockState, losses: Losses) -> Losses:
        """Return what histories hold: the training losses, or losses on held-out data.

        What is not finite counts as infinitely bad.
        """
        if self.context.config.tap.criterion in ("validation", "paired"):
            losses = self.rule.held_out(client, state, losses)
        return {task: loss if math.isfinite(loss) else math.inf for task, loss in losses.items()}

    def _load(self, client: Client, round_: int,
              w: BlockState | None = None) -> tuple[BlockState, History, History]:
        """Return X, h^(l) and h^(p); at first X is W's start and the histories are infinite.

        So are those of a task that the client has got since.
        """
        start, nothing = self.first(client, w), dict.fromkeys(client.tasks, math.inf)
        kept = self.load(client, before=round_)
        if kept is None:
            return start.clone(), dict(nothing), dict(nothing)
        state, notes = kept
        if len(state) < len(start):
            state = BlockState({**start, **state.to(self.context.device)}, start.shapes)
        return (state.to(self.context.device), nothing | _from_json(notes["federated"]),
                nothing | _from_json(notes["personal"]))

    def _save(self, client: Client, round_: int, personal: BlockState, federated: History,
              history: History) -> None:
        self.save(client, round_, personal,
                  {"federated": _to_json(federated), "personal": _to_json(history)})


class Distillation:
    """The loss of stage 2 (paper eq. kd-loss): sum of lambda_o l_o plus sum of beta_o KD_o."""

    graph_safe = True
    counted: ClassVar[bool] = True  # whether tokens of padding may be omitted

    def __init__(self, teacher: Network, context: Context) -> None:
        self.teacher, self.context = teacher, context

    def __call__(self, network: Network,
                 parts: Sequence[TaskBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch, and the tasks' own losses."""
        settings, tasks = self.context.config.tap, self.context.tasks
        losses, extra = {}, []
        for part in parts:
            outputs = network(part.task, part.batch, counted=self.counted)
            losses[part.task] = network.loss(part.task, outputs, part.batch)
            with torch.no_grad():
                taught = self.teacher(part.task, part.batch, counted=self.counted).prediction
            weight = settings.distill_weights.of(tasks[part.task].kind)
            extra.append(weight * self.divergence(taught, outputs.prediction, part.batch))
        return weighted(losses, parts) + torch.stack(extra).sum(), losses

    def divergence(self, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        """Return KD_o: how far the student's outputs are from the teacher's."""
        return divergence(teacher, student, batch, self.context.config.tap.temperature)


def _to_json(history: History) -> dict[str, float | None]:
    """Infinity has no place in JSON."""
    return {task: None if math.isinf(loss) else loss for task, loss in history.items()}


def _from_json(history: dict[str, float | None]) -> History:
    return {task: math.inf if loss is None else loss for task, loss in history.items()}
