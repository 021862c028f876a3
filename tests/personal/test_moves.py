"""Rules that move X a part of the way to W: whole runs against oracles."""

import copy
import math

import torch

from tapfl.blocks import BlockState
from tests.experiment import FederatedRun, read_events, tiny_experiment
from tests.personal.test_oracle import Oracle, _same


class MovingOracle(Oracle):
    """TAP whose X goes a part of the way to W."""

    def move(self, client, towards, share_of):
        personal = self.personal[client.id]
        with torch.no_grad():
            for name in self.blocks(client):
                share = share_of(name)
                for p, q in zip(personal.blocks[name].parameters(),
                                towards.blocks[name].parameters(), strict=True):
                    p.copy_((1 - share) * p + share * q)

    def plain2(self, client):
        personal, train = self.personal[client.id], self.config.train
        self.train(personal, client, 2 * self.config.post.steps, train.lr_initial, train.rounds,
                   "distill")
        return personal


class SoftOracle(MovingOracle):
    """tap-soft: X goes half of the way to the trained W, trains; in the end again, and 2P steps."""

    def half(self, client):
        return lambda _: 0.5 if client.id in self.replaced else 1.0

    def round(self, t, cohort):
        train, sent = self.config.train, []
        lr = train.rate(t)
        for client in cohort:
            local = copy.deepcopy(self.server)
            self.train(local, client, train.local_steps, lr, t, "federated")
            sent.append((client, local))
            self.move(client, local, self.half(client))
            self.replaced.append(client.id)
            self.train(self.personal[client.id], client, train.local_steps, lr, t, "personal")
        self.average(sent)

    def finish(self, client):
        self.move(client, self.server, self.half(client))
        return self.plain2(client)


class WeighedOracle(MovingOracle):
    """TAP's rounds; then each block moves by x^k / (x^k + w^k), for its task that asks for most."""

    k = 4

    def share(self, x, w):
        return x ** self.k / (x ** self.k + w ** self.k)

    def weigh(self, client, towards):
        losses = self.h_l[client.id]
        shares = {task: 1.0 if math.isinf(x) else self.share(x, losses[task])
                  for task, x in self.h_p[client.id].items()}
        self.move(client, towards, lambda name: max(
            share for task, share in shares.items()
            if name in self.ownership.blocks_of_task(task)))

    def finish(self, client):
        self.weigh(client, self.server)
        return self.plain2(client)


class GapOracle(WeighedOracle):
    """The same by 1 / (1 + e^(k (w - x))), and in every round instead of TAP's replacement."""

    k = 8

    def share(self, x, w):
        return 1 / (1 + math.exp(self.k * (w - x)))

    def round(self, t, cohort):
        train, sent = self.config.train, []
        lr = train.rate(t)
        for client in cohort:
            local = copy.deepcopy(self.server)
            self.h_l[client.id] |= self.train(local, client, train.local_steps, lr, t, "federated")
            sent.append((client, local))
            self.weigh(client, local)
            self.h_p[client.id] |= self.train(self.personal[client.id], client, train.local_steps,
                                              lr, t, "personal")
        self.average(sent)


def _compare(tmp_path, oracle, **settings):
    # All data in each minibatch: every task is seen whenever its client takes part.
    config = tiny_experiment(tmp_path, train={"rounds": 3, "batch_size": 200, "local_steps": 1},
                             lora={"dropout": 0.0}, **settings)
    run = FederatedRun(config, tmp_path / "run")
    run.method.network.double()
    run.method.initial = run.server.blocks = BlockState.extract(run.method.network.blocks)
    oracle = oracle(run)
    for t in range(config.train.rounds):
        run.round(t)
        oracle.round(t, [oracle.clients[i] for i in run.server.cohort(t)])
    _same(run.server.blocks, oracle.server.blocks, run.server.blocks)
    (personalizer,) = run.personalizers
    for client in oracle.clients[:2]:
        final = run.server.blocks.subset(run.method.owned(client))
        _same(personalizer.after_federation(client, final), oracle.finish(client).blocks, final)


def test_a_last_move_by_losses_equals_its_oracle(tmp_path):
    _compare(tmp_path, WeighedOracle, methods=["tap"], tap={
        "final_share": "losses", "sharpness": 4, "end": "plain2"})
    events = read_events(tmp_path / "run", "replacement")
    assert {e["share"] for e in events if e["round"] < 3} == {1.0}  # its rounds are TAP's


def test_tap_soft_equals_its_oracle(tmp_path):
    _compare(tmp_path, SoftOracle, methods=["tap-soft"])
    events = read_events(tmp_path / "run", "replacement")
    assert {e["share"] for e in events} == {0.5, 1.0}
    assert all((e["share"] == 1.0) == e["initial"] for e in events)
    assert {e["margin"] for e in events} == {0.0}


def test_tap_gap_equals_its_oracle(tmp_path):
    _compare(tmp_path, GapOracle, methods=["tap-gap"])
    shares = {e["share"] for e in read_events(tmp_path / "run", "replacement") if not e["initial"]}
    assert len(shares) > 1
    assert all(0 < share < 1 for share in shares)
