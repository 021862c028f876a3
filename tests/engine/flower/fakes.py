"""A federation without data or networks: nodes that speak the messages, and a server's rounds."""

from types import SimpleNamespace

import torch

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Member
from tapfl.engine.checkpoints import Checkpoints
from tapfl.engine.departures import Departures
from tapfl.engine.eventlog import EventLog
from tapfl.engine.flower.elsewhere import Remote
from tapfl.engine.flower.frames import pack, unpack
from tapfl.engine.flower.headers import VERSION, Announced, Hello, ReportPart
from tapfl.engine.flower.nodes import Nodes, Patience
from tapfl.engine.flower.reported import Due
from tapfl.engine.flower.wire import final_frame, read_ask, update_frame
from tapfl.engine.messages import Final, Update
from tapfl.engine.rounds import Rounds
from tapfl.events import PersonalLosses, nobody
from tapfl.federated.server import Server
from tests.engine.flower.memory import InMemory
from tests.experiment import read_events

BLOCKS = ["decoder/a", "decoder/b"]
SHAPES = {name: {"w": torch.Size([64])} for name in BLOCKS}
ZERO = BlockState({name: torch.zeros(64) for name in BLOCKS}, SHAPES)
CLIENTS = {f"c{i}": ["t", "u"] for i in range(4)}
MEMBERS = [Member(id_, i, tuple(tasks), 10 + i) for i, (id_, tasks) in enumerate(CLIENTS.items())]
PLAN = SimpleNamespace(name="fedavg", plain=True, constant=True, config=SimpleNamespace(seed=42),
                       personalizers=((SimpleNamespace(name="tap"), None),))
DUE = Due(MEMBERS[1], 2, [0, 1], ["fedavg", "tap"], ["fedavg", "tap", "constant"], 42)
METHOD = SimpleNamespace(initial=ZERO, exchanged=lambda member: BLOCKS,
                         context=SimpleNamespace(device="cpu"))


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def row(client, **changes):
    return {"seed": 42, "method": "tap", "client": client, "task": "t", "dataset": "t",
            "metric": "accuracy", "value": 50.0, "samples": 6} | changes


def event(client, round_, **changes):
    return PersonalLosses("tap", round_, client, {"t": 1.0 + round_}).record() | changes


def update(client, round_, blocks):
    """What a client makes of blocks: noise of its own."""
    draw = torch.Generator().manual_seed(100 * round_ + int(client[1:]))
    new = {n: v + torch.randn(v.shape, generator=draw) for n, v in blocks.items()}
    return Update(client, BlockState(new, SHAPES), 10 + int(client[1:]), {"t": 1.0 + round_})


class FakeNode:
    """Hosts clients. ``changed`` gets every answer but hello as (header, body); it may change it.

    ``hello`` are changes of what it says of itself.
    """

    def __init__(self, *clients, changed=None, **hello):
        self.clients, self.changed, self.hello = clients, changed, hello
        self.asked = []

    def answer(self, data):
        header, body = unpack(data)
        if header["kind"] == "hello":
            return pack(hello(*self.clients) | self.hello)
        asked, blocks = read_ask((header, body), ZERO, BLOCKS)
        self.asked.append(asked)
        made = unpack(self._made(asked, blocks))
        if self.changed is None:
            return pack(*made)
        found = self.changed(*made)
        return pack(*found) if isinstance(found, tuple) else found

    def _made(self, asked, blocks):
        reports = [ReportPart(round=r, events=[event(asked.client, r)]) for r in asked.awaited]
        if asked.kind == "train":
            return update_frame(update(asked.client, asked.round, blocks), asked.round, reports,
                                asked.compression)
        return final_frame(Final(asked.client, [row(asked.client)]), reports)


def hello(*clients, **changes):
    return Hello(version=VERSION, tapfl="1", code="1", torch="2", threads=1, config="config",
                 weights="weights", clients=[
                     Announced(id=id_, tasks=CLIENTS.get(id_, ["t"]), samples=10)
                     for id_ in clients]).model_dump() | changes


class Fakes:
    """A server and its nodes, in memory and outside of time."""

    def __init__(self, folder, *nodes, rounds=3, every=2, cohort=4, notify=nobody, transport=None,
                 compression="none", **patience):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "events.jsonl").write_text("")
        self.folder, self.clock, self.said = folder, Clock(), []
        self.transport = transport or InMemory(nodes)
        patience = Patience(**{"join": 10, "hello": 3, "round": 20, "finish": 30, "poll": 1.0,
                               **patience})
        self.nodes = Nodes(self.transport, CLIENTS, "config", "weights", patience,
                           self.said.append, self.clock, self.clock.sleep)
        config = Config.model_validate({"train": {"rounds": rounds, "cohort": cohort},
                                        "checkpoint": {"every": every}})
        self.server = Server(ZERO, 4, cohort, 42)
        self.rounds = Rounds(
            "fedavg", config, MEMBERS, self.server, METHOD.exchanged,
            Remote(PLAN, METHOD, self.nodes, compression, ""),
            Checkpoints(folder / "checkpoints", "fedavg"),
            EventLog(folder / "events.jsonl", folder / "segment.jsonl"), folder / "final", notify,
            Departures(folder, folder))

    @property
    def texts(self):
        return [str(message) for message in self.said]

    def events(self, kind=None):
        return [{k: v for k, v in e.items() if k not in ("seconds", "bytes_up")}
                for e in read_events(self.folder, kind)]
