"""The bound against closed forms, its monotonicity, and bad input."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfl.errors import TapflError
from tapfl.theory.bound import (
    FORMS,
    TERMS,
    Block,
    Setting,
    bound,
    constant,
    diminishing,
    max_step_size,
    step_size_limits,
    time_average,
)

# K = 4 clients; 1/2 + 1/4 + 1 = C_K, 3 + 5 + 0 = Z
BLOCKS = (Block("a", 2, 3.0), Block("b", 4, 5.0), Block("c", 1, 0.0))
SETTING = Setting(BLOCKS, clients=4, smoothness=0.5, noise=2.0, local_steps=3, gap=7.0)
positive = st.floats(1e-3, 1e3)
settings = st.builds(
    lambda blocks, smoothness, noise, tau, gap: Setting(
        tuple(Block(str(i), k, z) for i, (k, z) in enumerate(blocks)), 9, smoothness, noise, tau,
        gap),
    st.lists(st.tuples(st.integers(1, 9), positive), min_size=2, max_size=6), positive, positive,
    st.integers(1, 9), positive)


def by_hand(setting, steps):
    """Return the theorem's three terms, written out."""
    eta, eta2, eta3 = (sum(e**p for e in steps) for p in (1, 2, 3))
    tau, smooth, noise = setting.local_steps, setting.smoothness, setting.noise
    c_k = sum(1 / b.owners for b in setting.blocks)
    z = sum(b.heterogeneity for b in setting.blocks)
    r = len(setting.blocks) - 1
    return (8 * setting.gap / eta, 16 * smooth * tau * (c_k * noise + 3 * tau * z) / eta * eta2,
            16 * tau**3 * smooth**2 * (r * noise + z) / eta * eta3)


def test_the_theorem_by_hand():
    steps = [0.01, 0.005]  # sums: 0.015, 1.25e-4, 1.125e-6
    found = bound(SETTING, steps)
    assert found.terms["gap"] == pytest.approx(56 / 0.015)
    # 16 L tau = 24; C_K sigma^2 = 1.75 * 2 = 3.5; 3 tau Z = 72
    assert found.terms["noise"] == pytest.approx(24 * 3.5 / 0.015 * 1.25e-4)
    assert found.terms["heterogeneity"] == pytest.approx(24 * 72 / 0.015 * 1.25e-4)
    # 16 tau^3 L^2 = 108; R sigma^2 + Z = 2 * 2 + 8 = 12
    assert found.terms["drift"] == pytest.approx(108 * 12 / 0.015 * 1.125e-6)
    assert list(found.terms) == list(TERMS)


def test_the_proof_has_a_third_of_the_blocks():
    steps = [0.01, 0.005]
    found = bound(SETTING, steps, "proof").terms
    assert found["drift"] == pytest.approx(108 * (3 / 3 * 2 + 8) / 0.015 * 1.125e-6)
    assert {k: v for k, v in found.items() if k != "drift"} == pytest.approx(
        {k: v for k, v in bound(SETTING, steps).terms.items() if k != "drift"})


def test_the_weighted_form_by_hand():
    found = bound(SETTING, [0.01, 0.005], "weighted").terms
    assert found["gap"] == pytest.approx(4 * 7 / 3 / 0.015)
    # at most 3/4 by counting blocks, at most 1/1 by the fewest owners
    assert found["noise"] == pytest.approx(4 * 0.5 * 2 * 0.75 / 0.015 * 1.25e-4)
    uneven = 2 / 4 * 3 + 4 / 4 * 5
    assert found["heterogeneity"] == 0
    assert found["drift"] == pytest.approx(8 * 9 * 0.25 * (2 / 3 + uneven) / 0.015 * 1.125e-6)


@given(settings, st.floats(0.01, 1), st.integers(1, 50))
def test_the_theorem_for_any_setting(setting, share, rounds):
    steps = diminishing(share * max_step_size(setting.smoothness, setting.local_steps), rounds)
    found, (gap, middle, last) = bound(setting, steps), by_hand(setting, steps)
    assert found.terms["gap"] == pytest.approx(gap)
    assert found.terms["noise"] + found.terms["heterogeneity"] == pytest.approx(middle)
    assert found.terms["drift"] == pytest.approx(last)
    assert found.total == pytest.approx(gap + middle + last)
    assert sum(found.costs.values()) == pytest.approx(middle + last)


@given(settings, st.floats(0.01, 1))
def test_each_form_is_at_most_the_one_before(setting, share):
    steps = constant(share * max_step_size(setting.smoothness, setting.local_steps), 7)
    theorem, proof, weighted = (bound(setting, steps, form).total for form in FORMS)
    assert weighted <= proof * (1 + 1e-9) <= theorem * (1 + 2e-9)


