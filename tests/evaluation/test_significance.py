import math

import numpy as np
import pytest

from tapfl.evaluation.significance import (
    Sample,
    f_test,
    holm,
    incomplete_beta,
    paired,
    student,
    student_quantile,
    welch,
)


@pytest.mark.parametrize(("freedom", "t"), [
    (1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)])
def test_students_t_is_that_of_the_tables(freedom, t):
    assert student_quantile(0.05, freedom) == pytest.approx(t, abs=5e-4)


@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 3.0, 50.0])
def test_students_t_in_closed_form(t):
    assert student(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-10)
    assert student(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-10)


@pytest.mark.parametrize(("a", "b", "x"), [(2.5, 0.7, 0.3), (0.5, 40.0, 0.01), (30.0, 3.0, 0.95)])
def test_the_incomplete_beta_function_is_the_integral(a, b, x):
    # u = (t / x) ** a takes the singularity at 0 away.
    u = (np.arange(400_000) + 0.5) / 400_000
    below = (x ** a / a * (1 - x * u ** (1 / a)) ** (b - 1)).mean()
    whole = math.exp(math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b))
    assert incomplete_beta(a, b, x) == pytest.approx(below / whole, rel=1e-5)
    assert incomplete_beta(1, b, x) == pytest.approx(1 - (1 - x) ** b, rel=1e-10)
    assert math.isnan(incomplete_beta(a, b, math.nan))


def test_f_of_one_degree_is_t_squared():
    assert f_test(2.3 ** 2, 1, 17) == pytest.approx(student(2.3, 17), rel=1e-10)


def test_welch_on_samples_and_on_their_figures():
    a, b = [3.0, 4.0, 5.0, 8.0], [1.0, 2.0, 2.5]
    test = welch(a, b)
    # By hand: means 5 and 11/6, variances 14/3 and 7/12.
    shares = 14 / 3 / 4, 7 / 12 / 3
    t = (5 - 11 / 6) / math.sqrt(sum(shares))
    freedom = sum(shares) ** 2 / (shares[0] ** 2 / 3 + shares[1] ** 2 / 2)
    assert (test.t, test.freedom) == (pytest.approx(t), pytest.approx(freedom))
    assert test.p == pytest.approx(student(t, freedom))
    assert welch(Sample.of(a), Sample.of(b)) == test


def test_welch_without_spread():
    assert welch([1, 1], [1, 1]).p == 1
    assert welch([1, 1], [2, 2]).p == 0
    assert [welch([1, 1], [b, b]).t for b in (0, 1, 2)] == [math.inf, 0, -math.inf]
    assert math.isnan(welch([1], [2, 3]).p)
    assert math.isnan(welch([math.nan, 1], [2, 3]).p)


def test_pairs():
    found = paired([1.0, 2.0, 0.0, -1.0])
    assert (found.mean, found.pairs, found.better) == (0.5, 4, 0.625)
    assert found.deviation == pytest.approx(math.sqrt(5 / 3))
    assert found.effect == pytest.approx(0.5 / math.sqrt(5 / 3))
    assert found.error == pytest.approx(math.sqrt(5 / 3) / 2)
    assert found.p == pytest.approx(student(0.5 / math.sqrt(5 / 3 / 4), 3))
    assert paired([0.0, 0.0]).p == 1
    assert paired([2.0] * 30).p == 0
    assert math.isnan(paired([2.0] * 29).p)
    assert math.isnan(paired([2.0, 2.0]).p)  # so few may be equal by chance
    for value in (100 / 13, -100 / 13):
        equal = paired(np.full(9, value))  # numpy's deviation of these is not 0
        assert equal.deviation == 0
        assert math.isnan(equal.p)
        assert math.isnan(equal.effect)
    assert math.isnan(paired([2.0]).p)
    assert math.isnan(paired([2.0, math.nan]).p)
    assert math.isnan(paired([2.0, math.inf]).p)  # a diverged model proves nothing


def test_pairs_see_what_welch_does_not():
    """Clients differ much, methods little: only pairs show it."""
    clients = np.linspace(10, 90, 9)
    mine = clients + 1 + 0.1 * np.sin(np.arange(9))
    assert paired(mine - clients).p < 1e-6
    assert welch(mine, clients).p > 0.9


def test_holm():
    # The example of many a textbook: 0.01, 0.04, 0.03, 0.005 of four tests.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1, 1]
    found = holm([0.04, math.nan])
    assert found[0] == 0.04
    assert math.isnan(found[1])
    assert holm([]) == []


def test_the_incomplete_beta_function_of_whole_numbers_is_a_binomial_sum():
    binomial = sum(math.comb(32, k) * 0.95 ** k * 0.05 ** (32 - k) for k in (30, 31, 32))
    assert incomplete_beta(30, 3, 0.95) == pytest.approx(binomial, rel=1e-12)


def test_few_families_of_clients_have_a_false_alarm():
    """39 clients without any gain, tested on 60 samples each: one report in 20 may name one."""
    rng = np.random.default_rng(3)
    alarms = uncorrected = 0
    for _ in range(200):
        p = [paired(gains).p for gains in rng.normal(size=(39, 60))]
        alarms += min(holm(p)) < 0.05
        uncorrected += min(p) < 0.05
    assert alarms / 200 <= 0.09
    assert uncorrected / 200 > 0.7
