"""The nodes of a federation, seen from its server: which one hosts which client.

A node joins by answering a hello. One that does not fit is left out, with a reason; one that is
gone is forgotten; one that comes back under another id is found again by the clients it hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tapfl.data.federation import Member
from tapfl.engine.flower.frames import FrameError, one_line, pack, unpack
from tapfl.engine.flower.headers import SLACK, Announced, Hello
from tapfl.engine.flower.wire import read_hello
from tapfl.engine.record import Started
from tapfl.errors import TapflError
from tapfl.events import Message, Subscriber, nobody

NO_LONGER = 5.0  # seconds between two lines that say who is missing


class Transport(Protocol):
    """What carries frames to nodes and back."""

    def nodes(self) -> Sequence[int]:
        """Return the ids of the nodes that are connected."""

    def push(self, node: int, data: bytes, patience: float) -> str:
        """Send a frame; return the message's id. An answer after ``patience`` seconds is late."""

    def pull(self, ids: Collection[str]) -> Mapping[str, bytes | str]:
        """Return the answers that have come, by the id of what they answer: a frame, or a fault."""


@dataclass(frozen=True)
class Patience:
    """How long a server waits, in seconds, and for how many.

    ``minimum`` is how many clients must be connected for a round to begin.
    """

    join: float = 300.0
    hello: float = 60.0
    round: float = 600.0
    finish: float = 3600.0
    poll: float = 0.2
    minimum: int = 1


@dataclass(frozen=True)
class Host:
    """A node that is known beforehand: its id, the name of its key, and the clients it may have."""

    node: int
    name: str
    clients: tuple[str, ...]


