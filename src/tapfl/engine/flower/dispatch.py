"""Who takes which turn: clients in the roster's order, each to the next worker that is free.

A worker answers with W first and trains X while the server averages and others train W. Its next
ask waits in its queue by then, so that it is never idle between two turns. A turn that a worker's
death cut short is another worker's: turns depend on what they are given, so the results are those
of a run in which nobody died.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tapfl.blocks import BlockState
from tapfl.data.federation import Member
from tapfl.engine.clientstore import ClientStore, Files
from tapfl.engine.flower.frames import FrameError, unpack
from tapfl.engine.flower.headers import SLACK, Asked
from tapfl.engine.flower.reported import Due, event_of
from tapfl.engine.flower.wire import ask_frame, read_update
from tapfl.engine.inprocess import adopt_files, kept_files
from tapfl.engine.messages import Answer, Ask, Final, NoAnswer, Report, Update
from tapfl.engine.worker import Worker
from tapfl.errors import TapflError
from tapfl.events import Message, Subscriber

TRIES = 2  # for a turn, before its client counts as missing


class Gone(Exception):
    """A worker's process has ended."""


class Pool(Protocol):
    """Worker processes, by number; each does what it is sent in that order."""

    size: int

    def send(self, worker: int, name: str, *arguments: Any) -> Any:
        """Have a worker's station do something; return a ticket for its answer."""

    def wait(self, tickets: Sequence[Any]) -> Sequence[Any]:
        """Return some of these tickets, whose answers are there."""

    def get(self, ticket: Any) -> Any:
        """Return an answer; raise Gone if there will be none."""

    def renew(self, worker: int) -> None:
        """Start a worker again that has ended."""


@dataclass(eq=False)
class _Turn:
    """A client's turn; ``answered`` once the server has its update, ``lost`` so many times."""

    member: Member
    blocks: BlockState
    files: Files
    lost: int = 0
    answered: bool = False


@dataclass
class _Queue:
    """What a worker has before it, oldest first: tickets with what was asked and whose turn it is.

    ``unreported`` are turns whose update is there and whose files are not yet.
    """

    tickets: dict[Any, tuple[str, _Turn | None]] = field(default_factory=dict)
    unreported: list[_Turn] = field(default_factory=list)

    @property
    def training(self) -> list[_Turn]:
        """The turns that the worker has not answered."""
        return [turn for name, turn in self.tickets.values() if name == "ask" and turn]

    def under_way(self) -> list[_Turn]:
        """Return what the worker is at: not what waits behind that."""
        _, turn = next(iter(self.tickets.values()))
        return self.unreported if turn is None else [turn]


