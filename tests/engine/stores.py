"""Small states, and a gate that holds the writer up: what tests of the store share."""

import threading

import torch

from tapfl.blocks import BlockState
from tapfl.engine import clientstore as store_module

SHAPES = {"backbone": {"a": torch.Size([10, 5]), "b": torch.Size([50])}}
BYTES = 400


def state(value):
    return BlockState({"backbone": torch.full((100,), float(value))}, SHAPES)


def value(found):
    """Return the one number that a state is made of."""
    flat = found[0]["backbone"]
    assert flat.shape == (100,)
    assert found[0].shapes == SHAPES
    assert (flat == flat[0]).all()
    return float(flat[0])


def on_disk(store):
    return sorted(str(p.relative_to(store.folder)).removesuffix(".safetensors")
                  for p in store.folder.glob("*/*/*.safetensors"))


class Gate:
    """write_state with a door: it counts, waits and fails as told."""

    def __init__(self, monkeypatch):
        self.open, self.error, self.written = threading.Event(), None, []
        self.real = store_module.write_state
        self.open.set()
        monkeypatch.setattr(store_module, "write_state", self)

    def __call__(self, path, label, state, notes):
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        digest = self.real(path, label, state, notes)
        self.written.append(path)
        return digest


def writers():
    return [t for t in threading.enumerate() if t.name == "tapfl-writer"]
