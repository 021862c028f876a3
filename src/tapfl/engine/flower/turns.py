"""What every process that answers a server's asks has: one federated run open at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Client
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.flower.frames import Frame, FrameError
from tapfl.engine.flower.headers import Asked
from tapfl.engine.flower.wire import read_ask
from tapfl.engine.registry import plan
from tapfl.engine.site import Here
from tapfl.engine.worker import Others, Worker
from tapfl.errors import TapflError
from tapfl.methods import folder_name


class Turns:
    """The clients of a process, between messages; what they keep is below ``out``.

    ``others`` finds other clients' test data, which only a simulation has.
    """

    def __init__(self, config: Config, here: Here, out: Path, modules: Path | None = None,
                 others: Others | None = None) -> None:
        self.config, self.here, self.out = config, here, out
        self._plans = {each.name: each for each in plan(config, modules)}
        self._others = others
        self._stack = contextlib.ExitStack()
        self._worker: Worker | None = None

    def open(self, run: str) -> Worker:
        """Return the worker of a federated run; one at a time is held."""
        if self._worker is None or self._worker.plan.name != run:
            if run not in self._plans:
                raise FrameError(f"no federated run '{run}' in this node's configuration")
            self.leave()
            store = self._stack.enter_context(self._store(self.folder(run)))
            self._worker = Worker(self._plans[run], self.here.experiment.context, store,
                                  self.here.evaluator, self.out, self._others, self.here.samples)
            self._worker.check(self.here.kinds)
        return self._worker

    def leave(self) -> None:
        """Have everything written, and forget the federated run."""
        self._stack.close()
        self._worker = None

    def folder(self, run: str) -> Path:
        """Return where a federated run keeps its state."""
        return self.out / "state" / folder_name(run)

    def _store(self, folder: Path) -> ClientStore:
        return self.here.store(folder)

    def read(self, frame: Frame) -> tuple[Worker, Client, Asked, BlockState]:
        """Return who is asked, for what, and the blocks that came with it."""
        header = frame[0]
        worker = self.open(str(header.get("run")))
        client = self._client(str(header.get("client")))
        method = worker.method
        asked, received = read_ask(frame, method.initial, method.exchanged(client))
        rounds = worker.plan.config.train.rounds
        if (asked.round != rounds) if asked.kind == "finish" else (asked.round >= rounds):
            raise FrameError(f"asked to {asked.kind} in round {asked.round}; this run has {rounds}")
        return worker, client, asked, received.to(method.context.device)

    def _client(self, id_: str) -> Client:
        try:
            return self.here.experiment.federation.find(id_)
        except TapflError:  # its text names other clients of this node
            raise FrameError(f"unknown client '{id_}'") from None

    @contextlib.contextmanager
    def whole_or_not(self) -> Iterator[None]:
        """Have a turn cut short leave nothing in memory: the next one starts from what is stored.

        A disk that does not take what is written says so in one line.
        """
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # what ended it matters more
                self._stack.__exit__(type(error), error, error.__traceback__)
            self._stack, self._worker = contextlib.ExitStack(), None
            if isinstance(error, OSError):
                raise TapflError(f"{self.out}: {error.strerror or error}") from None
            raise
