import math

import numpy as np
import pytest
import torch
from torch import nn

from tapfl.blocks import BlockState
from tapfl.data.batches import ClientData
from tapfl.federated.context import randomness
from tapfl.federated.disentafl import disentanglement
from tapfl.federated.feddat import Bottleneck
from tapfl.federated.perfedavg import meta_gradient
from tapfl.federated.stepper import parameters_of
from tapfl.federated.training import Tally, gradients, task_objective
from tests.experiment import FederatedRun, tiny_experiment
from tests.federated.test_stepper import in_float64


def test_every_owned_block_equals_the_servers_average_bit_for_bit(tmp_path):
    """Trap 1: what the server averages is what clients get, the backbone included."""
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg"]), tmp_path)
    run.round(0)
    for client in run.federation:
        run.server.send(run.method.exchanged(client)).load_into(run.method.network.blocks)
        received = BlockState.extract(run.method.network.blocks, run.method.owned(client))
        assert any(name.startswith("mome/") for name in received)
        for name in received:
            assert torch.equal(received[name], run.server.blocks[name])


def test_blocks_that_nobody_sent_keep_their_value(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg"]), tmp_path)
    cohort = [run.federation[i] for i in run.server.cohort(0)]
    sent = {b for c in cohort for b in run.method.owned(c)}
    before = run.server.blocks
    run.round(0)
    for name in before:
        assert torch.equal(before[name], run.server.blocks[name]) == (name not in sent)


def test_local_never_talks_to_the_server(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["local"]), tmp_path)
    before = run.server.blocks
    for t in range(3):
        run.round(t)
    assert all(torch.equal(before[n], run.server.blocks[n]) for n in before)
    seen = {i for t in range(3) for i in run.server.cohort(t)}
    for client in run.federation:
        own = run.worker.turn(client)._private(as_of=2)
        assert any(not torch.equal(own[n], before[n]) for n in own) == (client.index in seen)


# Per-FedAvg on f(w) = 1/2 w'Hw - b'w, whose gradient is Hw - b.

@pytest.mark.parametrize("delta", [None, 1e-3])
def test_meta_gradient_on_a_quadratic(delta):
    torch.manual_seed(0)
    root = torch.randn(4, 4, dtype=torch.float64)
    hessian, b = root @ root.T, torch.randn(4, dtype=torch.float64)
    w = nn.Parameter(torch.randn(4, dtype=torch.float64))
    start, rate = w.detach().clone(), 0.05
    place = torch.zeros(4, dtype=torch.float64)  # the same each time, as captured steps write it

    def gradient(_):
        return [place.copy_(hessian @ w.detach() - b)]

    (meta,) = meta_gradient([w], gradient, ([], [], []), rate, delta)
    adapted = start - rate * (hessian @ start - b)
    first_order = hessian @ adapted - b
    # The exact gradient of f(w - a grad f(w)) is (I - a H) g; the difference quotient is exact.
    expected = first_order if delta is None else first_order - rate * hessian @ first_order
    torch.testing.assert_close(meta, expected, atol=1e-9, rtol=1e-9)
    assert torch.equal(w, start)


@pytest.mark.parametrize("delta", [None, 1e-3])
def test_each_gradient_of_a_meta_step_is_of_a_minibatch_of_its_own(delta):
    torch.manual_seed(0)
    hessians = [root @ root.T for root in torch.randn(3, 4, 4, dtype=torch.float64)]
    w = nn.Parameter(torch.randn(4, dtype=torch.float64))
    start, rate = w.detach().clone(), 0.05
    (meta,) = meta_gradient([w], lambda k: [hessians[k] @ w.detach()], (0, 1, 2), rate, delta)
    expected = hessians[1] @ (start - rate * hessians[0] @ start)
    if delta is not None:
        expected = expected - rate * hessians[2] @ expected
    torch.testing.assert_close(meta, expected, atol=1e-9, rtol=1e-9)


def test_hessian_free_is_no_dropout_noise(tmp_path):
    """With the same dropout above and below, a small delta gives what a smaller one gives."""
    config = tiny_experiment(tmp_path, methods=["perfedavg"], lora={"dropout": 0.3})
    run = FederatedRun(config, tmp_path)
    client = run.federation.find("news")
    run.method.network.double().train()
    parameters = parameters_of(run.method.network, run.method.owned(client))
    batches = list(client.data.minibatches(3, 8, np.random.default_rng(0)))

    def gradient(parts):
        return gradients(task_objective(run.method.network, parts)[0], parameters)

    found = []
    for delta in (1e-3, 1e-4):
        torch.manual_seed(0)
        found.append(torch.cat([g.flatten() for g in meta_gradient(
            parameters, gradient, batches, 0.1, delta)]))
    assert (found[0] - found[1]).norm() < 1e-2 * found[0].norm()