@given(st.integers(0, 30))
def test_a_third_of_the_blocks_is_at_most_r_from_two_blocks_on(last):
    assert ((last + 1) / 3 <= last) == (last >= 1)


def test_one_block_is_where_the_theorem_says_less_than_its_proof():
    one = dataclasses.replace(SETTING, blocks=BLOCKS[:1])
    theorem, proof = (bound(one, [0.01], form).terms["drift"] for form in ("theorem", "proof"))
    assert theorem < proof


@pytest.mark.parametrize("form", FORMS)
@given(setting=settings)
def test_what_makes_the_bound_larger(form, setting):
    tau = setting.local_steps
    steps = constant(max_step_size(setting.smoothness * 2, tau + 1), 5)

    def total(**changes):
        return bound(dataclasses.replace(setting, **changes), steps, form).total

    before, (first, *rest) = total(), setting.blocks
    assert total(noise=2 * setting.noise) > before
    assert total(smoothness=2 * setting.smoothness) > before
    assert total(gap=2 * setting.gap) > before
    more = dataclasses.replace(first, heterogeneity=2 * first.heterogeneity)
    assert total(blocks=(more, *rest)) > before
    if form != "weighted":  # there a block without disagreement costs nothing, and tau shortens
        assert total(blocks=(*setting.blocks, Block("new", 9, 0.0))) > before
        assert total(local_steps=tau + 1) > before
        if first.owners > 1:
            fewer = dataclasses.replace(first, owners=first.owners - 1)
            assert total(blocks=(fewer, *rest)) > before


def test_more_owners_can_outweigh_a_new_block():
    """A pair that is added brings owners to shared blocks: C_K may fall."""
    few = dataclasses.replace(SETTING, clients=20, blocks=(Block("a", 1, 0.0), Block("b", 1, 0.0)))
    more = dataclasses.replace(few, blocks=(
        Block("a", 20, 0.0), Block("b", 20, 0.0), Block("c", 19, 0.0)))
    assert bound(more, [0.01]).terms["noise"] < bound(few, [0.01]).terms["noise"]


def test_step_sizes():
    limits = step_size_limits(2.0, 5)
    assert list(limits.values()) == pytest.approx([
        1 / 480, 1 / (math.sqrt(8) * 10), (1 / (96 * 8 * 125)) ** (1 / 3)])
    assert max_step_size(2.0, 5) == 1 / 480
    assert constant(0.5, 3) == [0.5] * 3
    assert diminishing(0.6, 3) == pytest.approx([0.6, 0.3, 0.2])


@given(positive, st.integers(1, 100))
def test_the_first_limit_is_the_one_that_counts(smoothness, tau):
    limits = step_size_limits(smoothness, tau)
    assert min(limits, key=limits.__getitem__) == "1/(48 L tau)"


def test_with_a_diminishing_step_size_the_bound_goes_to_zero_slowly():
    alpha = max_step_size(SETTING.smoothness, SETTING.local_steps)
    totals = [bound(SETTING, diminishing(alpha, 10**n)).total for n in range(6)]
    assert all(b < a for a, b in itertools.pairwise(totals))
    assert totals[5] > totals[0] / 13  # the sum of 1 / (t + 1) is 12.1 after 100,000 rounds


def test_rounds_weigh_by_their_step_size():
    assert time_average([1.0, 4.0], [2.0, 1.0]) == 2.0


@pytest.mark.parametrize(("change", "message"), [
    ({"blocks": ()}, "blocks: expected at least one"),
    ({"clients": 3}, "block 'b' has 4 owners, more than the 3 clients"),
    ({"smoothness": 0.0}, "L: expected a number above 0, got 0.0"),
    ({"smoothness": math.nan}, "L: expected"), ({"noise": -1.0}, "sigma\\^2: expected"),
    ({"local_steps": 0}, "tau: expected"), ({"local_steps": 1.5}, "tau: expected"),
    ({"gap": math.inf}, "gap: expected")])
def test_bad_settings(change, message):
    with pytest.raises(TapflError, match=message):
        dataclasses.replace(SETTING, **change)


def test_bad_blocks_and_steps():
    with pytest.raises(TapflError, match="block 'x': 0 owners"):
        Block("x", 0, 1.0)
    with pytest.raises(TapflError, match="block 'x': zeta"):
        Block("x", 1, -1.0)
    for steps, message in (([], "at least one"), ([0.0], "round 0: expected a number above 0"),
                           ([0.01, 1.0], "round 1: 1 is above 0.01389")):
        with pytest.raises(TapflError, match=message):
            bound(SETTING, steps)
    with pytest.raises(TapflError, match=r"unknown form 'prof'.*proof"):
        bound(SETTING, [0.01], "prof")
