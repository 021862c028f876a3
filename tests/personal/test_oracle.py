"""The engine against the paper's pseudocode, written out slowly with a deep copy per model."""

import copy
import math

import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.federated.context import randomness
from tests.experiment import FederatedRun, read_events, tiny_experiment

INFINITY = math.inf


class Oracle:
    """One full copy of the model for the server, and two for every client."""

    def __init__(self, run):
        self.context, self.config = run.context, run.context.config
        self.ownership = run.method.network.ownership
        self.clients = list(run.federation)
        self.server = copy.deepcopy(run.method.network)
        self.personal = {c.id: copy.deepcopy(self.server) for c in self.clients}
        self.h_l = {c.id: dict.fromkeys(c.tasks, INFINITY) for c in self.clients}
        self.h_p = {c.id: dict.fromkeys(c.tasks, INFINITY) for c in self.clients}
        self.replaced = []

    def blocks(self, client):
        return self.ownership.blocks_of(None, client.tasks)

    def train(self, model, client, steps, lr, round_, role, teacher=None):
        parameters = [p for name in self.blocks(client) for p in model.blocks[name].parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, fused=True)
        losses, counts = {}, {}
        with randomness(self.context, client, round_, role) as rng:
            model.train()
            for parts in client.data.minibatches(steps, self.config.train.batch_size, rng):
                optimizer.zero_grad()
                total = 0.0
                for part in parts:
                    out = model(part.task, part.batch)
                    loss = model.loss(part.task, out, part.batch)
                    total = total + part.weight * loss
                    losses[part.task] = losses.get(part.task, 0.0) + loss.item() * part.samples
                    counts[part.task] = counts.get(part.task, 0) + part.samples
                    if teacher is not None:
                        total = total + self.distill(teacher, part, out.prediction)
                total.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        return {task: losses[task] / counts[task] for task in losses}

    def distill(self, teacher, part, student):
        with torch.no_grad():
            taught = teacher(part.task, part.batch).prediction
        p, q = taught.softmax(-1), student.softmax(-1)
        kl = (p * (p / q).log()).sum(-1)
        kind = self.ownership.task(part.task).kind
        if kind == "text_generation" and part.batch.answer_mask is not None:
            kl = kl[part.batch.answer_mask[:, 1:]]
        return self.config.tap.distill_weights.of(kind) * kl.mean()

    def round(self, t, cohort):
        train = self.config.train
        lr = train.lr if t >= train.warmup_rounds else (
            train.lr_initial + (train.lr - train.lr_initial) * t / train.warmup_rounds)
        sent = []
        for client in cohort:
            local = copy.deepcopy(self.server)
            seen = self.train(local, client, train.local_steps, lr, t, "federated")
            self.h_l[client.id] |= seen
            sent.append((client, local))
            for task in seen:
                margin = self.config.tap.margins.of(self.ownership.task(task).kind)
                if self.h_l[client.id][task] + margin < self.h_p[client.id][task]:
                    for name in self.ownership.blocks_of_task(task):
                        self.personal[client.id].blocks[name].load_state_dict(
                            local.blocks[name].state_dict())
                    self.replaced.append((t, client.id, task))
            self.h_p[client.id] |= self.train(
                self.personal[client.id], client, train.local_steps, lr, t, "personal")
        self.average(sent)

    def average(self, sent):
        with torch.no_grad():
            for name, block in self.server.blocks.items():
                owners = [(c, m) for c, m in sent if name in self.blocks(c)]
                total = sum(c.samples for c, _ in owners)
                for key, parameter in block.named_parameters():
                    if owners:
                        parameter.copy_(sum(
                            c.samples / total * dict(m.blocks[name].named_parameters())[key]
                            for c, m in owners))

    def finish(self, client):
        """Stage 2: W trains P steps and teaches X."""
        post, end = self.config.post.steps, self.config.train.rounds
        for task in client.tasks:
            if self.h_p[client.id][task] == INFINITY:
                for name in self.ownership.blocks_of_task(task):
                    self.personal[client.id].blocks[name].load_state_dict(
                        self.server.blocks[name].state_dict())
        teacher, rate = copy.deepcopy(self.server), self.config.train.lr_initial
        self.train(teacher, client, post, rate, end, "post")
        self.train(self.personal[client.id], client, post, rate, end, "distill", teacher.eval())
        return teacher, self.personal[client.id]


def _same(state, module_dict, names):
    for name in names:
        expected = torch.cat([p.detach().flatten() for _, p in
                              sorted(module_dict[name].named_parameters())])
        torch.testing.assert_close(state[name], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.long), 0.2])
def test_engine_equals_the_papers_algorithm(tmp_path, dropout):
    margins = {"image_classification": 0.0, "image_generation": 0.0, "text_classification": 0.0,
               "text_generation": 0.0}
    config = tiny_experiment(tmp_path, lora={"dropout": dropout}, tap={"margins": margins},
                             methods=["fedavg+post", "tap"], train={"rounds": 5})
    run = FederatedRun(config, tmp_path / "run")
    # In float64: AdamW divides tiny gradients by tiny numbers and would magnify fp32's rounding.
    run.method.network.double()
    run.method.teacher.double()
    run.method.initial = run.server.blocks = BlockState.extract(run.method.network.blocks)
    oracle = Oracle(run)
    for t in range(config.train.rounds):
        run.round(t)
        oracle.round(t, [oracle.clients[i] for i in run.server.cohort(t)])
    _same(run.server.blocks, oracle.server.blocks, run.server.blocks)
    events = read_events(tmp_path / "run", "replacement")
    assert sorted((e["round"], e["client"], e["task"]) for e in events) == sorted(oracle.replaced)
    assert len(events) > len({(e["client"], e["task"]) for e in events})  # not only initial ones
    tap = run.personalizers[1]
    post = run.personalizers[0]
    for client in oracle.clients:
        personal, h_l, h_p = tap._load(client, config.train.rounds)
        _same(personal, oracle.personal[client.id].blocks, personal)
        for ours, theirs in ((h_l, oracle.h_l[client.id]), (h_p, oracle.h_p[client.id])):
            assert ours == pytest.approx(theirs, abs=1e-6)
    for client in oracle.clients[:2]:
        final = run.server.blocks.subset(run.method.owned(client))
        teacher, student = oracle.finish(client)
        _same(post.after_federation(client, final), teacher.blocks, final)
        _same(tap.after_federation(client, final), student.blocks, final)
