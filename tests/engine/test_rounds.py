"""The server's loop with fake clients: it needs no data, no network and no personal models."""

import random

import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Member
from tapfl.engine.checkpoints import Checkpoints
from tapfl.engine.departures import Departures
from tapfl.engine.eventlog import EventLog
from tapfl.engine.messages import Final, NoAnswer, Report, Update
from tapfl.engine.rounds import Rounds
from tapfl.errors import TapflError
from tapfl.events import Message, Note, Refused
from tapfl.federated.server import Server
from tests.experiment import read_events

BLOCKS = ["decoder/a", "decoder/b"]
SHAPES = {name: {"w": torch.Size([64])} for name in BLOCKS}
MEMBERS = [Member(f"c{i}", i, ("t",), 10 + i) for i in range(6)]


class Fakes:
    """Clients that add noise of their own; they answer in an order of ours, or not at all."""

    def __init__(self, order=None, silent=(), wrong=()):
        self.order, self.silent, self.wrong = order, silent, wrong
        self.asked, self.listed = [], []
        self.fault = None

    def ask(self, ask, whom):
        self.asked.append(ask)
        answers = [answer for member, blocks in whom for answer in self._answers(
            ask, member, blocks)]
        if self.order is not None:
            self.order.shuffle(answers)
        return iter(answers)

    def _answers(self, ask, member, blocks):
        if member.id in self.silent:
            return [NoAnswer(member.id, "timed out")]
        if ask.kind == "finish":
            return [Final(member.id, [{"client": member.id}],
                          [Note("fedavg", ask.round, member.id, {"done": True})])]
        draw = torch.Generator().manual_seed(100 * ask.round + member.index)
        new = {n: v + torch.randn(v.shape, generator=draw) for n, v in blocks.items()}
        if member.id in self.wrong:
            new["decoder/a"] = new["decoder/a"] * float("nan")
        return [Update(member.id, BlockState(new, SHAPES), member.samples, {"t": 1.0 + ask.round}),
                Report(member.id, ask.round, [Note("tap", ask.round, member.id, {"x": 1})])]

    def settle(self, round_):
        return [["tap", "c0", round_, "abc"]]

    def keeps(self, member, models, scores, samples):
        return True

    def check(self, listed):
        self.listed.append(list(listed))
        return self.fault


