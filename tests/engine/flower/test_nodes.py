"""Who is connected: who joins, who is refused and why, who comes back."""

import pytest

from tapfl.engine.flower.frames import pack
from tapfl.engine.flower.nodes import Host, Nodes, Patience
from tapfl.errors import TapflError
from tests.engine.flower.fakes import CLIENTS, Clock, FakeNode, hello
from tests.engine.flower.memory import InMemory


class Silent:
    """A node that never answers."""

    def answer(self, data):
        return None


class Says:
    """A node that answers whatever it is told to."""

    def __init__(self, answer):
        self.said = answer

    def answer(self, data):
        return self.said


def nodes_of(*residents, **patience):
    clock, said = Clock(), []
    nodes = Nodes(InMemory(residents), CLIENTS, "config", "weights",
                  Patience(**{"join": 10, "hello": 3, "poll": 1.0, **patience}), said.append,
                  clock, clock.sleep)
    nodes.said = said
    return nodes


def texts(nodes):
    return [str(message) for message in nodes.said]


def test_a_node_has_the_clients_of_its_key_alone():
    nodes = nodes_of(FakeNode("c0"), FakeNode("c0", "c1"), FakeNode("c2"), FakeNode("c3"))
    nodes.bound = [Host(1, "first", ("c1",)), Host(2, "second", ("c0", "c1")), Host(3, "third", ())]
    nodes.wait(2)
    assert {client: nodes.host(client) for client in CLIENTS} == {
        "c0": 2, "c1": 2, "c2": None, "c3": None}
    assert {node: why.partition(": ")[2] for node, why in nodes.refused.items()} == {
        1: "client 'c0' is not this node's: the key 'first' has c1",
        3: "client 'c2' is not this node's: the key 'third' has no clients",
        4: "client 'c3' is not this node's: its key has no clients"}


def test_nodes_join_with_their_clients():
    nodes = nodes_of(FakeNode("c0", "c2"), FakeNode("c1", "c3"))
    nodes.wait(4)
    assert {client: nodes.host(client) for client in CLIENTS} == {
        "c0": 1, "c1": 2, "c2": 1, "c3": 2}
    assert [(m.id, m.index, m.tasks, m.samples) for m in nodes.members()] == [
        (id_, i, ("t", "u"), 10) for i, id_ in enumerate(CLIENTS)]
    assert nodes.clock() == 0


@pytest.mark.parametrize(("changes", "reason"), [
    ({"config": "other"}, "configuration other, the server has config"),
    ({"weights": "other"}, "weights other, the server has weights"),
    ({"version": 9}, "messages of version 9, the server has 1"),
    ({"version": 9, "news": 1}, "messages of version 9, the server has 1"),
    ({"news": 1}, "'news'"),
    ({"clients": []}, "no clients"),
    ({"clients": [{"id": "x\x1b[2J", "tasks": ["t"], "samples": 1}]}, "'clients.0.id'"),
    ({"clients": [{"id": "c9", "tasks": ["t"], "samples": 1}]}, "'c9' is none of this federation"),
    ({"clients": [{"id": "c1", "tasks": ["t"], "samples": 1}]},
     "'c1' has the tasks t, expected t, u"),
    ({"clients": [{"id": "c1", "tasks": ["t", "u"], "samples": 0}]}, "'clients.0.samples'"),
    ({"clients": [{"id": "c1", "tasks": ["t", "u"], "samples": 1}] * 2}, "the same client twice")])
def test_a_node_that_does_not_fit_is_refused(changes, reason):
    nodes = nodes_of(FakeNode("c0"), FakeNode("c1", **changes))
    nodes.wait(1)
    assert nodes.host("c1") is None
    assert reason in nodes.refused[2]
    (said,) = [text for text in texts(nodes) if "refused" in text]
    assert reason in said
    assert said.isprintable()
    nodes.refresh()
    nodes.refresh()
    assert len([text for text in texts(nodes) if "refused" in text]) == 1  # said once


@pytest.mark.parametrize("answer", [
    b"", b"garbage", pack({}), pack({"kind": "update"}), pack({"kind": "hello"}),
    pack({"kind": ["hello"]}), pack(hello("c1"), bytes(2 << 20)), pack(hello("c1"))[:-1]])
def test_garbage_instead_of_a_hello(answer):
    nodes = nodes_of(Says(answer), FakeNode("c0"))
    nodes.wait(1)
    assert list(nodes.refused) == [1]
    assert nodes.host("c1") is None


def test_a_refused_node_that_is_mended_joins_under_a_new_id():
    nodes = nodes_of(FakeNode("c1", config="other"))
    nodes.refresh()
    assert list(nodes.refused) == [1]
    nodes.transport.residents = {2: FakeNode("c1")}
    nodes.refresh()
    assert nodes.host("c1") == 2
    assert nodes.refused == {}  # what is gone is not remembered


def test_a_second_node_with_the_same_client_waits_until_the_first_is_gone():
    """One that comes back may be early: its old connection is not known to be dead yet."""
    nodes = nodes_of(FakeNode("c1"))
    nodes.refresh()
    nodes.transport.residents[2] = FakeNode("c1")
    nodes.refresh()
    assert nodes.host("c1") == 1
    assert "'c1' is already connected, by node 1" in nodes.refused[2]
    del nodes.transport.residents[1]
    nodes.refresh()
    assert nodes.host("c1") == 2
    assert nodes.refused == {}


