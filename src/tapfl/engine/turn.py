"""One client's turn: what a client does when its server asks. Made for one ask and dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tapfl.blocks import BlockState
from tapfl.data.batches import Rows, TaskData
from tapfl.data.federation import Client
from tapfl.engine.contract import calling, check_blocks, check_losses, is_shipped, name_of
from tapfl.engine.curves import curve
from tapfl.engine.files import Label, write_state
from tapfl.engine.messages import Final, Row, Update
from tapfl.engine.samples import write_inputs, write_predictions
from tapfl.engine.scores import write_scores
from tapfl.errors import TapflError
from tapfl.evaluation.constant import CONSTANT, constant_scores
from tapfl.evaluation.evaluate import Scores
from tapfl.evaluation.metrics import GENERAL
from tapfl.evaluation.predictions import Predictions, Watch
from tapfl.events import Diverged, Event
from tapfl.federated.context import Losses
from tapfl.personal.personalizer import Personalizer
from tapfl.privacy.mechanism import private_update

if TYPE_CHECKING:
    from tapfl.engine.worker import Worker


class Evaluated(NamedTuple):
    """What an evaluation found: scores of all samples, and predictions for those to be kept."""

    scores: Scores
    predictions: Predictions | None


class ClientTurn:
    """A client, its method and its personal models, while they are asked for something."""

    def __init__(self, worker: Worker, client: Client) -> None:
        self.worker, self.client = worker, client
        self.method, self.plan = worker.method, worker.plan
        self._received: BlockState | None = None
        self._trained: tuple[BlockState, BlockState, Losses] | None = None
        self._models: dict[str, str] = {}  # checksums of what is kept, by method
        self._scored: dict[str, str] = {}
        self._sampled: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    # A round

    def train(self, round_: int, received: BlockState) -> Update:
        """Train W from the received blocks; return what goes back to the server."""
        method, client, blocks = self.method, self.client, self.method.network.blocks
        # 1. The blocks it owns, and what it kept for itself.
        self._received = received
        private = self._private(as_of=round_ - 1)
        for state in (received, private):
            state.load_into(blocks)
        # 2. Local training of W.
        with calling(method, "train"):
            losses = check_losses(method, client, method.train(client, round_))
        owned, exchanged = method.owned(client), method.exchanged(client)
        trained = check_blocks(method, "train", BlockState.extract(blocks, owned), method.initial)
        kept = BlockState.extract(blocks, private)
        # 3. Its own check: an update that is not sound never happened, to the client either.
        fault = kept.not_finite() or trained.not_finite()
        if fault is None:
            if len(kept):
                self.worker.store.save(self.plan.name, client.id, round_, kept, {})
            before = BlockState({n: received[n] if n in received else private[n] for n in owned},
                                method.initial.shapes)
            self._trained = before, trained, losses
        update = Update(client.id, trained.subset(exchanged), client.samples, losses, fault,
                        self._not_finite(round_, losses))
        return self._hidden(update, received, round_)

    def _hidden(self, update: Update, received: BlockState, round_: int) -> Update:
        """Return what leaves the client: with local privacy, clipped blocks with noise alone.

        Whether a training failed depends on data, so that does not leave it either: such an
        update adds nothing, with noise. The client's own report says what happened.
        """
        privacy, own = self.plan.config.privacy, update.blocks
        if privacy.mode != "local":
            return update
        self.worker.events += update.events
        if update.fault is not None:
            own = received.subset(own)
            if not update.events:
                self.worker.events.append(
                    Diverged(self.plan.name, round_, update.client, [], update.fault))
        return dataclasses.replace(
            update, blocks=private_update(own, received, privacy.clip, privacy.noise),
            losses={}, fault=None, events=())

    def personalize(self, round_: int) -> list[Event]:
        """Let the personal models see W, which they leave alone; return what happened to them."""
        if self._trained is not None:
            received, trained, losses = self._trained
            for personalizer in self.worker.personalizers:
                before, after = (_safe(personalizer, state) for state in (received, trained))
                with calling(personalizer, "after_training"):
                    personalizer.after_training(self.client, round_, before, after, dict(losses))
        every = self.plan.config.evaluation.every
        curves = self._curves(round_) if every and (round_ + 1) % every == 0 else []
        return [*self.worker.drain(), *curves]

    def _curves(self, round_: int) -> list[Event]:
        """Score W as it was received, and every X as it is now, on a sample of the test data.

        W is as it came: nothing adapts it, since that may train. It predicts as in the end.
        """
        assert self._received is not None
        whole = self._whole(self._received, as_of=round_ - 1)
        models = {self.plan.name: whole}
        for personalizer in self.worker.personalizers:
            with calling(personalizer, "current"):
                personal = personalizer.current(self.client, round_)
            if personal is not None:
                models[personalizer.name] = self._checked(
                    personalizer, "current", personal).to(self.method.context.device)
        # All of them stay until the turn is over: the memo knows data by where they are.
        self._samples = self.worker.curve_samples.of(self.client)
        one_w = {self.plan.name} if self.method.shares_final_model else set()
        return [curve(name, round_, self.client.id, data, self._evaluated(
                    state, data, set(state) == set(whole), common and name in one_w).scores)
                for data, common in self._samples for name, state in models.items()]

    def _private(self, as_of: int) -> BlockState:
        """Return the client's private blocks: as it last saved them, or as they start."""
        kept = self.worker.store.load(self.plan.name, self.client.id, as_of)
        names = self.method.private(self.client)
        if kept and set(kept[0]) == set(names):
            return kept[0]
        fresh = self.method.initial.subset(names)  # a client may have got a task since
        return BlockState({**fresh, **(kept[0] if kept else {})}, fresh.shapes)

    def _not_finite(self, round_: int, losses: Losses) -> list[Event]:
        tasks = [task for task, loss in losses.items() if not math.isfinite(loss)]
        if not tasks:
            return []
        return [Diverged(self.plan.name, round_, self.client.id, tasks,
                         f"the loss of {tasks[0]} is not finite")]

    # After the last round

    def finish(self, received: BlockState) -> Final:
        """Make the client's final models, evaluate and keep them."""
        started = time.perf_counter()
        final = self._final(received)
        rows = self.evaluate(received) if self.plan.plain else []
        for personalizer in self.worker.personalizers:
            personal = self._personal(personalizer, final)
            # A personal model of all the client's blocks, private ones too, predicts as W does.
            like_w = set(personal) == set(final)
            rows += self._evaluate(personalizer.name, personal, like_w)
            self._keep(personalizer.name, personal)
        if self.plan.constant:
            rows += self._constant()
        models = self._models if self.plan.config.checkpoint.models else None
        self._seconds[""] = time.perf_counter() - started
        return Final(self.client.id, rows, self.worker.drain(), models, self._scored,
                     self._sampled, self._seconds)

    def _personal(self, personalizer: Personalizer, final: BlockState) -> BlockState:
        """Return a client's personal model; W itself where that went astray."""
        with self._timed(personalizer.name), calling(personalizer, "after_federation"):
            personal = personalizer.after_federation(self.client, final.clone())
        self._checked(personalizer, "after_federation", personal)
        return self._sound(personalizer.name, personal, final)

    @contextlib.contextmanager
    def _timed(self, method: str) -> Iterator[None]:
        """Measure how long a final model takes; a training waits for the device at its end."""
        started = time.perf_counter()
        yield
        self._seconds[method] = time.perf_counter() - started

    def _checked(self, personalizer: Personalizer, hook: str, personal: BlockState) -> BlockState:
        """Return a personal model that a hook returned, if it is a whole one."""
        check_blocks(personalizer, hook, personal, self.method.initial)
        lost = sorted(set(self.method.owned(self.client)) - set(personal))
        if lost:
            raise TapflError(f"{name_of(personalizer)}.{hook}: block '{lost[0]}' is missing; "
                             "expected all blocks that the client owns")
        return personal

    def _sound(self, name: str, state: BlockState, before: BlockState) -> BlockState:
        """Return a final model, or what it was made from if it holds values that are not finite."""
        fault = state.not_finite()
        if fault is None:
            return state
        self.worker.events.append(Diverged(name, self.plan.config.train.rounds, self.client.id, [],
                                           fault))
        return before

    def evaluate(self, received: BlockState) -> list[Row]:
        """Evaluate W as this client would use it; one that is the client's own is kept."""
        method, state, name = self.method, self._final(received), self.plan.name
        if method.shares_final_model:
            return self._evaluate(name, state, like_w=True, shared=True)
        state.load_into(method.network.blocks)
        with self._timed(name), calling(method, "adapt"):
            method.adapt(self.client)
        state = self._sound(name, BlockState.extract(method.network.blocks, state), state)
        self._keep(name, state)
        return self._evaluate(name, state, like_w=True)

    def _final(self, received: BlockState) -> BlockState:
        return self._whole(received, as_of=self.plan.config.train.rounds - 1)

    def _whole(self, received: BlockState, as_of: int) -> BlockState:
        """Return the client's W: what it received, and the blocks that it kept for itself."""
        private = self._private(as_of)
        return BlockState({**received, **private.to(self.method.context.device)},
                          self.method.initial.shapes)

    def _keep(self, method: str, state: BlockState) -> None:
        if self.plan.config.checkpoint.models:
            self._models[method] = write_state(self.worker.model_path(method, self.client.id),
                                               self._label(method), state, {"method": method})

    def _label(self, method: str) -> Label:
        return Label(method, self.client.id, self.plan.config.train.rounds)

    def _constant(self) -> list[Row]:
        """Score the text that answers every question best without reading it."""
        rows: list[Row] = []
        own = constant_scores(self.worker.evaluator, self.client)
        for task, scores in own.items():
            rows += self._rows(CONSTANT, task, "", [scores])
        self._keep_scores(CONSTANT, own)
        return rows

    def _keep_scores(self, method: str, own: Mapping[str, Scores]) -> None:
        """Write the score of every sample of the client's own test data, in its rows' order."""
        named = {f"{task}|{metric}": values
                 for task, scores in own.items() for metric, values in scores.items()}
        if named and self.plan.config.evaluation.scores:
            self._scored[method] = write_scores(self.worker.scores_path(method, self.client.id),
                                                self._label(method), named)

    def _keep_samples(self, method: str, own: Mapping[str, Evaluated]) -> None:
        """Write what a model predicts for the samples that were chosen for people to look at."""
        chosen = self.worker.samples.of_client(self.client.id)
        found = {task: (seen.predictions.of(chosen[task]), _of_rows(seen.scores, chosen[task]))
                 for task, seen in own.items() if task in chosen and seen.predictions is not None}
        if not found:
            return
        if "" not in self._sampled:
            self._sampled[""] = write_inputs(self.worker.samples_path("", self.client.id),
                                             self.client, chosen, self.worker.evaluator.tokenizer)
        self._sampled[method] = write_predictions(
            self.worker.samples_path(method, self.client.id), self._label(method), found)

    def _evaluate(self, name: str, state: BlockState, like_w: bool,
                  shared: bool = False) -> list[Row]:
        """Score a model on the client's test data, and in a simulation on the others'."""
        rows: list[Row] = []
        own: dict[str, Evaluated] = {}
        for task in self.client.tasks:
            pieces = [("", [self.client.tests[task]])]
            if self.worker.others is not None:
                pieces.append((GENERAL, self.worker.others(self.client, task)))
            for before, data in pieces:
                found = [(self._evaluated(state, each, like_w, shared), chosen)
                         for each, chosen in data if len(chosen)]
                rows += self._rows(name, task, before, [_of_rows(seen.scores, chosen)
                                                        for seen, chosen in found])
                if found and not before:
                    own[task] = found[0][0]
        self._keep_scores(name, {task: _of_rows(seen.scores, self.client.tests[task][1])
                                 for task, seen in own.items()})
        self._keep_samples(name, own)
        return rows

    def _evaluated(self, state: BlockState, data: TaskData, like_w: bool,
                   shared: bool) -> Evaluated:
        """Return the score of every sample; the same model is not asked twice.

        Clients that share a model may have other tasks: then this task's blocks decide.
        """
        if shared:
            state = state.subset(self.method.blocks_of_task(data.task.name))

        def work() -> Evaluated:
            # Another client may use the result: the samples of all that share the data are kept.
            wanted = self.worker.samples.of_data(data)
            watch = Watch(wanted) if len(wanted) else None
            state.load_into(self.method.network.blocks)
            with (calling(self.method, "predicting"),
                  self.method.predicting() if like_w else contextlib.nullcontext()):
                scores = self.worker.evaluator(self.method.network, data, watch)
            return Evaluated(scores, None if watch is None else watch.predictions())

        return self.worker.memo.once(("evaluate", id(data), like_w), state, work, keep=shared)

    def _rows(self, method: str, task: str, before: str, found: list[Scores]) -> list[Row]:
        rows: list[Row] = []
        for metric in found[0] if found else ():
            values = np.concatenate([scores[metric] for scores in found])
            rows.append({"seed": self.plan.config.seed, "method": method, "client": self.client.id,
                         "task": task, "dataset": task, "metric": before + metric,
                         "value": float(values.mean()), "samples": len(values)})
        return rows


def _of_rows(scores: Scores, chosen: Rows) -> Scores:
    """Return the scores of some samples, in their order."""
    return {metric: values[chosen] for metric, values in scores.items()}


def _safe(personalizer: Personalizer, state: BlockState) -> BlockState:
    """Return W for a personalizer; a class of the user's own gets a copy to do as it likes with."""
    return state if is_shipped(personalizer) else state.clone()
