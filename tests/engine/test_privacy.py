"""Whole runs with noise: what leaves a client, and what run.json promises."""

import json
import math
from collections import Counter

import pytest

from tapfl.cli import main
from tapfl.config import Config
from tapfl.data.federation import Member
from tapfl.engine.build import build
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.promise import promise, rounded_up
from tapfl.engine.record import read_record
from tapfl.engine.registry import plan
from tapfl.engine.released import Released
from tapfl.engine.rounds import Rounds
from tapfl.engine.run import run
from tapfl.engine.worker import Worker
from tapfl.errors import TapflError
from tapfl.evaluation.evaluate import Evaluator
from tapfl.events import Message, RoundEnded
from tapfl.privacy.accountant import Releases, epsilon
from tests.engine.flower.memory import Killed, while_alive
from tests.experiment import tiny_experiment


def _run(folder, methods=("fedavg",), **privacy):
    config = tiny_experiment(folder, methods=list(methods), privacy=privacy)
    said = []
    rows = run(config, folder / "out", notify=lambda e: said.append(e))
    record = json.loads((folder / "out/run.json").read_text())
    return rows, record["privacy"], [e.text for e in said if isinstance(e, Message)]


def test_a_central_run_states_its_epsilon(tmp_path):
    rows, found, said = _run(tmp_path, ["fedavg", "tap", "fedprox"], mode="central", noise=2.0)
    assert rows
    assert set(found) == {"fedavg", "fedprox"}  # tap shares W with fedavg
    each = found["fedavg"]
    rounds = {client: count for client, (_, count) in each["releases"].items()}
    assert sum(rounds.values()) == 4 * 2  # four rounds, cohorts of two
    blocks, count = each["releases"][each["client"]]
    assert each["epsilon"] == pytest.approx(epsilon([Releases(2.0, blocks, count, False)], 1e-5))
    assert max(rounds.values()) == count or blocks > 1
    assert any("privacy: fedavg: epsilon" in text for text in said)
    assert any("all federated runs here together" in text for text in said)


def test_a_federated_run_without_noise_tells_what_the_others_hide(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg", "bare"], train={"rounds": 1},
                             privacy={"mode": "central"},
                             variants={"bare": {"of": "fedavg", "privacy": {"mode": "none"}}})
    said = []
    run(config, tmp_path / "out", notify=lambda e: said.append(str(e)))
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["privacy"]["fedavg"]["epsilon"] > 0
    assert record["privacy"]["bare"]["epsilon"] is None
    assert "privacy: all federated runs here together: epsilon infinite at delta 1e-05" in said


def test_a_secret_cohort_counts_every_client_in_every_round(tmp_path):
    _, found, _ = _run(tmp_path, mode="central", noise=2.0, secret_cohort=True)
    each = found["fedavg"]
    assert each["cohort"] == [2, 3]  # of four clients: each knows whether it was drawn itself
    assert {count for _, count in each["releases"].values()} == {4}


def _members(*tasks):
    return [Member(f"c{i}", i, each, 1) for i, each in enumerate(tasks)]


def _secret(cohort, members, there):
    config = Config.model_validate({"train": {"cohort": cohort}, "privacy": {
        "mode": "central", "noise": 12.0, "secret_cohort": True}})
    released = Released()
    for count in there:
        released.begin([], count)
    return promise(config, members, lambda member: member.tasks, released)


def test_who_has_left_hides_nobody_any_more():
    """Twenty of thirty clients leave: two of the other ten are drawn, no longer two of thirty."""
    members = _members(*[("a", "b")] * 30)
    all_there, few = _secret(2, members, [30] * 5), _secret(2, members, [30, 30, 10, 10, 10])
    assert (all_there.cohort, few.cohort) == ((2, 29), (2, 9))
    assert few.epsilon > all_there.epsilon
    assert _secret(2, members, [2] * 5).cohort == (1, 1)  # the other one knows: nothing is hidden
    assert _secret(2, members, [1] * 5).epsilon == _secret(2, members, [2] * 5).epsilon


