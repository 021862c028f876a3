"""Minibatches in pieces: the losses and gradients of the whole, in fp64 and without dropout."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.batches import TaskBatch
from tapfl.engine.registry import plan
from tapfl.errors import TapflError
from tapfl.events import Message
from tapfl.federated import training
from tapfl.federated.micro import MicroBatches, split
from tapfl.federated.proximal import Proximal
from tapfl.federated.stepper import Stepper, backward
from tapfl.federated.training import task_objective
from tapfl.personal.tap import Distillation
from tapfl.reading import check
from tests.conftest import TASKS, make_batch
from tests.experiment import FederatedRun, tiny_experiment
from tests.federated.test_stepper import Played


def build(tmp_path, name="fedavg", **sections):
    config = tiny_experiment(tmp_path, methods=[name], lora={"dropout": 0.0}, **sections)
    run = FederatedRun(config, tmp_path)
    for module in run.method.network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    run.method.network.double()
    run.method.initial = BlockState.extract(run.method.network.blocks)
    return run


@pytest.fixture
def fedavg(tmp_path):
    return build(tmp_path)


def minibatch(client, rounded, size=7):
    """A minibatch as a CPU draws it, or of rounded shapes with samples that do not count."""
    if not rounded:
        return next(client.data.minibatches(1, size, np.random.default_rng(0)))
    drawn = np.random.default_rng(0).permutation(client.samples)[:size]
    return next(client.data._on_device([client.data._split_by_task(drawn)], size))


def gradients(run, client, objective, parts, micro):
    stepper = Stepper(run.method.network, run.context.config.train, micro=micro)
    stepper.restart(run.method.owned(client), 1e-3)
    losses = stepper.gather(lambda piece: backward(*objective(run.method.network, piece)), parts)
    return losses, [torch.zeros_like(p) if p.grad is None else p.grad for p in stepper.parameters]


def same(one, other, rtol=1e-7, atol=1e-12):
    assert set(one[0]) == set(other[0])
    for task in one[0]:
        torch.testing.assert_close(one[0][task], other[0][task], rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", ["shapes", "looks", "words"])  # all four kinds of tasks, mixed
def test_pieces_have_the_gradient_of_the_whole(fedavg, name, rounded):
    client = fedavg.federation.find(name)
    parts = minibatch(client, rounded)
    whole = gradients(fedavg, client, task_objective, parts, MicroBatches())
    assert any(g.abs().max() > 1e-4 for g in whole[1])
    for most in (1, 3):
        same(gradients(fedavg, client, task_objective, parts, MicroBatches(most)), whole)


@pytest.mark.parametrize("name", ["shapes", "looks"])
def test_pieces_of_distillation(fedavg, name):
    client = fedavg.federation.find(name)
    teacher = copy.deepcopy(fedavg.method.network).eval()
    with torch.no_grad():
        for parameter in teacher.blocks.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    objective = Distillation(teacher, fedavg.context)
    for rounded in (False, True):
        parts = minibatch(client, rounded)
        whole = gradients(fedavg, client, objective, parts, MicroBatches())
        same(gradients(fedavg, client, objective, parts, MicroBatches(2)), whole)


@pytest.mark.parametrize("rounded", [False, True])
def test_the_proximal_term_counts_once(fedavg, rounded):
    client = fedavg.federation.find("looks")
    network, parts = fedavg.method.network, minibatch(client, rounded)
    objective = Proximal(network, 0.7)
    anchor = BlockState.extract(network.blocks, fedavg.method.owned(client))
    objective.towards(BlockState({k: v + 0.1 for k, v in anchor.items()}, anchor.shapes))
    whole = gradients(fedavg, client, objective, parts, MicroBatches())
    for most in (1, 3):
        same(gradients(fedavg, client, objective, parts, MicroBatches(most)), whole,
             rtol=1e-5, atol=1e-7)  # a piece's part is a number in fp32


def test_texts_of_different_lengths_count_by_their_tokens(fedavg):
    """A mean of the pieces' means would be another loss."""
    client = fedavg.federation.find("words")
    (part,) = [p for p in minibatch(client, rounded=False, size=12) if p.task == "commongen"]
    network = fedavg.method.network.eval()
    pieces = [dataclasses.replace(p.batch, whole=None) for p in split(part, 2)]
    means = [network.loss(p.task, network(p.task, b), b)
             for p, b in zip([part] * len(pieces), pieces, strict=True)]
    whole = network.loss(part.task, network(part.task, part.batch), part.batch)
    assert abs(torch.stack(means).mean() - whole) > 1e-6 * whole
    summed = sum(network.loss(p.task, network(p.task, p.batch), p.batch) for p in split(part, 2))
    torch.testing.assert_close(summed, whole)


