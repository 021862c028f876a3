"""Clients on other machines: how a server's rounds reach them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Member
from tapfl.data.participants import tasks_of
from tapfl.engine.departures import leavers
from tapfl.engine.files import read_checked_json, write_checked_json
from tapfl.engine.flower.agreement import agreement, weights_mark
from tapfl.engine.flower.frames import Frame, FrameError, one_line, unpack
from tapfl.engine.flower.headers import SLACK, Asked, Compression
from tapfl.engine.flower.nodes import Host, Nodes, Patience, Transport
from tapfl.engine.flower.reported import Due
from tapfl.engine.flower.wire import ask_frame, read_final, read_refusal, read_update
from tapfl.engine.messages import Answer, Ask, Clients, NoAnswer
from tapfl.engine.record import ELSEWHERE, code_digest, run_id
from tapfl.engine.registry import Plan
from tapfl.engine.site import Apart, model_facts
from tapfl.engine.start import started
from tapfl.evaluation.constant import CONSTANT
from tapfl.events import Subscriber
from tapfl.federated.method import FederatedMethod


@dataclass
class Elsewhere(Apart):
    """A site whose clients answer over a transport. It has no personal model."""

    transport: Transport
    patience: Patience
    config: Config
    device: str
    out: Path
    notify: Subscriber
    compression: Compression = "none"
    hosts: Sequence[Host] | None = None

    def __post_init__(self) -> None:
        self._build()
        expected = tasks_of(self._part, self.config.federation)
        self._id = run_id(self.out)
        self.nodes = Nodes(self.transport, expected, agreement(self.config),
                           weights_mark(self.config), self.patience, self.notify,
                           code=code_digest(), gone=set(leavers(self.out)) & set(expected),
                           start=started(self.config, self.out), bound=self.hosts)
        self._members = self._roster()

    def _roster(self) -> list[Member]:
        """Return the members: known when everybody has said hello once, perhaps to an earlier
        start of this run, which need not wait for everybody again.
        """
        path = self.out / "state" / "roster.json"
        known = read_checked_json(path) or {}
        self.nodes.samples |= known.get("samples", {})
        self.nodes.gather()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(path, {"samples": self.nodes.samples})
        return self.nodes.members()

    def facts(self, plans: Sequence[Plan]) -> dict[str, Any]:
        """Return what a server can say: nothing of data, which stay where they are."""
        names = {name: list(entry.names) for name, entry in self._part.tasks.items() if entry.names}
        return model_facts(self._context, plans, self.device) | {
            "id": self._id, "clients": len(self._members), "federation": self._part,
            "classes": names, "data": dict.fromkeys(self._part.tasks, ELSEWHERE),
            "data_sha256": {}, "metrics": {}, "dropped": []}

    def started(self) -> None:
        """Labels are the clients' own affair."""

    @contextlib.contextmanager
    def open(self, plan: Plan, folder: Path) -> Iterator[tuple[FederatedMethod, Clients]]:
        """Return a federated run's method, and the way to its clients."""
        method = self._worker(plan, folder).method
        yield method, Remote(plan, method, self.nodes, self.compression, self._id)


class Lost(NoAnswer):
    """A client that cannot be reached, as of now."""