@dataclass
class Dispatch:
    """Clients whose turns are taken by worker processes that share the run's folder."""

    pool: Pool
    worker: Worker  # the server's own: its method, and paths; it takes no turns
    owners: Sequence[str]
    notify: Subscriber

    def __post_init__(self) -> None:
        self._store: ClientStore = self.worker.store
        self._queues = [_Queue() for _ in range(self.pool.size)]

    def ask(self, ask: Ask, whom: Iterable[tuple[Member, BlockState]]) -> Iterator[Answer]:
        """Hand out turns; yield answers as they come. All files are on disk when it ends."""
        fresh = (self._turn(ask, member, blocks) for member, blocks in whom)
        again: deque[_Turn] = deque()
        while True:
            self._hand_out(ask, fresh, again)
            waiting = [ticket for queue in self._queues for ticket in queue.tickets]
            if not waiting:
                return
            for ticket in self.pool.wait(waiting):
                yield from self._take(ask, ticket, again)

    def _turn(self, ask: Ask, member: Member, blocks: BlockState) -> _Turn:
        return _Turn(member, blocks, self._store.newest(member.id, self.owners, ask.round - 1))

    def _hand_out(self, ask: Ask, fresh: Iterator[_Turn], again: deque[_Turn]) -> None:
        """Give every worker that has answered its next turn, else ask for what it owes."""
        free = [n for n, queue in enumerate(self._queues) if not queue.training]
        for number in sorted(free, key=lambda n: len(self._queues[n].tickets)):
            turn = again.popleft() if again else next(fresh, None)
            if turn is not None:
                self._begin(ask, number, turn)
            elif self._queues[number].unreported and not self._queues[number].tickets:
                self._send(number, "rest", None)

    def _begin(self, ask: Ask, number: int, turn: _Turn) -> None:
        frame = ask_frame(Asked(kind=ask.kind, run=self.worker.plan.name, client=turn.member.id,
                                round=ask.round, kept=list(ask.kept)), turn.blocks)
        self._send(number, "ask", turn, frame, dict(turn.files))
        if ask.kind == "train":
            self._send(number, "after", turn)

    def _send(self, number: int, name: str, turn: _Turn | None, *arguments: Any) -> None:
        ticket = self.pool.send(number, name, *arguments)
        self._queues[number].tickets[ticket] = (name, turn)

    def _take(self, ask: Ask, ticket: Any, again: deque[_Turn]) -> Iterator[Answer]:
        """Yield what an answer brings."""
        number = next((n for n, q in enumerate(self._queues) if ticket in q.tickets), None)
        if number is None:  # of a worker whose end has been noticed
            return
        queue = self._queues[number]
        try:
            said = self.pool.get(ticket)
        except Gone as gone:
            yield from self._lost(ask, number, str(gone), again)
            return
        name, turn = queue.tickets.pop(ticket)
        if name == "ask" and turn is not None:
            if not turn.answered:
                yield self._read(ask, turn.member, said)
            turn.answered = True
            if ask.kind == "train":
                queue.unreported.append(turn)
        elif said is not None:
            yield self._report(ask, queue, said)

    def _report(self, ask: Ask, queue: _Queue, said: Mapping[str, Any]) -> Report:
        client = said["client"]
        self._store.note(client, said["files"])
        queue.unreported = [turn for turn in queue.unreported if turn.member.id != client]
        return Report(client, ask.round, [event_of(record) for record in said["events"]])

    def _lost(self, ask: Ask, number: int, why: str, again: deque[_Turn]) -> Iterator[Answer]:
        """Start a worker again; its turns are taken again, or are missing at last."""
        queue, self._queues[number] = self._queues[number], _Queue()
        turns = list(dict.fromkeys([*queue.unreported, *queue.training]))
        self.notify(Message(
            f"worker {number + 1} has ended ({why}) with {', '.join(t.member.id for t in turns)}; "
            "it is started again"))
        self.pool.renew(number)
        for turn in queue.under_way():  # it may be what ended the worker
            turn.lost += 1
        for turn in turns:
            if turn.lost < TRIES:
                again.append(turn)
                continue
            client, reason = turn.member.id, f"its worker ended {TRIES} times"
            what = "has lost what its X learned" if turn.answered else "is missing"
            self.notify(Message(f"{client} {what} in round {ask.round + 1}: {reason}"))
            yield Report(client, ask.round) if turn.answered else NoAnswer(client, reason)

    def _read(self, ask: Ask, member: Member, said: Any) -> Update | Final:
        if ask.kind != "train":
            return Final(member.id, **{**said, "events": [event_of(e) for e in said["events"]]})
        method, plan = self.worker.method, self.worker.plan
        due = Due(member, ask.round, (), self.owners, (), plan.config.seed)
        names = method.exchanged(member)
        limit = sum(method.initial[name].nbytes for name in names) + SLACK
        try:
            update, _ = read_update(unpack(said, limit), due, method.initial, names)
        except FrameError as error:
            raise TapflError(f"{member.id}: its update cannot be read: {error}") from None
        return dataclasses.replace(update, blocks=update.blocks.to(method.context.device))

    # What clients keep

    def settle(self, round_: int) -> list[Any]:
        """Return the files that a round consists of: workers wrote them before they reported."""
        return list(self._store.listing(as_of=round_))

    def keeps(self, member: Member, models: Mapping[str, str], scores: Mapping[str, str],
              samples: Mapping[str, str]) -> bool:
        """Compare the checksums that the files carry."""
        return kept_files(self.worker, member, models, scores, samples)

    def check(self, listed: Sequence[Any]) -> str | None:
        """Compare the clients' files with what a checkpoint lists."""
        return self._store.check(listed)

    def adopt(self, folder: Path, listed: Sequence[Any] | None,
              clients: Sequence[str]) -> list[Any]:
        """Copy what clients kept for the methods of this federated run."""
        return adopt_files(self.worker, folder, listed, clients)