@pytest.mark.parametrize(("variant", "batches", "moves"), [
    ("fo", ["fmnist", "vqa", "fmnist"], False),
    ("hf", ["fmnist", "vqa", "vqa"], False),
    ("hf", ["fmnist", "vqa", "fmnist"], True)])
def test_a_meta_step_moves_the_tasks_of_its_outer_minibatches_alone(
        tmp_path, monkeypatch, variant, batches, moves):
    """A gradient of zero is none: neither moments nor weight decay move the other blocks."""
    real = ClientData.minibatches

    def chosen(data, steps, size, rng):
        """Each minibatch has one task; all of the first step have both, to give them moments."""
        for place, parts in enumerate(real(data, steps, 40, rng)):
            yield parts if place < 3 else [p for p in parts if p.task == batches[place % 3]]

    monkeypatch.setattr(ClientData, "minibatches", chosen)
    ends = []
    for steps in (1, 3):
        config = tiny_experiment(tmp_path, methods=["perfedavg"], train={"local_steps": steps},
                                 perfedavg={"variant": variant})
        run = FederatedRun(config, tmp_path / str(steps))
        method = run.method
        method.initial.load_into(method.network.blocks)
        method.train(run.federation.find("looks"), 0)
        ends.append(BlockState.extract(method.network.blocks))
    only = set(method.blocks_of_task("fmnist")) - set(method.blocks_of_task("vqa"))
    assert only
    assert {torch.equal(ends[0][name], ends[1][name]) for name in only} == {not moves}
    other = set(method.blocks_of_task("vqa")) - set(method.blocks_of_task("fmnist"))
    assert not any(torch.equal(ends[0][name], ends[1][name]) for name in other)


def test_perfedavg_adapts_on_training_data_before_evaluation(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["perfedavg"]), tmp_path)
    client = run.federation[0]
    run.method.initial.load_into(run.method.network.blocks)
    before = BlockState.extract(run.method.network.blocks)
    run.method.adapt(client)
    after = BlockState.extract(run.method.network.blocks)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed
    assert changed <= set(run.method.owned(client))


RATES = {"inner_lr_initial": 0.05, "inner_lr": 0.1, "adapt_steps": 2, "delta": 0.01}


