"""The weighted form against exact moments: nothing is sampled, so even a tiny violation would show.

With quadratic losses a round of FedAvg is linear in W_t, so mean and covariance of W_t follow from
those before. Losses couple blocks and may be concave, owners are uneven, noise is correlated
between blocks, and step sizes are the largest allowed. Of zeta_r^2 each round has its own: that is
all that the derivation needs, and less than the largest.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from tapfl.theory.bound import Block, Setting, bound, max_step_size
from tapfl.theory.check import UNEVEN
from tapfl.theory.quadratic import coupled
from tapfl.theory.simulate import Layout, measure

CASES = 500


@dataclass(frozen=True)
class Case:
    """Clients with the gradients H_i W + pull_i and noise of covariance S_i; L is 1."""

    layout: Layout
    hessians: np.ndarray  # (clients, parameters, parameters)
    pulls: np.ndarray  # (clients, parameters)
    noise: np.ndarray  # (clients, parameters, parameters)
    start: np.ndarray
    tau: int
    rounds: int
    weights: np.ndarray  # of the clients; they sum to 1

    @property
    def steps(self):
        return [max_step_size(1.0, self.tau)] * self.rounds

    @property
    def sigma2(self):
        return max(np.trace(s) for s in self.noise)

    @property
    def p(self):
        """The share of every block: the weight of its owners."""
        return self.weights @ self.layout.owned

    @property
    def parts(self):
        """A client's part in the mean of each of its parameters."""
        masks = np.stack([self.layout.mask(i) for i in range(self.layout.clients)])
        return self.weights[:, None] * masks / self.p[self.layout.block_of]

    def squares(self, linear, mean, cov):
        """Return E v^2 by parameter for v = linear (W, 1), a mean and a covariance of W."""
        a, b = linear
        return (a @ mean + b) ** 2 + np.einsum("...ij,jk,...ik->...i", a, cov, a)


def draw(rng, even=True):
    """Draw a case."""
    clients, sizes = int(rng.integers(1, 7)), rng.integers(1, 3, size=int(rng.integers(1, 5)))
    owned = rng.random((clients, len(sizes))) < rng.choice([0.2, 0.5, 0.8, 1.0])
    owned[rng.integers(clients, size=len(sizes)), np.arange(len(sizes))] = True
    layout = Layout(owned[owned.any(axis=1)], tuple(int(s) for s in sizes))
    count, size = layout.clients, int(sizes.sum())
    hessians, noise = np.zeros((2, count, size, size))
    pulls = np.zeros((count, size))
    spread, kind = rng.choice([0.1, 1.0, 10.0]), rng.integers(4)
    for i in range(count):
        mine = np.flatnonzero(layout.mask(i))
        basis = np.linalg.qr(rng.normal(size=(len(mine), len(mine))))[0]
        values = (rng.uniform(0, 1, len(mine)), rng.uniform(-1, 1, len(mine)), np.ones(len(mine)),
                  rng.choice([-1.0, 0.0, 1.0], len(mine)))[kind]
        hessians[i][np.ix_(mine, mine)] = basis * values @ basis.T
        pulls[i, mine] = spread * rng.normal(size=len(mine))
        way = rng.normal(size=len(mine))
        noise[i][np.ix_(mine, mine)] = np.outer(way, way) / (way @ way)
    hessians /= np.abs(np.linalg.eigvalsh(hessians)).max() or 1.0
    start = rng.normal(size=size) * rng.choice([0.1, 1.0, 10.0])
    if rng.random() < 0.5:  # start near where F is zero: noise and drift count for more
        rest = np.linalg.lstsq(hessians.sum(axis=0), -pulls.sum(axis=0), rcond=None)[0]
        start = rest + 0.01 * start
    weights = np.ones(count) if even else rng.exponential(size=count) ** 2
    return Case(layout, hessians, pulls, noise * rng.choice([0.0, 1e-3, 1.0, 30.0]), start,
                int(rng.integers(1, 9)), int(rng.choice([1, 2, 5, 10])), weights / weights.sum())


@dataclass(frozen=True)
class Sides:
    """Left sides, what the right side needs, and each step's two sides in every round."""

    weighted: float
    gradient: float  # that of the mean of all losses
    zeta2: np.ndarray
    gap: float
    derivation: list[tuple[str, float, float]]


