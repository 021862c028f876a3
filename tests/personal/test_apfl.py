"""APFL against its mixture, differentiated by autograd."""

import pytest
import torch

from tapfl.blocks import BlockState
from tests.experiment import FederatedRun, tiny_experiment
from tests.federated.test_stepper import Played
from tests.personal.watched import assert_same, slow_training, watched

RATE = 0.3


class Mixture:
    """alpha v + (1 - alpha) w, with alpha as one more leaf of autograd's graph."""

    def __init__(self, alpha, w):
        self.alpha, self.w = torch.tensor(alpha, dtype=torch.float64, requires_grad=True), w

    def loss(self, own, task_loss):
        self.alpha.grad = None
        return task_loss({(name, key): self.alpha * value
                          + (1 - self.alpha) * self.w.parameters(name)[key]
                          for (name, key), value in own.items()})

    def step(self):
        with torch.no_grad():
            self.alpha.sub_(RATE * self.alpha.grad).clamp_(0, 1)


def test_rounds_and_finish_against_autograd(tmp_path):
    run, apfl, turns = watched(tmp_path, "fedavg+apfl", train={"rounds": 3},
                               apfl={"alpha": 0.4, "rate": RATE, "finish": 3})
    for t in range(3):
        run.round(t)
    train = run.context.config.train
    own, alpha = {}, {}
    for turn in turns:
        client, mixture = turn.client, Mixture(alpha.get(turn.client.id, 0.4), turn.trained)
        start = own.get(client.id, run.method.initial.subset(run.method.owned(client)))
        own[client.id] = slow_training(run, client, start, turn.round, "personal",
                                       train.local_steps, train.rate(turn.round), mixture.loss,
                                       mixture.step)
        alpha[client.id] = mixture.alpha.item()
        state, notes = apfl.load(client, before=turn.round + 1)
        assert_same(state, own[client.id])
        assert notes["alpha"] == pytest.approx(alpha[client.id], abs=1e-7)
    assert len(own) < len(turns)
    assert len(set(alpha.values())) == len(alpha)  # each client has its own
    assert all(abs(a - 0.4) > 1e-4 for a in alpha.values())
    client, final = turns[-1].client, run.final(turns[-1].client)
    mixture = Mixture(alpha[client.id], final)
    v = slow_training(run, client, own[client.id], 3, "post", 3 * 2, run.context.config.post_lr,
                      mixture.loss, mixture.step)
    share = mixture.alpha.item()
    assert_same(apfl.after_federation(client, final), BlockState(
        {n: share * v[n] + (1 - share) * final[n] for n in v}, v.shapes))


def finished(folder, **settings):
    config = tiny_experiment(folder, methods=["fedavg+apfl", "fedavg+post2"], apfl=settings)
    run = FederatedRun(config, folder)
    client = run.federation.find("words")
    final = BlockState({n: v + 0.01 for n, v in run.final(client).items()},
                       run.method.initial.shapes)
    return final, *(p.after_federation(client, final) for p in run.personalizers)


def test_alpha_one_is_a_model_alone(tmp_path):
    """Of a client that never took part: W after 2P steps, the model of post2."""
    final, mixture, alone = finished(tmp_path, alpha=1, rate=0)
    assert mixture.equals(alone)
    assert not mixture.equals(final)


def test_alpha_zero_is_w(tmp_path):
    final, mixture, _ = finished(tmp_path, alpha=0, rate=0)
    assert mixture.equals(final)


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_alpha_stays_within_its_bounds(tmp_path, alpha):
    """At a huge rate alpha is at one of its ends after a step, and W or v is the model."""
    config = tiny_experiment(tmp_path, methods=["fedavg+apfl"],
                             apfl={"alpha": alpha, "rate": 1e9}, train={"cohort": 4})
    run = FederatedRun(config, tmp_path)
    run.round(0)
    ends = {run.personalizers[0].load(client, before=1)[1]["alpha"] for client in run.federation}
    assert ends <= {0.0, 1.0}


def test_a_training_that_diverged_is_dropped(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg+apfl"]), tmp_path)
    (apfl,), client = run.personalizers, run.federation.find("news")
    w = run.method.initial.subset(run.method.owned(client))
    broken = BlockState({n: v * float("nan") for n, v in w.items()}, w.shapes)
    apfl.after_training(client, 0, w, w, {})
    before = apfl.load(client, before=1)
    apfl.after_training(client, 1, w, broken, {})
    kinds = [type(e).__name__ for e in run.worker.drain()]
    assert kinds == ["PersonalLosses", "Diverged", "PersonalLosses"]
    after = apfl.load(client, before=2)
    assert after[0].equals(before[0])
    assert after[1] == before[1]
    apfl.after_training(client, 2, w, w, {})  # the next one is sound again
    assert apfl.load(client, before=3)[0].not_finite() is None
    assert not apfl.load(client, before=3)[0].equals(before[0])


def test_a_step_that_finds_no_memory_leaves_v_in_the_network(tmp_path, monkeypatch):
    """It may be tried again: it then has to start from v, not from the mixture."""
    def full(*_):
        raise torch.cuda.OutOfMemoryError("no memory")

    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg+apfl"]), tmp_path)
    (apfl,), client = run.personalizers, run.federation.find("news")
    w = run.method.initial.subset(run.method.owned(client))
    trained = BlockState({n: v + 1 for n, v in w.items()}, w.shapes)
    monkeypatch.setattr("tapfl.personal.apfl.backward", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        apfl.after_training(client, 0, w, trained, {})
    assert BlockState.extract(run.method.network.blocks, w).equals(w)


def test_captured_steps_read_each_clients_values(tmp_path):
    def ends(folder, graphs):
        run, apfl, turns = watched(folder, "fedavg+apfl", apfl={"rate": RATE},
                                   train={"local_steps": 4})
        if graphs:
            run.method.network.__dict__["_stepper"] = Played(
                run.method.network, run.context.config.train, graphs=True)
        places = set()
        for t in range(2):
            run.round(t)
            still = [p for values in (apfl._v, apfl._w)
                     for p in values.parameters(run.method.initial)]
            places.add(tuple(p.data_ptr() for p in (*still, apfl._alpha)))
        assert len(places) == 1
        kinds = [key[0] for key in run.context.stepper(run.method.network)._captured]
        assert (apfl in kinds) == graphs
        ends = [apfl.load(turn.client, before=2) for turn in turns[2:]]
        return ends, run.method.initial

    for name in ("played", "plain"):
        (tmp_path / name).mkdir()
    played, start = ends(tmp_path / "played", True)
    plain, _ = ends(tmp_path / "plain", False)
    for (one, note), (other, expected) in zip(played, plain, strict=True):
        assert note["alpha"] == pytest.approx(expected["alpha"], abs=1e-5)
        assert_same(one, other, start)
