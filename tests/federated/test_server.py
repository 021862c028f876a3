import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapfl.blocks import BlockState
from tapfl.federated.server import Server
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
