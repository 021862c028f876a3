"""A small network with blocks as in the paper, whose constants have to be estimated.

A client has one modality and one task. Its inputs go through the modality's encoder, a shared
layer and the task's decoder: its loss couples three blocks that different numbers of clients own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, hessian, vmap

from tapfl.theory.simulate import Array, Layout

WIDTH = 3  # of inputs and hidden layers
BATCH = 4  # samples of a minibatch


@dataclass(frozen=True)
class TinyNetwork:
    """Regression with tanh layers; client i has the modality and the task ``pairs[i]``."""

    layout: Layout
    pairs: tuple[tuple[int, int], ...]
    inputs: Tensor  # (clients, samples, WIDTH)
    targets: Tensor  # (clients, samples)

    def loss(self, client: int, states: Array) -> Array:
        """Return the client's mean loss at every state."""
        found = vmap(lambda w: self._loss(client, w, self._all()))(torch.from_numpy(states))
        return np.asarray(found.numpy())

    def gradient(self, client: int, states: Array) -> Array:
        """Return the gradient of the mean loss at every state."""
        found = vmap(grad(lambda w: self._loss(client, w, self._all())))(torch.from_numpy(states))
        return np.asarray(found.numpy())

    def noisy_gradient(self, client: int, states: Array, rng: np.random.Generator) -> Array:
        """Return the gradient of a minibatch, drawn anew for every state."""
        drawn = rng.integers(self.inputs.shape[1], size=(len(states), BATCH))
        found = vmap(grad(lambda w, rows: self._loss(client, w, rows)))(
            torch.from_numpy(states), torch.from_numpy(drawn))
        return np.asarray(found.numpy())

    def noise(self, states: Array) -> float:
        """Return sigma^2: the largest variance of a client's minibatch gradient at some states."""
        most = 0.0
        one = grad(lambda w, row, client: self._loss(client, w, row[None]))
        for client in range(self.layout.clients):
            each = vmap(vmap(one, in_dims=(None, 0, None)), in_dims=(0, None, None))(
                torch.from_numpy(states), self._all(), client)
            variance = (each - each.mean(1, keepdim=True)).square().sum(-1).mean(1) / BATCH
            most = max(most, float(variance.max()))
        return most

    def smoothness(self, states: Array) -> float:
        """Return the largest curvature of a client's loss at some states: L is at least that."""
        most = 0.0
        for client in range(self.layout.clients):
            found = vmap(hessian(lambda w, client=client: self._loss(client, w, self._all())))(
                torch.from_numpy(states))
            most = max(most, float(torch.linalg.eigvalsh(found).abs().max()))
        return most

    def _all(self) -> Tensor:
        return torch.arange(self.inputs.shape[1])

    def _loss(self, client: int, parameters: Tensor, rows: Tensor) -> Tensor:
        modality, task = self.pairs[client]
        parts = torch.split(parameters, list(self.layout.sizes))
        modalities = 1 + max(m for m, _ in self.pairs)
        encoder, shared = parts[1 + modality].view(WIDTH, WIDTH), parts[0].view(WIDTH, WIDTH)
        hidden = torch.tanh(torch.tanh(self.inputs[client][rows] @ encoder) @ shared)
        return (hidden @ parts[1 + modalities + task] - self.targets[client][rows]).square().mean()


def tiny_network(pairs: tuple[tuple[int, int], ...], samples: int = 24,
                 seed: int = 0) -> TinyNetwork:
    """Return a network for clients with these modalities and tasks: shared, encoders, decoders."""
    rng = np.random.default_rng(seed)
    modalities, tasks = (1 + max(pair[i] for pair in pairs) for i in (0, 1))
    owned = np.zeros((len(pairs), 1 + modalities + tasks), dtype=bool)
    owned[:, 0] = True
    for client, (modality, task) in enumerate(pairs):
        owned[client, [1 + modality, 1 + modalities + task]] = True
    sizes = (WIDTH**2,) * (1 + modalities) + (WIDTH,) * tasks
    inputs = rng.normal(size=(len(pairs), samples, WIDTH))
    # A task's targets have something in common, and something of each client's own.
    common, own = rng.normal(size=(tasks, WIDTH)), rng.normal(size=(len(pairs), WIDTH))
    targets = np.stack([np.tanh(inputs[i] @ (common[task] + 0.5 * own[i]))
                        for i, (_, task) in enumerate(pairs)])
    return TinyNetwork(Layout(owned, sizes), pairs, torch.from_numpy(inputs),
                       torch.from_numpy(targets))
