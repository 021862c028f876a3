"""Ditto against its objective, written out slowly."""

import pytest

from tapfl.blocks import BlockState
from tapfl.federated.training import local_training, minimise, task_objective
from tests.experiment import FederatedRun, read_events, tiny_experiment
from tests.federated.test_stepper import Played
from tests.personal.watched import assert_same, slow_training, watched

PULL = 0.7


def pulled(anchor):
    def loss(own, task_loss):
        apart = sum(((value - anchor.parameters(name)[key]) ** 2).sum()
                    for (name, key), value in own.items())
        return task_loss(own) + PULL / 2 * apart

    return loss


def test_rounds_and_finish_against_the_objective(tmp_path):
    run, ditto, turns = watched(tmp_path, "fedavg+ditto", ditto={"pull": PULL, "finish": 3},
                                train={"rounds": 3})
    for t in range(3):
        run.round(t)
    train = run.context.config.train
    own = {}
    for turn in turns:
        client = turn.client
        start = own.get(client.id, run.method.initial.subset(run.method.owned(client)))
        own[client.id] = slow_training(run, client, start, turn.round, "personal",
                                       train.local_steps, train.rate(turn.round),
                                       pulled(turn.received))
        assert_same(ditto.load(client, before=turn.round + 1)[0], own[client.id])
    assert len(own) < len(turns)  # somebody goes on from where it was
    client, final = turns[-1].client, run.final(turns[-1].client)
    expected = slow_training(run, client, own[client.id], 3, "post", 3 * 2,
                             run.context.config.post_lr, pulled(final))
    assert_same(ditto.after_federation(client, final), expected)
    losses = read_events(run.folder, "personal")
    assert [(e["round"], e["client"]) for e in losses] == [(t.round, t.client.id) for t in turns]
    assert all(set(e["losses"]) for e in losses)


def test_without_pull_x_trains_alone(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg+ditto"], ditto={"pull": 0})
    run = FederatedRun(config, tmp_path)
    method, (ditto,), client = run.method, run.personalizers, run.federation.find("shapes")
    w = method.initial.subset(method.owned(client))
    ditto.after_training(client, 0, w, w, {})
    w.load_into(method.network.blocks)
    local_training(run.context, method.network, client, w, steps=2, lr=config.train.rate(0),
                   round_=0, role="personal", step=minimise(task_objective))
    assert BlockState.extract(method.network.blocks, w).equals(ditto.load(client, before=1)[0])


def test_a_client_that_never_took_part_starts_from_the_final_w(tmp_path):
    """Without pull it is then W after 2P steps, the model of post2, bit for bit."""
    config = tiny_experiment(tmp_path, methods=["fedavg+ditto", "fedavg+post2"],
                             ditto={"pull": 0})
    run = FederatedRun(config, tmp_path)
    client = run.federation.find("words")
    final = BlockState({n: v + 0.01 for n, v in run.final(client).items()},
                       run.method.initial.shapes)
    own, twice = (p.after_federation(client, final) for p in run.personalizers)
    assert own.equals(twice)
    assert not own.equals(final)


def test_a_training_that_diverged_is_dropped(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg+ditto"]), tmp_path)
    (ditto,), client = run.personalizers, run.federation.find("news")
    w = run.method.initial.subset(run.method.owned(client))
    broken = BlockState({n: v * float("nan") for n, v in w.items()}, w.shapes)
    ditto.after_training(client, 0, w, w, {})
    ditto.after_training(client, 1, broken, w, {})
    kinds = [type(e).__name__ for e in run.worker.drain()]
    assert kinds == ["PersonalLosses", "Diverged", "PersonalLosses"]
    assert ditto.load(client, before=2)[0].equals(ditto.load(client, before=1)[0])
    assert ditto.after_federation(client, broken).equals(ditto.load(client, before=1)[0])


def test_the_current_model_is_x_after_the_round(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg+ditto"]), tmp_path)
    (ditto,), client = run.personalizers, run.federation.find("news")
    w = run.final(client)
    assert ditto.current(client, 0) is None
    ditto.after_training(client, 0, w, w, {})
    assert ditto.current(client, 0).equals(ditto.load(client, before=1)[0])


def test_captured_steps_pull_to_what_each_client_received(tmp_path):
    def ends(folder, graphs):
        run, ditto, turns = watched(folder, "fedavg+ditto", ditto={"pull": 2.0},
                                    train={"local_steps": 4})
        if graphs:
            run.method.network.__dict__["_stepper"] = Played(
                run.method.network, run.context.config.train, graphs=True)
        places = set()
        for t in range(2):
            run.round(t)
            places.add(tuple(p.data_ptr() for p in
                             ditto.proximal.anchor.parameters(run.method.initial)))
        assert len(places) == 1
        kinds = [key[0] for key in run.context.stepper(run.method.network)._captured]
        assert (ditto.proximal in kinds) == graphs
        ends = [ditto.load(turn.client, before=2)[0] for turn in turns[2:]]
        return ends, run.method.initial

    for name in ("played", "plain"):
        (tmp_path / name).mkdir()
    played, start = ends(tmp_path / "played", True)
    plain, _ = ends(tmp_path / "plain", False)
    for one, other in zip(played, plain, strict=True):
        assert_same(one, other, start)


@pytest.mark.parametrize("method", ["fedprox+ditto", "fedper+ditto", "feddat+ditto"])
def test_ditto_beside_other_methods(tmp_path, method):
    run = FederatedRun(tiny_experiment(tmp_path, methods=[method]), tmp_path)
    run.round(0)
    client = run.federation[run.server.cohort(0)[0]]
    final = run.worker.turn(client)._final(run.server.send(run.method.exchanged(client)))
    found = run.personalizers[0].after_federation(client, final)
    assert set(found) == set(run.method.owned(client))
    assert found.not_finite() is None
