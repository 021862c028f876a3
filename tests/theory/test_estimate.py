"""Constants estimated from a run, against gradients taken the plain way."""

import shutil

import numpy as np
import pytest
import torch

from tapfl.engine.build import build
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.federated.method import FedAvg
from tapfl.federated.training import task_objective
from tapfl.theory.estimate import estimate, stored
from tests.experiment import tiny_experiment


@pytest.fixture(scope="module")
def still():
    """Batches of all of a client's data have no noise but dropout's, which is off here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory, still):
    path = tmp_path_factory.mktemp("bound")
    config = tiny_experiment(path, methods=["fedavg"], lora={"dropout": 0.0},
                             train={"batch_size": 1000, "rounds": 1})
    run(config, path / "run", device="cpu")
    return path / "run"


@pytest.fixture(scope="module")
def found(folder):
    return estimate(stored(folder), "cpu", 2, 50)


@pytest.fixture(scope="module")
def exact(folder):
    """Return each client's whole gradient by block, at the run's server model, and its loss."""
    at = stored(folder)
    experiment = build(at.config, "cpu")
    network = FedAvg(experiment.context).network
    at.blocks().load_into(network.blocks)
    gradients = []
    for client in experiment.federation:
        network.zero_grad()
        (parts,) = client.data.minibatches(1, 1000, np.random.default_rng(0))
        task_objective(network, parts)[0].backward()
        gradients.append({name: torch.cat([p.grad.reshape(-1) for p in block.parameters()])
                          for name, block in network.blocks.items()
                          if all(p.grad is not None for p in block.parameters())})
    return gradients


def test_whole_batches_have_no_noise(found):
    assert found.noise < 1e-6
    assert (found.clients, found.batches) == (4, 2)


def test_heterogeneity_against_the_definition(found, exact):
    squared = 0.0
    for block, value in found.heterogeneity.items():
        owners = torch.stack([each[block] for each in exact if block in each]).double()
        mean = owners.mean(0)
        squared += float(mean.square().sum())
        assert value == pytest.approx(float((owners - mean).square().sum(1).mean()),
                                      rel=1e-3, abs=1e-7), block
    assert found.gradient == pytest.approx(squared, rel=1e-3)
    assert found.heterogeneity["decoder/tiny-imagenet"] == pytest.approx(0, abs=1e-9)  # one owner
    assert found.heterogeneity["decoder/agnews"] > 0


def test_the_curvature_is_at_least_that_of_a_decoders_bias(found, folder):
    """The loss of logits moves with a shift of them; along the power method's way it moves more."""
    at = stored(folder)
    experiment = build(at.config, "cpu")
    network = FedAvg(experiment.context).network
    at.blocks().load_into(network.blocks)
    (parts,) = experiment.federation[1].data.minibatches(1, 1000, np.random.default_rng(0))
    bias = network.blocks["decoder/agnews"].get_parameter(_bias(network))
    slope, = torch.autograd.grad(task_objective(network, parts)[0], bias, create_graph=True)
    rows = [torch.autograd.grad(each, bias, retain_graph=True)[0] for each in slope]
    curvature = float(torch.linalg.eigvalsh(torch.stack(rows))[-1])
    assert 0 < curvature <= found.smoothness * 1.001


def _bias(network):
    """Return the name of the last layer's bias."""
    return [name for name, _ in network.blocks["decoder/agnews"].named_parameters()
            if name.endswith("bias")][-1]


@pytest.mark.long
def test_the_same_every_time(found, folder):
    assert estimate(stored(folder), "cpu", 2, 50) == found


def test_noise_of_small_batches_is_seen(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg"], train={"rounds": 1})
    run(config, tmp_path / "run", device="cpu")
    found = estimate(stored(tmp_path / "run"), "cpu", 3, 50)
    assert found.noise >= found.mean_noise > 0.01


def test_bad_input(folder, tmp_path):
    with pytest.raises(TapflError, match="--batches 1: expected at least 2"):
        estimate(stored(folder), "cpu", 1, 50)
    with pytest.raises(TapflError, match="--clients 2: expected at least 4, one of every kind"):
        estimate(stored(folder), "cpu", 2, 2)
    with pytest.raises(TapflError, match=r"run\.json: not a readable record"):
        stored(tmp_path)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    shutil.rmtree(bare / "models")
    with pytest.raises(TapflError, match=r"server\.safetensors: missing"):
        stored(bare)
    (bare / "run.json").write_text((folder / "run.json").read_text().replace(
        '"finished": true', '"finished": false'))
    with pytest.raises(TapflError, match="this run is not complete"):
        stored(bare)


def test_a_run_without_fedavg_is_refused(tmp_path):
    config = tiny_experiment(tmp_path, methods=["local"], train={"rounds": 1, "local_steps": 1})
    run(config, tmp_path / "run", device="cpu")
    with pytest.raises(TapflError, match="expected a run with fedavg"):
        stored(tmp_path / "run")
