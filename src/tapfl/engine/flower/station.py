"""A worker process of a simulation: the whole federation's data, any client's turn.

Its base and its data stay between asks. It is told which files of a client count, and says which
ones it wrote: so the next turn of that client can be any worker's. What clients keep, and their
final models, lie in the run's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tapfl.config import Config
from tapfl.engine.clientstore import ClientStore, Files
from tapfl.engine.flower.frames import FrameError, unpack
from tapfl.engine.flower.headers import Asked
from tapfl.engine.flower.reported import records
from tapfl.engine.flower.turns import Turns
from tapfl.engine.flower.wire import update_frame
from tapfl.engine.record import code_digest
from tapfl.engine.site import Here
from tapfl.engine.turn import ClientTurn
from tapfl.engine.worker import Worker
from tapfl.errors import TapflError
from tapfl.events import DataPrepared, Event
from tapfl.reading import check

FACTS = ("data", "data_sha256", "classes", "metrics", "dropped")  # what only data can tell
Said = dict[str, Any]  # plain values: what a station answers


@dataclass
class _Turn:
    """A turn whose update is on its way, or whose files are being written."""

    turn: ClientTurn
    asked: Asked
    events: list[dict[str, Any]]


class Station(Turns):
    """Takes turns for a server that shares its folder. Calls come one at a time."""

    def __init__(self, config: Config, out: Path, device: str, modules: Path | None = None,
                 share: int = 1) -> None:
        self._said: list[str] = []
        here = Here(config, device, out, self._listen)
        super().__init__(config, here, out, modules, here.experiment.federation.others)
        self._share = share  # of the memory for clients' state: one part in so many
        self._trained: _Turn | None = None
        self._written: _Turn | None = None

    def _listen(self, event: Event) -> None:
        if not isinstance(event, DataPrepared):
            self._said.append(str(event))

    def _store(self, folder: Path) -> ClientStore:
        memory = self.config.checkpoint.cache_mb << 20
        return ClientStore(folder / "clients", memory // self._share, self.here.device)

    # What is asked once

    def hello(self) -> Said:
        """Return what must be equal everywhere, who the clients are, and what the data are."""
        facts = self.here.facts(list(self._plans.values()))
        return {"code": code_digest(), "torch": torch.__version__, "weights": facts["weights"],
                "facts": {key: facts[key] for key in FACTS}, "said": self._said,
                "members": [(m.id, m.tasks, m.samples) for m in self.here.members]}

    def started(self) -> None:
        """Write what belongs beside run.json."""
        self.here.started()

    # A turn: ask, and for a training after; in the end rest

    def ask(self, data: bytes, files: Files) -> bytes | Said:
        """Return a client's update as a frame, or its results."""
        try:
            with self.whole_or_not():
                worker, client, asked, received = self.read(unpack(data))
                worker.store.adopt(client.id, owners(worker), files)
                turn = worker.turn(client)
                if asked.kind == "train":
                    update = turn.train(asked.round, received)
                    self._trained = _Turn(turn, asked, [])
                    return update_frame(update, asked.round, (), asked.compression)
                final = turn.finish(received)
                worker.end_turn(client, asked.round, asked.kept)
                worker.store.release(client.id, owners(worker))
                return {"rows": list(final.rows), "events": records(final.events),
                        "models": None if final.models is None else dict(final.models),
                        "scores": dict(final.scores), "samples": dict(final.samples),
                        "seconds": dict(final.seconds)}
        except FrameError as error:  # both ends are of one version: it is an error of ours
            raise TapflError(f"a worker cannot read what it is asked: {error}") from None

    def after(self) -> Said | None:
        """Train X with the W that has just been sent; return the report of the turn before.

        That turn's files were written while this one trained, so nobody waits for the disk.
        """
        with self.whole_or_not():
            report = self.rest()
            done, self._trained = self._trained, None
            assert done is not None
            done.events = records(done.turn.personalize(done.asked.round))
            worker, client = done.turn.worker, done.turn.client
            worker.end_turn(client, done.asked.round, done.asked.kept)
            self._written = done
            return report

    def rest(self) -> Said | None:
        """Return the report of the last turn that has none yet: its files are on disk."""
        done, self._written = self._written, None
        if done is None:
            return None
        with self.whole_or_not():
            worker, client = done.turn.worker, done.turn.client.id
            worker.store.flush()
            files = worker.store.newest(client, owners(worker), done.asked.round)
            worker.store.release(client, owners(worker))
            return {"client": client, "events": done.events, "files": dict(files)}


def owners(worker: Worker) -> list[str]:
    """Return under which names a client may keep something."""
    return [worker.plan.name, *(each.name for each in worker.personalizers)]


def make_station(order: Mapping[str, Any]) -> Station:
    """Return a station from plain values: those of ``Order``."""
    torch.set_num_threads(order["threads"])
    modules = order["modules"]
    return Station(check(Config, dict(order["config"]), "the server's configuration"),
                   Path(order["out"]), order["device"], modules and Path(modules), order["share"])
