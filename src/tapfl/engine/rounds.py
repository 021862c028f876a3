"""The server's loop: cohort, ask, check, average, checkpoint; then every client finishes.

It knows members, the server's blocks, checkpoints and events; never data, networks or personal
models. Whether clients live in this process or on other machines makes no difference to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Member
from tapfl.engine.checkpoints import Checkpoints
from tapfl.engine.departures import Departures
from tapfl.engine.eventlog import EventLog
from tapfl.engine.files import read_checked_json, write_checked_json
from tapfl.engine.messages import (
    Answer,
    Ask,
    Clients,
    Final,
    Kind,
    NoAnswer,
    Report,
    Row,
    Update,
)
from tapfl.engine.record import Times, fixed_settings
from tapfl.engine.released import Released
from tapfl.errors import TapflError
from tapfl.events import (
    ClientFinished,
    Event,
    Left,
    Logged,
    Message,
    Missing,
    Refused,
    RoundEnded,
    RunStarted,
    Subscriber,
)
from tapfl.federated.server import Server


@dataclass
class Rounds:
    """One federated run, seen from the server.

    ``exchanged`` says which blocks travel to and from a member; ``final`` is the folder for what
    clients report in the end. Events go to the ``log`` first, then to ``notify``. ``departures``
    says who has left, ``released`` counts what clients are asked for.
    """

    name: str
    config: Config
    members: Sequence[Member]
    server: Server
    exchanged: Callable[[Member], Sequence[str]]
    clients: Clients
    checkpoints: Checkpoints
    log: EventLog
    final: Path
    notify: Subscriber
    departures: Departures
    released: Released = field(default_factory=Released)
    times: Times | None = field(default=None, init=False)  # when all is over
    _done: int = field(default=-1, init=False)  # the last complete round
    _places: dict[str, int] = field(default_factory=dict, init=False)  # of members that left
    _awaited: dict[str, list[int]] = field(default_factory=dict, init=False)  # reports to come

    def __post_init__(self) -> None:
        # What was made with other settings does not belong to this run.
        # Those at their defaults do not count: a newer version may have more of them.
        settings = fixed_settings(self.config).model_dump_json(exclude_defaults=True)
        self._settings = hashlib.sha256(settings.encode()).hexdigest()
        self._complete(-1)

    def run(self, resume: bool = False) -> list[Row]:
        """Run to the end, from wherever it stands; return the results in the roster's order."""
        train, every = self.config.train, self.config.checkpoint.every
        if resume:
            self._restore()
        there = len(self.members) - len(self._absent(self._done + 1))
        self.notify(RunStarted(self.name, train.rounds, self._done + 1, there))
        try:
            for round_ in range(self._done + 1, train.rounds):
                self.round(round_)
                if every is not None and (round_ + 1) % every == 0:
                    self.commit()
        except BaseException:  # whatever ends it, the last whole round is written down
            with contextlib.suppress(Exception):  # what ended it matters more
                self.commit()
            raise
        self.commit()
        return self.finish()

    def round(self, round_: int) -> None:
        """Run one round."""
        started = time.perf_counter()
        # 1. The cohort, of those that have not left; each member gets the blocks it exchanges.
        absent = self._absent(round_)
        cohort = [self.members[i] for i in self.server.cohort(round_, absent)]
        self.released.begin([member.id for member in cohort], len(self.members) - len(absent))
        sent = ((member, self.server.send(self.exchanged(member))) for member in cohort)
        answers = self.clients.ask(self._ask("train", round_), sent)
        # 2. Updates are checked and averaged in the roster's order, whenever they come.
        events: dict[str, list[Event]] = {member.id: [] for member in cohort}
        losses: dict[str, list[float]] = {}
        for member, update in self._in_order(round_, cohort, answers, events):
            events[member.id][:0] = self._count_in(member, update, round_)
            for task, loss in update.losses.items() if isinstance(update, Update) else ():
                if math.isfinite(loss):
                    losses.setdefault(task, []).append(loss)
        traffic = {"bytes_up": self.server.bytes_up, "bytes_down": self.server.bytes_down}
        contributors = self.server.aggregate()
        # 3. What happened, client by client: written down, then shown.
        happened = [event for member in cohort for event in events[member.id]]
        happened += self._left(round_)
        happened.append(RoundEnded(
            self.name, round_, [member.id for member in cohort], self.config.train.rate(round_),
            {task: sum(values) / len(values) for task, values in losses.items()}, **traffic,
            seconds=time.perf_counter() - started,
            contributors={name: contributors[name] for name in sorted(contributors)}))
        for event in happened:
            self.log(event)
        self._complete(round_)
        for event in happened:
            self.notify(event)

    def _absent(self, round_: int) -> set[int]:
        """Return the places of the members that have left."""
        gone = self.departures.gone(round_)
        if gone - set(self._places):  # members are built on access: look through them once
            self._places |= {m.id: m.index for m in self.members if m.id in gone}
        return {self._places[client] for client in gone if client in self._places}

    def _left(self, round_: int) -> list[Event]:
        return [Left(self.name, round_, client) for client in self.departures.just_left(round_)]

    def _ask(self, kind: Kind, round_: int) -> Ask:
        return Ask(kind, round_, self.checkpoints.rounds, self._awaited)

    def _in_order(self, round_: int, cohort: Sequence[Member], answers: Iterator[Answer],
                  events: dict[str, list[Event]]) -> Iterator[tuple[Member, Update | NoAnswer]]:
        """Yield each member's update when its turn has come; one that is early waits."""
        waiting: dict[str, Update | NoAnswer] = {}
        turn = iter(cohort)
        member = next(turn, None)
        for answer in answers:
            if isinstance(answer, Report):
                self._heard(answer)
                events[answer.client] += answer.events
            elif isinstance(answer, Update | NoAnswer):
                waiting[answer.client] = answer
                if isinstance(answer, Update):  # its report follows, now or with its next answer
                    self._awaited.setdefault(answer.client, []).append(round_)
            while member is not None and member.id in waiting:
                yield member, waiting.pop(member.id)
                member = next(turn, None)
        while member is not None:
            yield member, waiting.pop(member.id, NoAnswer(member.id, "no answer"))
            member = next(turn, None)

    def _heard(self, report: Report) -> None:
        rounds = self._awaited.get(report.client, [])
        if report.round in rounds:
            rounds.remove(report.round)

    def _count_in(self, member: Member, update: Update | NoAnswer, round_: int) -> list[Event]:
        """Average an update, or say why it does not count."""
        if isinstance(update, NoAnswer):
            return [Missing(self.name, round_, member.id, update.reason)]
        fault, names = update.fault, self.exchanged(member)
        if fault is None and names:
            fault = self.server.receive(member.id, names, update.blocks, update.samples)
        refused = [] if fault is None else [Refused(self.name, round_, member.id, fault)]
        return [*update.events, *refused]

    # Checkpoints

    def _complete(self, round_: int) -> None:
        """Remember a whole round: one assignment, so that an interrupt finds all or nothing."""
        self._last = (round_, self.server.blocks, self.log.position(), self.server.bound.state(),
                      {client: list(rounds) for client, rounds in self._awaited.items() if rounds})
        self._done = round_

    def commit(self) -> None:
        """Write the last whole round down; one that was interrupted will run again."""
        round_, blocks, position, norms, awaited = self._last
        if self.config.checkpoint.every is not None and round_ > self.checkpoints.newest:
            self.checkpoints.write(round_, blocks, {
                "settings": self._settings, "events": position, "norms": norms, "awaited": awaited,
                "clients": self.clients.settle(round_)})

    def begin_after(self, round_: int, blocks: BlockState, norms: Mapping[str, Any],
                    listed: Sequence[Any]) -> None:
        """Write down where another run ended, as this run's own checkpoint to go on from."""
        self.checkpoints.write(round_, blocks, {
            "settings": self._settings, "events": self.log.position(), "norms": norms,
            "awaited": {}, "clients": listed})

    def _restore(self) -> None:
        """Go back to the newest checkpoint that is whole, with all that belongs to it."""
        if self.checkpoints.rounds and self.config.checkpoint.every is None:
            raise TapflError(f"{self.checkpoints.folder}: the run has checkpoints to go on from; "
                             "checkpoint.every: expected a number, got null")
        faults = []
        for found in self.checkpoints.newest_first():
            fault = found if isinstance(found, str) else self._fault(found[2])
            if isinstance(found, str) or fault is not None:
                faults.append(str(fault))
                continue
            round_, blocks, notes = found
            for fault in faults:
                self.notify(Message(f"{fault}; going back to round {round_ + 1}"))
            self.checkpoints.forget_after(round_)
            self.server.blocks = blocks.to(next(iter(self.server.blocks.values())).device)
            self.server.bound.restore(notes["norms"])
            self._awaited = notes.get("awaited", {})
            self.log.rewind(notes["events"][0])
            self._complete(round_)
            return
        if faults:
            raise TapflError("; ".join(faults) + ": no sound checkpoint is left to resume from")
        self.clients.check([])
        self.log.rewind(0)
        self._awaited = {}
        # Models made from a W that is trained anew, perhaps with other clients, are not its.
        shutil.rmtree(self.final, ignore_errors=True)
        self._complete(-1)

    def _fault(self, notes: dict[str, Any]) -> str | None:
        """Say what is wrong with what a checkpoint lists, if anything is."""
        if notes.get("settings") != self._settings:
            return f"{self.checkpoints.folder}: made with another configuration"
        length, digest = notes["events"]
        return self.log.check((length, digest)) or self.clients.check(notes["clients"])

    # After the last round

    def finish(self) -> list[Row]:
        """Let every client make and evaluate its final models; each client is a checkpoint."""
        rounds = self.config.train.rounds
        absent = self._absent(rounds)  # who left has no part in this
        members = [member for member in self.members if member.index not in absent]
        total, place = len(members), {member.id: place for place, member in enumerate(members)}
        records = [self._finished(member) for member in members]
        missing = [m for m, record in zip(members, records, strict=True) if record is None]
        sent = ((member, self.server.send(self.exchanged(member))) for member in missing)
        done = total - len(missing)
        reports: dict[str, list[Event]] = {}
        reasons: dict[str, str] = {}
        for answer in self.clients.ask(self._ask("finish", rounds), sent):
            if isinstance(answer, Report):  # of its last round, or of one whose answer was lost
                reports.setdefault(answer.client, []).extend(answer.events)
            if isinstance(answer, NoAnswer):
                reasons[answer.client] = answer.reason
            if not isinstance(answer, Final):
                continue
            record = {**self._of(answer.client), "rows": list(answer.rows),
                      "models": None if answer.models is None else dict(answer.models),
                      "scores": dict(answer.scores), "samples": dict(answer.samples),
                      "seconds": dict(answer.seconds),
                      "reports": [e.record() for e in reports.get(answer.client, ())
                                  if isinstance(e, Logged)],
                      "events": [e.record() for e in answer.events if isinstance(e, Logged)]}
            write_checked_json(self.final / f"{answer.client}.json", record)
            records[place[answer.client]] = record
            done += 1
            self.notify(ClientFinished(answer.client, done, total))
        lost = [f"{m.id} ({reasons.get(m.id, 'no answer')})"
                for m, r in zip(members, records, strict=True) if r is None]
        if lost:
            raise TapflError(f"{self.name}: no final models from {', '.join(lost[:5])}"
                             f"{' …' if len(lost) > 5 else ''}; continue with --resume")
        whole = [record for record in records if record is not None]
        self.log.arrange(event for record in whole for event in record.get("reports", ()))
        late = [event.record() for event in self._left(rounds) if isinstance(event, Logged)]
        self.log.replay([*late, *(event for record in whole for event in record["events"])])
        self.departures.complete()
        self.times = Times.of(self.log.seconds(), [record["seconds"] for record in whole])
        return [row for record in whole for row in record["rows"]]

    def _finished(self, member: Member) -> dict[str, Any] | None:
        """Return what a client reported in the end, if it did and still has its files."""
        record = read_checked_json(self.final / f"{member.id}.json")
        if record is None or any(record.get(k) != v for k, v in self._of(member.id).items()):
            return None
        # Whether models are kept may have changed since: one that kept none makes them again.
        models = record["models"] if self.config.checkpoint.models else {}
        whole = models is not None and self.clients.keeps(
            member, models, record["scores"], record.get("samples", {}))
        return record if whole else None

    def _of(self, client: str) -> dict[str, Any]:
        return {"method": self.name, "client": client, "round": self.config.train.rounds,
                "settings": self._settings}

