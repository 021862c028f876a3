"""Where the theorem's proof needs more than it says: the examples of docs/theory.md."""

import numpy as np
import pytest

from tapfl.theory.bound import Block, Setting, bound, max_step_size
from tapfl.theory.check import UNEVEN, check_quadratic
from tapfl.theory.quadratic import Quadratic, coupled, separable
from tapfl.theory.simulate import Layout, mean_field

COUPLED = np.array([[1.0, 0.5], [0.5, 1.0]])


def example(owned):
    """Client 0 couples blocks a and b; others pull at what they own of them."""
    layout = Layout(np.array(owned), (1, 1))
    rest = [np.diag(row.astype(float)) for row in layout.owned[1:]]
    return Quadratic(layout, np.stack([COUPLED, *rest]), np.zeros((layout.clients, 2)))


def around_the_square(problem):
    """Integrate F along the sides of the unit square; for a gradient the sum is 0."""
    corners = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])
    middles, ways = (corners[1:] + corners[:-1]) / 2, np.diff(corners, axis=0)
    field, _ = mean_field(problem, middles)  # F is linear: its middle is its mean
    return float((field * ways).sum())


def test_the_mean_of_owners_gradients_need_not_be_a_gradient():
    """Block a has two owners and b one: F_a has half of the coupling, F_b all of it."""
    problem = example([[True, True], [True, False]])
    assert problem.jacobian.tolist() == [[1.0, 0.25], [0.5, 1.0]]
    assert problem.curl == 0.25
    assert around_the_square(problem) == pytest.approx(0.25)


def test_it_is_one_where_coupled_blocks_have_as_many_owners():
    problem = example([[True, True], [True, True]])
    assert problem.curl == 0
    assert around_the_square(problem) == pytest.approx(0)
    state, way = np.array([[[1.0, 2.0]], [[0.3, -0.7]]])  # f has the coupling, too
    slope = problem.potential(state + way) - problem.potential(state - way)
    assert (mean_field(problem, state)[0] * way).sum() == pytest.approx(slope[0] / 2)


def test_separable_losses_always_have_an_f():
    problem = separable(Layout(np.array(UNEVEN), (2, 2, 2)), 1.0, 0.0)
    assert problem.curl == 0
    state, way = np.random.default_rng(0).normal(size=(2, 1, 6))
    slope = problem.potential(state + way) - problem.potential(state - way)
    assert (mean_field(problem, state)[0] * way).sum() == pytest.approx(slope[0] / 2)


def test_a_blocks_own_quantities_do_not_bound_what_moves_its_gradient():
    """At W = (1, -0.5) block b is at rest, but a's local steps change b's gradient.

    The proof bounds that change by 2 L^2 eta^2 tau^3 (||F_b||^2 + zeta_b^2 + sigma^2 / 3) = 0.
    """
    problem = example([[True, True]])
    start, eta, tau = np.array([[1.0, -0.5]]), max_step_size(1.5, 4), 4
    field, uneven = mean_field(problem, start)
    assert field[0, 1] == 0
    assert uneven[0, 1] == 0
    own, change = start.copy(), 0.0
    for _ in range(tau):
        moved = problem.gradient(0, own)[0, 1] - problem.gradient(0, start)[0, 1]
        change += moved**2
        own = own - eta * problem.gradient(0, own)
    assert change > 1e-5


def test_summed_over_blocks_it_fails_where_owners_are_uneven():
    """Many own block a, one owns b. A drift of a counts 1/K_a, but moves b's gradient in full."""
    many = 20
    problem = example([[True, True], *[[True, False]] * (many - 1)])
    layout, smooth = problem.layout, problem.smoothness
    start = np.zeros((1, 2))
    moved = start + np.array([[0.1, 0.0]])  # client 0 alone has drifted, in block a
    change = (problem.gradient(0, moved) - problem.gradient(0, start))[0] ** 2
    drift = ((moved - start)[0]) ** 2
    assert (change / layout.owners).sum() > smooth**2 * (drift / layout.owners).sum()
    shares = layout.owners / layout.clients  # with these weights it holds
    assert (shares * change / layout.owners).sum() <= (
        smooth**2 * (shares * drift / layout.owners).sum())


@pytest.mark.parametrize("seed", range(5))
def test_the_theorem_holds_for_the_global_objective_all_the_same(seed):
    problem = coupled(Layout(np.array(UNEVEN), (3, 3, 3)), 1.0, 1.0, seed=seed)
    assert problem.curl > 0.01
    assert problem.smoothness == pytest.approx(1)
    start = np.random.default_rng(seed).normal(size=9) * 3
    found = check_quadratic("", problem, 4, max_step_size(1.0, 4), start, 40)
    assert found.holds
    assert found.side < found.weighted_side  # what the weighted form bounds is more


def test_with_one_block_the_theorem_is_wrong_for_very_many_clients():
    """One parameter w, from 0; every client's gradient is max(w, 0) - slope, with noise 1 or -1.

    Where noise takes a client above 0 its gradient grows, below 0 it stays: on average clients go
    down, and the loss grows. The noise of the mean is what little the theorem has against it.
    """
    clients, tau, slope = 12_000, 2, 1 / 768
    eta = max_step_size(1.0, tau)
    ends = [0.0]
    for _ in range(tau):
        ends = [w - eta * (max(w, 0.0) - slope + noise) for w in ends for noise in (1, -1)]
    mean = sum(ends) / len(ends)
    assert mean < 0  # where the loss is -slope w
    # The loss is convex, so its mean is at least the loss of the mean: the gap is at most this.
    setting = Setting((Block("w", clients, 0.0),), clients, 1.0, 1.0, tau, gap=slope * mean)
    assert bound(setting, [eta], "theorem").total < slope**2
    assert bound(setting, [eta], "proof").total > slope**2
    weighted = bound(setting, [eta], "weighted")
    assert weighted.total > slope**2 > weighted.total - weighted.terms["drift"]
