import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapfl.blocks import BlockState
from tapfl.federated.server import NormBound, Server
from tests.experiment import FederatedRun, read_events, tiny_experiment

NAMES = [f"decoder/d{i}" for i in range(6)]


def state(values):
    flat = {n: torch.full((3,), float(v)) for n, v in values.items()}
    return BlockState(flat, {n: {"w": torch.Size([3])} for n in flat})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(
    st.integers(1, 10_000), st.dictionaries(st.sampled_from(NAMES), st.floats(-100, 100),
                                            min_size=1)), max_size=6))
def test_averaging_against_brute_force(updates):
    server = Server(state(dict.fromkeys(NAMES, 7)), clients=10, cohort=3, seed=0)
    for index, (samples, values) in enumerate(updates):
        assert server.receive(f"c{index}", NAMES, state(values), samples) is None
    contributors = server.aggregate()
    for name in NAMES:
        owners = [(n, v[name]) for n, v in updates if name in v]
        expected = sum(n * v for n, v in owners) / sum(n for n, _ in owners) if owners else 7
        assert server.blocks[name].tolist() == pytest.approx([expected] * 3, abs=1e-3, rel=1e-5)
        assert len(contributors.get(name, [])) == len(owners)


def test_cohorts():
    server = Server(state({"decoder/d0": 0}), clients=30, cohort=2, seed=3)
    drawn = [server.cohort(t) for t in range(300)]
    assert all(len(set(c)) == 2 and c == sorted(c) for c in drawn)
    assert {i for c in drawn for i in c} == set(range(30))
    again = Server(state({"decoder/d0": 0}), clients=30, cohort=2, seed=3)
    assert [again.cohort(t) for t in reversed(range(300))][::-1] == drawn
    other = Server(state({"decoder/d0": 0}), clients=30, cohort=2, seed=4)
    assert [other.cohort(t) for t in range(300)] != drawn
    assert len(Server(state({"decoder/d0": 0}), clients=3, cohort=9, seed=3).cohort(0)) == 3
    few = Server(state({"decoder/d0": 0}), clients=5, cohort=3, seed=3)
    assert few.cohort(0, absent={0, 1, 3}) == [2, 4]


def _bad(name="decoder/d0", shape=(3,), dtype=torch.float32, value=1.0):
    flat = {name: torch.full(shape, value, dtype=dtype)}
    return BlockState(flat, {name: {"w": torch.Size(shape)}})


@pytest.mark.parametrize(("update", "samples", "reason"), [
    (_bad("decoder/unknown"), 5, "unknown block"),
    (_bad("decoder/d1"), 5, "is not the client's"),
    (_bad(shape=(4,)), 5, "other shapes"),
    (_bad(dtype=torch.float64), 5, "torch.float64"),
    (_bad(value=float("nan")), 5, "not finite"),
    (_bad(value=float("inf")), 5, "not finite"),
    (_bad(value=3e38), 5, "too large to be averaged"),
    (_bad(value=-3e38), 5, "too large to be averaged"),
    (_bad(value=1e38), 5, "too large to be averaged"),
    (_bad(), 0, "sample count of 0"),
    (_bad(), -3, "sample count of -3"),
    (_bad(), 10**12, "sample count"),
    (_bad(), 2.5, "sample count of 2.5"),
    (_bad(), True, "sample count of True"),
    (BlockState({}, {}), 5, "no blocks"),
])
def test_bad_updates_are_refused_whole(update, samples, reason):
    server = Server(state({"decoder/d0": 1, "decoder/d1": 2}), clients=2, cohort=2, seed=0)
    assert reason in server.receive("c", ["decoder/d0"], update, samples)
    assert server.receive("d", ["decoder/d0"], state({"decoder/d0": 9}), 1) is None
    assert server.aggregate() == {"decoder/d0": ["d"]}
    assert server.blocks["decoder/d0"].tolist() == [9, 9, 9]
    assert server.blocks["decoder/d1"].tolist() == [2, 2, 2]


