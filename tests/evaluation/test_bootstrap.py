import math

import numpy as np
import pytest

from tapfl.evaluation.bootstrap import (
    Interval,
    _variance,
    _variance_of_means,
    interval,
    judge,
    margin,
)
from tapfl.evaluation.significance import student_quantile

TOLD = ("better", "worse")


def simulate(rng, shape, seed=0.0, client=0.0, sample=0.0, noise=3.0, shift=0.0):
    """Return differences with random effects of seeds, clients, common samples, and noise."""
    seeds, clients, samples = shape
    return (shift + seed * rng.normal(size=(seeds, 1, 1)) + client * rng.normal(size=(clients, 1))
            + sample * rng.normal(size=samples) + noise * rng.normal(size=shape))


def share_told(shape, cases=120, shared=True, **effects):
    rng = np.random.default_rng(5)
    told = 0
    for _ in range(cases):
        found = simulate(rng, shape, **effects)
        told += judge(interval(found.mean(axis=2), list(found), shared), within=0.0) in TOLD
    return told / cases


@pytest.mark.parametrize("effects", [
    {}, {"seed": 0.5}, {"client": 0.5}, {"seed": 0.5, "client": 0.5}, {"sample": 3.0}])
def test_without_a_difference_few_are_told_apart(effects):
    """5% would be exact; three seeds do not allow that, but plain percentiles give up to 29%."""
    assert share_told((3, 9, 30), **effects) <= 0.11


def test_a_difference_is_found():
    assert share_told((3, 9, 30), cases=30, shift=1.5, client=0.5) >= 0.95
    assert share_told((1, 9, 30), cases=30, shift=2.0, client=0.5) >= 0.95


def test_one_test_set_for_all_is_not_many_test_sets():
    assert share_told((2, 9, 30), sample=3.0, shared=False) > 0.25
    assert share_told((2, 9, 30), sample=3.0, shared=True) < 0.11


@pytest.mark.parametrize(("seed", "client", "noise", "variance", "freedom"), [
    (0.5, 0.5, 1, (2 + 2 + 8) / 7 / 8, 7),  # nothing differs: all eight values are alike
    (3, 0.5, 1, 72 / 8, 1), (0.5, 4, 1, 128 / 3 / 8, 3),
    (3, 4, 1, 112 / 8, 112 ** 2 / (72 ** 2 + (128 / 3) ** 2 / 3 + (8 / 3) ** 2 / 3)),
    (3, 0, 0, 72 / 8, 1), (0, 4, 0, 128 / 3 / 8, 3)])  # without noise, what is there is no chance
def test_the_analysis_of_variance_by_hand(seed, client, noise, variance, freedom):
    """Two seeds, four clients; the sums of squares are 8 times the square of each effect."""
    means = (seed * np.array([[1.0], [-1.0]]) + client * np.array([1.0, 1.0, -1.0, -1.0])
             + noise * np.array([[1.0], [-1.0]]) * np.array([1.0, -1.0, 1.0, -1.0]))
    assert _variance_of_means(means + 5) == pytest.approx((variance, freedom))
    assert _variance(means, None, means[..., None]) == pytest.approx(_variance_of_means(means))
    # Four samples that are easy or hard for all, and of which chance makes some 32 / 21 / 8.
    easy = np.array([3.0, 5.0, -4.0, -4.0])
    chance = np.outer(np.array([1.0, -1.0] * 4), [1.0, -1.0, 1.0, -1.0]).reshape(2, 4, 4)
    common = ((9 + 25 + 16 + 16) / 3 - 32 / 21 / 8) / 4
    both = variance + common
    assert _variance(means, None, means[..., None] + easy + chance) == pytest.approx(
        (both, both ** 2 / (variance ** 2 / freedom + common ** 2 / 3)))


def test_the_variance_of_one_model_and_of_one_seed_by_hand():
    values = np.array([1.0, 2.0, 3.0, 6.0])  # squares of 2, 1, 0 and 3 around the mean
    for found in (_variance(np.array([[3.0]]), [[values]], None),
                  _variance_of_means(values[None]), _variance_of_means(values[:, None])):
        assert found == pytest.approx((14 / 3 / 4, 3))
    assert all(map(math.isnan, _variance(np.array([[3.0]]), [[values[:1]]], None)))


def test_one_model_is_judged_by_its_samples():
    values = np.random.default_rng(0).normal(0.3, 1, size=400)
    found = interval(np.array([[values.mean()]]), [[values]])
    half = student_quantile(0.05, 399) * values.std(ddof=1) / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)


def test_clients_of_one_seed_without_samples():
    means = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    found = interval(means)
    half = student_quantile(0.05, 5) * means.std(ddof=1) / math.sqrt(6)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert interval(means) == found


def test_clients_may_have_samples_of_different_number():
    rng = np.random.default_rng(2)
    samples = [[rng.normal(1, 1, size=n) for n in (40, 7, 100)] for _ in range(2)]
    means = np.array([[values.mean() for values in row] for row in samples])
    found = interval(means, samples, shared=True)
    assert found == interval(means, samples, shared=False)
    assert found.low < means.mean() < found.high


def test_what_cannot_be_told():
    nothing = interval(np.array([[1.0]]))
    assert nothing.mean == 1
    assert math.isnan(nothing.low)
    assert judge(nothing, 1.0) == "not told apart"
    assert judge(interval(np.array([[1.0, math.nan]])), 1.0) == "not told apart"
    # Equal differences: many of them are certain, a few may be equal by chance.
    assert interval(np.zeros((3, 10))) == Interval(0, 0, 0)
    assert interval(np.full((1, 1), 25.0), [[np.full(30, 25.0)]]) == Interval(25, 25, 25)
    six = np.full(6, 25.0)
    for few in (interval(np.zeros((3, 4))), interval(np.full((1, 1), 25.0), [[six]]),
                interval(np.full((1, 9), 100 / 13)),  # rounding is no spread
                interval(np.full((1, 9), 25.0), [[six] * 9], shared=True),  # the same six
                interval(np.full((9, 1), 25.0), [[six]] * 9)):  # nor do seeds make them more
        assert math.isnan(few.low)
        assert judge(few, 1.0) == "not told apart"


@pytest.mark.parametrize(("low", "high", "verdict"), [
    (0.5, 3.0, "better"), (-3.0, -0.5, "worse"), (-0.5, 3.0, "not told apart"),
    (-0.9, 0.9, "equivalent"), (0.1, 0.9, "equivalent"), (-1.0, 0.5, "not told apart"),
    (0.0, 3.0, "not told apart"), (-3.0, 0.0, "not told apart"),
    (0.5, math.inf, "not told apart"), (-math.inf, -0.5, "not told apart")])
def test_verdicts(low, high, verdict):
    assert judge(Interval((low + high) / 2, low, high), 1.0) == verdict


def test_margins():
    assert margin("accuracy", 80.0) == margin("bertscore(m,6)", 40.0) == 1.0
    assert margin("mse", 0.6) == pytest.approx(0.03)
    assert margin("general_mse", 0.6, mse=0.1) == pytest.approx(0.06)
    assert margin("meteor", 40.0, points=2.0) == 2.0
