"""Per-FedAvg (Fallah et al., 2020): learn a W that one step of a client's own adapts well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapfl.config import warm_up
from tapfl.data.federation import Client
from tapfl.federated.context import Losses
from tapfl.federated.method import FederatedMethod
from tapfl.federated.stepper import Stepper, parameters_of
from tapfl.federated.still import Still
from tapfl.federated.training import Minibatch, local_training, task_gradients


class PerFedAvg(FederatedMethod):
    """The meta-gradient g at the adapted point, applied at the point before adapting.

    First-order (``fo``) takes g itself; Hessian-free (``hf``) corrects it by a finite difference
    of gradients along g.
    """

    name: ClassVar[str] = "perfedavg"
    shares_final_model: ClassVar[bool] = False  # each client adapts it

    def train(self, client: Client, round_: int) -> Losses:
        """Take tau meta-steps, each on independent minibatches."""
        train, inner_lr = self.context.config.train, self._inner_lr(round_)
        slope = self._slope.parameters(self.owned(client))
        return local_training(
            self.context, self.network, client, self.owned(client), steps=train.local_steps,
            lr=train.rate(round_), round_=round_, role="federated", batches_per_step=3,
            step=lambda stepper, stream: self._meta_step(list(islice(stream, 3)), stepper, slope,
                                                         inner_lr))

    def _meta_step(self, batches: Sequence[Minibatch], stepper: Stepper, slope: list[Tensor],
                   inner_lr: float) -> tuple[Minibatch, dict[str, Tensor]]:
        parameters, seen = stepper.parameters, dict[str, Tensor]()

        def gradient(minibatch: Minibatch) -> list[Tensor]:
            losses = self._find_slope(stepper, minibatch, slope)
            if minibatch is batches[1]:
                # What the adapted model loses on data it has not seen.
                seen.update({task: loss.clone() for task, loss in losses.items()})
            return slope

        settings = self.context.config.perfedavg
        delta = settings.delta if settings.variant == "hf" else None
        meta = meta_gradient(parameters, gradient, batches, inner_lr, delta)
        used = self._used(batches[1:] if delta else batches[1:2])
        for parameter, value in zip(parameters, meta, strict=True):
            # A gradient of zero is none: AdamW's moments and weight decay would move the block.
            parameter.grad = value if parameter in used else None
        stepper.move(parameters)
        return batches[1], seen

    def _used(self, minibatches: Sequence[Minibatch]) -> frozenset[nn.Parameter]:
        """Return the parameters that the tasks in some minibatches use."""
        tasks = frozenset(part.task for minibatch in minibatches for part in minibatch)
        if tasks not in self._parameters_of_tasks:
            blocks = {block for task in tasks for block in self.blocks_of_task(task)}
            self._parameters_of_tasks[tasks] = frozenset(parameters_of(self.network, blocks))
        return self._parameters_of_tasks[tasks]

    @functools.cached_property
    def _parameters_of_tasks(self) -> dict[frozenset[str], frozenset[nn.Parameter]]:
        return {}

    def _find_slope(self, stepper: Stepper, minibatch: Minibatch,
                    slope: list[Tensor]) -> dict[str, Tensor]:
        """Write the gradient of a minibatch to ``slope``; return the tasks' losses."""
        def body(parts: Minibatch) -> dict[str, Tensor]:
            losses, found = task_gradients(self.network, stepper, parts)
            torch._foreach_copy_(slope, found)
            return losses

        return stepper.run("slope", body, minibatch)

    @functools.cached_property
    def _slope(self) -> Still:
        """Room for the gradient.

        A graph holds the gradient of one minibatch, not a whole step: a step has two or three
        minibatches, and there are far more kinds of pairs than of minibatches.
        """
        return Still(self.network)

    def adapt(self, client: Client) -> None:
        """Take inner steps on the client's training data, never on test data."""
        config, slope = self.context.config, self._slope.parameters(self.owned(client))
        inner_lr = self._inner_lr(config.train.rounds)

        def inner_step(stepper: Stepper, stream: Iterator[Minibatch],
                       ) -> tuple[Minibatch, dict[str, Tensor]]:
            minibatch = next(stream)
            losses = self._find_slope(stepper, minibatch, slope)
            _move(stepper.parameters, slope, -inner_lr)
            return minibatch, losses

        local_training(self.context, self.network, client, self.owned(client),
                       steps=config.perfedavg.adapt_steps, lr=inner_lr,
                       round_=config.train.rounds, role="adapt", step=inner_step)

    def _inner_lr(self, round_: int) -> float:
        config = self.context.config
        return warm_up(config.perfedavg.inner_lr_initial, config.perfedavg.inner_lr,
                       config.train.warmup_rounds, round_)


def meta_gradient(
    parameters: list[nn.Parameter], gradient: Callable[[Minibatch], list[Tensor]],
    batches: Sequence[Minibatch], inner_lr: float, delta: float | None,
) -> list[Tensor]:
    """Return the gradient of f(w - a grad f(w)) at w, first-order or (with delta) Hessian-free.

    ``gradient`` may write to the same place each time. The parameters come back as they were.
    """
    before = _copies([*parameters])
    _move(parameters, gradient(batches[0]), -inner_lr)  # w~ = w - a grad f(w; D)
    meta = gradient(batches[1])  # g = grad f(w~; D')
    if delta is not None:
        meta = _copies(meta)
        # The same dropout in both, or their difference would be noise divided by delta.
        rng_state = _rng_state()
        _restore(parameters, before)
        _move(parameters, meta, delta)
        above = _copies(gradient(batches[2]))
        _set_rng_state(rng_state)
        _restore(parameters, before)
        _move(parameters, meta, -delta)
        below = gradient(batches[2])
        meta = [g - inner_lr * (up - down) / (2 * delta)
                for g, up, down in zip(meta, above, below, strict=True)]
    _restore(parameters, before)
    return meta


@torch.no_grad()
def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies, made by a few kernels for all of them."""
    found = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(found, tensors)
    return found


def _rng_state() -> list[Tensor]:
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpu]


def _set_rng_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


@torch.no_grad()
def _move(parameters: list[nn.Parameter], direction: list[Tensor], rate: float) -> None:
    torch._foreach_add_([*parameters], direction, alpha=rate)


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    torch._foreach_copy_([*parameters], values)
