"""The theorem checked by simulation: left sides stay below bounds, and move as it says."""

import itertools

import numpy as np
import pytest

from tapfl.theory import check
from tapfl.theory.bound import constant, max_step_size
from tapfl.theory.quadratic import Quadratic, dealt, separable
from tapfl.theory.simulate import Layout, fedavg, mean_field, measure, objective
from tapfl.theory.tiny_network import tiny_network


def rising(values):
    return all(a < b for a, b in itertools.pairwise(values))


@pytest.fixture(scope="module")
def swept():
    return check.sweeps()


@pytest.fixture(scope="module")
def network():
    return check.check_network("", 2, rounds=20, draws=4)


def test_quadratics_stay_below_the_bound(monkeypatch):
    monkeypatch.setattr(check, "check_network", lambda *_: None)
    *found, _ = check.problems()
    assert len(found) == 3
    for each in found:
        assert each.holds, each
        assert each.side > each.theorem / 100  # the model moves: a bound on nothing says nothing
        assert each.weighted_side > each.weighted / 10


def test_a_small_network_stays_below_the_bound(network):
    assert network.holds
    assert network.side > network.theorem / 200


@pytest.mark.long
def test_all_problems_that_the_documents_show():
    assert all(each.holds for each in check.problems())


def test_all_sweeps_stay_below_the_bound(swept):
    assert all(each.holds for points in swept.values() for _, each in points)


@pytest.mark.parametrize("name", ["blocks, fixed noise of a block", "local steps",
                                  "heterogeneity"])
def test_more_makes_both_sides_larger(swept, name):
    points = [each for _, each in swept[name]]
    assert rising([each.side for each in points])
    assert rising([each.theorem for each in points])


def test_more_owners_make_both_sides_smaller(swept):
    points = [each for _, each in reversed(swept["owners of a block"])]
    assert rising([each.side for each in points])
    assert rising([each.theorem for each in points])


def test_noise_averages_out_over_owners(swept):
    sides = {k: each.side for k, each in swept["owners of a block"]}
    assert sides[1] / sides[8] == pytest.approx(8, rel=0.25)


def test_blocks_alone_cost_nothing_where_a_clients_noise_is_fixed(swept):
    """The theorem's R grows although the noise of a client's blocks adds up to the client's."""
    points = [each for _, each in swept["blocks, fixed noise of a client"]]
    assert points[-1].theorem > 7 * points[0].theorem
    assert points[-1].side < 1.25 * points[0].side


def test_disagreement_about_the_target_alone_costs_nothing():
    """With equal curvatures drifts cancel in the mean; the theorem's Z counts them."""
    layout = dealt(4, 4, 2, 3)
    problem = separable(layout, 1.0, 0.0)
    same = Quadratic(layout, np.stack([np.diag(layout.mask(i) * 0.7) for i in range(4)]),
                     problem.centres)
    found = measure(same, same.stationary, constant(max_step_size(0.7, 8), 20), 8, 1, 0)
    assert found.field < 1e-25
    assert sum(found.heterogeneity) > 1


def test_one_round_by_hand():
    """Two clients share block 0; the second alone has block 1."""
    layout = Layout(np.array([[True, False], [True, True]]), (1, 1))
    hessians = np.array([np.diag([1.0, 0.0]), np.diag([0.5, 0.25])])
    problem = Quadratic(layout, hessians, np.array([[1.0, 0.0], [-1.0, 2.0]]))
    first, last = fedavg(problem, np.zeros(2), [0.1], 2, 1, np.random.default_rng(0))
    assert first.tolist() == [[0.0, 0.0]]
    # client 0 goes to 1 - 0.9^2 = 0.19, client 1 to -(1 - 0.95^2) = -0.0975
    assert last[0] == pytest.approx([(0.19 - 0.0975) / 2, 2 * (1 - 0.975**2)])
    field, uneven = mean_field(problem, first)
    assert field[0] == pytest.approx([(-1 + 0.5) / 2, -0.5])
    assert uneven[0] == pytest.approx([0.75**2, 0])


def test_noise_has_the_variance_that_is_said():
    problem = separable(dealt(4, 4, 2, 3), 1.0, 2.0)
    states = np.zeros((20_000, 12))
    rng = np.random.default_rng(0)
    noise = problem.noisy_gradient(0, states, rng) - problem.gradient(0, states)
    assert (noise**2).sum(axis=1).mean() == pytest.approx(2, rel=0.03)
    assert not noise[:, ~problem.layout.mask(0)].any()


def test_the_networks_minibatches_are_unbiased_and_their_variance_is_known():
    problem = tiny_network(check.PAIRS)
    state = np.random.default_rng(1).normal(size=(1, sum(problem.layout.sizes)))
    states = np.repeat(state, 4000, axis=0)
    most = 0.0
    for client in range(problem.layout.clients):
        drawn = problem.noisy_gradient(client, states, np.random.default_rng(client))
        exact = problem.gradient(client, state)[0]
        assert (abs(drawn.mean(axis=0) - exact) <= 5 * drawn.std(axis=0) / 4000**0.5).all()
        assert not exact[~problem.layout.mask(client)].any()
        most = max(most, ((drawn - exact) ** 2).sum(axis=1).mean())
    assert problem.noise(state) == pytest.approx(most, rel=0.1)


def test_gradients_are_those_of_the_losses():
    for problem in (tiny_network(check.PAIRS), separable(dealt(4, 4, 2, 3), 1.0, 0.0)):
        size = sum(problem.layout.sizes)
        state, way = np.random.default_rng(2).normal(size=(2, 1, size))
        slope = (objective(problem, state + 1e-5 * way) - objective(problem, state - 1e-5 * way))
        field, _ = mean_field(problem, state)
        shares = (problem.layout.owners / problem.layout.clients)[problem.layout.block_of]
        assert float((shares * field * way).sum()) == pytest.approx(float(slope[0]) / 2e-5)
