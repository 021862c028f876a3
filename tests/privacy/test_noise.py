import numpy as np
import pytest
import torch
from scipy import stats

from tapfl.blocks import BlockState
from tapfl.privacy.mechanism import clipped, private_update
from tapfl.privacy.noise import PIECE, secure_normal


def test_it_is_normal_and_independent():
    source = np.random.default_rng(1).bytes  # so that the test cannot fail by chance
    values = secure_normal(torch.empty(50_001), source).double().numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(values[:25_000], values[25_000:50_000])[0, 1]) < 0.04
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_form_and_type():
    like = torch.empty(3, 4, dtype=torch.float64)
    found = secure_normal(like)
    assert found.shape == like.shape
    assert found.dtype == like.dtype
    assert secure_normal(torch.empty(0)).numel() == 0
    assert secure_normal(torch.empty(PIECE + 3)).std().item() == pytest.approx(1, abs=0.01)


def test_nobody_can_repeat_it():
    assert not torch.equal(secure_normal(torch.empty(9)), secure_normal(torch.empty(9)))


def test_extreme_bytes_stay_finite():
    for byte in (b"\x00", b"\xff"):
        assert secure_normal(torch.empty(7), lambda n, b=byte: b * n).isfinite().all()


def test_every_byte_counts_once():
    """Box and Muller, written out for two numbers."""
    first, second = 1 << 62, 3 << 62 & (1 << 64) - 1
    source = np.array([first, second], dtype=np.uint64).tobytes()
    u, v = ((x >> 11) + 0.5 for x in (first, second))
    u, v = u * 2.0**-53, v * 2.0**-53
    radius = np.sqrt(-2 * np.log(u))
    expected = [radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)]
    found = secure_normal(torch.empty(2, dtype=torch.float64), lambda n: source[:n])
    assert found.tolist() == pytest.approx(expected)


def test_what_a_client_sends_is_its_clipped_update_and_noise():
    shapes = {"decoder/a": {"w": torch.Size([2])}}
    received = BlockState({"decoder/a": torch.tensor([1.0, 2.0])}, shapes)
    trained = BlockState({"decoder/a": torch.tensor([4.0, 6.0])}, shapes)
    sent = private_update(trained, received, 2.0, 0.5, lambda like: torch.ones_like(like))
    # clipped to a norm of 2: (1.2, 1.6); the noise is 0.5 * 2 in each coordinate
    assert sent["decoder/a"].tolist() == pytest.approx([1 + 1.2 + 1, 2 + 1.6 + 1], rel=1e-5)
    assert torch.equal(trained["decoder/a"], torch.tensor([4.0, 6.0]))


def block(values):
    values = torch.as_tensor(values, dtype=torch.float32)
    return BlockState({"decoder/a": values}, {"decoder/a": {"w": values.shape}})


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e30, 1e37, 3e38])
def test_no_update_is_so_large_that_the_bound_gives_way(size):
    for clip in (1e-3, 1.0):
        found = clipped(block([size] * 1000), block([-size] * 1000), clip)["decoder/a"]
        assert found.isfinite().all()
        assert found.double().norm().item() <= clip


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_adds_nothing(fault):
    """What leaves a client is finite, so that nobody sees whose training went astray."""
    assert clipped(block([fault, 1.0]), block([0.0, 0.0]), 1.0)["decoder/a"].tolist() == [0, 0]


def test_noise_comes_before_any_rounding_to_what_was_received():
    """A server that sends large values must not learn which side of their grid an update is on."""
    received, trained = block([2.0**23]), block([2.0**23 + 1])  # neighbours among float32
    sent = private_update(trained, received, 0.55, 0.4, lambda like: -torch.ones_like(like))
    # 0.55 - 0.22 is nearer to 0; rounded before the noise, it would have been 1 - 0.22.
    assert sent["decoder/a"].item() == 2.0**23
