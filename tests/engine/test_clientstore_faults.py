"""The store when things go wrong: full disks, errors in the writer's thread, abrupt ends."""

import threading
import time

import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.engine import clientstore as store_module
from tapfl.engine.clientstore import ClientStore
from tapfl.errors import TapflError
from tests.engine.stores import BYTES, SHAPES, on_disk, state, value, writers

FULL = TapflError("c: cannot be written (No space left on device); make room")


@pytest.mark.parametrize("call", [
    lambda store: store.save("tap", "z", 1, state(9), {}),
    lambda store: store.flush(),
    lambda store: store.close(),
], ids=["save", "flush", "close"])
def test_an_error_surfaces_once_and_a_later_attempt_succeeds(tmp_path, gate, call):
    store = ClientStore(tmp_path)
    store.save("tap", "before", 0, state(1), {})
    store.flush()
    gate.error = FULL
    store.save("tap", "a", 1, state(2), {"n": 2})
    while writers():
        time.sleep(0.01)
    with pytest.raises(TapflError, match="No space left") as caught:
        call(store)
    assert caught.value is FULL
    # Nothing is lost, in memory or on disk, and the round does not count as written.
    assert value(store.load("tap", "a", as_of=99)) == 2
    assert value(store.load("tap", "before", as_of=99)) == 1
    assert store.load("tap", "z", as_of=99) is None
    assert ClientStore(tmp_path).load("tap", "a", as_of=99) is None
    with pytest.raises(TapflError, match="No space left"):
        store.flush()  # it has tried again
    gate.error = None
    store.close()
    again = ClientStore(tmp_path)
    assert value(again.load("tap", "a", as_of=99)) == 2
    assert on_disk(again) == ["tap/a/000001", "tap/before/000000"]


def test_an_error_frees_a_caller_that_is_held_up(tmp_path, gate):
    gate.open.clear()
    gate.error = FULL
    store = ClientStore(tmp_path, cache_bytes=BYTES)
    store.save("tap", "a", 0, state(1), {})
    threading.Timer(0.1, gate.open.set).start()
    with pytest.raises(TapflError, match="No space left"):
        store.save("tap", "b", 0, state(2), {})
    assert store.load("tap", "b", as_of=99) is None
    assert value(store.load("tap", "a", as_of=99)) == 1


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    def save(self, path, metadata=None):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.BlockState, "save", save)
    store = ClientStore(tmp_path)
    store.save("tap", "a", 0, state(1), {})
    with pytest.raises(TapflError, match=r"tap/a/000000.*cannot be written .*--resume") as caught:
        store.flush()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.partial"))


def test_closing(tmp_path):
    store = ClientStore(tmp_path)
    store.close()  # nothing was ever written
    store.save("tap", "a", 0, state(1), {})
    store.close()
    store.close()
    assert on_disk(store) == ["tap/a/000000"]
    assert not store._files._busy
    assert not store._files._written
    with ClientStore(tmp_path) as other:
        other.save("tap", "b", 0, state(1), {})
    assert on_disk(store) == ["tap/a/000000", "tap/b/000000"]


def _leave(store, clients, *others):
    with store:
        for client in clients:
            store.save("tap", client, 0, state(1), {})
        for other in others:
            other()
        raise KeyError("mine")


def test_leaving_with_an_error_shows_that_error(tmp_path, gate):
    """Not the disk's; and what no checkpoint refers to is not waited for."""
    store, gate.error = ClientStore(tmp_path), FULL
    with pytest.raises(KeyError, match="mine"):
        _leave(store, "a")
    assert not store._files._busy
    gate.error = None
    gate.open.clear()
    with pytest.raises(KeyError, match="mine"):
        _leave(store, "bcdefg", lambda: time.sleep(0.1),  # the first is under way
               threading.Timer(0.2, gate.open.set).start)
    assert on_disk(store) == ["tap/b/000000"]
    assert not list(tmp_path.rglob("*.partial"))


def test_the_thread_ends_when_there_is_nothing_to_write(tmp_path):
    store = ClientStore(tmp_path)
    store.save("tap", "a", 0, state(1), {})
    assert all(t.daemon for t in writers())
    store.flush()
    deadline = time.monotonic() + 10
    while writers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not writers()


def test_many_clients_against_a_dictionary(tmp_path):
    """Two hundred clients through a memory of twenty, in random order, byte for byte."""
    draw = torch.Generator().manual_seed(1)
    store, expected = ClientStore(tmp_path, cache_bytes=20 * BYTES), {}
    for t in range(6):
        for index in torch.randperm(200, generator=draw)[:60].tolist():
            client = f"c{index}"
            found = store.load("tap", client, as_of=99)
            assert (found is None) == (client not in expected)
            if found is not None:
                assert torch.equal(found[0]["backbone"], expected[client])
            expected[client] = torch.randn(100, generator=draw)
            state_ = BlockState({"backbone": expected[client]}, SHAPES)
            store.save("tap", client, t, state_, {})
        if t % 2:
            store.flush()
    again = ClientStore(tmp_path)
    for found in (store, again):
        for client, values in expected.items():
            assert torch.equal(found.load("tap", client, as_of=99)[0]["backbone"], values)
