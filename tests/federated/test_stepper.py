"""Recorded steps against plain ones. Without a GPU a recording is played by running its body."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.data.batches import ROW_STEP, TaskBatch, bucket_length, prefetch
from tapfl.federated.distill import divergence
from tapfl.federated.stepper import Stepper, _Captured, _copy, _own, graph_safe
from tapfl.federated.training import local_training, minimise, task_objective
from tests.experiment import FederatedRun, tiny_experiment


class Played(Stepper):
    """Plays a recording by running what was recorded, on the tensors it was recorded with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses = []

    def _capture(self, body, parts):
        still = [TaskBatch(p.task, _copy(p.batch), _own(p.weight), p.samples) for p in parts]
        losses = {}

        def replay():
            found = body(still)
            # Recordings share their memory: a replay overwrites what others have left there.
            for tensor in self.losses:
                tensor.fill_(math.nan)
            for task, loss in found.items():
                if task not in losses:
                    losses[task] = torch.empty_like(loss)
                    self.losses.append(losses[task])
                losses[task].copy_(loss)

        self.recordings = getattr(self, "recordings", 0) + 1
        return _Captured(SimpleNamespace(replay=replay), still, losses)


def in_float64(run, played):
    """Make a run compute in float64, with steps that are played or plain.

    AdamW would magnify the last bits of fp32, in which the two differ.
    """
    method = run.method
    method.network.double()
    method.initial = run.server.blocks = BlockState.extract(method.network.blocks)
    if played:
        method.network.__dict__["_stepper"] = Played(
            method.network, run.context.config.train, graphs=True)


@pytest.fixture
def method(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg"], lora={"dropout": 0.0})
    run = FederatedRun(config, tmp_path)
    run.method.federation = run.federation
    return run.method


def train(method, client, stepper, objective=task_objective, steps=6):
    method.initial.load_into(method.network.blocks)
    method.network.__dict__["_stepper"] = stepper
    losses = local_training(method.context, method.network, client, method.owned(client),
                            steps=steps, lr=1e-2, round_=0, role="test", step=minimise(objective))
    return losses, BlockState.extract(method.network.blocks, method.owned(client))


def same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["shapes", "news", "looks"])
def test_recorded_steps_equal_plain_ones(method, name):
    client = method.federation.find(name)
    config = method.context.config.train
    plain = train(method, client, Stepper(method.network, config))
    recorded = Played(method.network, config, graphs=True)
    # Twice: the second training starts with the moments of the first set back.
    same(train(method, client, recorded), plain)
    same(train(method, client, recorded), plain)
    assert recorded.recordings


def test_an_objective_that_is_not_marked_is_never_recorded(method):
    client = method.federation.find("news")
    stepper = Played(method.network, method.context.config.train, graphs=True)
    calls = []

    def own(network, parts):
        calls.append(1)
        return task_objective(network, parts)

    train(method, client, stepper, own)
    assert len(calls) == 6
    assert not hasattr(stepper, "recordings")
    train(method, client, stepper, graph_safe(own))
    assert stepper.recordings


def test_moments_do_not_pass_from_client_to_client(method):
    one, other = (method.federation.find(n) for n in ("shapes", "news"))
    config = method.context.config.train
    alone = train(method, other, Played(method.network, config, graphs=True))
    shared = Played(method.network, config, graphs=True)
    train(method, one, shared)
    same(train(method, other, shared), alone)


@pytest.mark.parametrize("graphs", [False, True])
def test_only_the_named_blocks_train(method, graphs):
    client = method.federation.find("news")
    stepper = Played(method.network, method.context.config.train, graphs)
    method.initial.load_into(method.network.blocks)
    method.network.__dict__["_stepper"] = stepper
    local_training(method.context, method.network, client, ["decoder/agnews"], steps=5, lr=1e-2,
                   round_=0, role="test", step=minimise(task_objective))
    now = BlockState.extract(method.network.blocks)
    moved = {name for name in now if not torch.equal(now[name], method.initial[name])}
    assert moved == {"decoder/agnews"}


def test_gradients_of_another_layout_move_the_right_elements(method):
    stepper = Stepper(method.network, method.context.config.train)
    stepper.restart(["decoder/agnews"], 1e-2)
    weight = max(stepper.parameters, key=lambda p: p.numel())
    before, gradient = weight.detach().clone(), torch.zeros_like(weight)
    gradient[0, 1] = 1.0
    weight.grad = gradient.T.contiguous().T
    assert weight.grad.stride() != weight.stride()
    stepper.move(stepper.parameters)
    moved = (weight - before * (1 - 1e-2 * stepper.config.weight_decay)).abs() > 1e-4
    assert moved.nonzero().tolist() == [[0, 1]]


def test_without_memory_for_recordings_steps_are_plain(method):
    client = method.federation.find("news")
    config = method.context.config.train

    class Full(Played):
        def _capture(self, body, parts):
            raise torch.cuda.OutOfMemoryError("no memory")

    full = Full(method.network, config, graphs=True)
    same(train(method, client, full), train(method, client, Stepper(method.network, config)))
    assert not full._capturing


def test_a_copied_network_has_no_recordings(method):
    method.context.stepper(method.network)
    assert copy.deepcopy(method.network).__dict__["_stepper"] is None


# Minibatches of rounded shapes, as a GPU gets them

def test_rounded_minibatches_lose_the_same(method):
    for name in ("shapes", "looks", "words"):
        client = method.federation.find(name)
        exact = list(client.data.minibatches(3, 7, np.random.default_rng(0)))
        draws = [client.data._split_by_task(d) for d in _order(client, 3, 7)]
        rounded = list(client.data._on_device(draws, 7))
        method.network.eval()
        for one, other in zip(exact, rounded, strict=True):
            assert [p.samples for p in one] == [p.samples for p in other]
            assert all(len(p.batch) % ROW_STEP == 0 for p in other)
            loss, each = task_objective(method.network, one)
            loss2, each2 = task_objective(method.network, other)
            torch.testing.assert_close(loss2, loss)
            for task, value in each.items():
                torch.testing.assert_close(each2[task], value)
            _same_divergence(method, one, other)


def _order(client, steps, size):
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(client.samples)
                            for _ in range(-(-steps * size // client.samples))])
    return [order[i * size:(i + 1) * size] for i in range(steps)]


def _same_divergence(method, one, other):
    teacher = copy.deepcopy(method.network)
    with torch.no_grad():
        for parameter in teacher.blocks.parameters():
            parameter.add_(0.1)
        found = [[divergence(teacher(p.task, p.batch).prediction,
                             method.network(p.task, p.batch).prediction, p.batch) for p in parts]
                 for parts in (one, other)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_lengths_go_up_a_ladder():
    lengths = [bucket_length(n) for n in range(1, 257)]
    assert all(a >= n and a - n < 32 for n, a in enumerate(lengths, 1))
    assert len(set(lengths)) == 13


def test_items_are_made_ahead_in_order_and_errors_come_through():
    assert list(prefetch(iter(range(5)))) == list(range(5))

    def broken():
        yield 1
        raise ValueError("no more")

    items = prefetch(broken())
    assert next(items) == 1
    with pytest.raises(ValueError, match="no more"):
        list(items)
