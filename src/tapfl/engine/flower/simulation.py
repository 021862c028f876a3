"""A simulation in several processes: `tapfl run --engine flower`.

The server's loop is here; clients' turns are taken by workers, which hold the base and the data
and write into the run's own folder. A run made so is the run that one process makes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tapfl.config import Config
from tapfl.data.federation import Member
from tapfl.engine.flower.dispatch import Dispatch, Gone, Pool
from tapfl.engine.flower.station import owners
from tapfl.engine.messages import Clients
from tapfl.engine.record import code_digest, run_id
from tapfl.engine.registry import Plan
from tapfl.engine.site import Apart, MakeSite, model_facts
from tapfl.errors import TapflError
from tapfl.events import Message, Subscriber
from tapfl.federated.method import FederatedMethod


class Startable(Pool, Protocol):
    """A pool whose workers begin when it is known what for: plain values (``make_station``)."""

    def start(self, order: dict[str, Any], notify: Subscriber) -> None:
        """Start all workers."""


@contextlib.contextmanager
def simulation(workers: int | None = None, address: str | None = None,
               modules: Path | None = None) -> Iterator[MakeSite]:
    """Yield the ``site`` of a run whose clients are in ``workers`` processes, over Ray.

    By default as many as there are GPUs, or one. ``address`` is that of a Ray cluster, whose
    machines must see the run's folder, the data and ``modules`` under the same paths. Without one,
    Ray is started on this machine, and ends with this.
    """
    from tapfl.engine.flower.ray_pool import RayPool

    with RayPool(workers, address) as pool:
        yield functools.partial(Simulation, pool, modules)


@dataclass
class Simulation(Apart):
    """A site whose clients are in worker processes."""

    pool: Startable
    modules: Path | None
    config: Config
    device: str
    out: Path
    notify: Subscriber

    def __post_init__(self) -> None:
        self.pool.start({
            "config": self.config.model_dump(mode="json"), "out": str(self.out.resolve()),
            "device": self.device, "threads": torch.get_num_threads(),
            "modules": str((self.modules or Path.cwd()).resolve())}, self.notify)
        self._build()
        hello = self._hello()
        self._facts: dict[str, Any] = hello["facts"]
        self._members = [Member(id_, index, tuple(tasks), samples)
                         for index, (id_, tasks, samples) in enumerate(hello["members"])]
        for text in hello["said"]:
            self.notify(Message(text))

    def _hello(self) -> dict[str, Any]:
        """Return what the workers say of themselves; all must say the same."""
        everybody = self._everybody("hello")
        expected = {"code": code_digest(), "torch": torch.__version__,
                    "weights": self._context.foundation.weights, "facts": everybody[0]["facts"]}
        for number, said in enumerate(everybody, 1):
            for key, value in expected.items():
                if said[key] != value:
                    raise TapflError(f"worker {number} has other {_NAMES[key]}: {said[key]}, "
                                     f"expected {value}")
        return everybody[0]

    def _everybody(self, name: str) -> list[dict[str, Any]]:
        try:
            return [self.pool.get(ticket) for ticket in
                    [self.pool.send(number, name) for number in range(self.pool.size)]]
        except Gone as gone:
            raise TapflError(f"a worker could not be started: {gone}") from None

    def facts(self, plans: Sequence[Plan]) -> dict[str, Any]:
        """Return what belongs into run.json before the first round."""
        facts = model_facts(self._context, plans, self.device) | self._facts | {
            "id": run_id(self.out), "clients": len(self._members), "federation": self._part}
        facts["environment"]["workers"] = self.pool.size
        return facts

    def started(self) -> None:
        """Have the clients' labels counted where the data are."""
        self.pool.get(self.pool.send(0, "started"))

    @contextlib.contextmanager
    def open(self, plan: Plan, folder: Path) -> Iterator[tuple[FederatedMethod, Clients]]:
        """Return a federated run's method, and the way to its clients."""
        worker = self._worker(plan, folder)  # it also says where files are
        yield worker.method, Dispatch(self.pool, worker, owners(worker), self.notify)


_NAMES = {"code": "code of tapfl", "torch": "a torch", "weights": "weights", "facts": "data"}
