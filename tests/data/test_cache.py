import json
import multiprocessing
import time

import pytest
import torch

from tapfl.data.cache import NOTES, TENSORS, cached, root


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TAPFL_CACHE", str(tmp_path))
    return tmp_path


class Maker:
    def __init__(self, value=1):
        self.calls, self.value = 0, value

    def __call__(self):
        self.calls += 1
        return {"x": torch.arange(100) + self.value}, {"told": self.value}


def fetch(key, make):
    said = []
    tensors, notes = cached(key, make, said.append)
    return tensors["x"][0].item(), notes["told"], said


def entries(folder):
    return [p for p in (folder / "data").iterdir() if p.is_dir()]


def test_hit_and_miss(folder):
    assert root() == folder
    make = Maker()
    assert fetch({"a": 1}, make) == fetch({"a": 1}, make) == (1, 1, [])
    assert make.calls == 1
    assert fetch({"a": 2}, Maker(5)) == (5, 5, [])
    assert len(entries(folder)) == 2


@pytest.mark.parametrize("name", [TENSORS, NOTES])
@pytest.mark.parametrize("size", [0, 10, 200])
def test_a_truncated_file_is_made_anew(folder, name, size):
    fetch({"a": 1}, Maker())
    path = entries(folder)[0] / name
    path.write_bytes(path.read_bytes()[:min(size, path.stat().st_size - 1)])
    make = Maker()
    assert fetch({"a": 1}, make) == (1, 1, [])
    assert make.calls == 1
    assert fetch({"a": 1}, make)[0] == 1
    assert make.calls == 1


def test_other_damage_is_made_anew(folder):
    fetch({"a": 1}, Maker())
    notes = entries(folder)[0] / NOTES
    for text in ("[]", "{}", "nonsense", json.dumps({"size": 3, "notes": {}})):
        notes.write_text(text)
        make = Maker()
        assert fetch({"a": 1}, make)[0] == 1
        assert make.calls == 1


def test_a_half_made_entry_is_none(folder):
    class Interrupted(Exception):
        pass

    def broken():
        raise Interrupted

    with pytest.raises(Interrupted):
        fetch({"a": 1}, broken)
    (folder / "data" / "rubbish.partial").mkdir()
    assert fetch({"a": 1}, Maker())[0] == 1


def test_a_cache_that_cannot_be_written_is_gone_without(folder, monkeypatch):
    (folder / "data").write_text("in the way")
    value, _, said = fetch({"a": 1}, Maker())
    assert value == 1
    assert "cannot be used" in said[0]


def _slow(folder, log):
    import os

    os.environ["TAPFL_CACHE"] = str(folder)

    def make():
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.5)
        return Maker()()

    assert fetch({"a": 1}, make)[0] == 1


@pytest.mark.long
def test_two_processes_at_once_make_it_once(folder):
    log = folder / "log"
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=_slow, args=(folder, log)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [p.exitcode for p in both] == [0, 0]
    assert log.read_text() == "made\n"
