"""A resident: restarted, cut short, out of disk, asked for nonsense; and what leaves its node."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

from tapfl.config import Config
from tapfl.engine import files, turn
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.flower.frames import pack, unpack
from tapfl.engine.flower.headers import Asked
from tapfl.engine.flower.resident import Resident
from tapfl.engine.flower.wire import ask_frame
from tapfl.engine.rounds import Rounds
from tapfl.errors import TapflError
from tapfl.events import RoundEnded
from tests.engine.flower.memory import (
    EVERYTHING,
    Deadly,
    InMemory,
    Killed,
    Listening,
    residents,
    served,
    while_alive,
)
from tests.experiment import read_events, tiny_experiment

GROUPS = [["shapes"], ["news"]]
ROUNDS = 3


def small(folder, **more) -> Config:
    """Two clients with private blocks and X: a run takes less than a second."""
    folder.mkdir(parents=True, exist_ok=True)
    return tiny_experiment(
        folder, methods=["fedper+tap"], data={"train": 8, "test": 2}, post={"steps": 1},
        federation={"clients": ["shapes", "news"]}, checkpoint={"every": 2},
        train={"rounds": ROUNDS, "cohort": 2, "local_steps": 1, "batch_size": 2},
        evaluation={"every": 2, "sample": 2, "samples": 0}, **more)


def events(folder):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in read_events(folder)]


def outcome(folder, out="server"):
    """Everything that must be the same: results, events, models on both sides."""
    models = {path.relative_to(folder).as_posix(): load_file(path)
              for where in (out, "node0", "node1")
              for path in sorted((folder / where / "models").rglob("*.safetensors"))}
    return (folder / out / "results.csv").read_text(), events(folder / out), models


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert set(found[2]) == set(expected[2])
    for path, tensors in expected[2].items():
        assert all(tensors[name].equal(found[2][path][name]) for name in tensors), path


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """An undisturbed run: its configuration, its outcome, and every byte from its nodes."""
    folder = tmp_path_factory.mktemp("calm")
    config = small(folder)
    nodes = residents(config, folder, GROUPS)
    transport = Listening(nodes)
    served(config, folder / "server", transport)
    for node in nodes:
        node.close()
    return config, outcome(folder), transport.heard


class Restarted:
    """A node whose process ends after every message, once X is trained or before it could be."""

    def __init__(self, *arguments, dies_before=(), **more):
        self.arguments, self.more = arguments, {"allow": EVERYTHING, **more}
        self.dies_before, self.trained = dies_before, 0

    def answer(self, data):
        resident = Resident(*self.arguments, **self.more)
        try:
            reply, then = resident.answer(data)
            self.trained += unpack(data)[0]["kind"] == "train"
            if self.trained not in self.dies_before:
                then()
            else:
                resident._stack.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        finally:
            resident.close()
        return reply


def test_a_resident_that_is_restarted_between_any_two_messages(tmp_path, calm):
    config, expected, _ = calm
    nodes = [Restarted(config, hosted, tmp_path / f"node{i}") for i, hosted in enumerate(GROUPS)]
    served(config, tmp_path / "server", InMemory(nodes))
    assert_same(outcome(tmp_path), expected)


def test_a_client_that_is_killed_while_x_trains(tmp_path, calm):
    """Its W counts, its report is empty, X goes on from the round before; others notice nothing."""
    config, expected, _ = calm
    nodes = [Restarted(config, ["shapes"], tmp_path / "node0"),
             Restarted(config, ["news"], tmp_path / "node1", dies_before=(2,))]
    served(config, tmp_path / "server", InMemory(nodes))
    found = events(tmp_path / "server")
    assert not [e for e in found if e["event"] in ("missing", "refused")]
    assert [e for e in found if e["event"] == "round"] == [
        e for e in expected[1] if e["event"] == "round"]  # W is as it would have been

    def of(client, among, rounds):
        return [e for e in among if e.get("client") == client and e["round"] in rounds]

    assert of("shapes", found, range(9)) == of("shapes", expected[1], range(9))
    assert of("news", found, [0]) == of("news", expected[1], [0])
    assert of("news", found, [1]) == []
    assert of("news", found, [2]) != []
    assert len(read_events(tmp_path / "node1")) > 0


# The server killed

@pytest.mark.parametrize(("nth", "restarted"), [(4, False), (6, True), (8, False), (10, True)])
def test_a_server_that_is_killed_goes_on(tmp_path, calm, monkeypatch, nth, restarted):
    """Two hellos, then two messages a round; a checkpoint is written after the second.

    Its residents stay, or are made again from their folders.
    """
    config, expected, _ = calm
    nodes = residents(config, tmp_path, GROUPS)
    transport = Deadly(nodes, nth)
    monkeypatch.setattr(Rounds, "commit", while_alive)
    with pytest.raises(Killed):
        served(config, tmp_path / "server", transport)
    while transport.after:
        transport.after.pop(0)()
    if restarted:
        for node in nodes:
            node.close()
        nodes = residents(config, tmp_path, GROUPS)
    resume = (tmp_path / "server" / "run.json").is_file()
    served(config, tmp_path / "server", InMemory(nodes), resume=resume)
    assert_same(outcome(tmp_path), expected)


def test_a_server_that_is_killed_goes_on_without_a_client_that_is_gone(tmp_path, calm, monkeypatch):
    """It knows the roster from before; the client's final models are asked for once it is back."""
    config, expected, _ = calm
    nodes = residents(config, tmp_path, GROUPS)
    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "commit", while_alive)
        with pytest.raises(Killed):
            served(config, tmp_path / "server", Deadly(nodes, 8))
    with pytest.raises(TapflError, match=r"no final models from news \(not connected\)"):
        served(config, tmp_path / "server", InMemory(nodes[:1]), resume=True)
    served(config, tmp_path / "server", InMemory(nodes), resume=True)
    missing = [e["client"] for e in events(tmp_path / "server") if e["event"] == "missing"]
    assert set(missing) == {"news"}
    assert outcome(tmp_path)[0].count("\n") == expected[0].count("\n")


