"""Quadratic losses with known constants: the theorem can be checked to the last digit.

g_i(W) = 1/2 (W - c_i)^T H_i (W - c_i) on the client's own blocks. Where every H_i is
block-diagonal, the loss is a sum over blocks and the theorem's f exists; elsewhere it need not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapfl.theory.simulate import Array, Layout


@dataclass(frozen=True)
class Quadratic:
    """A federation of quadratic losses.

    Noise is Gaussian and the same for every parameter; ``noise`` is sigma^2, the whole of it for
    the client with most parameters.
    """

    layout: Layout
    hessians: Array  # (clients, parameters, parameters)
    centres: Array  # (clients, parameters)
    noise: float = 0.0

    def loss(self, client: int, states: Array) -> Array:
        """Return g_i at every state."""
        away = states - self.centres[client]
        return np.asarray(((away @ self.hessians[client]) * away).sum(axis=-1) / 2)

    def gradient(self, client: int, states: Array) -> Array:
        """Return the gradient of g_i at every state."""
        return np.asarray((states - self.centres[client]) @ self.hessians[client])

    def noisy_gradient(self, client: int, states: Array, rng: np.random.Generator) -> Array:
        """Return the gradient with noise on the client's own parameters."""
        mask = self.layout.mask(client)
        scale = np.sqrt(self.noise / (self.layout.owned @ self.layout.sizes).max())
        return np.asarray(self.gradient(client, states)
                          + rng.normal(size=states.shape) * scale * mask)

    @property
    def smoothness(self) -> float:
        """L, exactly: the largest curvature, up or down, of any client's loss."""
        return float(np.abs(np.linalg.eigvalsh(self.hessians)).max())

    @property
    def jacobian(self) -> Array:
        """The derivative of F, the mean of each block's owners' gradients."""
        owners = self.layout.owners[self.layout.block_of]
        return np.asarray(self.hessians.sum(axis=0) / owners[:, None])

    @property
    def curl(self) -> float:
        """How far F is from being the gradient of any f: the asymmetry of its derivative."""
        return float(np.abs(self.jacobian - self.jacobian.T).max())

    def potential(self, states: Array) -> Array:
        """Return the theorem's f, whose gradient is F, but for a constant; it needs curl 0."""
        pulls = np.einsum("kij,kj->i", self.hessians, self.centres)
        owners = self.layout.owners[self.layout.block_of]
        return np.asarray(((states @ self.jacobian / 2 - pulls / owners) * states).sum(axis=-1))

    @property
    def stationary(self) -> Array:
        """Where F is zero."""
        pulls = np.einsum("kij,kj->i", self.hessians, self.centres)
        found = np.linalg.lstsq(self.hessians.sum(axis=0), pulls, rcond=None)[0]
        return np.asarray(found)


def dealt(clients: int, blocks: int, owners: int, size: int) -> Layout:
    """Return a layout in which every block has as many owners, dealt to the clients in turn."""
    owned = np.zeros((clients, blocks), dtype=bool)
    for r in range(blocks):
        owned[(r * owners + np.arange(owners)) % clients, r] = True
    return Layout(owned, (size,) * blocks)


def separable(layout: Layout, spread: float, noise: float, seed: int = 0) -> Quadratic:
    """Return block-separable losses whose largest curvature is 1.

    Owners of a block differ in where they pull it (``spread``) and in how strongly: were their
    curvatures equal, their drifts would cancel in the mean.
    """
    rng = np.random.default_rng(seed)
    count = layout.clients
    curvatures = rng.uniform(0.2, 1.0, size=(count, sum(layout.sizes)))
    curvatures[0, layout.mask(0)] = 1.0
    masks = np.stack([layout.mask(i) for i in range(count)])
    hessians = np.stack([np.diag(c * m) for c, m in zip(curvatures, masks, strict=True)])
    return Quadratic(layout, hessians, spread * rng.normal(size=masks.shape) * masks, noise)


def coupled(layout: Layout, spread: float, noise: float, strength: float = 1.0,
            seed: int = 0) -> Quadratic:
    """Return losses whose Hessians also have entries between blocks; the largest curvature is 1."""
    rng = np.random.default_rng(seed)
    count, size = layout.clients, sum(layout.sizes)
    masks = np.stack([layout.mask(i) for i in range(count)])
    hessians = np.zeros((count, size, size))
    for i, mask in enumerate(masks):
        factor = rng.normal(size=(size, size)) * mask * mask[:, None]
        full = factor @ factor.T / size
        same = layout.block_of[:, None] == layout.block_of[None]
        within = np.where(same, full, 0.0)
        hessians[i] = within + strength * (full - within)
    hessians /= max(np.linalg.eigvalsh(h)[-1] for h in hessians)
    return Quadratic(layout, hessians, spread * rng.normal(size=masks.shape) * masks, noise)