def test_a_secret_cohort_hides_a_client_among_others_with_more_blocks():
    """Sampling exchanges its update for another client's, which may have more blocks."""
    found = _secret(1, _members(("a",), ("b", "c", "d", "e")), [2] * 3)
    assert {blocks for blocks, _ in found.releases.values()} == {4}


def test_a_round_that_is_run_again_is_released_twice(tmp_path, monkeypatch):
    config = tiny_experiment(tmp_path, methods=["fedavg"], privacy={"mode": "central"},
                             checkpoint={"every": 10})
    monkeypatch.setattr(Rounds, "commit", while_alive)
    rounds = []

    def killed(event):
        rounds.extend([event] if isinstance(event, RoundEnded) else [])
        if len(rounds) == 3:
            raise Killed

    with pytest.raises(Killed):
        run(config, tmp_path / "out", notify=killed)
    run(config, tmp_path / "out", resume=True, notify=rounds.append)
    asked = Counter(client for event in rounds if isinstance(event, RoundEnded)
                    for client in event.cohort)
    assert asked.total() == 2 * (3 + 4)  # three rounds, and once more all four
    (found,) = json.loads((tmp_path / "out/run.json").read_text())["privacy"].values()
    assert {client: count for client, (_, count) in found["releases"].items() if count} == asked


def test_a_run_that_goes_on_adds_to_what_was_released(tmp_path):
    def small(rounds, **more):
        return tiny_experiment(tmp_path, methods=["fedavg"], data={"train": 12, "test": 2},
                               train={"rounds": rounds, "local_steps": 1, "cohort": 4}, **more)

    run(small(2, privacy={"mode": "central", "noise": 2.0}), tmp_path / "first")
    run(small(2), tmp_path / "plain")

    def goes_on(start):
        config = small(4, privacy={"mode": "central", "noise": 3.0}, start=str(tmp_path / start))
        said, out = [], tmp_path / f"after-{start}"
        run(config, out, notify=lambda e: said.append(str(e)))
        return read_record(out).privacy["fedavg"], said

    found, _ = goes_on("first")
    before = read_record(tmp_path / "first").privacy["fedavg"]
    assert found.earlier == before
    worst = found.client
    (blocks, old), (_, new) = before.releases[worst], found.releases[worst]
    assert {count for _, count in found.releases.values()} == {2}  # rounds of its own
    assert found.epsilon == pytest.approx(epsilon(
        [Releases(2.0, blocks, old, False), Releases(3.0, blocks, new, False)], 1e-5))
    assert found.epsilon > before.epsilon
    # What was released without noise stays so.
    found, said = goes_on("plain")
    assert found.epsilon is None
    assert any("goes on from a run that promised nothing" in text for text in said)


def test_what_is_stated_is_never_less_than_it_is():
    assert [rounded_up(value) for value in (9.0546875, 0.0, 20.0, 6.001, 123.4, 0.00123400001)] == [
        "9.06", "0", "20", "6.01", "124", "0.00124"]


def test_no_noise_is_no_promise(tmp_path):
    _, found, said = _run(tmp_path, mode="central", noise=0.0)
    assert found["fedavg"]["epsilon"] is None
    assert any("nothing is promised" in text for text in said)


def test_without_privacy_nothing_is_said(tmp_path):
    _, found, said = _run(tmp_path)
    assert found == {}
    assert not any("privacy" in text for text in said)


def _turn(folder, **privacy):
    config = tiny_experiment(folder, methods=["fedavg"], privacy=privacy)
    experiment = build(config, "cpu")
    worker = Worker(plan(config)[0], experiment.context, ClientStore(folder / "clients"),
                    Evaluator(experiment.tokenizer, config.evaluation), folder)
    client = experiment.federation[0]
    return worker, worker.turn(client), worker.method.initial.subset(worker.method.owned(client))


