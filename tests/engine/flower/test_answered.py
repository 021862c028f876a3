"""Noise of a client's own: a round is answered once, whoever asks and however often."""

import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.engine.flower.frames import unpack
from tapfl.engine.flower.headers import Asked
from tapfl.engine.flower.resident import Resident
from tapfl.engine.flower.wire import ask_frame
from tapfl.engine.rounds import Rounds
from tests.engine.flower.memory import Deadly, InMemory, Killed, residents, served, while_alive
from tests.engine.flower.test_resident import GROUPS, ROUNDS, small
from tests.experiment import read_events


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def resident(folder, mode="local"):
    return Resident(small(folder, privacy={"mode": mode, "noise": 1.0}), ["news"], folder / "node")


def ask(node, round_=0, moved=0.0, **more):
    """Have a node answer; return its header and body."""
    worker = node.open("fedper")
    names = worker.method.exchanged(node._client("news"))
    blocks = BlockState({name: worker.method.initial[name] + moved for name in names},
                        worker.method.initial.shapes)
    asked = Asked(kind="train", run="fedper", client="news", round=round_, **{"kept": []} | more)
    reply, then = node.answer(ask_frame(asked, blocks))
    then()
    return unpack(reply)


def test_the_same_question_has_the_same_answer(tmp_path):
    node = resident(tmp_path)
    first = ask(node)
    assert first[0]["kind"] == "update"
    assert ask(node)[1] == first[1]
    assert ask(node, compression="zlib")[1] != first[1]  # the same, packed
    node.close()
    node = resident(tmp_path)  # it does not forget
    assert ask(node)[1] == first[1]
    assert ask(node, 1)[1] != first[1]
    node.close()


def test_another_question_about_the_same_round_has_none(tmp_path):
    node = resident(tmp_path)
    ask(node)
    for more in ({}, {"id": "abc"}):  # it may be of another run
        header, body = ask(node, moved=0.1, **more)
        assert header["kind"] == "refusal"
        assert "round 0 was answered before, to other blocks" in header["reason"]
        assert body == b""
    assert ask(node, 1, moved=0.1)[0]["kind"] == "update"
    node.close()


def test_what_is_too_old_is_dropped_but_not_that_it_was_answered(tmp_path):
    node = resident(tmp_path)
    ask(node)
    last = ask(node, 1, kept=[0])
    sizes = {path.stem: path.stat().st_size
             for path in (tmp_path / "node").rglob("answered/news/*")}
    assert sizes.pop("000000") == 0
    assert all(sizes.values())
    assert ask(node)[0]["kind"] == "refusal"
    assert ask(node, 1)[1] == last[1]
    node.close()


def test_without_noise_of_its_own_a_client_may_be_asked_anything(tmp_path):
    node = resident(tmp_path, "none")
    assert ask(node)[0]["kind"] == ask(node, moved=0.1)[0]["kind"] == "update"
    assert not list((tmp_path / "node").rglob("answered"))
    node.close()


def test_a_run_that_goes_on_answers_no_round_of_the_one_before(tmp_path):
    node = resident(tmp_path)
    ask(node)
    node.close()
    config = small(tmp_path, privacy={"mode": "local", "noise": 1.0})
    train = config.train.model_copy(update={"rounds": ROUNDS + 1})
    later = config.model_copy(update={"train": train, "start": str(tmp_path / "node")})
    node = Resident(later, ["news"], tmp_path / "later")
    assert ask(node)[0]["kind"] == "refusal"
    assert ask(node, ROUNDS)[0]["kind"] == "update"
    node.close()


@pytest.mark.parametrize("nth", [pytest.param(4, marks=pytest.mark.long), 8])
def test_a_server_that_is_killed_gets_the_same_answers_again(tmp_path, monkeypatch, nth):
    """In the first round, before any checkpoint, or in the third, after one."""
    config = small(tmp_path, privacy={"mode": "local", "noise": 1.0})
    nodes = residents(config, tmp_path, GROUPS)
    transport = Deadly(nodes, nth)
    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "commit", while_alive)
        with pytest.raises(Killed):
            served(config, tmp_path / "server", transport)
    while transport.after:
        transport.after.pop(0)()
    resume = (tmp_path / "server" / "run.json").is_file()
    served(config, tmp_path / "server", InMemory(nodes), resume=resume)
    found = read_events(tmp_path / "server")
    assert [event for event in found if event["event"] in ("missing", "refused")] == []
    assert len([event for event in found if event["event"] == "round"]) == ROUNDS
