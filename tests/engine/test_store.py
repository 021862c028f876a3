"""Clients' state between memory and disk: bounded, in the background, and never lost."""

import threading
import time

import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.engine import cache as cache_module
from tapfl.engine import store as store_module
from tapfl.engine.store import Store
from tests.engine.stores import BYTES, SHAPES, on_disk, state, value


def test_round_trip_of_blocks_and_notes(tmp_path):
    """Memory and disk give back the same, with what JSON makes of the notes."""
    notes = {"h": {"t": None, "u": 0.1 + 0.2}, "list": (1, 2), "word": "é"}
    store = Store(tmp_path)
    store.save("tap", "a", 0, state(3), notes)
    assert store.load("tap", "a") is None  # round 0 is not over
    store.round = 0
    near = store.load("tap", "a")
    store.close()
    far = Store(tmp_path)
    far.round = 0
    for found in (near, store.load("tap", "a"), far.load("tap", "a")):
        assert value(found) == 3
        assert found[1] == {**notes, "list": [1, 2]}
        assert list(found[0].parameters("backbone")) == ["a", "b"]


def test_copies_are_independent(tmp_path, gate):
    """Of what was saved and of what was loaded; a change never reaches the file either."""
    gate.open.clear()
    store, mine, notes = Store(tmp_path), state(1), {"h": {"t": 1.0}}
    store.save("tap", "a", 0, mine, notes)
    store.round = 0
    mine["backbone"].fill_(9)
    notes["h"]["t"] = 9.0
    found = store.load("tap", "a")
    assert value(found) == 1
    found[0]["backbone"].fill_(8)
    found[1]["h"]["t"] = 8.0
    gate.open.set()
    store.flush()
    for _ in range(2):  # from memory, then from disk
        found = store.load("tap", "a")
        assert value(found) == 1
        assert found[1] == {"h": {"t": 1.0}}
        found[0]["backbone"].fill_(7)
        store.close()


def test_two_owners_and_two_clients(tmp_path):
    store = Store(tmp_path)
    for number, (owner, client) in enumerate(
            [("tap", "a"), ("tap", "b"), ("pkg.mod:Own+post", "a")]):
        store.save(owner, client, 0, state(number), {"n": number})
    store.round = 0
    for _ in range(2):
        assert [value(store.load("tap", c)) for c in "ab"] == [0, 1]
        assert value(store.load("pkg.mod:Own+post", "a")) == 2
        assert store.load("fedavg", "a") is None
        store.close()


def test_memory_is_bounded_and_evicted_states_come_back(tmp_path, monkeypatch):
    store = Store(tmp_path, cache_bytes=3 * BYTES)
    for number in range(10):
        store.save("tap", f"c{number}", 0, state(number), {"n": number})
        files = store._files
        with files._lock:
            assert files._waiting.nbytes + files._written.nbytes <= 3 * BYTES
    store.round = 0
    store.flush()
    assert [p.parent.name for p in store._files._written] == ["c7", "c8", "c9"]
    reads, real = [], BlockState.load
    monkeypatch.setattr(store_module.BlockState, "load",
                        staticmethod(lambda path: reads.append(path.parent.name) or real(path)))
    for number in range(10):
        found = store.load("tap", f"c{number}")
        assert (value(found), found[1]) == (number, {"n": number})
    assert reads == [f"c{n}" for n in range(7)]


def test_the_least_recently_used_goes_first(tmp_path):
    store = Store(tmp_path, cache_bytes=2 * BYTES)
    store.save("tap", "a", 0, state(1), {})
    store.save("tap", "b", 0, state(2), {})
    store.flush()
    store.round = 0
    store.load("tap", "a")
    store.save("tap", "c", 0, state(3), {})
    store.flush()
    assert [p.parent.name for p in store._files._written] == ["a", "c"]


def test_a_new_version_takes_its_predecessors_place(tmp_path):
    store = Store(tmp_path)
    for t in range(3):
        store.save("tap", "a", t, state(t), {})
        store.flush()
    assert [p.name for p in store._files._written] == ["000002.safetensors"]


@pytest.mark.parametrize("limit", [0, BYTES - 1])
def test_without_memory_there_is_only_the_disk(tmp_path, limit):
    store = Store(tmp_path, cache_bytes=limit)
    for t in range(3):
        for client in "abc":
            store.save("tap", client, t, state(t), {})
        store.round = t
        assert [value(store.load("tap", c)) for c in "abc"] == [t, t, t]
    store.flush()
    assert not store._files._written


def test_what_waits_is_never_lost_and_holds_the_caller_up(tmp_path, gate):
    gate.open.clear()
    store, saved = Store(tmp_path, cache_bytes=3 * BYTES), []

    def fill():
        for number in range(5):
            store.save("tap", f"c{number}", 0, state(number), {})
            saved.append(number)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert saved == [0, 1, 2]  # the fourth does not fit before the first is written
    assert not gate.written
    store.round = 0
    assert [value(store.load("tap", f"c{n}")) for n in saved] == [0, 1, 2]
    gate.open.set()
    thread.join(20)
    store.flush()
    assert [p.parent.name for p in gate.written] == [f"c{n}" for n in range(5)]  # in order
    assert [value(store.load("tap", f"c{n}")) for n in range(5)] == [0, 1, 2, 3, 4]