@pytest.mark.parametrize(("rows", "most", "sizes"), [
    (7, 3, [3, 3, 1]), (8, 3, [3, 3, 2]), (6, 6, [6]), (5, 1, [1] * 5), (10, 8, [5, 5])])
def test_a_share_is_split_into_nearly_equal_pieces(rows, most, sizes):
    part = TaskBatch("vqa", make_batch(TASKS["vqa"], size=rows), 0.5, rows)
    pieces = split(part, most)
    assert [len(p.batch) for p in pieces] == [p.samples for p in pieces] == sizes
    assert [p.rows.start for p in pieces] == list(np.cumsum([0, *sizes[:-1]]))
    for field in ("image", "text", "text_mask", "answer", "answer_mask"):
        together = torch.cat([getattr(p.batch, field) for p in pieces])
        assert torch.equal(together, getattr(part.batch, field))


def test_a_minibatch_that_is_small_enough_stays_whole(fedavg):
    parts = minibatch(fedavg.federation.find("shapes"), rounded=False)
    assert len(parts) == 2
    assert MicroBatches().pieces(parts) == [parts]
    assert MicroBatches(7).pieces(parts) == [parts]
    assert [len(p) for p in MicroBatches(6).pieces(parts)] == [1, 1]


# Methods with steps of their own

def trained(tmp_path, name, micro, **sections):
    run = build(tmp_path, name, speed={"micro_batch": micro}, **sections)
    client = run.federation.find("looks")
    run.method.initial.load_into(run.method.network.blocks)
    losses = run.method.train(client, 0)
    run.method.adapt(client)
    return losses, BlockState.extract(run.method.network.blocks)


@pytest.mark.parametrize(("name", "sections"), [
    ("feddat", {"feddat": {"kl_weight": 0.5}}), ("perfedavg", {}),
    ("perfedavg", {"perfedavg": {"variant": "hf"}})])
def test_methods_with_steps_of_their_own(tmp_path, name, sections):
    whole, pieces = (trained(tmp_path, name, micro, **sections) for micro in (None, 2))
    assert pieces[0] == pytest.approx(whole[0], rel=1e-7)
    for block in whole[1]:
        torch.testing.assert_close(pieces[1][block], whole[1][block], rtol=1e-6, atol=1e-8)


def test_weights_of_fedala_are_learned_in_pieces(tmp_path, monkeypatch):
    found, sizes = [], []
    original = training.task_objective
    monkeypatch.setattr(training, "task_objective", lambda network, parts: (
        sizes.append(sum(len(part.batch) for part in parts)), original(network, parts))[1])
    for micro in (None, 2):
        sizes.clear()
        run = build(tmp_path, "fedala", speed={"micro_batch": micro}, fedala={"lr": 50.0})
        client, network = run.federation.find("looks"), run.method.network
        run.method.initial.load_into(network.blocks)
        run.method.train(client, 0)
        run.method.initial.subset(run.method.owned(client)).load_into(network.blocks)  # W, again
        run.method.adapt(client)
        found.append(BlockState.extract(network.blocks))
    assert max(sizes) <= 2
    weights = [name for name in found[0] if name.startswith("ala/weight/")]
    assert any((found[0][name] < 1).any() for name in weights)  # something was learned
    for block in found[0]:
        torch.testing.assert_close(found[1][block], found[0][block], rtol=1e-6, atol=1e-8)


