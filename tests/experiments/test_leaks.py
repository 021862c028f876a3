"""Losses and gradients of single samples, against the network's own."""

import numpy as np
import pytest
import torch

from tapfl.engine.build import build
from tapfl.errors import TapflError
from tapfl.experiments.leaks import decoder_gradients, losses_of
from tapfl.federated.method import FedAvg
from tests.conftest import randomize
from tests.experiment import tiny_experiment


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    experiment = build(tiny_experiment(tmp_path_factory.mktemp("leaks")), "cpu")
    method = FedAvg(experiment.context)
    randomize(method.network)
    return experiment.federation, method.network, type(method.initial).extract(
        method.network.blocks)


@pytest.mark.parametrize("task", ["tiny-imagenet", "agnews"])
def test_they_add_up_to_the_mean_loss_and_its_gradient(made, task):
    federation, network, model = made
    data, rows = next(h for h in federation[0].data.holdings if h[0].task.name == task)
    network.eval()
    batch = data.batch(rows)
    network.zero_grad()
    loss = network.loss(task, network(task, batch), batch)
    loss.backward()
    expected = torch.cat([p.grad.reshape(-1) for _, p in
                          sorted(network.blocks[f"decoder/{task}"].named_parameters())])
    for parameter in network.blocks.parameters():
        parameter.data.add_(1.0)  # another client's model is in the network: ours is copied in
    losses, gradients = (f(network, model, data, rows) for f in (losses_of, decoder_gradients))
    assert losses.shape == (len(rows),)
    assert losses.mean() == pytest.approx(loss.item(), rel=1e-4)
    assert gradients.shape == (len(rows), len(model[f"decoder/{task}"]))
    assert gradients.mean(axis=0) == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-5)
    assert np.ptp(losses) > 0


def test_a_step_down_a_samples_gradient_lowers_its_loss(made):
    federation, network, model = made
    data, rows = federation[0].data.holdings[0]
    before = losses_of(network, model, data, rows[:3])
    slope = torch.from_numpy(decoder_gradients(network, model, data, rows[:3])[1]).float()
    moved = model.clone()
    moved["decoder/tiny-imagenet"].sub_(1e-2 * slope / slope.norm())
    after = losses_of(network, moved, data, rows[:3])
    assert before[1] - after[1] == pytest.approx(1e-2 * slope.norm().item(), rel=0.1)


def test_pieces_change_nothing(made, monkeypatch):
    federation, network, model = made
    data, rows = federation[0].data.holdings[0]
    whole = losses_of(network, model, data, rows)
    monkeypatch.setattr("tapfl.experiments.leaks.SIZE", 5)
    assert losses_of(network, model, data, rows) == pytest.approx(whole, rel=1e-5)
    assert len(decoder_gradients(network, model, data, rows[:7])) == 7


def test_generation_has_no_such_gradients(made):
    federation, network, model = made
    data, rows = federation.find("words").data.holdings[0]
    with pytest.raises(TapflError, match="task 'commongen': gradients are compared for class"):
        decoder_gradients(network, model, data, rows)
