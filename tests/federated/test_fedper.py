"""FedPer and FedRep: decoders that never leave the client, and who trains when."""

import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.engine.registry import plan
from tapfl.errors import TapflError
from tapfl.federated import fedrep as module
from tests.experiment import FederatedRun, tiny_experiment


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_decoders_stay_with_their_clients(tmp_path, method):
    run = FederatedRun(tiny_experiment(tmp_path, methods=[method]), tmp_path)
    before = run.server.blocks
    for t in range(3):
        run.round(t)
    changed = {n for n in before if not torch.equal(before[n], run.server.blocks[n])}
    assert changed
    assert not any(n.startswith("decoder/") for n in changed)
    seen = {i for t in range(3) for i in run.server.cohort(t)}
    kept = {}
    for client in run.federation:
        private, exchanged = run.method.private(client), run.method.exchanged(client)
        assert sorted((*private, *exchanged)) == sorted(run.method.owned(client))
        assert all(n.startswith("decoder/") for n in private)
        kept[client.id] = run.worker.turn(client)._private(as_of=2)
        assert set(kept[client.id]) == set(private)
        assert all(torch.equal(kept[client.id][n], before[n]) != (client.index in seen)
                   for n in private)
    if {run.federation.find("news").index, run.federation.find("shapes").index} <= seen:
        assert not torch.equal(kept["news"]["decoder/agnews"], kept["shapes"]["decoder/agnews"])


def test_fedper_trains_all_blocks_as_fedavg_does(tmp_path):
    found = []
    for method in ("fedper", "fedavg"):
        run = FederatedRun(tiny_experiment(tmp_path, methods=[method]), tmp_path / method)
        client = run.federation.find("looks")
        losses = run.method.train(client, 0)
        found.append((losses, BlockState.extract(run.method.network.blocks)))
    assert found[0][0] == found[1][0]
    assert found[0][1].equals(found[1][1])


def test_fedrep_trains_the_head_then_the_body(tmp_path, monkeypatch):
    config = tiny_experiment(tmp_path, methods=["fedrep"], train={"local_steps": 5},
                             fedrep={"head_share": 0.6})
    run = FederatedRun(config, tmp_path)
    method, client = run.method, run.federation.find("looks")
    calls, original = [], module.local_training

    def watched(context, network, client, blocks, **given):
        before = BlockState.extract(network.blocks)
        losses = original(context, network, client, blocks, **given)
        after = BlockState.extract(network.blocks)
        changed = {n for n in before if not torch.equal(before[n], after[n])}
        calls.append((given["role"], given["steps"], given["lr"], changed, losses))
        return losses

    monkeypatch.setattr(module, "local_training", watched)
    losses = method.train(client, 0)
    (head_role, head_steps, _, head, first), (body_role, body_steps, _, body, second) = calls
    assert (head_steps, body_steps) == (3, 2)
    assert head_role != body_role
    assert head == {"decoder/image_generation", "decoder/text_generation"}
    assert body == set(method.exchanged(client))
    assert losses == first | second
    # The final model: the head alone, as many steps as in a round, at the rate of post-training.
    calls.clear()
    method.adapt(client)
    ((role, steps, rate, changed, _),) = calls
    assert role not in (head_role, body_role)
    assert (steps, rate, changed) == (3, config.post_lr, head)


def test_fedrep_reports_the_second_part_and_what_only_the_first_saw(tmp_path, monkeypatch):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedrep"]), tmp_path)
    parts = iter([{"vqa": 1.0, "fmnist": 2.0}, {"vqa": 3.0}])
    monkeypatch.setattr(module, "local_training", lambda *_, **__: next(parts))
    assert run.method.train(run.federation.find("looks"), 0) == {"vqa": 3.0, "fmnist": 2.0}


def test_fedreps_parts_know_their_round(tmp_path, monkeypatch):
    """It decides on the rate and on the minibatches."""
    config = tiny_experiment(tmp_path, methods=["fedrep"])
    run, seen = FederatedRun(config, tmp_path), []
    monkeypatch.setattr(module, "local_training", lambda *_, **given: seen.append(
        (given["round_"], given["lr"])) or {})
    client = run.federation.find("news")
    run.method.train(client, 1)
    run.method.adapt(client)
    assert config.train.rate(1) != config.train.rate(0)
    assert seen == [(1, config.train.rate(1))] * 2 + [(config.train.rounds, config.post_lr)]


@pytest.mark.parametrize(("steps", "share", "head"), [
    (2, 0.5, 1), (2, 0.01, 1), (2, 0.99, 1), (20, 0.5, 10), (20, 0.99, 19), (10, 0.25, 2),
    (10, 0.66, 7)])
def test_fedrep_leaves_a_step_for_each(tmp_path, steps, share, head):
    config = tiny_experiment(tmp_path, methods=["fedrep"], train={"local_steps": steps},
                             fedrep={"head_share": share})
    method = module.FedRep.__new__(module.FedRep)
    method.context = type("Context", (), {"config": config})
    assert method.head_steps == head


def test_fedrep_needs_two_steps(tmp_path):
    with pytest.raises(TapflError, match=r"train.local_steps: fedrep needs at least 2.*got 1"):
        plan(tiny_experiment(tmp_path, methods=["fedrep"], train={"local_steps": 1}))


def test_fedrep_post_trains_all_blocks(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedrep"]), tmp_path)
    client = run.federation.find("news")
    end = run.method.post_train(client, run.final(client), 2, 1e-2)
    assert all(not torch.equal(end[n], run.method.initial[n]) for n in run.method.owned(client))
