"""Whole runs with noise: what leaves a client, and what run.json promises."""

import json
import math

import pytest

from tapfl.engine.build import build
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.registry import plan
from tapfl.engine.run import run
from tapfl.engine.worker import Worker
from tapfl.evaluation.evaluate import Evaluator
from tapfl.events import Message
from tapfl.privacy.accountant import Releases, epsilon
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
    assert any("all federated runs on these data together" in text for text in said)


def test_a_secret_cohort_counts_every_client_in_every_round(tmp_path):
    _, found, _ = _run(tmp_path, mode="central", noise=2.0, secret_cohort=True)
    each = found["fedavg"]
    assert each["cohort"] == [2, 4]
    assert {count for _, count in each["releases"].values()} == {4}


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


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_an_update_that_is_not_sound_adds_nothing_and_does_not_say_so(tmp_path, monkeypatch, noise):
    worker, turn, received = _turn(tmp_path, mode="local", noise=noise)
    name = next(iter(received))

    def spoil(client, round_):
        next(worker.method.network.blocks[name].parameters()).data.fill_(float("nan"))
        return {}

    monkeypatch.setattr(worker.method, "train", spoil)
    update = turn.train(0, received)
    assert update.fault is None
    assert update.blocks.not_finite() is None
    assert update.blocks.equals(received) == (noise == 0)  # else all blocks have noise
    assert turn._trained is None