def rounds(folder, clients, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("")
    config = Config.model_validate({"train": {"rounds": 6, "cohort": 3, **changes},
                                    "checkpoint": {"every": 2}})
    zero = BlockState({n: torch.zeros(64) for n in BLOCKS}, SHAPES)
    server = Server(zero, len(MEMBERS), config.train.cohort, config.seed)
    said = []
    log = EventLog(folder / "events.jsonl", folder / "segment.jsonl")
    return Rounds("fedavg", config, MEMBERS, server,
                  lambda m: BLOCKS[:1] if m.index % 2 else BLOCKS, clients,
                  Checkpoints(folder / "checkpoints", "fedavg"), log, folder / "final",
                  said.append, Departures(folder, folder)), said


def without_seconds(folder):
    return [{k: v for k, v in e.items() if k != "seconds"} for e in read_events(folder)]


def test_the_order_of_answers_does_not_matter(tmp_path):
    """Averages are taken in the roster's order: bit for bit the same, events too."""
    calm, _ = rounds(tmp_path / "calm", Fakes())
    rows = calm.run()
    assert [r["client"] for r in rows] == [m.id for m in MEMBERS]
    for seed in range(3):
        shuffled, _ = rounds(tmp_path / f"s{seed}", Fakes(random.Random(seed)))
        assert shuffled.run() == rows
        assert shuffled.server.blocks.equals(calm.server.blocks)
        assert without_seconds(tmp_path / f"s{seed}") == without_seconds(tmp_path / "calm")


def test_events_come_by_round_and_roster(tmp_path):
    run, _ = rounds(tmp_path, Fakes(random.Random(1)))
    run.run()
    places = [(e["round"], [m.id for m in MEMBERS].index(e["client"]) if "client" in e else 99)
              for e in read_events(tmp_path) if e["round"] < 6]
    assert places == sorted(places)
    assert len(places) == 6 * (3 + 1)


def test_who_is_silent_or_wrong_does_not_count(tmp_path):
    run, said = rounds(tmp_path, Fakes(silent=("c1",), wrong=("c2",)), cohort=6)
    for t in range(3):
        run.round(t)
    assert {(e["event"], e["client"]) for e in read_events(tmp_path)
            if e["event"] in ("missing", "refused")} == {("missing", "c1"), ("refused", "c2")}
    for event in read_events(tmp_path, "round"):
        assert event["contributors"]["decoder/a"] == ["c0", "c3", "c4", "c5"]
    assert all(v.isfinite().all() for v in run.server.blocks.values())
    assert any(isinstance(event, Refused) for event in said)
    with pytest.raises(TapflError, match="no final models from c1"):
        run.finish()


def test_a_clients_own_check_is_believed(tmp_path):
    class Honest(Fakes):
        def _answers(self, ask, member, blocks):
            answers = super()._answers(ask, member, blocks)
            if ask.kind == "train" and member.id == "c0":
                answers[0] = Update("c0", answers[0].blocks, 1, {}, fault="I lost my mind")
            return answers

    run, _ = rounds(tmp_path, Honest(), cohort=6)
    run.round(0)
    assert [e["reason"] for e in read_events(tmp_path, "refused")] == ["I lost my mind"]
    assert "c0" not in read_events(tmp_path, "round")[0]["contributors"]["decoder/a"]


def test_a_message_names_the_rounds_to_go_back_to(tmp_path):
    clients = Fakes()
    rounds(tmp_path, clients)[0].run()
    assert [ask.kept for ask in clients.asked] == [(), (), (1,), (1,), (1, 3), (1, 3), (3, 5)]
    assert clients.asked[-1].kind == "finish"


def interrupted(folder, at=4):
    run, _ = rounds(folder, Fakes())
    for t in range(at):
        run.round(t)
        if t % 2:
            run.commit()
    return run


def test_a_resumed_run_is_the_undisturbed_one(tmp_path):
    calm, _ = rounds(tmp_path / "calm", Fakes())
    rows = calm.run()
    interrupted(tmp_path / "out", at=5)  # round 4 is not written down
    clients = Fakes()
    again, _ = rounds(tmp_path / "out", clients)
    assert again.run(resume=True) == rows
    assert clients.listed == [[["tap", "c0", 3, "abc"]]]
    assert [a.round for a in clients.asked] == [4, 5, 6]
    assert again.server.blocks.equals(calm.server.blocks)
    assert without_seconds(tmp_path / "out") == without_seconds(tmp_path / "calm")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [
    lambda f: _flip(f / "checkpoints" / "000003.safetensors"),
    lambda f: _flip(f / "checkpoints" / "000003.json"),
    lambda f: (f / "checkpoints" / "000003.safetensors").unlink(),
    lambda f: (f / "checkpoints" / "000003.safetensors").write_bytes(
        (f / "checkpoints" / "000001.safetensors").read_bytes()),
    lambda f: (f / "segment.jsonl").write_text((f / "segment.jsonl").read_text()[:-20]),
    lambda f: (f / "segment.jsonl").write_text(
        (f / "segment.jsonl").read_text().replace('"round": 3', '"round": 2')),
])
def test_damage_falls_back_to_the_checkpoint_before(tmp_path, damage):
    calm, _ = rounds(tmp_path / "calm", Fakes())
    rows = calm.run()
    interrupted(tmp_path / "out")
    damage(tmp_path / "out")
    again, said = rounds(tmp_path / "out", Fakes())
    assert again.run(resume=True) == rows
    assert "going back to round 2" in next(str(e) for e in said if isinstance(e, Message))
    assert without_seconds(tmp_path / "out") == without_seconds(tmp_path / "calm")


def test_events_that_are_damaged_before_every_checkpoint_are_refused(tmp_path):
    interrupted(tmp_path)
    _flip(tmp_path / "segment.jsonl")
    path = tmp_path / "segment.jsonl"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(TapflError, match=r"segment\.jsonl: damaged.*no sound checkpoint"):
        rounds(tmp_path, Fakes())[0].run(resume=True)


def test_clients_whose_files_are_not_there(tmp_path):
    interrupted(tmp_path)
    clients = Fakes()
    clients.fault = "c0: missing"
    with pytest.raises(TapflError, match=r"c0: missing.*no sound checkpoint is left"):
        rounds(tmp_path, clients)[0].run(resume=True)


def test_a_final_record_with_a_changed_digit_is_made_again(tmp_path):
    run, _ = rounds(tmp_path, Fakes())
    rows = run.run()
    path = tmp_path / "final" / "c2.json"
    path.write_text(path.read_text().replace("c2", "c3"))
    again, _ = rounds(tmp_path, Fakes())
    assert again.run(resume=True) == rows


def test_whatever_ends_it_the_last_whole_round_is_written(tmp_path):
    class Broken(Fakes):
        def ask(self, ask, whom):
            if ask.round == 3:
                raise RuntimeError("crash")
            return super().ask(ask, whom)

    run, _ = rounds(tmp_path, Broken())
    with pytest.raises(RuntimeError, match="crash"):
        run.run()
    assert Checkpoints(tmp_path / "checkpoints", "fedavg").newest == 2