def test_perfedavg_adapts_by_plain_steps_at_the_inner_rate(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["perfedavg"], lora={"dropout": 0.0},
                                       perfedavg=RATES), tmp_path)
    method, client, config = run.method, run.federation.find("news"), run.context.config
    network = method.network.double()
    start = BlockState.extract(network.blocks)
    method.adapt(client)
    found = BlockState.extract(network.blocks, method.owned(client))
    start.load_into(network.blocks)
    parameters = parameters_of(network, method.owned(client))
    with randomness(run.context, client, config.train.rounds, "adapt") as rng:
        for parts in client.data.minibatches(2, config.train.batch_size, rng):
            slope = gradients(task_objective(network.train(), parts)[0], parameters)
            with torch.no_grad():
                for parameter, value in zip(parameters, slope, strict=True):
                    parameter.sub_(0.1 * value)
    expected = BlockState.extract(network.blocks, found)
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize(("variant", "delta"), [("fo", None), ("hf", 0.01)])
def test_perfedavgs_inner_rate_delta_and_losses(tmp_path, monkeypatch, variant, delta):
    """The rate warms up; losses are those of the adapted model on data it has not seen."""
    from tapfl.federated import perfedavg as module

    run = FederatedRun(tiny_experiment(
        tmp_path, methods=["perfedavg"], lora={"dropout": 0.0}, train={"local_steps": 1},
        perfedavg={**RATES, "variant": variant}), tmp_path)
    method, client, seen = run.method, run.federation.find("news"), []
    network, original = method.network, module.meta_gradient
    for each in network.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0

    def watched(parameters, gradient, batches, *settings):
        start = BlockState.extract(network.blocks, method.owned(client))
        slope = gradients(task_objective(network, batches[0])[0], parameters)
        adapted = [p.detach() - settings[0] * g for p, g in zip(parameters, slope, strict=True)]
        with torch.no_grad():
            for parameter, value in zip(parameters, adapted, strict=True):
                parameter.copy_(value)
            losses = task_objective(network, batches[1])[1]
        start.load_into(network.blocks)
        seen.append((settings, {task: loss.item() for task, loss in losses.items()}))
        return original(parameters, gradient, batches, *settings)

    monkeypatch.setattr(module, "meta_gradient", watched)
    for round_, rate in ((0, 0.05), (1, 0.075), (2, 0.1)):  # two rounds of warm-up
        losses = method.train(client, round_)
        (settings, expected) = seen.pop()
        assert settings == (pytest.approx(rate), delta)
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_captured_meta_steps_equal_plain_ones(tmp_path, variant):
    """Gradients come from captured graphs: each client's own, at the adapted point, by turns."""
    def ends(graphs):
        run = FederatedRun(tiny_experiment(
            tmp_path, methods=["perfedavg"], lora={"dropout": 0.0},
            perfedavg={"variant": variant, "inner_lr_initial": 0.05, "inner_lr": 0.1}),
            tmp_path / str(graphs))
        method = run.method
        in_float64(run, graphs)
        for t in range(2):
            run.round(t)
        client = run.federation.find("shapes")
        run.server.blocks.load_into(method.network.blocks)
        method.adapt(client)
        adapted = BlockState.extract(method.network.blocks)
        return run, adapted, method.train(client, 2)

    (run, adapted, losses), (plain, expected, same) = ends(True), ends(False)
    assert run.context.stepper(run.method.network).recordings
    assert losses == pytest.approx(same, rel=1e-6)
    for name in expected:
        for one, other in ((run.server.blocks, plain.server.blocks), (adapted, expected)):
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(adapted[name], run.server.blocks[name]) for name in adapted)


def test_disentanglement_by_hand():
    a = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    b = torch.tensor([[1.0, 1.0]])
    # cosines of b with both rows of a are 1/sqrt(2): squared 1/2
    assert disentanglement([a, b]).item() == pytest.approx(0.5)
    c = torch.tensor([[5.0, 0.0]])
    # a-b: 1/2, a-c: (1 + 0) / 2, b-c: 1/2
    assert disentanglement([a, b, c]).item() == pytest.approx(0.5)
    assert disentanglement([a, c]).item() == pytest.approx(0.5)
    assert disentanglement([c, torch.tensor([[0.0, 1.0]])]).item() == pytest.approx(0.0)
    assert disentanglement([a]).item() == 0


def test_disentafl_adds_its_loss(tmp_path):
    config = tiny_experiment(tmp_path, methods=["disentafl"], lora={"dropout": 0.0})
    run = FederatedRun(config, tmp_path)
    client = run.federation.find("shapes")
    run.method.network.eval()
    parts = next(client.data.minibatches(1, 12, np.random.default_rng(0)))
    assert len(parts) == 2
    total, losses = run.method.objective(run.method.network, parts)
    latents = [v for p in parts
               for v in run.method.network(p.task, p.batch, latents=True).latents.values()]
    expected = sum(p.weight * losses[p.task] for p in parts) + 0.5 * disentanglement(latents)
    torch.testing.assert_close(total, expected)


def test_feddat_bottleneck_by_hand():
    adapter, h = Bottleneck(6, 2), torch.randn(3, 6)
    expected = torch.relu(h @ adapter.down.weight.T + adapter.down.bias) @ adapter.up.weight.T
    torch.testing.assert_close(adapter(h), expected + adapter.up.bias)
    assert adapter.down.bias.abs().sum() == adapter.up.bias.abs().sum() == 0


def test_feddat_dual_adapter_by_hand(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["feddat"]), tmp_path)
    method, h = run.method, torch.randn(1, 2, 3, 32)
    blocks = method.network.blocks
    shared, local, frozen = (blocks[f"adapter/{p}/mote"][0] for p in ("shared", "local", "frozen"))
    torch.testing.assert_close(method.network.adapter("mote", 0, h), h + shared(h))
    with method.predicting():
        torch.testing.assert_close(method.network.adapter("mote", 0, h),
                                   h + 0.5 * local(h) + 0.5 * frozen(h))
    torch.testing.assert_close(method.network.adapter("mote", 0, h), h + shared(h))