@dataclass
class Nodes:
    """Who is connected. ``expected`` are the clients of the federation with their tasks.

    ``gone`` are those that have left. ``start`` is what the run goes on from, if anything.
    ``bound`` says which node may have which clients; None lets any node have any.
    """

    transport: Transport
    expected: Mapping[str, Sequence[str]]
    config: str  # the agreement
    weights: str
    patience: Patience = field(default_factory=Patience)
    notify: Subscriber = nobody
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    code: str | None = None  # a checksum of the code that results depend on; None allows any
    gone: Collection[str] = ()
    start: Started | None = None
    bound: Sequence[Host] | None = None
    samples: dict[str, int] = field(default_factory=dict, init=False)
    refused: dict[int, str] = field(default_factory=dict, init=False)
    _hosts: dict[str, int] = field(default_factory=dict, init=False)
    _known: set[int] = field(default_factory=set, init=False)
    _hellos: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)  # until when
    _silent: dict[int, str] = field(default_factory=dict, init=False)  # and what was said of it
    _behind: dict[int, int] = field(default_factory=dict, init=False)  # who has its clients

    def host(self, client: str) -> int | None:
        """Return the node that hosts a client, if one is connected."""
        return self._hosts.get(client)

    def refresh(self) -> None:
        """Find out who is connected; say hello to whoever is new."""
        there = set(self.transport.nodes())
        for node in {*self._known, *self.refused, *self._silent} - there:
            self._release(node)
            for kept in (self.refused, self._silent, self._behind):
                kept.pop(node, None)
        now = self.clock()
        self._hellos = {id_: (node, until) for id_, (node, until) in self._hellos.items()
                        if node in there and until > now}
        asked = {node for node, _ in self._hellos.values()}
        self._greet(sorted(there - self._known - set(self.refused) - asked))

    def forget(self, node: int, why: str) -> None:
        """A node does not answer: it has to say hello again, and no round waits for that.

        It is asked at once: by the next round it may be back.
        """
        self._release(node)
        self._silent[node] = why
        if node not in {asked for asked, _ in self._hellos.values()}:
            self._say_hello(node)

    def _release(self, node: int) -> None:
        """Let a node's clients connect from elsewhere, also from a node that was early."""
        self._known.discard(node)
        self._hosts = {client: at for client, at in self._hosts.items() if at != node}
        for early in [e for e, host in self._behind.items() if host == node]:
            del self._behind[early], self.refused[early]

    def wait(self, count: int) -> None:
        """Return when so many clients are connected; too few for too long is an error."""
        until = self.clock() + self.patience.join

        def lacking() -> str | None:
            missing = len(self._missing())
            return None if len(self._awaited) - missing >= count else f"{count} are needed"

        if not self._wait(lacking, until):
            raise TapflError(f"{self._who(f'{count} are needed')}; gave up after "
                             f"{self.patience.join:g} s"
                             + "".join(f"; refused: {why}"
                                       for why in list(self.refused.values())[:1]))

    def wait_for_any(self, clients: Sequence[str], until: float) -> bool:
        """Return whether one of these clients is connected, now or before a point in time."""
        def lacking() -> str | None:
            return None if any(c in self._hosts for c in clients) else "all are needed"

        return self.clock() < until and self._wait(lacking, until)

    def gather(self) -> None:
        """Return when all clients are connected, or enough of those that were known before."""
        try:
            self.wait(len(self._awaited))
        except TapflError as error:
            if any(client not in self.samples for client in self._awaited):
                raise
            self.notify(Message(f"{error}; going on without"))
            self.wait(self.patience.minimum)

    def _wait(self, lacking: Callable[[], str | None], until: float) -> bool:
        """Return whether nothing is lacking any more before a point in time; say what is."""
        told = -NO_LONGER
        self.refresh()
        while (what := lacking()) is not None:
            now = self.clock()
            if now > until:
                return False
            if now - told >= NO_LONGER:
                self.notify(Message(f"waiting: {self._who(what)}"))
                told = now
            self.sleep(self.patience.poll)
            self.refresh()
        return True

    def _who(self, what: str) -> str:
        missing, awaited = self._missing(), len(self._awaited)
        return (f"{awaited - len(missing)} of {awaited} clients are connected, {what}; "
                f"missing: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}")

    @property
    def _awaited(self) -> list[str]:
        """The clients that have not left."""
        return [client for client in self.expected if client not in self.gone]

    def _missing(self) -> list[str]:
        return [client for client in self._awaited if client not in self._hosts]

    def members(self) -> list[Member]:
        """Return the federation's members in the roster's order.

        All must have joined once, but for those that have left: nobody asks these.
        """
        samples = dict.fromkeys(self.gone, 1) | self.samples
        return [Member(client, index, tuple(tasks), samples[client])
                for index, (client, tasks) in enumerate(self.expected.items())]

    def _greet(self, new: Sequence[int]) -> None:
        """Say hello to nodes; wait for those that have not been silent before."""
        for node in new:
            self._say_hello(node)
        while self._hellos:
            for id_, answer in self.transport.pull(list(self._hellos)).items():
                if id_ in self._hellos:  # else it is there a second time
                    self._joined(self._hellos.pop(id_)[0], answer)
            now = self.clock()
            late = {node for node, until in self._hellos.values() if until <= now}
            for node in late:
                self._no_hello(node, f"no answer within {self.patience.hello:g} s")
            if not {node for node, _ in self._hellos.values()} - set(self._silent):
                return
            self.sleep(self.patience.poll)

    def _say_hello(self, node: int) -> None:
        patience = self.patience.hello
        id_ = self.transport.push(node, pack({"kind": "hello"}), patience)
        self._hellos[id_] = node, self.clock() + patience

    def _no_hello(self, node: int, why: str) -> None:
        """Remember who said no hello: it may be starting still, and is asked again."""
        if self._silent.get(node) != why:
            self.notify(Message(f"node {node}: no hello ({why})"))
        self._silent[node] = why

    def _joined(self, node: int, answer: bytes | str) -> None:
        if isinstance(answer, str):
            self._no_hello(node, one_line(answer))
            return
        self._silent.pop(node, None)
        try:
            hello = read_hello(unpack(answer, SLACK))
            self._check(node, hello)
        except FrameError as error:
            self.refused[node] = f"node {node}: {error}"
            self.notify(Message(f"refused: {self.refused[node]}"))
            return
        self._known.add(node)
        for client in hello.clients:
            self._hosts[client.id] = node
            self.samples[client.id] = client.samples
        self.notify(Message(f"node {node} joined with {', '.join(c.id for c in hello.clients)}"))

    def _check(self, node: int, hello: Hello) -> None:
        """Refuse a node that could not take part."""
        for what, found, expected in (("code of tapfl", hello.code, self.code),
                                      ("configuration", hello.config, self.config),
                                      ("weights", hello.weights, self.weights)):
            if expected is not None and found != expected:
                raise FrameError(f"{what} {found}, the server has {expected}")
        ids = [client.id for client in hello.clients]
        if not ids or len(set(ids)) < len(ids):
            raise FrameError("the same client twice" if ids else "no clients")
        for client in hello.clients:
            if client.id not in self.expected:
                raise FrameError(f"client '{client.id}' is none of this federation")
            self._check_host(node, client.id)
            if list(client.tasks) != list(self.expected[client.id]):
                raise FrameError(f"client '{client.id}' has the tasks {', '.join(client.tasks)}, "
                                 f"expected {', '.join(self.expected[client.id])}")
            self._check_start(hello, client)
            taken = self._hosts.get(client.id)
            if taken is not None:
                self._behind[node] = taken  # it has its turn when that one is gone
                raise FrameError(f"client '{client.id}' is already connected, by node {taken}")

    def _check_host(self, node: int, client: str) -> None:
        """Refuse a node that says it has a client of another one's."""
        if self.bound is None:
            return
        own = [host for host in self.bound if host.node == node]
        if not own:
            raise FrameError(f"client '{client}' is not this node's: its key has no clients")
        if client not in own[0].clients:
            raise FrameError(f"client '{client}' is not this node's: the key '{own[0].name}' has "
                             f"{', '.join(own[0].clients) or 'no clients'}")

    def _check_start(self, hello: Hello, client: Announced) -> None:
        """Refuse a client whose earlier state is missing, or is of another run than W."""
        if self.start is None:
            return
        if client.known != (client.id in self.start.clients):
            raise FrameError(
                f"client '{client.id}' " + (
                    "brings earlier state, but the server's run goes on from one without it"
                    if client.known else "starts anew, but was in the run that the server goes on "
                    "from; expected its node's earlier folder as start"))
        if client.known and hello.start not in ("", self.start.run):
            raise FrameError(f"client '{client.id}' goes on from run {hello.start}, the server "
                             f"from {self.start.run}")
