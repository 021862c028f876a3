"""FedALA: weights by hand, what is W's and what is the client's, and what is kept."""

import pytest
import torch

from tapfl.blocks import BlockState, check_block
from tapfl.federated.context import randomness
from tapfl.federated.fedala import TRAININGS, Mixture
from tests.experiment import FederatedRun, tiny_experiment
from tests.federated.test_stepper import in_float64


def test_the_mixture_by_hand():
    own, received = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([4.0, 1.0, 0.0, 0.1])
    weights, values = torch.tensor([0.25, 0.5, 0.5, 1.0]), torch.zeros(4)
    mixture = Mixture([values], [own], [received], [weights])
    mixture.mix()
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, 1.0, 0.1]))
    assert values[3] == received[3]  # W, bit for bit
    # Spans are 4, 0, -2 and -4.9: weights lose 0.1 * gradient * span, and stay within 0 and 1.
    mixture.learn([torch.tensor([0.5, 9.0, 1.0, -9.0])], 0.1)
    torch.testing.assert_close(weights, torch.tensor([0.05, 0.5, 0.7, 0.0]))
    mixture.learn([torch.tensor([9.0, 0.0, 9.0, 0.0])], 1.0)
    assert weights.tolist() == pytest.approx([0.0, 0.5, 1.0, 0.0])


def fedala(folder, name="run", **sections):
    config = tiny_experiment(folder, methods=["fedala"], **sections)
    return FederatedRun(config, folder / name)


def other_w(method, seed):
    generator = torch.Generator().manual_seed(seed)
    return BlockState({n: v + 0.1 * torch.randn(v.shape, generator=generator)
                       for n, v in method.initial.items() if not n.startswith("ala/")},
                      method.initial.shapes)


def test_the_first_time_w_is_taken_as_it_is(tmp_path):
    """A first round, and a final model, of a client without a model of its own: FedAvg's."""
    run = fedala(tmp_path)
    method, client = run.method, run.federation.find("looks")
    plain = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg"]), tmp_path / "fedavg").method
    w = other_w(method, 0)
    for each in (method, plain):
        w.subset(each.initial.keys() & w.keys()).load_into(each.network.blocks)
    method.adapt(client)
    assert BlockState.extract(method.network.blocks, w).equals(w)
    assert method.train(client, 0) == plain.train(client, 0)
    after = BlockState.extract(method.network.blocks)
    assert after.subset(w).equals(BlockState.extract(plain.network.blocks))
    # The client keeps its decoders; its weights are still one.
    assert after[TRAININGS].item() == 1
    for name in ("image_generation", "text_generation"):
        assert torch.equal(after[f"ala/model/{name}"], after[f"decoder/{name}"])
        assert (after[f"ala/weight/{name}"] == 1).all()


@pytest.mark.parametrize("begin", [1.0, 0.5])
def test_taking_in_against_plain_torch(tmp_path, begin):
    """Two steps of learning, with the gradient of the weights from autograd."""
    rate = 50.0
    run = fedala(tmp_path, lora={"dropout": 0.0}, fedala={"lr": rate, "first_steps": 2})
    method, client = run.method, run.federation.find("news")
    network, block = method.network.double(), "decoder/agnews"
    method.initial = BlockState.extract(network.blocks)
    own, w = other_w(method, 1), other_w(method, 2)
    w.load_into(network.blocks)
    kept = {"ala/model/agnews": own[block],
            "ala/weight/agnews": torch.full_like(own[block], begin)}
    BlockState(kept, dict.fromkeys(kept, method.initial.shapes[block])).load_into(network.blocks)
    network.blocks[TRAININGS].count.data.fill_(1)
    method.adapt(client)
    found = BlockState.extract(network.blocks)

    weights = torch.full_like(own[block], begin, requires_grad=True)
    shapes = method.initial.shapes
    w.load_into(network.blocks)
    with randomness(run.context, client, run.context.config.train.rounds, "ala") as rng:
        network.train()
        for parts in client.data.minibatches(2, run.context.config.train.batch_size, rng):
            mixed = own[block] + (w[block] - own[block]) * weights
            views = BlockState({block: mixed}, shapes).parameters(block)
            values = {f"blocks.{block}.{key}": view for key, view in views.items()}

            def loss(parts=parts, values=values):
                (part,) = parts
                out = torch.func.functional_call(network, values, (part.task, part.batch))
                return network.loss(part.task, out, part.batch)

            (slope,) = torch.autograd.grad(loss(), [weights])
            weights = (weights - rate * slope).clamp(0, 1).detach().requires_grad_()
    inside = ((weights > 0.01) & (weights < 0.99)).sum()
    assert inside > 10  # the rate is large enough for the test to see something
    torch.testing.assert_close(found["ala/weight/agnews"], weights.detach())
    torch.testing.assert_close(found[block], (own[block] + (w[block] - own[block]) * weights)
                               .detach())
    # Everything below is W, bit for bit; the client's model is what it was.
    assert found.subset(n for n in w if n != block).equals(w.subset(n for n in w if n != block))
    assert torch.equal(found["ala/model/agnews"], own[block])


def test_steps_the_first_time_and_later(tmp_path, monkeypatch):
    from tapfl.federated import fedala as module

    run = fedala(tmp_path, fedala={"steps": 3, "first_steps": 4})
    method, client = run.method, run.federation.find("news")
    taken, original = [], module.local_training
    monkeypatch.setattr(module, "local_training",
                        lambda *a, **k: taken.append(k["steps"]) or original(*a, **k))
    for round_ in range(3):
        method.train(client, round_)
    assert taken == [4, 3]  # none in the first round
    method.adapt(client)
    assert taken == [4, 3, 3]
    final = BlockState.extract(method.network.blocks, (*method.owned(client),
                                                       *method.private(client)))
    method.post_train(client, final, 2, 1e-3)
    assert taken == [4, 3, 3, 3]  # post-training takes W in as every training does


def test_private_blocks_stay_private_and_are_kept(tmp_path):
    run = fedala(tmp_path, fedala={"lr": 100.0})
    for t in range(2):
        run.round(t)
    for client in run.federation:
        private = run.method.private(client)
        assert set(run.method.exchanged(client)) == set(run.method.owned(client))
        assert all(check_block(n).startswith("ala/") for n in private)
        kept = run.worker.turn(client)._private(as_of=1)
        assert set(kept) == set(private)
        assert kept[TRAININGS].item() == sum(client.index in run.server.cohort(t) for t in (0, 1))
        if not kept[TRAININGS].item():
            continue
        weights = torch.cat([v for n, v in kept.items() if n.startswith("ala/weight/")])
        assert 0 <= weights.min() < 1
        assert weights.max() <= 1
    assert run.server.blocks[TRAININGS].item() == 0


def test_captured_steps_read_each_clients_values(tmp_path):
    def ends(graphs):
        run = fedala(tmp_path, name=str(graphs), lora={"dropout": 0.0},
                     fedala={"lr": 20.0, "steps": 4, "first_steps": 4})
        method = run.method
        in_float64(run, graphs)
        places = set()
        for t in range(3):
            run.round(t)
            places.add(tuple(p.data_ptr() for group in vars(
                method._mixture(["decoder/agnews", "decoder/tiny-imagenet"])).values()
                for p in group))
        assert len(places) == 1
        kinds = [key[0] for key in method.context.stepper(method.network)._captured]
        assert ("ala" in kinds) == graphs
        return run.server.blocks

    one, other = ends(True), ends(False)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-5)
