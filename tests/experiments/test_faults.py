"""The public code's faults, one by one."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

import tapfl.personal.tap as tap_module
from tapfl.blocks import BlockState
from tapfl.experiments.catalogue import find_experiments
from tapfl.experiments.faults import BACKBONE, TEXT_HEAD, _Summed, fault_variants
from tapfl.federated.training import weighted
from tapfl.tasks import Batch
from tests.experiment import FederatedRun, tiny_experiment

FAULTS = "tapfl.experiments.faults:"
UNSENT = f"{FAULTS}UnsentBackbone"


@pytest.mark.parametrize("kind", ["routed", "standard"])
def test_the_servers_backbone_never_reaches_a_client(tmp_path, monkeypatch, kind):
    config = tiny_experiment(tmp_path, methods=[UNSENT], backbone={"kind": kind})
    run = FederatedRun(config, tmp_path)
    own = {}  # what every client's backbone must be: its own after its last round
    begun = []

    def watched(client, round_):
        blocks = BlockState.extract(run.method.network.blocks, run.method.owned(client))
        for name in blocks:
            if name.startswith(BACKBONE):
                expected = own.get((client.id, name), run.method.initial[name])
            else:
                expected = run.server.blocks[name]
            assert torch.equal(blocks[name], expected), name
        losses = train(client, round_)
        after = BlockState.extract(run.method.network.blocks, run.method.owned(client))
        own.update({(client.id, n): after[n].clone() for n in after if n.startswith(BACKBONE)})
        begun.append(client.id)
        return losses

    train = run.method.train
    monkeypatch.setattr(run.method, "train", watched)
    for round_ in range(4):
        run.round(round_)
    assert len(begun) > len(set(begun))  # somebody has come back
    before = run.method.initial
    changed = {n for n in before if not torch.equal(before[n], run.server.blocks[n])}
    assert changed
    assert not any(name.startswith(BACKBONE) for name in changed)
    for client in run.federation:
        private = run.method.private(client)
        assert private
        assert sorted((*private, *run.method.exchanged(client))) == sorted(run.method.owned(client))


def test_clients_end_with_their_own_backbones(tmp_path):
    config = tiny_experiment(tmp_path, methods=[UNSENT], train={"rounds": 2, "cohort": 4})
    run = FederatedRun(config, tmp_path)
    assert not run.method.shares_final_model
    for round_ in range(2):
        run.round(round_)
    finals = {}
    for client in run.federation:
        received = run.server.blocks.subset(run.method.exchanged(client))
        finals[client.id] = run.worker.turn(client)._final(received)
        for name in run.method.exchanged(client):
            assert torch.equal(finals[client.id][name], run.server.blocks[name])
    shared = {n for n in finals["shapes"] if n in finals["news"]}
    same = {n for n in shared if torch.equal(finals["shapes"][n], finals["news"][n])}
    assert shared - same == {n for n in shared if n.startswith(BACKBONE)} != set()
    assert same


def test_the_summed_divergence_by_hand():
    """Two samples with two distributions over three values each; the second sample only pads."""
    p = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], [[0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]])
    q = torch.full_like(p, 1 / 3)
    each = [sum(a * math.log(a * 3) for a in row.tolist()) for sample in p for row in sample]
    logits = [p.log() + 5, q.log() - 1]  # a constant changes no softmax
    summed = functools.partial(_Summed.divergence, None)  # it reads nothing of the object
    both = summed(*logits, Batch())
    assert both.item() == pytest.approx((each[0] + each[1] + each[2] + each[3]) / 2, rel=1e-5)
    real = summed(*logits, Batch(real=torch.tensor([True, False])))
    assert real.item() == pytest.approx(each[0] + each[1], rel=1e-5)
    classes = summed(p[:, 0].log(), q[:, 0].log(), Batch())  # one distribution a sample
    assert classes.item() == pytest.approx((each[0] + each[2]) / 2, rel=1e-5)


def test_stage_two_adds_the_sum_to_the_tasks_losses(tmp_path):
    name = "fedavg+tapfl.experiments.faults:SummedDivergence"
    run = FederatedRun(tiny_experiment(tmp_path, methods=[name], lora={"dropout": 0.0}), tmp_path)
    (tap,) = run.personalizers
    objective, client = tap._distillation, run.federation.find("looks")
    assert isinstance(objective, _Summed)
    network = run.method.network.eval()
    with torch.no_grad():
        for parameter in run.method.teacher.blocks.parameters():
            parameter.add_(0.05)
        parts = next(iter(client.data.minibatches(1, 8, np.random.default_rng(0))))
        loss, losses = objective(network, parts)
        extra = 0.0
        for part in parts:
            taught = run.method.teacher(part.task, part.batch).prediction.double().softmax(-1)
            mine = network(part.task, part.batch).prediction.double().log_softmax(-1)
            kl = (taught * (taught.log() - mine)).sum() / len(mine)
            weight = run.context.config.tap.distill_weights.of(run.context.tasks[part.task].kind)
            assert kl > 0
            extra += weight * kl.item()
    assert set(losses) == {part.task for part in parts}
    assert loss.item() == pytest.approx(weighted(losses, parts).item() + extra, rel=1e-4)
    assert extra > 0.01


def batch_of(run, client, task):
    data = run.federation.find(client).data
    parts = next(iter(data.minibatches(1, 8, np.random.default_rng(0))))
    return next(part.batch for part in parts if part.task == task)


@pytest.mark.parametrize("name", ["fedavg", f"{FAULTS}UnheardInput", f"{FAULTS}AllOfFedAvg"])
def test_a_text_head_that_does_not_hear_its_input(tmp_path, name):
    config = tiny_experiment(tmp_path, methods=[name], lora={"dropout": 0.0})
    run = FederatedRun(config, tmp_path)
    network, batch = run.method.network.eval(), batch_of(run, "words", "commongen")
    other = dataclasses.replace(batch, text=batch.text + 1)
    first, second = (network("commongen", b).prediction for b in (batch, other))
    faulty = name != "fedavg"
    assert torch.equal(first, second) == faulty
    first.sum().backward()
    blocks = network.ownership.blocks_of_task("commongen")
    moved = {b for b in blocks for p in network.blocks[b].parameters()
             if p.grad is not None and p.grad.abs().max() > 0}
    assert TEXT_HEAD in moved
    assert (moved == {TEXT_HEAD}) == faulty  # nothing before the head learns from texts


@pytest.mark.parametrize("name", ["UnheardInput", "PastTheEnd", "AllOfFedAvg"])
def test_faulty_heads_begin_with_the_same_values(tmp_path, name):
    plain = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg"]), tmp_path / "plain")
    faulty = FederatedRun(tiny_experiment(tmp_path, methods=[FAULTS + name]), tmp_path / "faulty")
    assert faulty.method.initial.equals(plain.method.initial)
    for network in (faulty.method.network, faulty.method.teacher):
        assert type(network.blocks[TEXT_HEAD]) is not type(plain.method.network.blocks[TEXT_HEAD])


def test_texts_past_their_end_train_alike_and_go_on(tmp_path):
    blocks, written = [], []
    for name in ("fedavg", f"{FAULTS}PastTheEnd"):
        run = FederatedRun(tiny_experiment(tmp_path, methods=[name]), tmp_path / name[-6:])
        run.round(0)
        blocks.append(run.server.blocks)
        run.server.blocks.load_into(run.method.network.blocks)
        network, batch = run.method.network.eval(), batch_of(run, "words", "commongen")
        full = network.generate("commongen", batch, start=2, end=-1, pad=0, max_new_tokens=8)
        end = full[0, 2].item()  # where a text without faults ends
        written.append(network.generate("commongen", batch, start=2, end=end, pad=0,
                                        max_new_tokens=8))
    assert blocks[0].equals(blocks[1])
    at = (full[0] == end).nonzero()[0].item()
    assert torch.equal(written[1], full)
    assert torch.equal(written[0][0, :at + 1], full[0, :at + 1])
    assert (written[0][0, at + 1:] == 0).all()


def test_a_network_without_text_has_no_faulty_head(tmp_path):
    config = tiny_experiment(tmp_path, methods=[f"{FAULTS}AllOfFedAvg"],
                             federation={"clients": ["shapes", "news"]})
    run = FederatedRun(config, tmp_path)
    assert TEXT_HEAD not in run.method.network.blocks
    run.round(0)


def test_p_counts_micro_batches():
    for steps, fewer in ((50, 12), (20, 5), (3, 1), (1, 1)):
        found = fault_variants(steps)
        assert {v["post"]["steps"] for variants in found.values() for v in variants.values()
                if "post" in v} == {fewer}
    (experiment,) = find_experiments(["faults"], "mini", "small")
    assert len(experiment.parts) == 1 + len(found)


def test_a_summed_kl_beside_tap_trains_x_once_and_ends_as_alone(tmp_path, monkeypatch):
    """They share stage 1; stage 2 has another loss, so it must not be shared."""
    roles, train = [], tap_module.local_training

    def watched(*args, role, **more):
        roles.append(role)
        return train(*args, role=role, **more)

    monkeypatch.setattr(tap_module, "local_training", watched)
    summed = {"of": "fedavg+tapfl.experiments.faults:SummedDivergence"}
    finals = {}
    for methods in (["tap", "summed"], ["summed"]):
        config = tiny_experiment(tmp_path, methods=methods, variants={"summed": summed},
                                 tap={"distill_weights": {"image_generation": 1.0}})
        run = FederatedRun(config, tmp_path / methods[0])
        run.round(0)
        assert roles == ["personal"] * config.train.cohort
        client = run.federation.find("looks")
        for personalizer in run.personalizers:
            finals[len(methods), personalizer.name] = personalizer.after_federation(
                client, run.final(client))
        assert roles.count("distill") == len(methods)
        roles.clear()
    assert finals[2, "summed"].equals(finals[1, "summed"])
    assert not finals[2, "summed"].equals(finals[2, "tap"])
