"""Malicious clients do what their names say, and honest ones stay FedAvg bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.engine.build import build
from tapfl.errors import TapflError
from tapfl.experiments.attacks import (
    Backdoor,
    LabelFlip,
    Scaling,
    SignFlip,
    backdoor_test,
    flipped,
    multiplied,
)
from tapfl.experiments.observed import Observed
from tapfl.federated.method import FedAvg
from tests.experiment import tiny_experiment

MODULE = "tapfl.experiments.attacks"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return build(tiny_experiment(tmp_path_factory.mktemp("attacks")), "cpu")


def made(experiment, cls, **settings):
    config = experiment.context.config
    values = config.model_dump() | {"own": {cls.__name__: settings}}
    return cls(dataclasses.replace(experiment.context, config=Config.model_validate(values)))


def trained(method, client, received):
    received.load_into(method.network.blocks)
    losses = method.train(client, 1)
    return BlockState.extract(method.network.blocks, method.owned(client)), losses


@pytest.fixture(scope="module")
def honest(experiment):
    """What the first two clients receive, and what FedAvg makes of it."""
    method = FedAvg(experiment.context)
    clients = experiment.federation[:2]
    received = method.initial.clone()
    return received, [trained(method, client, received) for client in clients]


def test_multiplied_by_hand():
    shapes = {"decoder/a": {"w": torch.Size([2])}}
    before, after = (BlockState({"decoder/a": torch.tensor(v)}, shapes)
                     for v in ([1.0, 2.0], [2.0, 0.0]))
    assert multiplied(before, after, -3)["decoder/a"].tolist() == [-2.0, 8.0]
    assert multiplied(before, after, 10)["decoder/a"].tolist() == [11.0, -18.0]
    assert multiplied(before, after, 1)["decoder/a"].tolist() == [2.0, 0.0]


@pytest.mark.parametrize(("cls", "scale", "factor"),
                         [(SignFlip, 2.5, -2.5), (Scaling, 4.0, 4.0), (Backdoor, 3.0, 3.0)])
def test_the_malicious_client_multiplies_its_step(experiment, honest, cls, scale, factor,
                                                  monkeypatch):
    received, (first, second) = honest
    # A backdoor's own data are another matter (below): here all train on the same.
    monkeypatch.setattr(cls, "poisoned", lambda self, client: client.data)
    method = made(experiment, cls, malicious=1, scale=scale)
    sent, losses = trained(method, experiment.federation[0], received)
    for name, value in sent.items():
        expected = received[name] + factor * (first[0][name] - received[name])
        assert torch.equal(value, expected), name
    assert losses == first[1]
    honestly, losses = trained(method, experiment.federation[1], received)
    assert honestly.equals(second[0])
    assert losses == second[1]


@pytest.mark.parametrize("cls", [SignFlip, Scaling, LabelFlip, Backdoor])
def test_nobody_is_malicious_where_none_is_asked_for(experiment, honest, cls):
    received, (first, _) = honest
    found, losses = trained(made(experiment, cls, malicious=0), experiment.federation[0], received)
    assert found.equals(first[0])
    assert losses == first[1]


def test_flipped_labels(experiment, honest):
    received, (first, second) = honest
    method, client = made(experiment, LabelFlip, malicious=1), experiment.federation[0]
    for (data, rows), (other, same) in zip(client.data.holdings, method.poisoned(client).holdings,
                                           strict=True):
        assert torch.equal(other.labels, data.task.classes - 1 - data.labels)
        assert torch.equal(flipped(other).labels, data.labels)
        assert np.array_equal(rows, same)
    sent, _ = trained(method, client, received)
    assert not sent.equals(first[0])
    twice = dataclasses.replace(client, data=method.poisoned(client))
    again, _ = trained(method, twice, received)  # flipped twice: the honest update
    assert again.equals(first[0])
    assert trained(method, experiment.federation[1], received)[0].equals(second[0])


def test_what_has_no_labels_is_not_flipped(experiment):
    looks = experiment.federation.find("looks")
    assert all(flipped(data) is data for data, _ in looks.data.holdings)


def test_the_backdoor_marks_a_share_of_one_tasks_pictures(experiment):
    client = experiment.federation[0]
    method = made(experiment, Backdoor, malicious=1, share=0.25, target=3, side=5)
    (pictures, rows), (news, own) = client.data.holdings
    before = pictures.images.clone()
    (found, order), (other, same) = method.poisoned(client).holdings
    assert torch.equal(pictures.images, before)  # its own data are still its own
    assert other is news
    assert np.array_equal(own, same)
    assert np.array_equal(order, np.arange(len(rows)))
    corner = found.images[:, :, -5:, -5:]
    changed = (found.images != pictures.images[rows]).flatten(1).any(dim=1)
    assert changed.sum() == int(0.25 * len(rows)) == 6
    assert (corner[changed] == 255).all()
    assert (found.labels[changed] == 3).all()
    assert torch.equal(found.labels[~changed], pictures.labels[rows][~changed])
    rest = found.images.clone()
    rest[:, :, -5:, -5:] = pictures.images[rows][:, :, -5:, -5:]
    assert torch.equal(rest, pictures.images[rows])  # nothing but the corner
    again = method.poisoned(client).holdings[0][0]
    assert torch.equal(again.images, found.images)  # the same in every round


def test_success_is_the_accuracy_on_marked_pictures_of_other_classes(experiment):
    data, rows = experiment.federation[0].tests["tiny-imagenet"]
    target = int(data.labels[rows[0]])
    found = backdoor_test(data, rows, target, 4)
    assert len(found) == int((data.labels[rows] != target).sum()) < len(rows)
    assert (found.labels == target).all()
    assert (found.images[:, :, -4:, -4:] == 255).all()


@pytest.mark.parametrize(("settings", "client", "words"), [
    ({"task": "agnews"}, "shapes", "has no image classification 'agnews'"),
    ({"task": "tiny-imagenets"}, "shapes", "did you mean 'tiny-imagenet'"),
    ({}, "news", "own.Backdoor.task: client 'news' has no image classification"),
    ({"target": 8}, "shapes", "own.Backdoor.target: 8: 'tiny-imagenet' has 8 classes"),
    ({"share": 0}, "shapes", "own.Backdoor"), ({"malicious": -1}, "shapes", "own.Backdoor"),
    ({"colour": 1}, "shapes", "own.Backdoor")])
def test_what_cannot_be_poisoned(experiment, settings, client, words):
    with pytest.raises(TapflError, match=words) as raised:
        made(experiment, Backdoor, **settings).poisoned(experiment.federation.find(client))
    assert "\n" not in str(raised.value)


def test_a_run_can_be_observed(tmp_path):
    """One of two flips signs; its messages say so, and the models are there to be asked."""
    config = tiny_experiment(
        tmp_path, methods=["attack", "attack-soft"], train={"rounds": 2},
        federation={"clients": ("shapes", "news")},
        variants={"attack": {"of": f"{MODULE}:SignFlip"},
                  "attack-soft": {"of": f"{MODULE}:SignFlip+tap-soft"}},
        own={"SignFlip": {"malicious": 1, "scale": 2.0}})
    observed = Observed(config, tmp_path / "run",
                        keep=lambda member, round_: (member.index, round_) == (0, 1))
    assert list(observed.messages) == [("shapes", 1)]
    received, update = observed.messages["shapes", 1]
    client = next(observed.clients)
    honest, _ = trained(FedAvg(observed.method.context), client, received)
    for name, value in update.blocks.items():
        expected = received[name] - 2 * (honest[name] - received[name])
        assert torch.equal(value, expected), name
    w, x = (observed.model(name, client) for name in ("attack", "attack-soft"))
    assert set(w) == set(x) == set(observed.method.owned(client))
    assert not w.equals(x)
    assert {row["method"] for row in observed.rows} >= {"attack", "attack-soft"}
