"""Flower's grid as a transport: what a node sends may be no message at all."""

import httpx
import pytest

flwr = pytest.importorskip("flwr")

from flwr.app import Error, Message, RecordDict  # noqa: E402
from flwr.app.message.message import make_message  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import (  # noqa: E402
    add_header_to_object_body,
    get_all_nested_objects,
    get_object_id,
)
from flwr.supercore.inflatable.inflatable_utils import (  # noqa: E402
    inflate_object_from_contents,
)
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from tapfl.engine.flower.grid import GridTransport  # noqa: E402
from tapfl.engine.flower.records import content_of  # noqa: E402


class Grid:
    """What Flower does with answers: it hands each out once, and puts it together then."""

    def __init__(self):
        self.asked, self.contents, self.gone = {}, {}, set()

    def push_messages(self, messages):
        (message,) = messages
        id_ = message.object_id
        message.metadata.__dict__["_message_id"] = id_
        self.asked[id_] = message
        return [id_] if message.metadata.dst_node_id else []

    def answer(self, id_, frame, changed=lambda contents, root: root):
        """Have a node answer; ``changed`` may change what it sends, and returns its root."""
        message = Message(content_of(frame), reply_to=self.asked[id_])
        contents = {i: each.deflate() for i, each in get_all_nested_objects(message).items()}
        self.contents[id_] = changed(contents, message.object_id), contents

    def pull_messages(self, ids):
        found = {id_: self.contents.pop(id_) for id_ in ids if id_ in self.contents}
        lost = [id_ for id_ in ids if id_ in self.gone]
        self.gone |= set(found)
        return ([make_message(Message(Error(1, "lost"), reply_to=self.asked[id_]).metadata,
                              error=Error(1, "lost")) for id_ in lost]
                + [inflate_object_from_contents(*each) for each in found.values()])


@pytest.fixture
def grid(monkeypatch):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    return Grid()


def put(contents, old, new):
    """Put other content in an object's place."""
    del contents[old]
    contents[get_object_id(new)] = new
    return get_object_id(new)


def no_message(contents, root):
    """An answer whose root is a record."""
    return next(i for i, each in contents.items() if each.startswith(b"RecordDict "))


def no_json(contents, root):
    return put(contents, root, add_header_to_object_body(b"{garbage", RecordDict()))


def no_protobuf(contents, root):
    return put(contents, root, contents[root].replace(b"\x00", b"\x00\xff", 1))


def no_child(contents, root):
    del contents[no_message(contents, root)]
    return root


BAD = [no_message, no_json, no_protobuf, no_child]


@pytest.mark.parametrize("bad", BAD)
def test_an_answer_that_is_none_is_a_fault_of_its_node(grid, bad):
    transport = GridTransport(grid)
    id_ = transport.push(5, b"ask", 10)
    grid.answer(id_, b"answer", bad)
    ((found, said),) = transport.pull([id_]).items()
    assert found == id_
    assert isinstance(said, str)


@pytest.mark.parametrize("bad", BAD)
def test_other_nodes_lose_an_answer_once_at_most(grid, bad):
    transport = GridTransport(grid)
    ids = [transport.push(node, b"ask", 10) for node in (5, 6, 7)]
    grid.answer(ids[0], b"answer", bad)
    grid.answer(ids[1], b"answer")
    found = {**transport.pull(ids), **transport.pull(ids)}
    assert set(found) == set(ids[:2])
    assert isinstance(found[ids[0]], str)  # and the other's is there or lost, but waits for nobody
    grid.answer(ids[2], b"answer")
    assert transport.pull(ids[2:]) == {ids[2]: b"answer"}

    ids = [transport.push(node, b"again", 10) for node in (5, 6, 7)]
    for id_, changed in zip(ids, ([bad], [], []), strict=True):
        grid.answer(id_, b"answer", *changed)
    found = transport.pull(ids)
    assert isinstance(found.pop(ids[0]), str)
    assert found == dict.fromkeys(ids[1:], b"answer")


def test_a_superlink_that_does_not_answer_is_no_fault_of_a_node(grid):
    def gone(ids):
        raise httpx.ConnectError("refused")

    transport = GridTransport(grid)
    ids = [transport.push(node, b"ask", 10) for node in (5, 6)]
    grid.pull_messages = gone
    with pytest.raises(httpx.ConnectError):
        transport.pull(ids)


def test_nobody_answers_for_a_node_that_has_left(grid):
    """The id of a message that was not sent is easily guessed."""
    transport = GridTransport(grid)
    ids = [transport.push(5, b"ask", 10), transport.push(0, b"ask", 10)]
    grid.answer(ids[0], b"answer")
    pull = grid.pull_messages

    def guessed(asked):
        found = pull(asked)
        for message in found:
            message.metadata.__dict__["_reply_to_message_id"] = ids[1]
        return found

    grid.pull_messages = guessed
    assert transport.pull(ids) == {ids[1]: "the node has left"}
