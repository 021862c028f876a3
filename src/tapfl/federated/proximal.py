"""The proximal term: a loss that pulls blocks towards fixed ones, as FedProx and Ditto have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tapfl.blocks import BlockState
from tapfl.data.batches import TaskBatch
from tapfl.federated.stepper import parameters_of
from tapfl.federated.still import Still
from tapfl.federated.training import task_objective
from tapfl.model.network import Network


class Proximal:
    """The tasks' losses plus ``weight``/2 times the squared distance from an anchor.

    Steps on it can be captured: the anchor stays where it is, and ``towards`` copies into it. A
    captured step belongs to the blocks that train, so these have to be the anchor's.
    """

    graph_safe = True

    def __init__(self, network: Network, weight: float) -> None:
        self.weight, self.anchor = weight, Still(network)
        self._blocks: tuple[str, ...] = ()

    def towards(self, blocks: BlockState) -> None:
        """Set the anchor: the blocks that are going to train, as they pull."""
        self.anchor.copy(blocks)
        self._blocks = tuple(blocks)

    def __call__(self, network: Network,
                 parts: Sequence[TaskBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss that is minimised, and the tasks' own losses."""
        loss, losses = task_objective(network, parts)
        if not self.weight:  # no gradient, where one of zero would let weight decay act
            return loss, losses
        distance = squared_distance(parameters_of(network, self._blocks),
                                    self.anchor.parameters(self._blocks))
        return loss + self.weight / 2 * _part(parts) * distance, losses


def _part(parts: Sequence[TaskBatch]) -> float | Tensor:
    """Return how much of its minibatch this is: where it goes in pieces, each has its part."""
    shares = []
    for part in parts:
        whole, real = part.batch.whole, part.batch.real
        counts = len(part.batch) if real is None else real.sum()
        shares.append(part.weight if whole is None else part.weight * counts / whole[0])
    return sum(shares)


def squared_distance(values: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the squared Euclidean distance; its gradient is that of ``values`` alone."""
    found: Tensor = _SquaredDistance.apply(tuple(others), *values)  # type: ignore[no-untyped-call]
    return found


class _SquaredDistance(torch.autograd.Function):
    """Forward and backward with a few kernels for all tensors together."""

    @staticmethod
    def forward(ctx: Any, others: tuple[Tensor, ...], *values: Tensor) -> Tensor:
        apart = torch._foreach_sub(values, others)
        ctx.save_for_backward(*apart)
        return torch.stack(torch._foreach_norm(apart)).square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *torch._foreach_mul(ctx.saved_tensors, 2 * gradient)