def test_samples_up_to_the_limit_and_bytes_of_every_update_count():
    server = Server(state({"decoder/d0": 1}), clients=2, cohort=2, seed=0, max_samples=10)
    update = state({"decoder/d0": 2})
    assert "a sample count of 11" in server.receive("c", NAMES[:1], update, 11)
    assert server.receive("c", NAMES[:1], update, 10) is None
    assert server.bytes_up == 2 * update.nbytes == 24  # also those of what was refused
    server.aggregate()
    assert server.bytes_up == server.bytes_down == 0


def moved_by(norm, *names):
    return state(dict.fromkeys(names or NAMES[1:2], norm / math.sqrt(3)))


def test_a_bound_is_a_number_or_a_multiple_of_the_usual_norm():
    sent = state({NAMES[0]: 0, NAMES[1]: 0})
    fixed, usual = NormBound(3.0), NormBound("3x")
    three = BlockState({NAMES[0]: torch.tensor([1.0, 2.0, 2.0])}, sent.shapes)
    assert fixed.refuses(three, sent) is None  # as far as it may go
    assert "moved by 3.1, expected at most 3" in fixed.refuses(moved_by(3.1), sent)
    for norm in (0, 0, 0, 1, 1, 50):  # of a block that stayed, and of two, nothing is concluded
        assert usual.refuses(moved_by(norm), sent) is None
    assert usual.refuses(moved_by(2.9), sent) is None
    before = usual.state()
    assert "moved by" in usual.refuses(moved_by(10), sent)  # the median is now 1.95
    assert "d1" in usual.refuses(moved_by(10, *NAMES[:2]), sent)
    assert usual.state() == before  # a refused update is not remembered, nor a part of it


def test_a_bound_remembers_the_last_twenty_norms():
    sent, bound = state({NAMES[1]: 0}), NormBound("3x")
    for i in range(25):
        bound.refuses(moved_by(1 + i / 100), sent)
    assert bound.state()[NAMES[1]] == pytest.approx([1 + i / 100 for i in range(5, 25)])
    again = NormBound("3x")
    again.restore(bound.state())
    again.refuses(moved_by(1.25), sent)
    assert again.state()[NAMES[1]] == pytest.approx([1 + i / 100 for i in range(6, 26)])


def test_a_refused_update_is_an_event_and_the_round_goes_on(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["tap"], train={"cohort": 4}), tmp_path)
    poisoned, train = "news", run.method.train

    def poison(client, round_):
        losses = train(client, round_)
        if client.id == poisoned:
            run.method.network.blocks["decoder/agnews"][0].weight.data.fill_(float("nan"))
        return losses

    run.method.train = poison
    run.round(0)
    (event,) = read_events(tmp_path, "refused")
    assert event["client"] == poisoned
    assert "not finite" in event["reason"]
    (round_,) = read_events(tmp_path, "round")
    assert all(poisoned not in who for who in round_["contributors"].values())
    assert [c for c in ("news", "words") if run.store.load("tap", c, as_of=0)] == ["words"]
    assert all(v.isfinite().all() for v in run.server.blocks.values())


def test_round_events_account_for_traffic(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, methods=["fedavg"]), tmp_path)
    run.round(0)
    (event,) = read_events(tmp_path, "round")
    cohort = [run.federation.find(c) for c in event["cohort"]]
    owned = [run.method.owned(c) for c in cohort]
    expected = sum(run.server.blocks[b].numel() * 4 for names in owned for b in names)
    assert event["bytes_up"] == event["bytes_down"] == expected
    for name, who in event["contributors"].items():
        assert who == [c.id for c, names in zip(cohort, owned, strict=True) if name in names]


def test_arrival_order_does_not_matter_because_there_is_one():
    server = Server(state({"decoder/d0": 0}), clients=9, cohort=5, seed=1)
    assert server.cohort(4) == sorted(server.cohort(4))
    random.seed(99)
    assert server.cohort(4) == Server(server.blocks, 9, 5, 1).cohort(4)