def test_apfl_in_pieces(tmp_path):
    found = []
    for micro in (None, 2):
        run = build(tmp_path, "apfl", speed={"micro_batch": micro})
        client = run.federation.find("looks")
        (apfl,) = run.personalizers
        final = run.method.initial.subset(run.method.owned(client))
        found.append(apfl.after_federation(client, final))
    for block in found[0]:
        torch.testing.assert_close(found[1][block], found[0][block], rtol=1e-6, atol=1e-8)


def test_captured_steps_go_in_pieces_as_well(fedavg):
    client = fedavg.federation.find("looks")
    found = []
    for graphs in (False, True):
        stepper = Played(fedavg.method.network, fedavg.context.config.train, graphs,
                         MicroBatches(2))
        fedavg.method.initial.load_into(fedavg.method.network.blocks)
        stepper.restart(fedavg.method.owned(client), 1e-3)
        for parts in [minibatch(client, rounded=True)] * 3:
            losses = stepper.step(task_objective, parts)
        found.append([*(v.clone() for v in losses.values()),
                      *BlockState.extract(fedavg.method.network.blocks).values()])
        assert hasattr(stepper, "recordings") == graphs
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)  # the rate is fp32 in one


# Memory that runs out

class Small:
    """A GPU on which only so many samples fit."""

    def __init__(self, most):
        self.most, self.tried = most, []

    def __call__(self, network, parts):
        samples = sum(len(p.batch) for p in parts)
        self.tried.append(samples)
        if samples > self.most:
            raise torch.cuda.OutOfMemoryError("no memory")
        return task_objective(network, parts)


def test_auto_halves_until_it_fits_and_remembers(fedavg):
    client = fedavg.federation.find("news")
    parts = minibatch(client, rounded=False, size=8)
    whole = gradients(fedavg, client, task_objective, parts, MicroBatches())
    said, small = [], Small(2)
    micro = MicroBatches("auto", said.append)
    same(gradients(fedavg, client, small, parts, micro), whole)
    assert small.tried == [8, 4, 2, 2, 2, 2]
    assert len(said) == 2
    assert "agnews do not fit into memory; trying pieces of 2 samples" in said[1]
    same(gradients(fedavg, client, small, parts, micro), whole)
    assert small.tried[6:] == [2, 2, 2, 2]
    other = minibatch(fedavg.federation.find("shapes"), rounded=False)
    assert micro.pieces(other) == [other]  # other tasks may fit


def test_one_sample_that_does_not_fit_is_an_error(fedavg):
    client = fedavg.federation.find("news")
    parts = minibatch(client, rounded=False, size=4)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gradients(fedavg, client, Small(0), parts, MicroBatches("auto"))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gradients(fedavg, client, Small(3), parts, MicroBatches())


def test_what_does_not_fit_when_captured_is_captured_in_pieces(fedavg):
    class Tight(Played):
        def _capture(self, body, parts):
            if not self.micro.sizes:
                raise torch.cuda.OutOfMemoryError("no memory")
            return super()._capture(body, parts)

    client = fedavg.federation.find("news")
    stepper = Tight(fedavg.method.network, fedavg.context.config.train, True, MicroBatches("auto"))
    stepper.restart(fedavg.method.owned(client), 1e-3)
    parts = minibatch(client, rounded=False, size=8)
    for _ in range(4):
        stepper.step(task_objective, parts)
    assert stepper._capturing
    assert stepper.recordings == 1
    assert stepper.micro.sizes == {("agnews",): 4}


@pytest.fixture(scope="module")
def feddat(tmp_path_factory):
    """FedDAT, and what its training leads to where memory suffices."""
    run = build(tmp_path_factory.mktemp("feddat"), "feddat", feddat={"kl_weight": 0.5})
    return run, dual_training(run, False, None, Tries(run.method))


@pytest.mark.parametrize(("graphs", "micro", "fails"), [  # each step tries two halves
    (False, "auto", 2), (True, None, 2), (True, None, 4), (True, "auto", 1), (True, "auto", 4)])
