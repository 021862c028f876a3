"""Membership inference on scores of known distributions."""

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from tapfl.errors import TapflError
from tapfl.privacy.membership import alignment, auc, drop_score, found_share, leak, loss_score

NORMAL = statistics.NormalDist()


def gaussian(shift, members=4000, others=5000, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(shift, 1, members), rng.normal(0, 1, others)


@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0])
def test_normal_scores_give_the_known_auc_and_share(shift):
    members, others = gaussian(shift)
    assert auc(members, others) == pytest.approx(NORMAL.cdf(shift / math.sqrt(2)), abs=0.015)
    known = 1 - NORMAL.cdf(NORMAL.inv_cdf(0.99) - shift)
    assert found_share(members, others) == pytest.approx(known, abs=0.03)


def test_auc_is_what_mann_and_whitney_count_with_ties():
    rng = np.random.default_rng(1)
    members, others = rng.integers(0, 6, 37), rng.integers(0, 5, 53)
    counted = stats.mannwhitneyu(members, others).statistic / (37 * 53)
    assert auc(members, others) == pytest.approx(counted, abs=1e-12)
    assert auc([1, 1], [1, 1, 1]) == 0.5
    assert auc([2], [1]) == 1
    assert auc([0], [1]) == 0


def test_the_share_by_hand():
    others = np.arange(100.0)  # one of them may lie above: the threshold is 98
    assert found_share([97.0, 98.0, 98.5, 200.0], others) == 0.5
    assert found_share([97.0, 98.0, 98.5, 200.0], others[:99]) == 0.5  # none may: it is 98, too
    assert found_share([97.0, 98.0, 98.5, 200.0], others, false=0.02) == 0.75
    assert found_share([5.0], [5.0, 5.0]) == 0  # a tie finds nobody


def test_intervals_hold_the_truth_about_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr("tapfl.privacy.membership.REPLICATES", 300)
    truth = NORMAL.cdf(0.5 / math.sqrt(2))
    found = [leak(*gaussian(0.5, 80, 120, seed)).auc for seed in range(20)]
    held = sum(each.low <= truth <= each.high for each in found)
    assert held >= 16  # 19 are meant; fewer than 16 would come by chance once in four hundred times
    assert all(each.low < each.value < each.high for each in found)
    wide, narrow = (leak(*gaussian(0.5, n, n)).auc for n in (40, 1000))
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3
    assert leak(*gaussian(0.5, 60, 60)) == leak(*gaussian(0.5, 60, 60))


def test_scores_by_hand():
    assert loss_score([0.5, 2.0]).tolist() == [-0.5, -2.0]
    assert drop_score([1.0, 2.0], [0.25, 3.0]).tolist() == [0.75, -1.0]
    gradients = [[2.0, 0.0], [0.0, 5.0], [-1.0, -1.0], [0.0, 0.0]]
    assert alignment([-3.0, 0.0], gradients) == pytest.approx([1.0, 0.0, -math.sqrt(0.5), 0.0])
    assert alignment([0.0, 0.0], gradients).tolist() == [0, 0, 0, 0]


def test_a_step_of_gradient_descent_gives_its_samples_away():
    """Gradients in many dimensions are nearly orthogonal: the mean of a few points to them."""
    rng = np.random.default_rng(2)
    members, others = rng.normal(size=(10, 2000)), rng.normal(size=(300, 2000))
    step = -members.mean(axis=0)
    found = leak(alignment(step, members), alignment(step, others))
    assert found.auc.value == found.found.value == 1


@pytest.mark.parametrize(("members", "others", "words"), [
    ([], [1.0], "members: expected a list of scores"), ([1.0], [], "others: expected a list"),
    ([1.0, math.nan], [1.0], "members: a score is not a number"),
    ([[1.0]], [1.0], r"members: .* shape \(1, 1\)")])
def test_scores_that_say_nothing(members, others, words):
    for figure in (auc, found_share, leak):
        with pytest.raises(TapflError, match=words):
            figure(members, others)