def follow(case):
    """Follow mean and covariance of W_t."""
    block, p = case.layout.block_of, case.p[case.layout.block_of]
    field = (np.einsum("ki,kij->ij", case.parts, case.hessians),
             (case.parts * case.pulls).sum(axis=0))
    apart = (case.hessians - field[0], case.pulls - field[1])
    mean, cov = case.start, np.zeros((len(p), len(p)))
    weighted, gradient, zeta2, steps = [], [], [], []
    for eta in case.steps:
        squares = case.squares(field, mean, cov)
        weighted.append(p @ squares)
        gradient.append(p**2 @ squares)
        zeta2.append(np.bincount(block, (case.parts * case.squares(apart, mean, cov)).sum(axis=0)))
        move, noise, drifts, changes = _round(case, eta, mean, cov)
        delta = p @ (case.squares(move, mean, cov) + np.diag(noise))
        inner = p @ ((field[0] @ mean + field[1]) * (move[0] @ mean + move[1])
                     + np.diag(field[0] @ cov @ move[0].T))
        rest = weighted[-1] + case.p @ zeta2[-1]
        steps += [("2", change, drift) for change, drift in zip(changes, drifts, strict=True)]
        steps += [
            ("inner product", inner, -eta * case.tau / 2 * weighted[-1] + eta / 2 * sum(drifts)),
            ("3", sum(drifts), 2 * eta**2 * case.tau**3 * (rest + case.sigma2 / 3)),
            ("4", delta, 2 * eta**2 * case.tau * (noise_factor(case) * case.sigma2
                                                  + 2 * case.tau * weighted[-1] + 2 * sum(drifts)))]
        whole = np.eye(len(p)) + move[0]
        fall = _fall(case, mean, cov, mean + move[0] @ mean + move[1],
                     whole @ cov @ whole.T + noise)
        steps.append(("1", -fall, inner + delta / 2))
        mean, cov = mean + move[0] @ mean + move[1], whole @ cov @ whole.T + noise
    gap = _fall(case, case.start, np.zeros_like(cov), mean, cov)
    return Sides(np.mean(weighted), np.mean(gradient), np.mean(zeta2, axis=0), gap, steps)


def _round(case, eta, mean, cov):
    """Return how a round moves W (linear part, constant, noise), Phi_s, and what drift changes."""
    size, parts = len(mean), case.parts
    one, local = np.eye(size), np.eye(size) - eta * case.hessians
    a, b, noise = np.zeros_like(local), np.zeros_like(case.pulls), np.zeros_like(local)
    squared_parts = parts[:, :, None] * parts[:, None, :]
    p, drifts, changes = case.p[case.layout.block_of], [], []
    for _ in range(case.tau):  # W_i = W + a W + b + noise
        drifts.append(case.weights @ (case.squares((a, b), mean, cov).sum(axis=1)
                                      + np.trace(noise, axis1=1, axis2=2)))
        change = (np.einsum("ki,kij,kjl->il", parts, case.hessians, a),
                  np.einsum("ki,kij,kj->i", parts, case.hessians, b))
        spread = (squared_parts * (case.hessians @ noise @ case.hessians)).sum(axis=0)
        changes.append(p @ (case.squares(change, mean, cov) + np.diag(spread)))
        a = local @ (one + a) - one
        b = np.einsum("kij,kj->ki", local, b) - eta * case.pulls
        noise = local @ noise @ local + eta**2 * case.noise
    move = np.einsum("ki,kij->ij", parts, a), (parts * b).sum(axis=0)
    return move, (squared_parts * noise).sum(axis=0), drifts, changes


def _fall(case, mean, cov, last_mean, last_cov):
    """Return how far the mean of all losses falls, without differences of large numbers."""
    curve, way = np.einsum("k,kij->ij", case.weights, case.hessians), last_mean - mean
    slope = curve @ mean + case.weights @ case.pulls
    return -(slope @ way + way @ curve @ way / 2 + np.trace(curve @ (last_cov - cov)) / 2)


def noise_factor(case):
    """Return s_K with weights: the largest, times the blocks; or the largest part in a block."""
    return min(len(case.p) * case.weights.max(), case.parts.max())


def terms(case, found):
    """Return the weighted form's terms as the page has them, for one step size."""
    eta, tau = case.steps[0], case.tau
    return {"gap": 4 * found.gap / (tau * case.rounds * eta),
            "noise": 4 * noise_factor(case) * case.sigma2 * eta, "heterogeneity": 0.0,
            "drift": 8 * tau**2 * (case.sigma2 / 3 + case.p @ found.zeta2) * eta**2}


@pytest.fixture(scope="module")
def cases():
    rng = np.random.default_rng(0)
    return [(case, follow(case)) for case in (draw(rng) for _ in range(CASES))]


