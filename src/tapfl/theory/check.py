"""The theorem checked by numbers: simulations, their left side, and the bound of each.

Sweeps start where the mean field is zero, so that only noise and drift move the model and the gap
counts for nothing; what the theorem says of R, K_r, tau and heterogeneity then shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapfl.theory.bound import constant, max_step_size
from tapfl.theory.quadratic import Quadratic, coupled, dealt, separable
from tapfl.theory.simulate import (
    Array,
    Layout,
    Measured,
    Problem,
    measure,
    objective,
    right_sides,
)
from tapfl.theory.tiny_network import tiny_network

ROUNDS, DRAWS, SEED = 60, 32, 0
# Six clients; two modalities and three tasks in uneven numbers.
PAIRS = ((0, 0), (0, 0), (0, 1), (1, 1), (1, 2), (0, 2))
# Four clients; block 0 is everybody's, the others belong to two clients and to one.
UNEVEN = ((True, True, False), (True, False, True), (True, False, False), (True, True, False))


@dataclass(frozen=True)
class Checked:
    """A simulation beside its bounds.

    ``theorem`` and ``proof`` bound ``field`` (with the theorem's f, where losses are separable) or
    ``gradient`` (that of the global objective); ``weighted`` bounds ``weighted_side``.
    """

    name: str
    side: float
    theorem: float
    proof: float
    weighted_side: float
    weighted: float

    @property
    def holds(self) -> bool:
        """Whether every left side is at most its bound."""
        return self.side <= min(self.theorem, self.proof) and self.weighted_side <= self.weighted


def check_quadratic(name: str, problem: Quadratic, local_steps: int, step_size: float,
                    start: Array | None = None, rounds: int = ROUNDS,
                    noise: float | None = None) -> Checked:
    """Check the theorem on quadratics: constants are exact, but for zeta, the largest met.

    ``noise`` is a larger sigma^2 to assume, so that several problems share one.
    """
    steps = constant(step_size, rounds)
    begin = problem.stationary if start is None else start
    draws = DRAWS if problem.noise else 1
    found = measure(problem, begin, steps, local_steps, draws, SEED)
    assumed = problem.noise if noise is None else noise
    exists = problem.curl < 1e-12  # the theorem's f
    own = problem.potential if exists else lambda s: objective(problem, s)
    return _checked(name, problem, found, found.field if exists else found.gradient,
                    _fall(own(found.states[0]), own(found.states[-1])), problem.smoothness,
                    assumed, local_steps, steps)


def check_network(name: str, local_steps: int, rounds: int = ROUNDS, draws: int = 8) -> Checked:
    """Check it on a small network; L and sigma^2 are estimates, the largest met on the way."""
    problem = tiny_network(PAIRS)
    start = np.random.default_rng(SEED).normal(size=sum(problem.layout.sizes)) * 0.7
    # A first walk finds how steep the losses are where the second one goes.
    guess = problem.smoothness(start[None])
    first = measure(problem, start, constant(max_step_size(2 * guess, local_steps), rounds),
                    local_steps, draws, SEED)
    smoothness = 1.5 * problem.smoothness(np.concatenate(first.states[::10]))
    steps = constant(max_step_size(smoothness, local_steps), rounds)
    found = measure(problem, start, steps, local_steps, draws, SEED + 1)
    met = np.concatenate(found.states[::10])
    assert problem.smoothness(met) <= smoothness
    gap = _fall(objective(problem, found.states[0]), objective(problem, found.states[-1]))
    return _checked(name, problem, found, found.gradient, gap, smoothness,
                    problem.noise(met), local_steps, steps)


def _fall(first: Array, last: Array) -> float:
    return float(first.mean() - last.mean())


def _checked(name: str, problem: Problem, found: Measured, side: float, gap: float,
             smoothness: float, noise: float, local_steps: int,
             steps: Sequence[float]) -> Checked:
    """Put left and right sides together; the weighted form has the global objective's gap."""
    def sides(gap: float) -> dict[str, float]:
        setting = found.setting(problem.layout, smoothness, noise, local_steps, gap)
        return right_sides(setting, steps)

    ours = _fall(objective(problem, found.states[0]), objective(problem, found.states[-1]))
    published = sides(gap)
    return Checked(name, side, published["theorem"], published["proof"], found.weighted,
                   sides(ours)["weighted"])


def problems() -> list[Checked]:
    """Check the theorem where a model has a way to go: it falls, and the gap counts most."""
    eta = max_step_size(1.0, 4)
    layout = dealt(8, 8, 4, 4)
    uneven = Layout(np.array(UNEVEN), (3, 3, 3))
    far = {"separable quadratics": separable(layout, 1.0, 1.0),
           "separable, without noise": separable(layout, 1.0, 0.0),
           "coupled quadratics, uneven owners": coupled(uneven, 1.0, 1.0)}
    found = [check_quadratic(name, problem, 4, eta, 3 * np.ones(sum(problem.layout.sizes)), 200)
             for name, problem in far.items()]
    return [*found, check_network("small network, constants estimated", 4)]


def sweeps() -> dict[str, list[tuple[float, Checked]]]:
    """Vary one thing at a time, at one step size that is admissible for all values."""
    layout, eta = dealt(8, 8, 4, 4), max_step_size(1.0, 4)
    small = max_step_size(1.0, 16)
    return {
        "blocks, fixed noise of a block": [
            (r, check_quadratic("", separable(dealt(8, r, 4, 4), 0.0, r / 2), 4, eta, noise=8.0))
            for r in (2, 4, 8, 16)],
        "blocks, fixed noise of a client": [
            (r, check_quadratic("", separable(dealt(8, r, 4, 4), 0.0, 4.0), 4, eta))
            for r in (2, 4, 8, 16)],
        "owners of a block": [
            (k, check_quadratic("", separable(dealt(8, 8, k, 4), 0.0, float(k)), 4, eta, noise=8.0))
            for k in (1, 2, 4, 8)],
        "local steps": [
            (tau, check_quadratic("", separable(layout, 1.0, 0.0), tau, small))
            for tau in (2, 4, 8, 16)],
        "heterogeneity": [
            (spread**2, check_quadratic("", separable(layout, spread, 0.0), 4, eta))
            for spread in (0.5, 1.0, 2.0, 4.0)],
    }
