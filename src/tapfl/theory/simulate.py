"""Block-wise FedAvg with plain SGD and full participation, as in the theorem, and its left side.

Several draws of the noise run side by side: a state has the shape (draws, parameters). Their mean
stands for the expectation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tapfl.theory.bound import Block, Setting, bound, time_average

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """Which client owns which block, and which parameters a block has."""

    owned: NDArray[np.bool_]  # (clients, blocks)
    sizes: tuple[int, ...]  # parameters of every block

    @property
    def clients(self) -> int:
        """K."""
        return len(self.owned)

    @property
    def owners(self) -> NDArray[np.int64]:
        """K_r of every block."""
        return np.asarray(self.owned.sum(axis=0))

    @property
    def block_of(self) -> NDArray[np.int64]:
        """The block of every parameter."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def mask(self, client: int) -> NDArray[np.bool_]:
        """Return which parameters a client owns."""
        return np.asarray(self.owned[client][self.block_of])

    def per_block(self, squares: Array) -> Array:
        """Sum squares of parameters (..., parameters) by block."""
        return np.asarray(np.add.reduceat(squares, np.cumsum([0, *self.sizes[:-1]]), axis=-1))


class Problem(Protocol):
    """Clients' losses. Gradients are those of g_i: zero outside of the client's blocks."""

    @property
    def layout(self) -> Layout:
        """Who owns what."""

    def loss(self, client: int, states: Array) -> Array:
        """Return g_i at every state."""

    def gradient(self, client: int, states: Array) -> Array:
        """Return the gradient of g_i at every state."""

    def noisy_gradient(self, client: int, states: Array, rng: np.random.Generator) -> Array:
        """Return an unbiased estimate of it, as a minibatch gives one."""


def mean_field(problem: Problem, states: Array) -> tuple[Array, Array]:
    """Return F, on each block the mean of its owners' gradients, and zeta_r^2 at every state."""
    layout = problem.layout
    owners = layout.owners[layout.block_of]
    gradients = np.stack([problem.gradient(i, states) for i in range(layout.clients)])
    field = gradients.sum(axis=0) / owners
    apart = sum((gradients[i] - field) ** 2 * layout.mask(i) for i in range(layout.clients))
    return field, layout.per_block(np.asarray(apart) / owners)


def objective(problem: Problem, states: Array) -> Array:
    """Return the paper's global objective, the mean of all g_i, at every state."""
    count = problem.layout.clients
    return np.asarray(sum(problem.loss(i, states) for i in range(count))) / count


def fedavg(problem: Problem, start: Array, step_sizes: Sequence[float], local_steps: int,
           draws: int, rng: np.random.Generator) -> Iterator[Array]:
    """Yield W_0, W_1, ..., W_T for every draw."""
    layout = problem.layout
    owners = layout.owners[layout.block_of]
    states = np.tile(start, (draws, 1))
    yield states
    for eta in step_sizes:
        moved = np.zeros_like(states)
        for client in range(layout.clients):
            own = states.copy()
            for _ in range(local_steps):
                own -= eta * problem.noisy_gradient(client, own, rng)
            moved += own - states
        states = states + moved / owners
        yield states


@dataclass(frozen=True)
class Measured:
    """What a simulation gave, weighted by step size over rounds, a mean over draws.

    ``field`` is the left side with F, the mean of a block's owners' gradients, for grad f;
    ``weighted`` weighs blocks by their share of owners; ``gradient`` takes the gradient of the
    global objective. ``heterogeneity`` is the largest zeta_r^2 that was met.
    """

    field: float
    weighted: float
    gradient: float
    heterogeneity: tuple[float, ...]
    states: tuple[Array, ...]

    def setting(self, layout: Layout, smoothness: float, noise: float, local_steps: int,
                gap: float) -> Setting:
        """Return what the bound of this simulation depends on."""
        blocks = tuple(Block(f"block {r}", int(k), float(z)) for r, (k, z) in enumerate(
            zip(layout.owners, self.heterogeneity, strict=True)))
        return Setting(blocks, layout.clients, smoothness, noise, local_steps, gap)


def measure(problem: Problem, start: Array, step_sizes: Sequence[float], local_steps: int,
            draws: int, seed: int) -> Measured:
    """Run FedAvg and measure the theorem's left side."""
    layout = problem.layout
    shares = layout.owners / layout.clients
    states = tuple(fedavg(problem, start, step_sizes, local_steps, draws,
                          np.random.default_rng(seed)))
    found: list[Array] = []
    apart = np.zeros(len(layout.sizes))
    for each in states[:-1]:
        field, uneven = mean_field(problem, each)
        found.append(layout.per_block(field**2).mean(axis=0))
        apart = np.maximum(apart, uneven.max(axis=0))
    field_side, weighted, gradient = (
        time_average([float((f * p).sum()) for f in found], step_sizes)
        for p in (np.ones_like(shares), shares, shares**2))
    return Measured(field_side, weighted, gradient, tuple(apart.tolist()), states)


def right_sides(setting: Setting, step_sizes: Sequence[float]) -> dict[str, float]:
    """Return the right side in every form."""
    return {form: bound(setting, step_sizes, form).total
            for form in ("theorem", "proof", "weighted")}