def test_a_second_node_takes_over_from_one_that_does_not_answer():
    nodes = nodes_of(FakeNode("c1"))
    nodes.refresh()
    nodes.transport.residents[2] = FakeNode("c1")
    nodes.refresh()
    nodes.transport.residents[1] = Silent()
    nodes.forget(1, "no answer within 20 s")
    nodes.refresh()
    assert nodes.host("c1") == 2


def test_a_node_that_hangs_costs_its_patience_once():
    nodes = nodes_of(Silent(), FakeNode("c0"))
    nodes.wait(1)
    once = nodes.clock()
    assert once == 3
    for _ in range(20):
        nodes.wait(1)
    assert nodes.clock() == once
    assert [text for text in texts(nodes) if "node 1" in text] == [
        "node 1: no hello (no answer within 3 s)"]
    nodes.sleep(5)
    nodes.transport.residents[1] = FakeNode("c1")
    nodes.refresh()
    assert nodes.host("c1") == 1


def test_a_hello_that_comes_late_counts():
    nodes = nodes_of(Silent(), FakeNode("c0"), hello=30.0)
    nodes.forget(1, "no answer")  # so nobody waits for it
    nodes.wait(1)
    assert nodes.clock() == 0
    nodes.transport.waiting["0"] = FakeNode("c1").answer(pack({"kind": "hello"}))
    nodes.refresh()
    assert nodes.host("c1") == 1


def test_a_node_that_is_starting_is_asked_again():
    nodes = nodes_of(Says("nobody listens\x1b[2J"))
    for _ in range(3):
        nodes.refresh()
    assert texts(nodes) == ["node 1: no hello (nobody listens [2J)"]
    nodes.transport.residents[1] = FakeNode("c1")
    nodes.refresh()
    assert nodes.host("c1") == 1


def test_too_few_clients():
    nodes = nodes_of(FakeNode("c0"), FakeNode("c1", config="other"), join=30)
    with pytest.raises(TapflError) as error:
        nodes.wait(4)
    assert str(error.value) == (
        "1 of 4 clients are connected, 4 are needed; missing: c1, c2, c3; gave up after 30 s; "
        "refused: node 2: configuration other, the server has config")
    waiting = [text for text in texts(nodes) if text.startswith("waiting: 1 of 4 clients")]
    assert 5 <= len(waiting) <= 7  # not at every look
    assert 30 <= nodes.clock() <= 32


def test_whoever_comes_in_time_is_waited_for():
    nodes = nodes_of(FakeNode("c0"))
    pause = nodes.sleep

    def sleep(seconds):
        pause(seconds)
        if nodes.clock() >= 4:
            nodes.transport.residents[2] = FakeNode("c1", "c2", "c3")

    nodes.sleep = sleep
    nodes.wait(4)
    assert nodes.clock() == 4


def test_nodes_that_come_and_go_leave_nothing_behind():
    nodes = nodes_of()
    for number in range(1000):
        nodes.transport.residents = {
            3 * number: FakeNode("c0"), 3 * number + 1: FakeNode("c1", config="other"),
            3 * number + 2: FakeNode("c0"), 3 * number + 3_000_000: Says("starting")}
        nodes.refresh()
    kept = (nodes.refused, nodes._silent, nodes._behind, nodes._hellos, nodes._hosts, nodes._known)
    assert max(map(len, kept)) <= 2


def test_another_version_of_the_code_is_refused():
    nodes = nodes_of(FakeNode("c0"))
    nodes.code = "2"
    nodes.refresh()
    assert "code of tapfl 1, the server has 2" in nodes.refused[1]


def test_who_was_known_before_is_not_waited_for_for_ever():
    """A run that goes on knows how much data everybody has; a new one has to hear it first."""
    nodes = nodes_of(FakeNode("c0", "c2", "c3"), minimum=3)
    with pytest.raises(TapflError, match="missing: c1; gave up after 10 s"):
        nodes.gather()
    nodes = nodes_of(FakeNode("c0", "c2", "c3"), minimum=3)
    nodes.samples |= dict.fromkeys(CLIENTS, 7)
    nodes.gather()
    assert texts(nodes)[-1].endswith("missing: c1; gave up after 10 s; going on without")
    assert [m.samples for m in nodes.members()] == [10, 7, 10, 10]
    nodes.patience = Patience(join=10, hello=3, poll=1.0, minimum=4)
    with pytest.raises(TapflError, match="4 are needed"):
        nodes.gather()


def test_a_node_that_fails_is_greeted_at_once():
    nodes = nodes_of(FakeNode("c0", "c1", "c2", "c3"))
    nodes.wait(4)
    nodes.forget(1, "no answer")
    assert nodes.host("c1") is None
    nodes.forget(1, "no answer")  # one hello is under way
    assert len(nodes.transport.waiting) == 1
    nodes.refresh()
    assert nodes.host("c1") == 1
    assert nodes.clock() == 0
