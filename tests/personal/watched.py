"""A federated run in float64 whose personalizer is watched, for oracles that train again slowly."""

from dataclasses import dataclass

import torch

from tapfl.blocks import BlockState
from tapfl.federated.context import randomness
from tests.experiment import FederatedRun, tiny_experiment


@dataclass
class Turn:
    """What a personalizer saw of W in one turn of a client."""

    client: object
    round: int
    received: BlockState
    trained: BlockState


def watched(folder, method, **sections):
    """Return a run, its one personalizer, and the list its turns go to.

    In float64: AdamW divides tiny gradients by tiny numbers and would magnify fp32's rounding.
    """
    run = FederatedRun(tiny_experiment(folder, methods=[method], **sections), folder / "run")
    run.method.network.double()
    run.method.initial = run.server.blocks = BlockState.extract(run.method.network.blocks)
    (personalizer,) = run.personalizers
    turns, original = [], personalizer.after_training

    def after_training(client, round_, received, trained, losses):
        turns.append(Turn(client, round_, received.clone(), trained.clone()))
        original(client, round_, received, trained, losses)

    personalizer.after_training = after_training
    return run, personalizer, turns


def slow_training(run, client, start, round_, role, steps, lr, loss_of, after_step=lambda: None):
    """Train copies of blocks with an AdamW of torch's own; return them.

    ``loss_of(own, losses)`` gets the copies and a function from {parameter: value} to the loss.
    """
    network = run.method.network
    own = {(name, key): value.detach().clone().requires_grad_()
           for name in start for key, value in start.parameters(name).items()}
    optimizer = torch.optim.AdamW(list(own.values()), lr=lr, weight_decay=0.01)
    with randomness(run.context, client, round_, role) as rng:
        network.train()
        for parts in client.data.minibatches(steps, run.context.config.train.batch_size, rng):
            def task_loss(values, parts=parts):
                named = {f"blocks.{n}.{k}": v for (n, k), v in values.items()}
                return sum(part.weight * network.loss(part.task, torch.func.functional_call(
                    network, named, (part.task, part.batch)), part.batch) for part in parts)

            optimizer.zero_grad()
            loss_of(own, task_loss).backward()
            torch.nn.utils.clip_grad_norm_(list(own.values()), 1.0)
            optimizer.step()
            after_step()
    return flat(own, start)


def flat(values, like):
    """Return {(block, parameter): value} as blocks."""
    return BlockState({name: torch.cat([values[name, key].detach().flatten()
                                        for key in like.shapes[name]]) for name in like},
                      like.shapes)


def assert_same(found, expected, start=None):
    """Compare all elements; or, with a ``start``, how far apart two ends are for their way.

    The latter where steppers differ: a captured AdamW has its learning rate in fp32. A bias of
    attention keys has no gradient but rounding, of which AdamW makes whole steps.
    """
    assert set(found) == set(expected)
    for name in found:
        if start is None:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
        else:
            way = (expected[name] - start[name]).norm()
            assert (found[name] - expected[name]).norm() < 5e-3 * way
