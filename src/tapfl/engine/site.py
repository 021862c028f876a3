"""Where the clients of a run are: here in this process, or elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from tapfl.config import Config
from tapfl.data.federation import Member
from tapfl.data.participants import load_federation, taking_part
from tapfl.engine.build import WORTH_COMPILING, build, build_model
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.inprocess import InProcess
from tapfl.engine.labels import write_labels
from tapfl.engine.memorystore import MemoryStore
from tapfl.engine.messages import Clients
from tapfl.engine.record import dropped, environment, run_id
from tapfl.engine.registry import Plan, default_models, own_code, second_models
from tapfl.engine.sample_choice import SampleChoice
from tapfl.engine.worker import Worker
from tapfl.evaluation.evaluate import Evaluator
from tapfl.events import Event, Message, RowsDropped, Subscriber
from tapfl.federated.context import Context
from tapfl.federated.method import FederatedMethod
from tapfl.model.summary import parameters


class Site(Protocol):
    """What a run needs to know of the place where its clients are.

    ``kinds`` has a client of every kind; ``facts`` is what belongs into run.json.
    """

    @property
    def members(self) -> Sequence[Member]: ...  # noqa: D102

    @property
    def kinds(self) -> Sequence[Member]: ...  # noqa: D102

    def facts(self, plans: Sequence[Plan]) -> dict[str, Any]: ...  # noqa: D102

    def started(self) -> None:
        """Write what belongs beside run.json, which is there now."""

    def open(self, plan: Plan,
             folder: Path) -> AbstractContextManager[tuple[FederatedMethod, Clients]]:
        """Return a federated run's method, and the way to its clients."""


MakeSite = Callable[[Config, str, Path, Subscriber], Site]


class Here:
    """All clients in this process, on one frozen base; what they keep is in the run's folder."""

    def __init__(self, config: Config, device: str, out: Path, notify: Subscriber) -> None:
        self.config, self.device, self.out = config, device, out
        self.lost: list[dict[str, Any]] = []

        def listen(event: Event) -> None:
            if isinstance(event, RowsDropped):
                self.lost.append(dropped(event))
            notify(event)

        self.experiment = build(config, device, listen)
        self.evaluator = Evaluator(self.experiment.tokenizer, config.evaluation, device)
        self.samples = SampleChoice.among(self.experiment.federation, config.evaluation.samples,
                                          config.seed)
        foundation = self.experiment.context.foundation
        if config.speed.compile and not foundation.execution_modes["compiled"]:
            notify(Message("compile: not used; it is for layers without kernels, on a GPU, in "
                           f"runs of {WORTH_COMPILING} steps or more"))

    @property
    def members(self) -> Sequence[Member]:
        """The roster."""
        return self.experiment.federation.members

    @property
    def kinds(self) -> Sequence[Member]:
        """A client of every kind."""
        return self.experiment.kinds

    def facts(self, plans: Sequence[Plan]) -> dict[str, Any]:
        """Return what belongs into run.json before the first round."""
        experiment = self.experiment
        return model_facts(experiment.context, plans, self.device) | {
            "id": run_id(self.out),
            "clients": len(experiment.federation), "federation": experiment.federation.file,
            "data": experiment.sources(), "data_sha256": experiment.digests(),
            "classes": experiment.classes(), "metrics": experiment.metrics(self.evaluator),
            "dropped": self.lost}

    def started(self) -> None:
        """Count every client's labels."""
        write_labels(self.out, self.experiment.federation)

    @contextlib.contextmanager
    def open(self, plan: Plan, folder: Path) -> Iterator[tuple[FederatedMethod, Clients]]:
        """Return a federated run's method, and clients that take their turns here."""
        federation = self.experiment.federation
        without_files = self.config.checkpoint.every is None
        with (MemoryStore(folder / "clients", self.device) if without_files
              else self.store(folder)) as store:
            worker = Worker(plan, self.experiment.context, store, self.evaluator, self.out,
                            federation.others, self.samples)
            worker.check(self.kinds)
            yield worker.method, InProcess(worker, federation)

    def store(self, folder: Path) -> ClientStore:
        """Return what clients keep below a federated run's folder."""
        return ClientStore(folder / "clients", self.config.checkpoint.cache_mb << 20, self.device)


class Apart:
    """A site whose clients are in other processes: it has the model, and reads no data."""

    config: Config
    device: str
    out: Path
    _members: Sequence[Member]

    def _build(self) -> None:
        """Read who takes part, and make the model."""
        self._part = taking_part(load_federation(self.config.federation), self.config.federation)
        self._context, self._tokenizer = build_model(self.config, self.device)

    @property
    def members(self) -> Sequence[Member]:
        """The roster."""
        return self._members

    @property
    def kinds(self) -> Sequence[Member]:
        """A client of every kind."""
        return one_of_each(self._members)

    def _worker(self, plan: Plan, folder: Path) -> Worker:
        """Make and check a federated run's method; nobody takes a turn here."""
        worker = Worker(plan, self._context, ClientStore(folder / "clients"),
                        Evaluator(self._tokenizer, self.config.evaluation), self.out)
        worker.check(self.kinds)
        return worker


def one_of_each(members: Iterable[Member]) -> list[Member]:
    """Return the first member of every kind: members with the same tasks are of one kind."""
    found: dict[tuple[str, ...], Member] = {}
    for member in members:
        found.setdefault(member.tasks, member)
    return list(found.values())


def model_facts(context: Context, plans: Sequence[Plan], device: str) -> dict[str, Any]:
    """Return what run.json says of a model and of the machine it is on."""
    foundation = context.foundation
    blocks = {name: parameters(block)
              for name, block in sorted(context.network().blocks.items())}
    frozen = parameters(foundation)
    return {
        "seed": context.seed, "models": default_models(plans),
        "second_models": second_models(plans), "environment": environment(device),
        "own_code": own_code(plans),
        "weights": foundation.weights, "random_weights": foundation.is_random,
        "computing": {"dtype": str(foundation.dtype).removeprefix("torch."),
                      "layers": foundation.execution_modes, "graphs": context.uses_cuda_graphs},
        "parameters": {"total": frozen + sum(blocks.values()), "frozen": frozen,
                       "trainable": sum(blocks.values()), "blocks": blocks},
    }