def test_the_same_version_again_while_it_is_being_written(tmp_path, gate):
    gate.open.clear()
    store = Store(tmp_path)
    store.save("tap", "a", 0, state(1), {})
    time.sleep(0.05)
    store.save("tap", "a", 0, state(2), {})
    store.round = 0
    assert value(store.load("tap", "a")) == 2
    gate.open.set()
    store.close()
    assert value(store.load("tap", "a")) == 2


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_an_unfinished_rounds_version_does_not_count(tmp_path, limit):
    """As after Ctrl-C in the middle of a round, in this process and in the next."""
    store = Store(tmp_path, limit)
    store.save("tap", "a", 0, state(10), {})
    store.round = 0
    store.save("tap", "a", 3, state(13), {})
    store.save("tap", "b", 3, state(23), {})
    assert value(store.load("tap", "a")) == 10
    assert store.load("tap", "b") is None
    store.commit(state(0), {"events": 0})
    store.close()
    again = Store(tmp_path, limit)
    again.restore()
    for found in (store, again):
        assert value(found.load("tap", "a")) == 10
        assert found.load("tap", "b") is None
    again.save("tap", "a", 3, state(33), {})  # the round runs again
    again.round = 3
    assert value(again.load("tap", "a")) == 33
    assert value(again.load("tap", "b")) == 23


def test_a_checkpoint_waits_for_the_clients(tmp_path, gate):
    gate.open.clear()
    store = Store(tmp_path)
    for client in "abc":
        store.save("tap", client, 0, state(1), {})
    store.round = 0
    thread = threading.Thread(target=store.commit, args=(state(0), {"events": 0}), daemon=True)
    thread.start()
    time.sleep(0.2)
    assert not (tmp_path / "checkpoints").exists()
    gate.open.set()
    thread.join(20)
    assert [p.parent.name for p in gate.written] == ["a", "b", "c", "checkpoints"]
    assert Store(tmp_path).restore()[1]["round"] == 0


def test_files_that_no_checkpoint_refers_to_go(tmp_path):
    """The files of an obvious version, which lists the folder at every save."""
    store, expected = Store(tmp_path), set()
    committed = []
    for t in range(12):
        if t % 3 != 1:
            store.save("tap", "a", t, state(t), {})
            expected.add(t)
            old = sorted(v for v in expected if v <= min(committed[-2:], default=-1))
            expected -= set(old[:-1])
        store.round = t
        if t % 2:
            store.commit(state(0), {"events": 0})
            committed.append(t)
        store.flush()
        assert on_disk(store) == [f"tap/a/{v:06d}" for v in sorted(expected)]
        if t == 5:  # another process goes on: it finds the versions on disk
            store = Store(tmp_path)
            assert store.restore()[1]["round"] == 5
    assert value(store.load("tap", "a")) == 11


def test_a_clients_folder_is_listed_once(tmp_path, monkeypatch):
    listed, real = [], type(tmp_path).glob
    store = Store(tmp_path)
    monkeypatch.setattr(type(tmp_path), "glob",
                        lambda self, *a, **k: listed.append(self.name) or real(self, *a, **k))
    for t in range(4):
        for client in "ab":
            store.load("tap", client)
            store.save("tap", client, t, state(t), {})
        store.round = t
        store.commit(state(0), {"events": 0})
    assert listed == ["a", "b"]


def test_a_cpu_run_leaves_cuda_alone(tmp_path, monkeypatch):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError(f"torch.cuda.{name}")

    monkeypatch.setattr(cache_module.torch, "cuda", Untouchable())
    with Store(tmp_path) as store:
        store.save("tap", "a", 0, state(1), {})
        store.round = 0
        assert value(store.load("tap", "a")) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_states_on_a_gpu(tmp_path):
    store = Store(tmp_path, device="cuda")
    for number in range(20):
        value_ = torch.zeros(100, device="cuda")
        torch.cuda._sleep(10_000_000)  # the value is not there yet when the thread wants it
        value_ += number
        store.save("tap", f"c{number}", 0, BlockState({"backbone": value_}, SHAPES), {})
    store.round = 0
    assert store.load("tap", "c7")[0]["backbone"].is_cuda
    store.close()
    assert [value(store.load("tap", f"c{n}")) for n in range(20)] == list(range(20))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_writing_does_not_disturb_a_graph_that_is_being_captured(tmp_path, gate):
    store, total = Store(tmp_path), torch.zeros(1, device="cuda")
    gate.open.clear()
    for number in range(5):
        store.save("tap", f"c{number}", 0, state(number).to("cuda"), {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total += 1
        gate.open.set()
        while len(gate.written) < 5:
            time.sleep(0.01)
        total += 1
    graph.replay()
    assert float(total) == 2
    store.round = 0
    store.close()
    assert [value(store.load("tap", f"c{n}")) for n in range(5)] == [0, 1, 2, 3, 4]
