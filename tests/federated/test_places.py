"""Logits only where an answer has tokens: the losses and gradients of all places, in fp64."""

import dataclasses

import numpy as np
import pytest
import torch

from tapfl.data.batches import Texts
from tapfl.federated.distill import divergence
from tapfl.federated.micro import MicroBatches
from tapfl.federated.training import task_objective
from tapfl.personal.tap import Distillation
from tests.federated.test_micro import build, gradients, minibatch, same


def everywhere(parts):
    return [dataclasses.replace(p, batch=dataclasses.replace(p.batch, places=None)) for p in parts]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return build(tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize("client", ["looks", "words"])
@pytest.mark.parametrize("taught", [False, True])
def test_losses_and_gradients_are_those_of_all_places(run, client, taught):
    client = run.federation.find(client)
    parts = minibatch(client, rounded=True, size=9)
    (text,) = (p.batch for p in parts if p.batch.answer is not None)
    assert len(text.places) < text.answer[:, 1:].numel()
    run.method.teacher.double()
    objective = Distillation(run.method.teacher, run.context) if taught else task_objective
    few, all_ = (gradients(run, client, objective, each, MicroBatches())
                 for each in (parts, everywhere(parts)))
    same(few, all_)


def test_outputs_have_all_places_unless_asked(run):
    """A method of the user's own finds the shapes that a CPU gives."""
    (part, *_) = minibatch(run.federation.find("words"), rounded=True, size=9)
    batch, network = part.batch, run.method.network
    whole, few = (network.eval()(part.task, batch, counted=counted).prediction
                  for counted in (False, True))
    assert whole.shape[:2] == batch.answer[:, 1:].shape
    torch.testing.assert_close(few, whole.flatten(0, 1)[batch.places])
    other = whole + torch.randn_like(whole)
    torch.testing.assert_close(
        divergence(few, other.flatten(0, 1)[batch.places], batch), divergence(whole, other, batch))


def test_labels_of_a_batch_that_has_answers_too_are_compared_by_samples(run):
    (part, *_) = minibatch(run.federation.find("words"), rounded=True, size=9)
    without = dataclasses.replace(part.batch, answer=None, answer_mask=None, places=None)
    logits = torch.randn(2, len(part.batch), 4, dtype=torch.float64)
    assert divergence(*logits, part.batch) == divergence(*logits, without)


def test_padding_of_the_places_alone_does_not_count(run):
    """Whatever is predicted there, the loss stays."""
    (part, *_) = minibatch(run.federation.find("words"), rounded=True, size=9)
    batch, network = part.batch, run.method.network
    outputs = network.eval()(part.task, batch, counted=True)
    loss = network.loss(part.task, outputs, batch)
    counts = batch.real_targets().flatten()[batch.places]
    assert 0 < int(counts.sum()) < len(counts)
    outputs.prediction = torch.where(counts[:, None], outputs.prediction, 1e3 * torch.randn(()))
    assert network.loss(part.task, outputs, batch) == loss


@pytest.mark.parametrize("seed", range(20))
def test_places_are_the_targets_rounded_up_to_quarters(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, rng.integers(3, 40), 12)
    texts = Texts(torch.zeros(12, int(lengths.max()), dtype=torch.int32), lengths)
    rows = rng.permutation(12)[:rng.integers(1, 12)]
    count = int(rng.integers(1, len(rows) + 1))
    ids, _ = texts.rows(rows, torch.from_numpy(rows), rounded=True)
    width = ids.shape[1] - 1
    expected = {row * width + token
                for row in range(count) for token in range(lengths[rows[row]] - 1)}
    found = texts.places(rows, count)
    size = len(rows) * width
    if found is None:
        assert len(expected) > 3 * size // 4 - 3
        return
    assert expected <= set(found.tolist()) <= set(range(size))
    assert len(set(found.tolist())) == len(found) < size
    assert set(found[:len(expected)].tolist()) == expected
    assert len(found) - len(expected) < -(-size // 4)
