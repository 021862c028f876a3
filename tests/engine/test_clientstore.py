"""Clients' state between memory and disk: bounded, in the background, and never lost."""

import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tapfl.blocks import BlockState
from tapfl.engine import cache as cache_module
from tapfl.engine import clientstore as store_module
from tapfl.engine.clientstore import ClientStore
from tapfl.errors import TapflError
from tests.engine.stores import BYTES, SHAPES, on_disk, state, value


def test_round_trip_of_blocks_and_notes(tmp_path):
    """Memory and disk give back the same, with what JSON makes of the notes."""
    notes = {"h": {"t": None, "u": 0.1 + 0.2}, "list": (1, 2), "word": "é"}
    store = ClientStore(tmp_path)
    store.save("tap", "a", 0, state(3), notes)
    assert store.load("tap", "a", as_of=-1) is None
    near = store.load("tap", "a", as_of=99)
    store.close()
    far = ClientStore(tmp_path)
    for found in (near, store.load("tap", "a", as_of=99), far.load("tap", "a", as_of=99)):
        assert value(found) == 3
        assert found[1] == {**notes, "list": [1, 2]}
        assert list(found[0].parameters("backbone")) == ["a", "b"]


def test_copies_are_independent(tmp_path, gate):
    """Of what was saved and of what was loaded; a change never reaches the file either."""
    gate.open.clear()
    store, mine, notes = ClientStore(tmp_path), state(1), {"h": {"t": 1.0}}
    store.save("tap", "a", 0, mine, notes)
    mine["backbone"].fill_(9)
    notes["h"]["t"] = 9.0
    found = store.load("tap", "a", as_of=99)
    assert value(found) == 1
    found[0]["backbone"].fill_(8)
    found[1]["h"]["t"] = 8.0
    gate.open.set()
    store.flush()
    for _ in range(2):  # from memory, then from disk
        found = store.load("tap", "a", as_of=99)
        assert value(found) == 1
        assert found[1] == {"h": {"t": 1.0}}
        found[0]["backbone"].fill_(7)
        store.close()


def test_two_owners_and_two_clients(tmp_path):
    store = ClientStore(tmp_path)
    for number, (owner, client) in enumerate(
            [("tap", "a"), ("tap", "b"), ("pkg.mod:Own+post", "a")]):
        store.save(owner, client, 0, state(number), {"n": number})
    for _ in range(2):
        assert [value(store.load("tap", c, as_of=99)) for c in "ab"] == [0, 1]
        assert value(store.load("pkg.mod:Own+post", "a", as_of=99)) == 2
        assert store.load("fedavg", "a", as_of=99) is None
        store.close()


def test_memory_is_bounded_and_evicted_states_come_back(tmp_path, monkeypatch):
    store = ClientStore(tmp_path, cache_bytes=3 * BYTES)
    for number in range(10):
        store.save("tap", f"c{number}", 0, state(number), {"n": number})
        files = store._files
        with files._lock:
            assert files._waiting.nbytes + files._written.nbytes <= 3 * BYTES
    store.flush()
    assert [p.parent.name for p in store._files._written] == ["c7", "c8", "c9"]
    reads, real = [], store_module.read_state
    monkeypatch.setattr(store_module, "read_state",
                        lambda path, label: reads.append(path.parent.name) or real(path, label))
    for number in range(10):
        found = store.load("tap", f"c{number}", as_of=99)
        assert (value(found), found[1]) == (number, {"n": number})
    assert reads == [f"c{n}" for n in range(7)]


def test_the_least_recently_used_goes_first(tmp_path):
    store = ClientStore(tmp_path, cache_bytes=2 * BYTES)
    store.save("tap", "a", 0, state(1), {})
    store.save("tap", "b", 0, state(2), {})
    store.flush()
    store.load("tap", "a", as_of=99)
    store.save("tap", "c", 0, state(3), {})
    store.flush()
    assert [p.parent.name for p in store._files._written] == ["a", "c"]


def test_a_new_version_takes_its_predecessors_place(tmp_path):
    store = ClientStore(tmp_path)
    for t in range(3):
        store.save("tap", "a", t, state(t), {})
        store.flush()
    assert [p.name for p in store._files._written] == ["000002.safetensors"]


@pytest.mark.parametrize("limit", [0, BYTES - 1])
def test_without_memory_there_is_only_the_disk(tmp_path, limit):
    store = ClientStore(tmp_path, cache_bytes=limit)
    for t in range(3):
        for client in "abc":
            store.save("tap", client, t, state(t), {})
        assert [value(store.load("tap", c, as_of=99)) for c in "abc"] == [t, t, t]
    store.flush()
    assert not store._files._written


