"""The proximal term and FedProx, against its gradient in closed form."""

import numpy as np
import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.federated.proximal import Proximal, squared_distance
from tapfl.federated.stepper import parameters_of
from tapfl.federated.training import gradients, task_objective
from tests.experiment import FederatedRun, tiny_experiment
from tests.federated.test_stepper import Played


def test_squared_distance_by_hand():
    values = [torch.tensor(v, requires_grad=True) for v in ([1.0, 2.0], [[3.0]])]
    others = [torch.tensor([0.0, 4.0]), torch.tensor([[3.0]])]
    distance = squared_distance(values, others)
    assert distance.item() == pytest.approx(5.0)  # 1 + 4 + 0
    found = torch.autograd.grad(3 * distance, values)
    torch.testing.assert_close(found[0], torch.tensor([6.0, -12.0]))
    assert found[1].item() == 0.0  # no trouble where nothing is apart


def fedprox(folder, mu, **sections):
    config = tiny_experiment(folder, methods=["fedprox"], fedprox={"mu": mu},
                             lora={"dropout": 0.0}, **sections)
    run = FederatedRun(config, folder)
    run.method.initial.load_into(run.method.network.blocks)
    return run


def moved(method, by=0.1):
    with torch.no_grad():
        for parameter in method.network.blocks.parameters():
            parameter.add_(by * torch.randn_like(parameter))


def test_the_gradient_is_the_tasks_plus_mu_times_the_way_back(tmp_path):
    run = fedprox(tmp_path, 0.3)
    method, client = run.method, run.federation.find("shapes")
    owned = method.owned(client)
    torch.manual_seed(0)
    moved(method)
    parts = next(client.data.minibatches(1, 12, np.random.default_rng(0)))
    parameters = parameters_of(method.network.eval(), owned)
    proximal = Proximal(method.network, 0.3)
    proximal.towards(method.initial.subset(owned))
    loss, losses = proximal(method.network, parts)
    plain, own_losses = task_objective(method.network, parts)
    assert losses.keys() == own_losses.keys()  # reported: the tasks' own
    assert all(torch.equal(losses[task], own_losses[task]) for task in losses)
    now = BlockState.extract(method.network.blocks, owned)
    apart = sum(((now[n] - method.initial[n]) ** 2).sum() for n in owned)
    torch.testing.assert_close(loss, plain + 0.15 * apart)
    anchors = [method.initial.parameters(n)[k] for n in owned
               for k, _ in method.network.blocks[n].named_parameters()]
    for found, task, p, a in zip(gradients(loss, parameters), gradients(plain, parameters),
                                 parameters, anchors, strict=True):
        torch.testing.assert_close(found, task + 0.3 * (p.detach() - a))


def test_fedprox_pulls_to_w_as_received_in_this_round(tmp_path, monkeypatch):
    run, given = fedprox(tmp_path, 0.3), {}
    method, client = run.method, run.federation.find("news")
    owned, train = method.owned(client), run.context.config.train
    torch.manual_seed(0)
    moved(method)  # another W than the first
    received = BlockState.extract(method.network.blocks, owned)
    monkeypatch.setattr("tapfl.federated.fedprox.local_training",
                        lambda *_, **values: given.update(values) or {})
    method.train(client, 1)
    assert (given["round_"], given["lr"]) == (1, train.rate(1))
    assert train.rate(1) != train.lr
    moved(method)
    parts = next(client.data.minibatches(1, 12, np.random.default_rng(0)))
    pulled, plain = (loss(method.network.eval(), parts)[0]
                     for loss in (method.proximal, task_objective))
    now = BlockState.extract(method.network.blocks, owned)
    apart = sum(((now[n] - received[n]) ** 2).sum() for n in owned)
    torch.testing.assert_close(pulled - plain, 0.15 * apart)


def test_mu_zero_is_fedavg_and_a_huge_mu_keeps_w(tmp_path):
    """Steps of AdamW have a length of their own; how far they lead away shrinks all the same."""
    ends = {}
    for mu in (0.0, 1.0, 1e4):
        run = fedprox(tmp_path, mu, train={"local_steps": 12, "weight_decay": 0.0})
        client = run.federation.find("news")
        run.method.train(client, 3)
        ends[mu] = BlockState.extract(run.method.network.blocks, run.method.owned(client))
    start = run.method.initial

    def distance(state):
        return sum(((state[n] - start[n]) ** 2).sum() for n in state).sqrt()

    assert distance(ends[1e4]) < 0.5 * distance(ends[1.0]) < 0.5 * distance(ends[0.0])
    config = tiny_experiment(tmp_path, methods=["fedavg"], lora={"dropout": 0.0},
                             train={"local_steps": 12, "weight_decay": 0.0})
    run = FederatedRun(config, tmp_path / "fedavg")
    run.method.train(run.federation.find("news"), 3)
    assert BlockState.extract(run.method.network.blocks, ends[0.0]).equals(ends[0.0])


def test_post_training_is_plain(tmp_path):
    strong, none = (fedprox(tmp_path, mu) for mu in (1e4, 0.0))
    client = strong.federation.find("news")
    found = [run.method.post_train(client, run.final(client), 4, 1e-2) for run in (strong, none)]
    assert found[0].equals(found[1])


def test_captured_steps_pull_to_what_each_client_received(tmp_path):
    """A captured step runs the body of its first client on and on: it has to find all values."""
    def ends(graphs):
        run = fedprox(tmp_path, 1.0, train={"local_steps": 6})
        method = run.method
        if graphs:
            method.network.__dict__["_stepper"] = Played(
                method.network, run.context.config.train, graphs=True)
        places, found = set(), []
        for round_, name in enumerate(("news", "shapes", "news", "shapes")):
            client = run.federation.find(name)
            torch.manual_seed(round_)
            method.initial.load_into(method.network.blocks)
            moved(method)  # another W every time
            method.train(client, round_)
            places.add(tuple(t.data_ptr() for t in method.proximal.anchor.parameters(
                method.initial)))
            found.append(BlockState.extract(method.network.blocks, method.owned(client)))
        assert len(places) == 1
        assert not graphs or method.context.stepper(method.network).recordings
        return found

    for one, other in zip(ends(True), ends(False), strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)