def test_states_that_were_undone_do_not_count(tmp_path, calm, monkeypatch):
    """Without a checkpoint a run begins again, where clients are rounds ahead of it."""
    config, expected, _ = calm
    nodes = residents(config, tmp_path, GROUPS)

    def stop(event):
        if isinstance(event, RoundEnded) and event.round == 2:
            raise Killed

    monkeypatch.setattr(Rounds, "commit", lambda _: None)
    with pytest.raises(Killed):
        served(config, tmp_path / "server", InMemory(nodes), notify=stop)
    monkeypatch.undo()
    served(config, tmp_path / "server", InMemory(nodes), resume=True)
    assert_same(outcome(tmp_path), expected)


# A full disk

class Full:
    """A disk that takes nothing while ``on``, as os.fsync says it."""

    def __init__(self, monkeypatch, folder):
        self.on, self.real, self.folder = False, files.write_state, folder
        monkeypatch.setattr("tapfl.engine.clientstore.write_state", self)

    def __call__(self, path, *arguments):
        if self.on and self.folder in path.parents:
            raise OSError(28, "No space left on device")
        return self.real(path, *arguments)


@pytest.mark.parametrize("when", ["update", "then"])
def test_a_full_disk(tmp_path, calm, monkeypatch, when):
    """The client refuses, or has an empty report; the round ends; later it goes on."""
    config, *_ = calm
    nodes = residents(config, tmp_path, GROUPS)
    disk = Full(monkeypatch, tmp_path / "node1")
    real = nodes[1].answer
    faults = []

    def answer(data):
        asked = unpack(data)[0]
        disk.on = when == "update" and asked.get("round") == 1
        reply, then = real(data)

        def after():
            disk.on = when == "then" and asked.get("round") == 1
            try:
                then()
            except TapflError as error:  # as the process that serves a node does
                faults.append(str(error))

        return reply, after

    nodes[1].answer = answer
    served(config, tmp_path / "server", InMemory(nodes))
    found = read_events(tmp_path / "server")
    missing = [(e["client"], e["round"]) for e in found if e["event"] == "missing"]
    assert missing == ([("news", 1)] if when == "update" else [])
    if when == "update":
        (reason,) = [e["reason"] for e in found if e["event"] == "missing"]
        assert reason.startswith("refused: ")
        assert "No space left on device" in reason
    else:
        assert "No space left on device" in faults[0]
    assert not [e for e in found if e.get("client") == "news" and e["event"] == "personal"
                and e["round"] == 1]
    assert [e["round"] for e in found if e["event"] == "personal" and e["client"] == "news"] == [
        0, 2]
    assert [e["round"] for e in found if e["event"] == "personal" and e["client"] == "shapes"] == [
        0, 1, 2]
    store = ClientStore(tmp_path / "node1" / "state" / "fedper" / "clients")
    assert store.load("fedper+tap", "news", as_of=9) is not None


def test_what_a_turn_cut_short_has_reported_is_not_the_next_ones(tmp_path, calm, monkeypatch):
    """Two clients of one node share a worker: one's events must not be sent as the other's."""
    config, *_ = calm
    (node,) = residents(config, tmp_path, [["shapes", "news"]])
    real, times = turn.curve, itertools.count()

    def curve(*arguments):  # when X has been trained, and has reported its losses
        if next(times) == 0:
            raise TapflError("no curve today")
        return real(*arguments)

    monkeypatch.setattr(turn, "curve", curve)
    failed = []
    answer = node.answer

    def guarded(data):
        reply, then = answer(data)

        def after():
            try:
                then()
            except TapflError as error:
                failed.append(str(error))

        return reply, after

    node.answer = guarded
    served(config, tmp_path / "server", InMemory([node]))
    assert failed == ["no curve today"]
    found = read_events(tmp_path / "server")
    assert not [e for e in found if e["event"] in ("missing", "refused")]
    assert [(e["client"], e["round"]) for e in found if e["event"] == "personal"] == [
        (client, round_) for round_ in range(ROUNDS) for client in ("shapes", "news")
        if (client, round_) != ("shapes", 1)]