def test_local_noise_hides_the_update_and_the_losses_stay(tmp_path):
    _, turn, received = _turn(tmp_path, mode="local", noise=3.0, clip=0.1)
    update = turn.train(0, received)
    assert update.losses == {}
    assert update.events == ()
    for name, value in update.blocks.items():
        if value.numel() > 200:
            spread = (value - received[name]).std().item()
            assert spread == pytest.approx(0.3, rel=6 / math.sqrt(value.numel()))
    # The client's own models see W as it was trained.
    assert not turn._trained[1].subset(update.blocks).equals(update.blocks)


def test_whether_a_training_failed_does_not_leave_a_client_with_local_noise(tmp_path, monkeypatch):
    worker, turn, received = _turn(tmp_path, mode="local", noise=3.0, clip=0.1)
    name = max(received, key=lambda each: received[each].numel())

    def spoil(client, round_):
        next(worker.method.network.blocks[name].parameters()).data.fill_(float("nan"))
        return {}

    monkeypatch.setattr(worker.method, "train", spoil)
    update = turn.train(0, received)
    assert (update.fault, update.losses, update.events) == (None, {}, ())
    for each in received:  # all look alike: noise, around what came
        assert update.blocks[each].isfinite().all()
        assert not update.blocks[each].equal(received[each])
    spread = (update.blocks[name] - received[name]).std().item()
    assert spread == pytest.approx(0.3, rel=6 / math.sqrt(received[name].numel()))
    # The client itself knows, and learns nothing from it.
    (said,) = turn.personalize(0)
    assert (said.kind, said.round, said.client) == ("diverged", 0, turn.client.id)
    assert name in said.reason


def test_a_count_that_is_damaged_is_not_taken_for_none(tmp_path):
    path = tmp_path / "released.json"
    Released(path).begin(["a", "b"], 4)
    Released(path).begin(["b"], 3)
    found = Released(path)
    assert (found.rounds, found.fewest, found.clients) == (2, 3, {"a": 1, "b": 2})
    path.write_text(path.read_text().replace("2", "1"))
    with pytest.raises(TapflError, match=r"released.json: damaged .* start the run anew"):
        Released(path)


# tapfl privacy

def _says(capsys, *words):
    assert main(["privacy", "quickstart", "--set", "privacy.mode=local", *words]) == 0
    return capsys.readouterr().out


def test_the_noise_that_is_named_reaches_the_epsilon(capsys):
    text = _says(capsys, "--epsilon", "20")
    noise = text.strip().rpartition("privacy.noise=")[2]
    stated = _says(capsys, "--set", f"privacy.noise={noise}").split()[2]
    assert float(stated) <= 20
    assert "privacy.noise=0" in _says(capsys, "--set", "train.rounds=0", "--epsilon", "20")


def test_several_federated_runs_are_planned_together(capsys):
    one = _says(capsys, "--epsilon", "20").strip().rpartition("=")[2]
    text = _says(capsys, "--set", "methods=[local, fedavg, fedprox]", "--epsilon", "20")
    assert [line.split(":")[0] for line in text.splitlines()[:3]] == [
        "fedavg", "fedprox", "all federated runs here together"]
    assert float(text.strip().rpartition("=")[2]) == pytest.approx(float(one) * 2**0.5, rel=0.01)


def test_one_run_without_noise_reaches_no_epsilon(capsys):
    bare = ["--set", "methods=[fedavg, bare]", "--set", "variants.bare.of=fedavg",
            "--set", "variants.bare.privacy.mode=none"]
    assert "together: epsilon infinite" in _says(capsys, *bare)
    assert main(["privacy", "quickstart", "--set", "privacy.mode=local", *bare,
                 "--epsilon", "20"]) == 2
    assert "'bare' adds no noise" in capsys.readouterr().err