@dataclass
class Remote:
    """Sends asks to the nodes that host the clients, and reads what comes back."""

    plan: Plan
    method: FederatedMethod
    nodes: Nodes
    compression: Compression
    id: str  # of the run

    def ask(self, ask: Ask, whom: Iterable[tuple[Member, BlockState]]) -> Iterator[Answer]:
        """Send each member its blocks; yield answers as they come, or why there is none."""
        self.nodes.wait(self.nodes.patience.minimum)
        if ask.kind == "train":
            yield from self._ask(ask, whom)
        else:
            yield from self._ask_again(ask, whom)

    def _ask_again(self, ask: Ask, whom: Iterable[tuple[Member, BlockState]]) -> Iterator[Answer]:
        """Ask for what every member must give: one that is lost is waited for, and asked again."""
        nodes, patience = self.nodes, self.nodes.patience.join
        due = {member.id: (member, blocks) for member, blocks in whom}
        until = nodes.clock() + patience
        while True:
            lost: dict[str, Lost] = {}
            for answer in self._ask(ask, list(due.values())):
                if isinstance(answer, Lost):
                    lost[answer.client] = answer
                    continue
                until = nodes.clock() + patience  # as long as answers come, others may, too
                yield answer
            due = {client: due[client] for client in lost}
            if not due or not nodes.wait_for_any(list(due), until):
                yield from lost.values()
                return

    def _ask(self, ask: Ask, whom: Iterable[tuple[Member, BlockState]]) -> Iterator[Answer]:
        """Ask each member once. A node has its clients' time in turn: it answers one at a time."""
        nodes, transport = self.nodes, self.nodes.transport
        limit = nodes.patience.round if ask.kind == "train" else nodes.patience.finish
        asked: dict[str, tuple[Member, int]] = {}
        queue: dict[int, int] = {}
        for member, blocks in whom:
            node = nodes.host(member.id)
            if node is None:
                yield Lost(member.id, "not connected")
                continue
            queue[node] = queue.get(node, 0) + 1
            frame = self._frame(ask, member, blocks)
            asked[transport.push(node, frame, limit * queue[node])] = member, node
        until = dict.fromkeys(queue, nodes.clock() + limit)
        while asked:
            for id_, data in transport.pull(list(asked)).items():
                if id_ in asked:  # else it is there a second time
                    member, node = asked.pop(id_)
                    until[node] = nodes.clock() + limit
                    yield from self._answers(ask, member, node, data)
            for id_ in [i for i, (_, node) in asked.items() if nodes.clock() >= until[node]]:
                yield self._lost(*asked.pop(id_), f"no answer within {limit:g} s")
            if asked:
                nodes.sleep(nodes.patience.poll)

    def _frame(self, ask: Ask, member: Member, blocks: BlockState) -> bytes:
        return ask_frame(Asked(
            kind=ask.kind, run=self.plan.name, client=member.id, round=ask.round,
            kept=list(ask.kept), awaited=list(ask.awaited.get(member.id, ())),
            compression=self.compression, id=self.id), blocks)

    def _answers(self, ask: Ask, member: Member, node: int,
                 data: bytes | str) -> Iterator[Answer]:
        """Yield what is in an answer: reports of earlier rounds, then the answer itself."""
        if isinstance(data, str):
            yield self._lost(member, node, one_line(data))
            return
        try:
            frame = unpack(data, self._limit(member))
            reason = read_refusal(frame)
            if reason is not None:
                yield NoAnswer(member.id, f"refused: {one_line(reason)}")
                return
            yield from self._read(ask, member, frame)
        except FrameError as error:
            yield NoAnswer(member.id, f"its answer cannot be used: {error}")

    def _read(self, ask: Ask, member: Member, frame: Frame) -> Iterator[Answer]:
        due = self._due(ask, member)
        if ask.kind == "train":
            update, reports = read_update(frame, due, self.method.initial,
                                          self.method.exchanged(member))
            yield from reports
            yield dataclasses.replace(update, blocks=update.blocks.to(self.method.context.device))
        else:
            final, reports = read_final(frame, due)
            yield from reports
            yield final

    def _due(self, ask: Ask, member: Member) -> Due:
        """Return what a client's answer may speak of."""
        plan = self.plan
        personal = [spec.name for spec, _ in plan.personalizers]
        evaluated = [*personal, *([plan.name] if plan.plain else ()),
                     *([CONSTANT] if plan.constant else ())]
        return Due(member, ask.round, list(ask.awaited.get(member.id, ())),
                   [plan.name, *personal], evaluated, plan.config.seed)

    def _limit(self, member: Member) -> int:
        """Return how many bytes a body may have."""
        return sum(self.method.initial[name].nbytes
                   for name in self.method.exchanged(member)) + SLACK

    def _lost(self, member: Member, node: int, why: str) -> Lost:
        self.nodes.forget(node, why)
        return Lost(member.id, why)

    def settle(self, round_: int) -> list[Any]:
        """Clients keep what they keep; each has it on disk before its answer counts."""
        return []

    def keeps(self, member: Member, models: Mapping[str, str], scores: Mapping[str, str],
              samples: Mapping[str, str]) -> bool:
        """A client that has reported its final models has them."""
        return True

    def check(self, listed: Sequence[Any]) -> str | None:
        """A message names the round to go on from: there is nothing to compare here."""
        return None

    def adopt(self, folder: Path, listed: Sequence[Any] | None,
              clients: Sequence[str]) -> list[Any]:
        """Each node takes what its own clients kept from its own earlier folder."""
        return []