def test_what_waits_is_never_lost_and_holds_the_caller_up(tmp_path, gate):
    gate.open.clear()
    store, saved = ClientStore(tmp_path, cache_bytes=3 * BYTES), []

    def fill():
        for number in range(5):
            store.save("tap", f"c{number}", 0, state(number), {})
            saved.append(number)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert saved == [0, 1, 2]  # the fourth does not fit before the first is written
    assert not gate.written
    assert [value(store.load("tap", f"c{n}", as_of=99)) for n in saved] == [0, 1, 2]
    gate.open.set()
    thread.join(20)
    store.flush()
    assert [p.parent.name for p in gate.written] == [f"c{n}" for n in range(5)]  # in order
    assert [value(store.load("tap", f"c{n}", as_of=99)) for n in range(5)] == [0, 1, 2, 3, 4]


def test_the_same_version_again_while_it_is_being_written(tmp_path, gate):
    gate.open.clear()
    store = ClientStore(tmp_path)
    store.save("tap", "a", 0, state(1), {})
    time.sleep(0.05)
    store.save("tap", "a", 0, state(2), {})
    assert value(store.load("tap", "a", as_of=99)) == 2
    gate.open.set()
    store.close()
    assert value(store.load("tap", "a", as_of=99)) == 2


def test_a_cpu_run_leaves_cuda_alone(tmp_path, monkeypatch):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError(f"torch.cuda.{name}")

    monkeypatch.setattr(cache_module.torch, "cuda", Untouchable())
    with ClientStore(tmp_path) as store:
        store.save("tap", "a", 0, state(1), {})
        assert value(store.load("tap", "a", as_of=99)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_states_on_a_gpu(tmp_path):
    store = ClientStore(tmp_path, device="cuda")
    for number in range(20):
        value_ = torch.zeros(100, device="cuda")
        torch.cuda._sleep(10_000_000)  # the value is not there yet when the thread wants it
        value_ += number
        store.save("tap", f"c{number}", 0, BlockState({"backbone": value_}, SHAPES), {})
    assert store.load("tap", "c7", as_of=99)[0]["backbone"].is_cuda
    store.close()
    assert [value(store.load("tap", f"c{n}", as_of=99)) for n in range(20)] == list(range(20))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_writing_does_not_disturb_a_graph_that_is_being_captured(tmp_path, gate):
    store, total = ClientStore(tmp_path), torch.zeros(1, device="cuda")
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
    store.close()
    assert [value(store.load("tap", f"c{n}", as_of=99)) for n in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_state_is_loaded_as_of_a_round(tmp_path, limit):
    """In this process and in the next: a round that was interrupted is not seen by its rerun."""
    store = ClientStore(tmp_path, limit)
    for round_, number in ((0, 10), (3, 13)):
        store.save("tap", "a", round_, state(number), {})
    store.save("tap", "b", 3, state(23), {})
    store.flush()
    for found in (store, ClientStore(tmp_path, limit)):
        assert [value(found.load("tap", "a", as_of=r)) for r in (0, 1, 2, 3, 9)] == [
            10, 10, 10, 13, 13]
        assert found.load("tap", "a", as_of=-1) is None
        assert found.load("tap", "b", as_of=2) is None
    store.save("tap", "a", 3, state(33), {})  # the round runs again
    assert value(store.load("tap", "a", as_of=3)) == 33


def test_pruning_keeps_what_somebody_may_go_back_to(tmp_path):
    store = ClientStore(tmp_path)
    for round_ in (0, 2, 5, 7):
        store.save("tap", "a", round_, state(round_), {})
    store.flush()
    store.prune("tap", "a", 7, kept=(1, 4))
    assert on_disk(store) == [f"tap/a/00000{r}" for r in (0, 2, 5, 7)]
    store.prune("tap", "a", 7, kept=(4, 6))
    assert on_disk(store) == [f"tap/a/00000{r}" for r in (2, 5, 7)]
    for found in (store, ClientStore(tmp_path)):
        assert [value(found.load("tap", "a", as_of=r)) for r in (4, 6, 7)] == [2, 5, 7]
    store.prune("tap", "nobody", 7, kept=(6,))
    assert len(on_disk(store)) == 3


def test_what_the_server_has_undone_pushes_nothing_out(tmp_path):
    """It went back to round 1 and runs 2 again: states of 3 and 4 are of another past."""
    store = ClientStore(tmp_path)
    for round_ in (1, 2, 3, 4):
        store.save("tap", "a", round_, state(round_), {})
    store.save("tap", "a", 2, state(22), {})
    store.flush()
    store.prune("tap", "a", 2, kept=(1,))
    assert on_disk(store) == ["tap/a/000001", "tap/a/000002"]
    assert value(store.load("tap", "a", as_of=9)) == 22


def test_without_a_checkpoint_the_two_newest_states_stay(tmp_path):
    store = ClientStore(tmp_path)
    for round_ in range(9):
        store.save("tap", "a", round_, state(round_), {})
        store.flush()
        store.prune("tap", "a", round_, kept=())
    assert on_disk(store) == ["tap/a/000007", "tap/a/000008"]
    listing = store.listing(as_of=7)  # round 8 was cut short
    assert ClientStore(tmp_path).check(listing) is None


def test_a_clients_folder_is_looked_up_once(tmp_path, monkeypatch):
    listed, real = [], type(tmp_path).glob
    store = ClientStore(tmp_path)
    monkeypatch.setattr(type(tmp_path), "glob",
                        lambda self, *a, **k: listed.append(self.name) or real(self, *a, **k))
    for t in range(4):
        for client in "ab":
            store.load("tap", client, as_of=t - 1)
            store.save("tap", client, t, state(t), {})
    assert listed == ["a", "b"]


def test_a_listing_names_the_files_of_a_round(tmp_path):
    store = ClientStore(tmp_path)
    for t in range(3):
        store.save("tap", "a", t, state(t), {})
    store.save("local", "b", 1, state(9), {})
    store.flush()
    listing = store.listing(as_of=1)
    assert [entry[:3] for entry in listing] == [("local", "b", 1), ("tap", "a", 1)]
    again = ClientStore(tmp_path)
    assert again.check(listing) is None
    assert value(again.load("tap", "a", as_of=9)) == 1  # a later round left nothing that counts
    assert again.load("tap", "c", as_of=9) is None
    assert again.listing(as_of=5) == listing


@pytest.mark.parametrize(("damage", "fault"), [
    (lambda f: f.unlink(), "missing"),
    (lambda f: f.write_bytes(f.read_bytes()[:-4] + b"\x00\x00\x00\x01"), "checksum"),
    (lambda f: f.write_bytes(f.read_bytes().replace(b'notes', b'motes', 1)), "damaged"),
    (lambda f: f.write_bytes((f.parent.parent / "b" / f.name).read_bytes()), "it should be"),
    (lambda f: f.write_bytes((f.parent / "000000.safetensors").read_bytes()), "it should be"),
    (lambda f: f.write_bytes(b""), "not a readable"),
])
def test_files_that_are_not_what_they_were(tmp_path, damage, fault):
    """A flipped bit, a deleted file, one client's file or another round's in a client's place."""
    store = ClientStore(tmp_path)
    for client, number in (("a", 1), ("b", 2)):
        for t in range(2):
            store.save("tap", client, t, state(number + t), {"n": number})
    store.close()
    listing = store.listing(as_of=1)
    damage(tmp_path / "tap" / "a" / "000001.safetensors")
    found = ClientStore(tmp_path).check(listing)
    assert fault in found
    assert "tap/a/000001.safetensors" in found
    if fault != "missing":
        with pytest.raises(TapflError, match=r"000001\.safetensors"):
            ClientStore(tmp_path).load("tap", "a", as_of=1)


def test_a_file_of_another_run_is_not_the_one_that_is_listed(tmp_path):
    one, other = (ClientStore(tmp_path / name) for name in ("one", "other"))
    for store, number in ((one, 1), (other, 2)):
        store.save("tap", "a", 0, state(number), {})
        store.close()
    listing = one.listing(as_of=0)
    path = "tap/a/000000.safetensors"
    (one.folder / path).write_bytes((other.folder / path).read_bytes())
    assert "not the file that the checkpoint lists" in ClientStore(one.folder).check(listing)


class StoreMachine(RuleBasedStateMachine):
    """The store against a dictionary: saves, loads as of rounds, prunes, crashes after a flush."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store, self.round, self.floor = ClientStore(self.folder, 3 * BYTES), 0, -1
        self.model = {}
        self.flushed = {}

    @rule(client=st.sampled_from("abc"), number=st.integers(0, 1000))
    def save(self, client, number):
        self.store.save("tap", client, self.round, state(number), {"n": number})
        self.model.setdefault(client, {})[self.round] = number

    @rule()
    def next_round(self):
        self.round += 1

    @rule(client=st.sampled_from("abc"), back=st.integers(0, 5))
    def load(self, client, back):
        as_of = self.round - back
        if as_of < self.floor:
            return
        known = [r for r in self.model.get(client, {}) if r <= as_of]
        found = self.store.load("tap", client, as_of)
        if not known:
            assert found is None
        else:
            expected = self.model[client][max(known)]
            assert (value(found), found[1]) == (expected, {"n": expected})

    @rule()
    def flush(self):
        self.store.flush()
        self.flushed = {c: dict(v) for c, v in self.model.items()}

    @rule(client=st.sampled_from("abc"))
    def prune(self, client):
        self.flush()
        self.floor = self.round
        self.store.prune("tap", client, self.round, kept=(self.round,))

    @rule()
    def restart(self):
        """Another process goes on from a checkpoint: it has to check what that lists first."""
        self.flush()
        listing = self.store.listing(as_of=self.round)
        self.store.close()
        self.store = ClientStore(self.folder, 3 * BYTES)
        assert self.store.check(listing) is None

    @rule()
    def resume(self):
        """A checkpoint is read again: what came after it never happened."""
        self.flush()
        listing = self.store.listing(as_of=self.round)
        self.store = ClientStore(self.folder, 3 * BYTES)
        assert self.store.check(listing) is None

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None,
                                          derandomize=True)
TestStoreMachine = StoreMachine.TestCase
