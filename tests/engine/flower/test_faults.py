"""A round goes on whatever a node does, and a server that was killed goes on as if it never was."""

import contextlib
import itertools

import pytest
import torch
from safetensors.torch import save

from tapfl.engine.flower.frames import pack, unpack
from tapfl.engine.rounds import Rounds
from tapfl.errors import TapflError
from tests.engine.flower.fakes import BLOCKS, ZERO, FakeNode, Fakes, event, row
from tests.engine.flower.memory import InMemory, Killed, while_alive

OTHERS = ("c0", "c2", "c3")


def at(number, change):
    """Change the updates of one round, and leave the rest alone."""
    def changed(header, body):
        return change(header, body) if header.get("round") == number else (header, body)

    return changed


def said(**changes):
    return lambda header, body: (header | changes, body)


def values(number):
    return save({name: torch.full([64], number) for name in BLOCKS})


HOSTILE = {
    "an error": (lambda *_: "the node is\x1b[2J gone", "the node is "),
    "nothing": (lambda *_: None, "no answer within 20 s"),
    "no bytes": (lambda *_: b"", "too few for a message"),
    "garbage": (lambda *_: b"garbage" * 30, "its answer cannot be used"),
    "half a message": (lambda *f: pack(*f)[:-9], "the message says"),
    "a huge length": (lambda *f: b"\xff" * 12 + pack(*f), "a header of 4294967295 bytes"),
    "ten times the bytes": (lambda header, body: (header, bytes(20 << 20)), "at most"),
    "no blocks": (lambda header, body: (header, b""), "cannot be read"),
    "a refusal": (lambda *_: pack({"kind": "refusal", "reason": "no"}), "refused: no"),
    "an unknown kind": (said(kind="party"), "'kind'"),
    "a kind that is a list": (said(kind=[]), "'kind'"),
    "a hello": (lambda *_: pack({"kind": "hello"}), "'kind'"),
    "results instead of an update": (said(kind="final"), "'kind'"),
    "another client's update": (said(client="c0"), "client 'c0', expected 'c1'"),
    "an earlier round's update": (said(round=0), "round '0', expected 1"),
    "events of another client": (said(events=[event("c0", 1)]), "client 'c0'"),
    "events of a round to come": (said(events=[event("c1", 2)]), "expected 1"),
    "events of another method": (said(events=[event("c1", 1, method="x")]), "no method"),
    "the end of a round": (said(events=[event("c1", 1, event="round")]), "kind 'round'"),
    "a report that nobody waits for": (said(reports=[{"round": 7, "events": []}]), "not due"),
    "a report twice": (said(reports=[{"round": 0, "events": []}] * 2), "twice"),
    "losses that overflow": (said(losses={"t": 1e308}), "no JSON"),
}


def run(folder, changed=None, **more):
    fakes = Fakes(folder, FakeNode(*OTHERS), FakeNode("c1", changed=changed), **more)
    rows = fakes.rounds.run()
    return fakes, rows


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What comes out when a client's second update is missing."""
    return run(tmp_path_factory.mktemp("without"), at(1, lambda *_: "gone"))


@pytest.mark.parametrize("name", HOSTILE)
def test_an_answer_that_cannot_be_used_costs_nothing_but_itself(tmp_path, without, name):
    change, reason = HOSTILE[name]
    fakes, rows = run(tmp_path, at(1, change))
    (missing,) = fakes.events("missing")
    assert (missing["client"], missing["round"]) == ("c1", 1)
    assert reason in missing["reason"]
    assert missing["reason"].isprintable()
    calm, calm_rows = without
    assert rows == calm_rows
    assert fakes.server.blocks.equals(calm.server.blocks)
    assert ([e for e in fakes.events() if e["event"] != "missing"]
            == [e for e in calm.events() if e["event"] != "missing"])


