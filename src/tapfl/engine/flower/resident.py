"""A node's resident process: it holds the base, the data and what its clients keep.

Flower starts a process for every message; this one stays. It answers with W first, and trains X
after its reply, while the server averages. What its clients keep lies in the node's own folder,
which is a run's folder: `predict`, `export` and `report` work there without a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from tapfl import __version__
from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Client
from tapfl.engine.files import read_checked_json, write_checked_json
from tapfl.engine.flower.agreement import agreement, weights_mark
from tapfl.engine.flower.allow import ALLOW
from tapfl.engine.flower.answered import FOLDER, Answered
from tapfl.engine.flower.frames import Frame, FrameError, one_line, pack, unpack
from tapfl.engine.flower.headers import VERSION, Announced, Asked, Hello, Refusal, ReportPart
from tapfl.engine.flower.own import OwnFolder
from tapfl.engine.flower.reported import records
from tapfl.engine.flower.told import told
from tapfl.engine.flower.turns import Turns
from tapfl.engine.flower.wire import final_frame, update_frame
from tapfl.engine.messages import Final, Update
from tapfl.engine.record import code_digest
from tapfl.engine.site import Here
from tapfl.engine.worker import Worker
from tapfl.errors import TapflError
from tapfl.events import Event, Message, Subscriber, nobody
from tapfl.tasks import check_name

Then = Callable[[], None]


def nothing() -> None:
    """Do nothing after a reply."""


class Resident(Turns):
    """The clients of one node, between messages.

    ``hosted`` are their ids. ``allow`` names what may leave the node beside W's updates: keys of
    ALLOW. ``answer`` takes one message at a time.
    """

    def __init__(self, config: Config, hosted: Sequence[str], out: Path, *, device: str = "cpu",
                 allow: Collection[str] = (), notify: Subscriber = nobody,
                 modules: Path | None = None) -> None:
        self.allow, self._notify = frozenset(allow), notify
        federation = config.federation.model_copy(update={"clients": tuple(hosted)})
        here = Here(config.model_copy(update={"federation": federation}), device, out, notify)
        super().__init__(config, here, out, modules)
        self.own = OwnFolder(out, here, list(self._plans.values()))

    def hello(self) -> Hello:
        """Return what this node says of itself."""
        start = self.own.start
        known = set(start.clients) if start else set()
        return Hello(
            version=VERSION, tapfl=__version__, code=code_digest(), torch=torch.__version__,
            threads=torch.get_num_threads(),
            config=agreement(self.config), weights=weights_mark(self.config),
            start=start.run if start else "",
            clients=[Announced(id=m.id, tasks=list(m.tasks), samples=m.samples,
                               known=m.id in known) for m in self.here.members])

    def answer(self, data: bytes) -> tuple[bytes, Then]:
        """Return the answer to a message, and what is to be done once it is on its way."""
        try:
            frame = unpack(data)
            kind = frame[0].get("kind")
            if kind == "hello":
                return pack(self.hello().model_dump()), nothing
            if kind not in ("train", "finish"):
                raise FrameError(f"asked for {str(kind)[:50]!r}; expected hello, train or finish")
            with self.whole_or_not():
                return self._train(frame) if kind == "train" else self._finish(frame)
        except FrameError as error:  # it speaks of the server's own message
            reason = one_line(str(error))
        except TapflError as error:
            self._notify(Message(f"an ask was refused: {error}"))
            reason = told(error)
        return pack(Refusal(reason=reason).model_dump()), nothing

    def read(self, frame: Frame) -> tuple[Worker, Client, Asked, BlockState]:
        """Return who is asked, for what, and the blocks; remember whose run it is."""
        found = super().read(frame)
        self.own.belongs_to(found[2].id)
        return found

    def close(self) -> None:
        """Have everything written."""
        self.leave()
        self.own.close()

    def _train(self, frame: Frame) -> tuple[bytes, Then]:
        worker, client, asked, received = self.read(frame)
        reports = self._reports(worker, asked)
        turn = worker.turn(client)
        update = self._once(worker, asked, received, lambda: turn.train(asked.round, received))
        worker.store.flush()  # what the client keeps to itself is safe before the update counts
        shown = dataclasses.replace(update, events=self._allowed(update.events))
        reply = update_frame(shown, asked.round, reports, asked.compression)

        def then() -> None:
            with self.whole_or_not():
                events = turn.personalize(asked.round)
                worker.store.flush()
                self._remember(worker, asked, events)
                worker.end_turn(client, asked.round, asked.kept)

        return reply, then

    def _once(self, worker: Worker, asked: Asked, received: BlockState,
              train: Callable[[], Update]) -> Update:
        """Return an update; one with noise of the client's own leaves the node once a round."""
        if worker.plan.config.privacy.mode != "local" or not len(received):
            return train()
        name = worker.plan.name
        sent = Answered(self.folder(name) / FOLDER, name)
        before = sent.answered(asked.client, asked.round, received)
        update = train()
        if before is not None:
            return dataclasses.replace(update, blocks=before)
        sent.keep(asked.client, asked.round, received, update.blocks)
        sent.forget(asked.client, asked.kept)
        return update

    def _finish(self, frame: Frame) -> tuple[bytes, Then]:
        worker, client, asked, received = self.read(frame)
        final = worker.turn(client).finish(received)
        worker.end_turn(client, asked.round, asked.kept)
        self.own.finished(worker.plan.name, final, self._journal(worker, client.id))
        return final_frame(self._shown(final), self._reports(worker, asked)), nothing

    def _shown(self, final: Final) -> Final:
        """Return what the server may see of a client's results."""
        return dataclasses.replace(final, events=self._allowed(final.events),
                                   rows=final.rows if "scores" in self.allow else ())

    def _allowed(self, events: Sequence[Event]) -> list[Event]:
        kinds = tuple(kind for name in self.allow for kind in ALLOW[name])
        return [event for event in events if isinstance(event, kinds)]

    # What happened to X, until the server asks for it

    def _remember(self, worker: Worker, asked: Asked, events: Sequence[Event]) -> None:
        write_checked_json(self._path(worker, asked.client, asked.round),
                           {"events": records(events)})

    def _journal(self, worker: Worker, client: str) -> list[dict[str, Any]]:
        """Return what happened to a client's X in all rounds."""
        rounds = range(worker.plan.config.train.rounds)
        return [record for round_ in rounds for record in self._heard(worker, client, round_)]

    def _heard(self, worker: Worker, client: str, round_: int) -> list[dict[str, Any]]:
        found = read_checked_json(self._path(worker, client, round_)) or {}
        return list(found.get("events", ()))

    def _path(self, worker: Worker, client: str, round_: int) -> Path:
        folder = self.folder(worker.plan.name) / "reports" / check_name(client, "client")
        return folder / f"{round_:06d}.json"

    def _reports(self, worker: Worker, asked: Asked) -> list[ReportPart]:
        """Return the reports that the server waits for; one that is lost is an empty one."""
        kinds = {cls.kind for name in self.allow for cls in ALLOW[name]}
        return [ReportPart(round=round_, events=[
            record for record in self._heard(worker, asked.client, round_)
            if record["event"] in kinds]) for round_ in asked.awaited]