def test_half_a_step_of_feddat_that_does_not_fit_is_tried_again_alone(feddat, graphs, micro, fails):
    """The shared adapters have moved when the local ones' turn comes: they must not move again."""
    run, plain = feddat
    tries = Tries(run.method, fails)
    found = dual_training(run, graphs, micro, tries)
    assert tries.made > 4
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    for block in plain[1]:
        torch.testing.assert_close(found[1][block], plain[1][block], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("micro", "made"), [(None, 1 + 2), ("auto", 1 + 4)])  # 5, 3, 2, 1 samples
def test_a_second_half_that_never_fits_is_an_error(feddat, micro, made):
    run, _ = feddat
    tries = Tries(run.method, *range(2, 100))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        dual_training(run, True, micro, tries)
    assert tries.made == made


class Tries:
    """Counts FedDAT's halves of steps, and lets some of them run out of memory."""

    def __init__(self, method, *fails):
        self.method, self.fails, self.made = method, fails, 0

    def __call__(self, parts, student, teacher):
        self.made += 1
        if self.made in self.fails:
            raise torch.cuda.OutOfMemoryError("no memory")
        return type(self.method)._mutual(self.method, parts, student, teacher)


def dual_training(run, graphs, micro, tries):
    method, client = run.method, run.federation.find("news")
    method._mutual = tries
    method.network.__dict__["_stepper"] = Played(
        method.network, run.context.config.train, graphs, MicroBatches(micro))
    method.initial.load_into(method.network.blocks)
    losses = method.train(client, 0)
    return losses, BlockState.extract(method.network.blocks)


def test_a_run_shows_what_auto_found(tmp_path):
    run = build(tmp_path, speed={"micro_batch": "auto"})
    client = run.federation.find("news")
    stepper = run.method.context.stepper(run.method.network)
    stepper.restart(run.method.owned(client), 1e-3)
    stepper.step(Small(4), minibatch(client, rounded=False, size=8))
    (event,) = run.worker.events
    assert isinstance(event, Message)
    assert str(event).startswith("speed.micro_batch: minibatches of agnews do not fit")


# What is refused

OWN = """
from tapfl.federated.disentafl import DisentAFL
from tapfl.federated.method import FedAvg
from tapfl.personal.posttrain import PostTrain

class Silent(FedAvg):
    pass

class Marked(FedAvg):
    splits_batches = True

class Heir(Marked):
    pass

class Across(DisentAFL):
    pass

class Thrice(PostTrain):
    times = 3
"""


@pytest.mark.parametrize(("method", "message"), [
    ("disentafl", "speed.micro_batch: disentafl looks across samples, so its minibatches cannot"),
    ("disentafl+post", "speed.micro_batch: disentafl looks across samples"),
    ("micro_own:Across", "speed.micro_batch: micro_own:Across looks across samples"),
    ("micro_own:Silent", "speed.micro_batch: micro_own:Silent does not say whether its losses are "
                         "sums over samples and tasks; if so, set splits_batches = True in it"),
    ("fedavg+micro_own:Thrice", "speed.micro_batch: micro_own:Thrice does not say"),
    ("micro_own:Marked", None), ("micro_own:Heir", None), ("tap", None), ("perfedavg+post", None),
    ("feddat", None), ("local", None)])
def test_only_sums_over_samples_are_split(tmp_path, method, message):
    (tmp_path / "micro_own.py").write_text(OWN)
    plan(Config.model_validate({"methods": [method]}), tmp_path)
    config = Config.model_validate({"methods": [method], "speed": {"micro_batch": 4}})
    if message is None:
        assert plan(config, tmp_path)
        return
    with pytest.raises(TapflError) as caught:
        plan(config, tmp_path)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "many", [16], 10**9])
def test_bad_values(value):
    with pytest.raises(TapflError) as caught:
        check(Config, {"speed": {"micro_batch": value}}, "mine.yaml")
    assert "speed.micro_batch" in str(caught.value)
    assert "expected a number of samples from 1 to 65536, 'auto' or null" in str(caught.value)
    assert "\n" not in str(caught.value)
