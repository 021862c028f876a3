"""The in-process engine: one process, one frozen base, every client in turn."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tapfl.blocks import BlockState
from tapfl.data.federation import Client
from tapfl.engine.record import EventLog, Row
from tapfl.engine.registry import Plan
from tapfl.engine.store import Store, slug, write_json, write_state
from tapfl.engine.watch import Watch
from tapfl.evaluation.evaluate import Evaluator, Scores
from tapfl.evaluation.metrics import GENERAL
from tapfl.federated.context import Context, Losses
from tapfl.federated.method import FederatedMethod
from tapfl.federated.server import Server, not_finite


@dataclass
class Trajectory:
    """One federated run with everybody who watches it: its rounds, then its clients' models."""

    plan: Plan
    context: Context
    store: Store
    events: EventLog
    evaluate: Evaluator
    models: Path
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        self.method: FederatedMethod = self.plan.method(self.context)
        self.personalizers = [make(self.context, self.method, name)
                              for name, make in self.plan.personalizers]
        federation, config = self.context.federation, self.context.config
        self.server = Server(self.method.initial, len(federation), config.train.cohort,
                             config.seed)
        self._common: dict[str, Scores] = {}
        self._complete(-1)

    def _complete(self, round_: int) -> None:
        """Remember a whole round: one assignment, so that an interrupt finds all or nothing."""
        self._last = (round_, self.server.blocks, self.events.offset())
        self.store.round = round_

    def run(self, resume: bool) -> list[Row]:
        """Run to the end, from wherever it stands; return the results."""
        config, federation = self.context.config, self.context.federation
        if resume:
            self._resume()
        self.watch.method(self.plan.federated, config.train.rounds, self.store.round + 1,
                          len(federation))
        try:
            for round_ in range(self.store.round + 1, config.train.rounds):
                self._round(round_)
                if (round_ + 1) % config.checkpoint.every == 0:
                    self._commit()
            self._commit()
        except KeyboardInterrupt:
            self._commit()
            raise
        return self._finish()

    # Rounds

    def _round(self, round_: int) -> None:
        started = time.perf_counter()
        seen: dict[str, list[float]] = {}
        refused, before = 0, self.events.replacements
        cohort = [self.context.federation[i] for i in self.server.cohort(round_)]
        for client in cohort:
            losses, fault = self._client(client, round_)
            refused += fault is not None
            for task, loss in losses.items():
                if math.isfinite(loss):
                    seen.setdefault(task, []).append(loss)
        traffic = {"bytes_up": self.server.bytes_up, "bytes_down": self.server.bytes_down}
        contributors = self.server.aggregate()
        means = {task: sum(values) / len(values) for task, values in seen.items()}
        self.context.emit(
            "round", method=self.plan.federated, round=round_, cohort=[c.id for c in cohort],
            lr=self.context.config.train.rate(round_), losses=means, **traffic,
            seconds=time.perf_counter() - started,
            contributors={name: contributors[name] for name in sorted(contributors)})
        self._complete(round_)
        self.watch.round(round_, [c.id for c in cohort], means,
                         self.events.replacements - before, refused)

    def _client(self, client: Client, round_: int) -> tuple[Losses, str | None]:
        """One client's turn: receive, train, send; then the personalizers."""
        method, blocks = self.method, self.method.network.blocks
        # 1. The blocks it owns, and what it kept for itself.
        exchanged, private = method.exchanged(client), method.private(client)
        self.server.send(exchanged).load_into(blocks)
        self._private(client).load_into(blocks)
        # 2. Local training of W.
        losses = method.train(client, round_)
        trained = BlockState.extract(blocks, method.owned(client))
        kept = BlockState.extract(blocks, private)
        # 3. Its update, which counts only if it is sound; else the round never happened to it.
        fault = not_finite(kept)
        if exchanged and fault is None:
            fault = self.server.receive(client.id, exchanged, trained.subset(exchanged),
                                        client.samples)
        if fault is not None:
            self.context.emit("refused", method=self.plan.federated, round=round_,
                              client=client.id, reason=fault)
            return losses, fault
        if private:
            self.context.states.save(self.plan.federated, client.id, round_, kept, {})
        # 4. Its personal models, which see W and leave it alone.
        for personalizer in self.personalizers:
            personalizer.after_training(client, round_, trained, losses)
        return losses, fault

    def _private(self, client: Client) -> BlockState:
        """Return the client's private blocks: as it last saved them, or as they start."""
        kept = self.context.states.load(self.plan.federated, client.id)
        return kept[0] if kept else self.method.initial.subset(self.method.private(client))

    def _commit(self) -> None:
        """Write the last whole round down; one that was interrupted will run again."""
        self.store.round, blocks, offset = self._last
        if self.store.round >= 0 and not self.store.is_committed():
            self.store.commit(blocks, {"events": offset})

    def _resume(self) -> None:
        found = self.store.restore()
        if found is None:
            self.events.rewind(0)
            self._complete(-1)
            return
        blocks, notes, faults = found
        for fault in faults:
            self.watch.say(f"{fault}; going back to round {self.store.round + 1}")
        self.server.blocks = blocks.to(self.context.device)
        self.events.rewind(notes["events"])
        self._complete(self.store.round)

    # After the last round

    def _finish(self) -> list[Row]:
        """Give every client its final models and evaluate them; each client is a checkpoint."""
        federation = self.context.federation
        rows: list[Row] = []
        folder = self.store.folder / "final"
        if self.method.exchanged(federation[0]):  # without a server there is no server's model
            write_state(self.models / slug(self.plan.federated) / "server.safetensors",
                        self.server.blocks, {})
        for index in range(len(federation)):
            path = folder / f"{federation.id_of(index)}.json"
            record = _recorded(path)
            if record is None:
                self.events.hold()
                found = self._final(federation[index])
                record = {"rows": found, "events": self.events.release()}
                write_json(path, record)
            self.events.replay(record["events"])
            rows += record["rows"]
            self.watch.client(federation.id_of(index), index + 1, len(federation))
        return rows

    def _final(self, client: Client) -> list[Row]:
        method = self.method
        final = BlockState({**self.server.blocks.subset(method.exchanged(client)),
                            **self._private(client).to(self.context.device)}, method.initial.shapes)
        rows: list[Row] = []
        if self.plan.plain:
            final.load_into(method.network.blocks)
            method.adapt(client)
            with method.predicting():
                rows += self._evaluate(self.plan.plain, client, method.is_common())
            if not method.is_common():
                self._keep(self.plan.plain, client, BlockState.extract(
                    method.network.blocks, final))
        for personalizer in self.personalizers:
            personal = personalizer.after_federation(client, final.clone())
            personal.load_into(method.network.blocks)
            # A personal model of all the client's blocks, private ones too, predicts as W does.
            like_w = set(personal) == set(final)
            with method.predicting() if like_w else contextlib.nullcontext():
                rows += self._evaluate(personalizer.name, client, common=False)
            self._keep(personalizer.name, client, personal)
        return rows

    def _keep(self, method: str, client: Client, state: BlockState) -> None:
        write_state(self.models / slug(method) / f"{client.id}.safetensors", state,
                    {"method": method})

    def _evaluate(self, method: str, client: Client, common: bool) -> list[Row]:
        """Evaluate the model in the network on the client's test data, and on the others'."""
        rows = []
        for task in client.tasks:
            data = self.context.federation.splits[task][1]
            scores = self._common.get(task) if common else None
            if scores is None:
                scores = self.evaluate(self.method.network, data)
                if common:
                    self._common[task] = scores
            others = np.ones(len(data), dtype=bool)
            others[client.tests[task]] = False
            for before, chosen in (("", ~others), (GENERAL, others)):
                for metric, values in scores.items() if chosen.any() else ():
                    rows.append({"seed": self.context.seed, "method": method, "client": client.id,
                                 "task": task, "dataset": task, "metric": before + metric,
                                 "value": float(values[chosen].mean()),
                                 "samples": int(chosen.sum())})
        return rows


def _recorded(path: Path) -> Mapping[str, Any] | None:
    """Return a client's final record, if it is there and whole."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and {"rows", "events"} <= set(record):
            return record
    return None