# What a resident is asked

@pytest.fixture(scope="module")
def resident(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    node = Resident(small(folder), ["news"], folder / "node")
    yield node
    node.close()


def refusal(resident, data):
    header, _ = unpack(resident.answer(data)[0])
    assert header["kind"] == "refusal"
    return header["reason"]


def ask(resident, **changes):
    worker = resident.open("fedper")
    client = resident.here.experiment.federation.find("news")
    blocks = worker.method.initial.subset(worker.method.exchanged(client))
    values = {"kind": "train", "run": "fedper", "client": "news", "round": 0, "kept": []} | changes
    return ask_frame(Asked(**values), blocks)


@pytest.mark.parametrize(("data", "reason"), [
    (b"", "too few"), (b"garbage" * 9, "header"), (pack({}), "asked for 'None'"),
    (pack({"kind": ["train"]}), "asked for"), (pack({"kind": "evaluate"}), "asked for 'evaluate'"),
    (pack({"kind": "train"}), "no federated run 'None'"),
    (pack({"kind": "train", "run": "../../x"}), "no federated run '../../x'"),
    (pack({"kind": "train", "run": "fedper", "client": "../x"}), "unknown client '../x'"),
    (pack({"kind": "train", "run": "fedper", "client": "shapes"}), "unknown client 'shapes'"),
    (pack({"kind": "finish", "run": "fedper", "client": "news"}), "'round'")])
def test_nonsense_is_refused(resident, data, reason):
    assert reason in refusal(resident, data)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"round": ROUNDS}, "asked to train in round 3; this run has 3"),
    ({"round": 10**15}, "asked to train in round 1000000000000000"),
    ({"kind": "finish", "round": 1}, "asked to finish in round 1; this run has 3"),
    ({"round": 1, "awaited": [1]}, "report of round 1 in round 1")])
def test_rounds_that_do_not_exist_are_refused(resident, changes, reason):
    assert reason in refusal(resident, ask(resident, **changes))


def test_other_blocks_than_its_own_are_refused(resident):
    whole = ask(resident)
    header, body = unpack(whole)
    assert "cannot be read" in refusal(resident, pack(header, body[:-1]))
    worker = resident.open("fedper")
    wrong = worker.method.initial.subset(["decoder/agnews"])
    asked = Asked(**{**header, "compression": "none"})
    assert "block 'decoder/agnews' is none" in refusal(resident, ask_frame(asked, wrong))


def test_the_same_ask_twice_gets_the_same_answer(tmp_path):
    node = Resident(small(tmp_path), ["news"], tmp_path / "node", allow=EVERYTHING)
    replies = []
    for _ in range(2):
        reply, then = node.answer(ask(node))
        then()
        replies.append(reply)
    node.close()
    assert replies[0] == replies[1]


# What may leave a node

SECRETS = (b'"replacement"', b'"personal"', b'"curve"', b'"diverged"', b'"note"', b"accuracy",
           b"federated_loss", b'"value"')


def test_with_nothing_allowed_no_score_and_no_loss_of_x_leaves(tmp_path, calm, capsys):
    from tapfl.cli import main

    config, *_ = calm
    nodes = residents(config, tmp_path, GROUPS, allow=())
    transport = Listening(nodes)
    assert served(config, tmp_path / "server", transport) == []
    for node in nodes:
        node.close()
    assert len(transport.heard) == 2 * (1 + ROUNDS + 1)
    for data in transport.heard:
        assert not [secret for secret in SECRETS if secret in data]
    for path in (tmp_path / "server").rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".csv"):
            content = path.read_bytes()
            assert not [s for s in SECRETS[:5] if s in content and path.name != "run.json"], path
    assert (tmp_path / "server" / "results.csv").read_text().count("\n") == 1
    assert {e["event"] for e in read_events(tmp_path / "server")} == {"round"}
    # The nodes have it all.
    assert (tmp_path / "node0" / "results.csv").read_text().count("\n") > 2
    assert {e["event"] for e in read_events(tmp_path / "node0")} >= {"personal", "curve"}
    for command in ("table", "report"):
        assert main([command, str(tmp_path / "server")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "no results: its clients keep their scores to themselves" in line


def test_everything_allowed_is_heard(calm):
    """The words that the test above looks for are those that would be there."""
    heard = b"".join(calm[2])
    assert {s for s in SECRETS if s in heard} >= {b'"replacement"', b'"personal"', b'"curve"',
                                                  b"accuracy", b"federated_loss", b'"value"'}
