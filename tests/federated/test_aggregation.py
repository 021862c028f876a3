"""Robust and private averages, against NumPy, closed forms and statistics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.errors import TapflError
from tapfl.federated.aggregation import (
    Mean,
    PrivateMean,
    Robust,
    find_aggregation,
    median_cut,
    trimmed_cut,
)
from tapfl.federated.server import Server
from tapfl.privacy.mechanism import clipped
from tapfl.privacy.noise import secure_normal
from tapfl.reading import check

NAME, OTHER = "decoder/d0", "decoder/d1"


def state(**values):
    flat = {f"decoder/{k}": torch.tensor(v, dtype=torch.float32) for k, v in values.items()}
    return BlockState(flat, {n: {"w": v.shape} for n, v in flat.items()})


def aggregated(rule, updates, before=None, asked=None):
    before = before or state(d0=[0.0] * len(updates[0][NAME]))
    for update in updates:
        rule.add(update, 1, before)
    return rule.result(before, asked or {NAME: len(updates)})


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 12).flatmap(lambda n: st.lists(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4), min_size=n, max_size=n)),
    st.floats(0.01, 0.49))
def test_robust_rules_are_what_numpy_and_scipy_compute(values, trim):
    updates, table = [state(d0=v) for v in values], np.array(values, dtype=np.float32)
    median = aggregated(Robust(median_cut), updates)[NAME].numpy()
    assert median == pytest.approx(np.median(table, axis=0), rel=1e-5, abs=1e-3)
    trimmed = aggregated(Robust(trimmed_cut(trim)), updates)[NAME].numpy()
    cut = min(max(1, int(trim * len(values))), (len(values) - 1) // 2)
    ordered = np.sort(table, axis=0)[cut:len(values) - cut]
    assert trimmed == pytest.approx(ordered.mean(axis=0), rel=1e-4, abs=1e-3)
    if int(trim * len(values)) >= 1:
        scipys = stats.trim_mean(table.astype(float), trim, axis=0)
        assert trimmed == pytest.approx(scipys, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_one_of_three_cannot_move_a_block_beyond_the_others(rule):
    config = Config.model_validate({"aggregation": {"rule": rule}})
    server = Server(state(d0=[0.0, 0.0]), clients=3, cohort=3, seed=0,
                    aggregation=find_aggregation(config, {}))
    for client, values in (("a", [1.0, -1.0]), ("b", [2.0, -2.0]), ("evil", [1e6, 1e6])):
        assert server.receive(client, [NAME], state(d0=values), 10**6) is None
    server.aggregate()
    assert server.blocks[NAME].tolist() == [2.0, -1.0]  # the middle of each coordinate


def test_fewer_than_three_are_averaged_by_their_samples():
    rule = Robust(median_cut)
    before = state(d0=[0.0], d1=[5.0])
    rule.add(state(d0=[1.0]), 1, before)
    rule.add(state(d0=[4.0]), 3, before)
    found = rule.result(before, {})
    assert found[NAME].tolist() == pytest.approx([3.25])
    assert OTHER not in found


def test_the_default_is_the_weighted_mean_bit_for_bit():
    assert find_aggregation(Config(), {}) is Mean
    local = Config.model_validate({"privacy": {"mode": "local"}})  # the clients add the noise
    assert find_aggregation(local, {}) is Mean


@pytest.mark.parametrize("secret", [False, True])
def test_a_private_mean_is_as_the_settings_say(secret):
    config = Config.model_validate({"privacy": {"mode": "central", "clip": 0.5, "noise": 1.3,
                                                "secret_cohort": secret}})
    rule = find_aggregation(config, {NAME: 2.0})()
    assert isinstance(rule, PrivateMean)
    assert (rule.clip, rule.noise, rule.expected) == (0.5, 1.3, {NAME: 2.0} if secret else None)


@pytest.mark.parametrize("settings", [
    {}, {"aggregation": {"rule": "median"}}, {"privacy": {"mode": "central"}}], ids=str)
def test_every_round_begins_with_nothing(settings):
    make = find_aggregation(Config.model_validate(settings), {})
    assert make() is not make()


@pytest.mark.parametrize("contributors", [1, 2, 5])
@pytest.mark.parametrize("secret", [False, True])
def test_noise_has_the_deviation_that_is_stated(contributors, secret):
    size, clip, noise = 40_000, 0.5, 1.3
    before = state(d0=np.linspace(-1, 1, size))
    update = BlockState({NAME: before[NAME] + 100.0}, before.shapes)  # far beyond the clip
    source = np.random.default_rng(contributors).bytes  # so that the test cannot fail by chance
    rule = PrivateMean(clip, noise, {NAME: float(contributors)} if secret else None,
                       lambda like: secure_normal(like, source))
    for _ in range(contributors):
        rule.add(update, 10**6, before)
    moved = (rule.result(before, {NAME: contributors})[NAME] - before[NAME]).double()
    # All of them push alike: the mean moves by the clip, spread over the coordinates.
    stated = noise * clip / contributors
    assert moved.mean().item() == pytest.approx(clip / math.sqrt(size),
                                                abs=5 * stated / math.sqrt(size))
    # The sum of squares over the variance follows a chi-square distribution.
    centred = moved - clip / math.sqrt(size)
    statistic = (centred.square().sum() / stated**2).item()
    assert 0.01 < stats.chi2.cdf(statistic, size) < 0.99
    assert stats.kstest((centred / stated).numpy(), "norm").pvalue > 0.01


def test_what_a_client_adds_is_bounded_in_every_block():
    before = state(d0=[1.0, 1.0], d1=[0.0])
    rule = PrivateMean(1.0, 0.0)
    rule.add(state(d0=[4.0, 5.0], d1=[0.25]), 7, before)  # 3-4-5: a norm of 5, and one of 0.25
    found = rule.result(before, {NAME: 1, OTHER: 1})
    assert found[NAME].tolist() == pytest.approx([1.6, 1.8], rel=1e-5)
    assert found[OTHER].tolist() == [0.25]
    assert (found[NAME] - before[NAME]).norm().item() <= 1.0


def test_a_client_changes_the_sum_by_what_it_adds_whoever_else_is_there():
    """Rounding that depends on the other summands would add to it, more with every client."""
    before = state(d0=[0.0] * 100)
    update = BlockState({NAME: torch.linspace(1, 2, 100)}, before.shapes)
    moved = []
    for contributors in (300, 299):
        rule = PrivateMean(1.0, 0.0)
        for _ in range(contributors):
            rule.add(update, 1, before)
        moved.append(rule.result(before, {NAME: 1})[NAME].double() - before[NAME])
        sums = rule._sums[NAME].double()
        assert sums.tolist() == pytest.approx((contributors * clipped(
            update, before, 1.0)[NAME].double()).tolist(), rel=1e-13)
    assert (moved[0] - moved[1]).norm().item() == pytest.approx(1, abs=1e-4)


def test_clients_that_do_not_answer_are_divided_by_all_the_same():
    """A client whose data spoil its update must not show in the divisor."""
    before = state(d0=[0.0])
    rule = PrivateMean(1.0, 0.0)
    rule.add(state(d0=[1.0]), 1, before)
    assert rule.result(before, {NAME: 4})[NAME].tolist() == pytest.approx([0.25], rel=1e-5)


def test_a_secret_cohort_leaves_no_trace_in_which_blocks_change():
    before = state(d0=[0.0] * 50, d1=[0.0] * 50)
    rule = PrivateMean(1.0, 1.0, {NAME: 2.0, OTHER: 0.5})
    rule.add(state(d0=[0.1] * 50), 1, before)
    found = rule.result(before, {NAME: 1})
    assert set(found) == {NAME, OTHER}
    assert found[OTHER].abs().min() > 0


def test_secret_cohorts_do_not_follow_from_the_seed():
    servers = [Server(state(d0=[0.0]), clients=1000, cohort=3, seed=1, secret=True)
               for _ in range(2)]
    drawn = [[server.cohort(t) for t in range(5)] for server in servers]
    assert drawn[0] != drawn[1]
    assert all(c == sorted(set(c)) and len(c) == 3 for cohorts in drawn for c in cohorts)


@pytest.mark.parametrize(("values", "words"), [
    ({"aggregation": {"rule": "mode"}}, "aggregation.rule"),
    ({"aggregation": {"trim": 0.5}}, "aggregation.trim"),
    ({"privacy": {"mode": "both"}}, "privacy.mode"),
    ({"privacy": {"clip": 0}}, "privacy.clip"),
    ({"privacy": {"noise": -1}}, "privacy.noise"),
    ({"privacy": {"delta": 0}}, "privacy.delta"),
    ({"privacy": {"secret_cohort": True}}, "set privacy.mode to central"),
    ({"privacy": {"mode": "central"}, "aggregation": {"rule": "median"}}, "expected mean"),
    ({"privacy": {"mode": "central"}, "federation": {"max_update_norm": 1.0}}, "max_update_norm"),
])
def test_bad_settings(values, words):
    with pytest.raises(TapflError, match=words):
        check(Config, values, "here")