def test_feddat_trains_shared_and_local_and_keeps_frozen(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["feddat"]), tmp_path)
    client = run.federation.find("looks")
    method = run.method
    method.initial.load_into(method.network.blocks)
    method.train(client, 0)
    after = BlockState.extract(method.network.blocks)
    for place in ("encoder/image", "encoder/text", "mote", "mome"):
        start = method.initial[f"adapter/shared/{place}"]
        assert torch.equal(after[f"adapter/frozen/{place}"], start)  # as received
        assert not torch.equal(after[f"adapter/shared/{place}"], start)
        assert not torch.equal(after[f"adapter/local/{place}"],
                               method.initial[f"adapter/local/{place}"])
    assert set(method.exchanged(client)) & set(method.private(client)) == set()
    assert not any("local" in n or "frozen" in n for n in method.exchanged(client))
    news = run.federation.find("news")
    assert not any("encoder/image" in n for n in (*method.exchanged(news), *method.private(news)))


def test_feddat_update_by_hand(tmp_path):
    """One step: the shared part descends task loss + KL(dual || shared), then the local part."""
    config = tiny_experiment(tmp_path, methods=["feddat"], lora={"dropout": 0.0},
                             train={"local_steps": 1, "warmup_rounds": 0, "weight_decay": 0.0,
                                    "clip": 1e9}, feddat={"kl_weight": 0.7})
    run = FederatedRun(config, tmp_path)
    method, client = run.method, run.federation.find("words")
    method.initial.load_into(method.network.blocks)
    with torch.no_grad():  # make the adapters large enough to matter
        for name, block in method.network.blocks.items():
            if name.startswith("adapter/"):
                for parameter in block.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
    start = BlockState.extract(method.network.blocks)
    method.train(client, 0)
    after = BlockState.extract(method.network.blocks)

    from tapfl.federated.context import randomness
    from tapfl.federated.distill import divergence

    start.load_into(method.network.blocks)
    method._freeze(method.places)
    net = method.network.train()
    with randomness(run.context, client, 0, "federated") as rng:
        (parts,) = client.data.minibatches(1, config.train.batch_size, rng)
        with method.predicting(), torch.no_grad():
            teacher = {p.task: net(p.task, p.batch).prediction for p in parts}
        student = {p.task: net(p.task, p.batch) for p in parts}
    loss = sum(p.weight * (net.loss(p.task, student[p.task], p.batch) + 0.7 * divergence(
        teacher[p.task], student[p.task].prediction, p.batch)) for p in parts)
    down = net.blocks["adapter/shared/mote"][0].up.weight
    (gradient,) = torch.autograd.grad(loss, [down])
    expected = down - config.train.lr * gradient / (gradient.abs() + 1e-8)  # AdamW's first step
    moved = after.parameters("adapter/shared/mote")["0.up.weight"]
    torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-3)
    assert (moved - down).abs().max() > 1e-3


def test_losses_are_means_over_samples():
    from tapfl.data.batches import TaskBatch
    from tapfl.tasks import Batch

    tally = Tally()
    tally.add([TaskBatch("a", Batch(), 0.5, 1)], {"a": torch.tensor(4.0)})
    tally.add([TaskBatch("a", Batch(), 0.5, 3)], {"a": torch.tensor(0.0)})
    assert tally.means() == {"a": 1.0}


def test_learning_rate_warms_up_linearly(tmp_path):
    train = tiny_experiment(tmp_path, train={"lr_initial": 1e-4, "lr": 3e-4,
                                             "warmup_rounds": 20}).train
    assert train.rate(0) == pytest.approx(1e-4)
    assert train.rate(10) == pytest.approx(2e-4)
    assert train.rate(20) == train.rate(199) == pytest.approx(3e-4)


def test_post_training_prefix(tmp_path):
    """2P steps begin with the minibatches of P steps."""
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg"]), tmp_path)
    data = run.federation[0].data
    short = list(data.minibatches(4, 5, np.random.default_rng(1)))
    long = list(data.minibatches(8, 5, np.random.default_rng(1)))
    for a, b in zip(short, long, strict=False):
        assert [(p.task, p.weight) for p in a] == [(p.task, p.weight) for p in b]
        assert all(torch.equal(p.batch.label, q.batch.label) for p, q in zip(a, b, strict=True))
    assert math.isclose(sum(p.weight for p in long[0]), 1.0)
