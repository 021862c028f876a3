"""A worker: one per process and federated run, where clients' data live."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from tapfl.data.batches import Rows, TaskData
from tapfl.data.federation import Client, Member
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.contract import calling, check_method
from tapfl.engine.curves import CurveSamples
from tapfl.engine.registry import Plan
from tapfl.engine.sample_choice import SampleChoice
from tapfl.engine.samples import samples_path
from tapfl.engine.turn import ClientTurn
from tapfl.evaluation.evaluate import Evaluator
from tapfl.events import Event
from tapfl.federated.context import Context
from tapfl.federated.memo import Memo
from tapfl.federated.method import FederatedMethod
from tapfl.methods import folder_name
from tapfl.personal.personalizer import Personalizer

T = TypeVar("T")
Others = Callable[[Member, str], list[tuple[TaskData, Rows]]]


class Worker:
    """The method with its networks, the personalizers, the evaluator and what they share.

    ``folder`` is where clients' final models, scores and samples go. ``others`` finds the test data
    of a task's other clients, for ``general_`` metrics: only a simulation has it. ``samples`` says
    which test samples are kept with their predictions.
    """

    def __init__(self, plan: Plan, context: Context, store: ClientStore, evaluator: Evaluator,
                 folder: Path, others: Others | None = None,
                 samples: SampleChoice | None = None) -> None:
        self.plan, self.store, self.evaluator = plan, store, evaluator
        self.folder, self.others, self.samples = folder, others, samples or SampleChoice()
        self.memo, self.events = Memo(), list[Event]()
        self.curve_samples = CurveSamples(plan.config)
        shared = dataclasses.replace(context, config=plan.config, memo=self.memo, states=store,
                                     events=self.events)
        self.method: FederatedMethod = _made(plan.method, shared)
        self.personalizers: list[Personalizer] = [
            _made(cls, dataclasses.replace(shared, config=spec.config), self.method, spec.name)
            for spec, cls in plan.personalizers]

    def check(self, members: Iterable[Member]) -> None:
        """Refuse a method that breaks its contract for one of these members."""
        check_method(self.method, members)

    def turn(self, client: Client) -> ClientTurn:
        """Return one client's turn."""
        return ClientTurn(self, client)

    def model_path(self, method: str, client: str) -> Path:
        """Return where a client's final model is kept."""
        return self.folder / "models" / folder_name(method) / f"{client}.safetensors"

    def scores_path(self, method: str, client: str) -> Path:
        """Return where the scores of a client's test samples are kept."""
        return self.folder / "scores" / folder_name(method) / f"{client}.safetensors"

    def samples_path(self, method: str, client: str) -> Path:
        """Return where a client's samples are listed (no method), or predictions for them."""
        return samples_path(self.folder, client, method)

    def drain(self) -> list[Event]:
        """Return what was reported since the last call."""
        events = list(self.events)
        self.events.clear()
        return events

    def end_turn(self, client: Member, round_: int, kept: Iterable[int]) -> None:
        """Forget what only this client's turn could use, and files that nobody goes back to."""
        self.memo.end_turn()
        for owner in (self.plan.name, *(p.name for p in self.personalizers)):
            self.store.prune(owner, client.id, round_, kept)


def _made(cls: type[T], *arguments: Any) -> T:
    """Return an instance; a constructor of a user's own class may fail, too."""
    with calling(cls, "__init__"):
        return cls(*arguments)