REFUSED = {
    "nan": (lambda header, _: (header, values(float("nan"))), "not finite"),
    "infinity": (lambda header, _: (header, values(float("inf"))), "not finite"),
    "values too large to be averaged": (lambda header, _: (header, values(3e38)), "too large"),
    "a weight that silences all": (said(samples=10**15), "a sample count of"),
    "a fault of its own": (said(fault="block 'x' is not finite"), "block 'x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_update_that_is_not_sound_is_refused(tmp_path, without, name):
    change, reason = REFUSED[name]
    fakes, _ = run(tmp_path, at(1, change))
    (refused,) = fakes.events("refused")
    assert (refused["client"], refused["round"]) == ("c1", 1)
    assert reason in refused["reason"]
    assert fakes.server.blocks.not_finite() is None
    assert fakes.server.blocks.equals(without[0].server.blocks)


def test_the_largest_values_that_count_leave_the_blocks_finite(tmp_path):
    def extreme(header, _):
        sign = -1 if header["client"] in ("c0", "c2") else 1
        return (header, values(sign * 8e37)) if header["kind"] == "update" else (header, b"")

    fakes = Fakes(tmp_path, FakeNode("c0", "c1", "c2", "c3", changed=extreme))
    fakes.rounds.run()
    assert fakes.events("refused") == []
    assert fakes.server.blocks.not_finite() is None


HOSTILE_RESULTS = {
    "results of another client": (said(rows=[row("c0")]), "client 'c0'"),
    "results of an unknown method": (said(rows=[row("c1", method="x")]), "no method"),
    "results of a foreign task": (said(rows=[row("c1", task="v")]), "no task"),
    "paths": (said(models={"../x": "1"}), "'models'"),
    "an update": (said(kind="update"), "'kind'"),
    "a refusal": (lambda *_: pack({"kind": "refusal", "reason": "disk full"}), "disk full"),
}


@pytest.mark.parametrize("name", HOSTILE_RESULTS)
def test_results_that_cannot_be_used_are_asked_for_again(tmp_path, name):
    change, reason = HOSTILE_RESULTS[name]
    node = FakeNode("c1", changed=lambda header, body: (
        change(header, body) if header["kind"] == "final" else (header, body)))
    transport = InMemory([FakeNode(*OTHERS), node])
    with pytest.raises(TapflError, match=r"no final models from c1 \(.*--resume") as error:
        Fakes(tmp_path, transport=transport).rounds.run()
    assert reason in str(error.value)
    node.changed = None
    again = Fakes(tmp_path, transport=transport)
    rows = again.rounds.run(resume=True)
    assert rows == run(tmp_path / "calm")[1]
    assert [asked.kind for asked in transport.residents[1].asked].count("finish") == 3  # not twice


class Late(InMemory):
    """One client's answer in one round comes when the server has ceased to wait."""

    clock, late = None, None

    def push(self, node, data, patience):
        id_ = super().push(node, data, patience)
        asked = getattr(self.residents[node], "asked", [])
        if node == 2 and asked and asked[-1].round == 1 and self.late is None:
            self.late = id_, self.waiting.pop(id_), self.clock() + patience + 2
        return id_

    def pull(self, ids):
        if self.late and self.clock() >= self.late[2]:
            self.waiting[self.late[0]] = self.late[1]
        return super().pull(ids)


def test_a_late_answer_does_not_count_for_the_next_round(tmp_path, without):
    transport = Late([FakeNode(*OTHERS), FakeNode("c1")])
    fakes = Fakes(tmp_path, transport=transport)
    transport.clock = fakes.clock
    fakes.rounds.run(), fakes.clock.sleep(30)
    assert [(e["client"], e["round"], e["reason"]) for e in fakes.events("missing")] == [
        ("c1", 1, "no answer within 20 s")]
    assert fakes.server.blocks.equals(without[0].server.blocks)


class Twice(InMemory):
    """Every answer is there again at the next look, beside new ones."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.again = {}

    def pull(self, ids):
        found = super().pull(ids)
        both = self.again | dict(itertools.islice(found.items(), 1))
        self.waiting |= dict(itertools.islice(found.items(), 1, None))  # one at a time
        self.again = both
        return both


def test_an_answer_that_is_there_twice_counts_once(tmp_path, calm):
    rows, undisturbed = calm
    fakes = Fakes(tmp_path, transport=Twice([FakeNode(*OTHERS), FakeNode("c1")]))
    assert fakes.rounds.run() == rows
    assert fakes.events() == undisturbed.events()
    assert fakes.server.blocks.equals(undisturbed.server.blocks)


def test_an_update_that_is_sent_again_later_is_refused(tmp_path, without):
    held = []

    def replay(header, body):
        if header.get("round") == 0:
            held.append(pack(header, body))
        return held[0] if header.get("round") == 1 else (header, body)

    fakes, _ = run(tmp_path, replay)
    assert [e["reason"] for e in fakes.events("missing")] == [
        "its answer cannot be used: round '0', expected 1"]
    assert fakes.server.blocks.equals(without[0].server.blocks)


def test_a_node_that_vanishes_comes_back_under_another_id(tmp_path):
    """In the middle of a round: it took the ask and is gone. Another id hosts the client then."""
    transport = InMemory([FakeNode(*OTHERS), FakeNode("c1")])

    def vanish(header, body):
        transport.residents[9] = FakeNode("c1")
        del transport.residents[2]

    transport.residents[2].changed = at(1, vanish)
    fakes = Fakes(tmp_path, transport=transport)
    fakes.rounds.run()
    assert [(e["client"], e["round"]) for e in fakes.events("missing")] == [("c1", 1)]
    contributors = [e["contributors"]["decoder/a"] for e in fakes.events("round")]
    assert ["c1" in each for each in contributors] == [True, False, True]
    assert {e["round"] for e in fakes.events("personal") if e["client"] == "c1"} == {0, 2}


def test_a_node_that_hangs_is_waited_for_once(tmp_path):
    """Then it is not connected, and rounds do not wait for it."""
    def hang(header, body):
        fakes.transport.residents[2].answer = lambda data: None

    fakes = Fakes(tmp_path, FakeNode(*OTHERS), FakeNode("c1", changed=at(1, hang)), rounds=6)
    with pytest.raises(TapflError, match=r"no final models from c1 \(not connected\)"):
        fakes.rounds.run()
    assert [e["reason"] for e in fakes.events("missing")] == [
        "no answer within 20 s", *["not connected"] * 4]
    assert fakes.clock() <= 32  # once in a round, and once in the end


def test_a_round_begins_with_the_minimum_or_not_at_all(tmp_path):
    fakes = Fakes(tmp_path, FakeNode(*OTHERS), FakeNode("c1", changed=at(
        1, lambda *_: fakes.transport.residents.pop(2) and "gone")), minimum=4)
    with pytest.raises(TapflError, match="3 of 4 clients are connected, 4 are needed; missing: c1"):
        fakes.rounds.run()
    assert [e["round"] for e in fakes.events("round")] == [0, 1]  # the round under way was ended
    assert any(text.startswith("waiting: 3 of 4") for text in fakes.texts)
    fakes.transport.residents[3] = FakeNode("c1")
    again = Fakes(tmp_path, transport=fakes.transport, minimum=4)
    assert len(again.rounds.run(resume=True)) == 4


def test_final_models_are_waited_for(tmp_path):
    """A client that is away in the end is asked when it is back; others are asked once."""
    transport = InMemory([FakeNode(*OTHERS), FakeNode("c1")])
    asked = transport.residents[1].asked

    def leave(header, body):
        del transport.residents[2]
        return "gone"

    transport.residents[2].changed = at(2, leave)
    fakes = Fakes(tmp_path, transport=transport)
    sleep = fakes.clock.sleep

    def come_back(seconds):
        sleep(seconds)
        if fakes.clock() > 5:
            transport.residents.setdefault(7, FakeNode("c1"))

    fakes.nodes.sleep = come_back
    assert fakes.rounds.run() == run(tmp_path / "calm")[1]
    assert [each.kind for each in asked].count("finish") == 3
    assert any("all are needed; missing: c1" in text for text in fakes.texts)


class OneAtATime(InMemory):
    """A node's answers come one after the other, each after ``pace`` seconds."""

    def __init__(self, nodes, pace):
        super().__init__(nodes)
        self.pace, self.clock, self.ready, self.free = pace, None, {}, {}

    def push(self, node, data, patience):
        id_, now = super().push(node, data, patience), self.clock()
        kind = unpack(data)[0]["kind"]
        self.free[node] = max(self.free.get(node, 0), now) + (0 if kind == "hello" else self.pace)
        self.ready[id_] = self.free[node], now + patience
        return id_

    def pull(self, ids):
        now = self.clock()
        return super().pull([id_ for id_ in ids if self.ready[id_][0] <= now <= self.ready[id_][1]])


@pytest.mark.parametrize(("pace", "missing"), [(15, 0), (25, 4)])
def test_a_nodes_clients_have_their_time_in_turn(tmp_path, pace, missing):
    """``round`` is a client's time: four on a node may take four times as long."""
    transport = OneAtATime([FakeNode("c0", "c1", "c2", "c3")], pace)
    fakes = Fakes(tmp_path, transport=transport, rounds=1, round=20)
    transport.clock = fakes.clock
    if missing:
        with contextlib.suppress(TapflError):
            fakes.rounds.run()
    else:
        fakes.rounds.run()
    assert len(fakes.events("missing")) == missing


def test_nothing_grows_over_a_thousand_rounds(tmp_path):
    """A client that is never sound, one that is lost at times, others that report late."""
    turns = itertools.count()

    def unreliable(header, body):
        return "lost" if next(turns) % 3 else (header, values(float("nan")))

    def in_the_end(header, body):
        return unreliable(header, body) if header["kind"] == "update" else (header, body)

    fakes = Fakes(tmp_path, FakeNode(*OTHERS), FakeNode("c1", changed=in_the_end), rounds=1000,
                  every=200, cohort=1)
    fakes.rounds.run()
    assert max(len(rounds) for rounds in fakes.rounds._awaited.values()) <= 1
    assert fakes.transport.waiting == {}
    nodes = fakes.nodes
    assert [*nodes.refused, *nodes._silent, *nodes._behind, *nodes._hellos] == []


# The server killed: at every event, and at every message

def killing(nth):
    calls = itertools.count(1)

    def call(*_):
        if next(calls) == nth:
            raise Killed

    return call


class Deadly(InMemory):
    """A transport after whose n-th push or pull the server is no more."""

    def __init__(self, residents, kill):
        super().__init__(residents)
        self.kill = kill

    def push(self, *arguments):
        id_ = super().push(*arguments)
        self.kill()
        return id_

    def pull(self, ids):
        found = super().pull(ids)
        self.kill()
        return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    fakes, rows = run(folder)
    return rows, fakes


@pytest.mark.parametrize("written", [True, False], ids=["interrupted", "killed"])
@pytest.mark.parametrize("where", ["notify", "transport"])
def test_a_server_that_ends_anywhere_goes_on(tmp_path, calm, monkeypatch, where, written):
    """``interrupted`` may still write the last whole round down; ``killed`` may not."""
    rows, undisturbed = calm
    if not written:
        monkeypatch.setattr(Rounds, "commit", while_alive)
    for nth in itertools.count(1):
        folder = tmp_path / str(nth)
        kill = killing(nth)
        residents = [FakeNode(*OTHERS), FakeNode("c1")]
        transport = Deadly(residents, kill if where == "transport" else lambda: None)
        first = Fakes(folder, transport=transport,
                      notify=kill if where == "notify" else lambda _: None)
        try:
            first.rounds.run()
        except Killed:
            second = Fakes(folder, transport=InMemory(residents))
            assert second.rounds.run(resume=True) == rows
            assert second.events() == undisturbed.events()
            assert second.server.blocks.equals(undisturbed.server.blocks)
            continue
        assert nth > 10
        return


def test_blocks_are_those_of_the_messages(calm):
    """The undisturbed run is one that has learnt something, with every report in its place."""
    _, fakes = calm
    assert not fakes.server.blocks.equals(ZERO)
    reported = [(e["round"], e["client"]) for e in fakes.events("personal")]
    assert reported == [(r, f"c{i}") for r in range(3) for i in range(4)]