def in_code(case, found, form):
    blocks = tuple(Block(str(r), int(k), float(z)) for r, (k, z) in enumerate(
        zip(case.layout.owners, found.zeta2, strict=True)))
    setting = Setting(blocks, case.layout.clients, 1.0, float(case.sigma2), case.tau,
                      float(found.gap))
    return bound(setting, case.steps, form)


def test_the_moments_are_those_of_the_simulation():
    problem = coupled(Layout(np.array(UNEVEN), (2, 2, 2)), 1.0, 4.0)
    start, masks = np.full(6, 0.1), np.stack([problem.layout.mask(i) for i in range(4)])
    noise = np.stack([np.diag(mask * 4.0 / 4) for mask in masks])  # a client has 4 parameters
    pulls = -np.einsum("kij,kj->ki", problem.hessians, problem.centres)
    case = Case(problem.layout, problem.hessians, pulls, noise, start, 4, 60, np.full(4, 0.25))
    exact, drawn = follow(case), measure(problem, start, case.steps, 4, 3000, 0)
    assert (drawn.weighted, drawn.gradient) == pytest.approx((exact.weighted, exact.gradient),
                                                             rel=0.01)
    without = measure(coupled(problem.layout, 1.0, 0.0), start, case.steps, 4, 1, 0)
    exact = follow(replace(case, noise=0 * noise))
    assert (without.weighted, without.gradient) == pytest.approx((exact.weighted, exact.gradient))


def test_the_weighted_form_holds(cases):
    """The smallest ratio of right to left side is 3.92: a right side 4 times smaller would fail."""
    ratios = []
    for case, found in cases:
        right = in_code(case, found, "weighted")
        assert right.terms == pytest.approx(terms(case, found))
        ratios.append(right.total / found.weighted)
    assert min(ratios) > 3.85


def test_the_theorem_holds_for_the_mean_of_all_losses(cases):
    ratios = {form: [in_code(case, found, form).total / found.gradient for case, found in cases
                     if len(case.p) > 1 or form == "proof"] for form in ("theorem", "proof")}
    assert min(ratios["theorem"] + ratios["proof"]) > 7.9


def test_every_step_of_the_derivation_holds(cases):
    """Steps 1 and 2 are met with equality; 3 is too large by 6 at least, and 4 by 2."""
    close = dict.fromkeys(("1", "inner product", "2", "3", "4"), 0.0)
    for case, found in cases:
        tiny = 1e-12 * (1 + np.abs(case.pulls).max() + np.abs(case.start).max()) ** 2
        for step, left, right in found.derivation:
            assert left <= right + tiny, (step, case)
            if left > 1e6 * tiny:
                close[step] = max(close[step], left / right)
    assert min(close["1"], close["2"]) > 0.99
    assert close["3"] > 1 / 6
    assert close["4"] > 1 / 2


def simple(hessians, pulls, noise, start, tau):
    """Return a case of one round with one block of one parameter."""
    count = len(hessians)
    layout = Layout(np.ones((count, 1), dtype=bool), (1,))
    return Case(layout, np.reshape(hessians, (count, 1, 1)), np.reshape(pulls, (count, 1)),
                np.full((count, 1, 1), noise), np.array([start]), tau, 1,
                np.full(count, 1 / count))


@pytest.mark.parametrize(("term", "factor", "case"), [
    ("gap", 4, simple([1.0], [0.0], 0.0, 1.0, 8)),
    ("noise", 2.2, simple([1.0, 1.0], [0.0, 0.0], 1.0, 0.0, 1)),
    # two owners pull against each other, one on a convex and one on a concave slope
    ("drift", 35, simple([1.0, -1.0], [1.0 + 0.006, -1.0 + 0.006], 0.0, 0.0, 8))])
def test_the_form_breaks_with_a_smaller_constant(term, factor, case):
    found = follow(case)
    right = in_code(case, found, "weighted").terms
    assert found.weighted <= sum(right.values())
    assert found.weighted > sum((right | {term: right[term] / factor}).values())


def test_weights_of_clients_change_the_noise_too():
    """It holds with them, but not with the s_K of equal weights."""
    rng = np.random.default_rng(1)
    for case in (draw(rng, even=False) for _ in range(200)):
        found = follow(case)
        assert sum(terms(case, found).values()) > 3.8 * found.weighted
    one = simple(np.ones(50), np.zeros(50), 1.0, 0.0, 1)
    heavy = replace(one, weights=np.array([0.51] + [0.01] * 49))
    found = follow(heavy)
    right = terms(heavy, found)
    assert found.weighted <= sum(right.values())
    assert found.weighted > sum((right | {"noise": right["noise"] * 0.02 / 0.51}).values())
