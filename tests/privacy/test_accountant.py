"""Epsilon is the library's, for the mechanism that a client's contribution really is."""

import math
import sys

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from tapfl.errors import TapflError
from tapfl.privacy.accountant import Releases, epsilon, needed_noise

DELTA = 1e-5
ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


def test_equals_the_library():
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(3.0 / math.sqrt(9)), 25)
    assert epsilon([Releases(3.0, 9, 25, replaced=False)], DELTA) == pytest.approx(
        accountant.get_epsilon(DELTA))


def test_a_secret_cohort_equals_the_library():
    accountant = rdp.RdpAccountant(neighboring_relation=ONE)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(
        30, 2, dp_accounting.GaussianDpEvent(6.0 / 2 / math.sqrt(4))), 200)
    found = epsilon([Releases(6.0, 4, 200, replaced=True, drawn=(2, 30))], DELTA)
    assert found == pytest.approx(accountant.get_epsilon(DELTA))
    # It is less than what everybody could have who knew the cohorts, all clients in all rounds.
    assert found < epsilon([Releases(6.0, 4, 200, replaced=True)], DELTA)


def test_blocks_together_are_one_gaussian():
    """By a sharper accountant: B mechanisms at once are one with noise z / sqrt(B)."""
    at_once = pld.PLDAccountant()
    at_once.compose(dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(4.0)] * 6))
    one = pld.PLDAccountant()
    one.compose(dp_accounting.GaussianDpEvent(4.0 / math.sqrt(6)))
    assert at_once.get_epsilon(DELTA) == pytest.approx(one.get_epsilon(DELTA), rel=1e-3)
    ours = epsilon([Releases(4.0, 6, 1, replaced=False)], DELTA)
    assert one.get_epsilon(DELTA) <= ours <= 1.3 * one.get_epsilon(DELTA)


def test_runs_on_the_same_data_add_up():
    first, second = Releases(2.0, 3, 10, False), Releases(4.0, 5, 7, False)
    both = epsilon([first, second], DELTA)
    assert max(epsilon([first], DELTA), epsilon([second], DELTA)) < both
    assert both < epsilon([first], DELTA) + epsilon([second], DELTA)


def test_whoever_replaces_data_does_so_in_every_release():
    """Noise at the server in one run and at the clients in another: one kind of neighbours."""
    central, local = Releases(20.0, 9, 5, replaced=False), Releases(40.0, 9, 5, replaced=True)
    accountant = pld.PLDAccountant()  # by a sharper accountant: both change by 2 C in 9 blocks
    accountant.compose(dp_accounting.GaussianDpEvent(20.0 / 2 / 3), 5)
    accountant.compose(dp_accounting.GaussianDpEvent(40.0 / 2 / 3), 5)
    found = epsilon([central, local], DELTA)
    assert found >= accountant.get_epsilon(DELTA)
    assert found == epsilon([Releases(20.0, 9, 5, replaced=True), local], DELTA)


def test_no_noise_promises_nothing_and_nothing_sent_everything():
    assert epsilon([Releases(0.0, 3, 10, False)], DELTA) == math.inf
    assert epsilon([Releases(0.0, 3, 0, False), Releases(0.0, 0, 5, False)], DELTA) == 0


def test_needed_noise_reaches_its_target():
    planned = [Releases(1.0, 9, 40, False)]
    noise = needed_noise(planned, DELTA, 8.0)
    assert epsilon([Releases(noise, 9, 40, False)], DELTA) <= 8.0
    assert epsilon([Releases(noise * 0.99, 9, 40, False)], DELTA) > 8.0


def test_without_the_library_a_run_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(TapflError, match=r"pip install 'tapfl\[privacy\]'"):
        epsilon([Releases(1.0, 1, 1, False)], DELTA)
