"""One run's folder, several processes: who writes there, and which files count."""

import subprocess
import sys
import threading
import time

import pytest

from tapfl.engine.clientstore import ClientStore
from tapfl.engine.folder import WORKERS, RunFolder, nobody_at_work, work_beside
from tapfl.errors import TapflError
from tests.engine.stores import on_disk, state, value


def turn(store, round_, files, number):
    """Take a client's turn in a process of its own; return the files that it wrote."""
    store.adopt("a", ["tap", "fedper"], files)
    found = store.load("tap", "a", as_of=round_ - 1)
    store.save("tap", "a", round_, state(number), {})
    store.prune("tap", "a", round_, ())
    store.flush()
    wrote = store.newest("a", ["tap", "fedper"], round_)
    store.release("a", ["tap", "fedper"])
    return found and value(found), wrote


def test_a_client_moves_between_processes(tmp_path):
    one, other, server = (ClientStore(tmp_path) for _ in range(3))
    before, files = turn(one, 0, {}, 10)
    assert before is None
    before, files = turn(other, 3, files, 13)
    assert before == 10
    before, files = turn(one, 5, files, 15)  # which has an older one of its own
    assert before == 13
    assert set(files) == {"tap"}
    server.note("a", files)
    assert server.newest("a", ["tap", "fedper"], as_of=5) == files
    assert server.newest("a", ["tap"], as_of=4) == {}
    assert server.listing(as_of=5) == [("tap", "a", 5, files["tap"][1])]
    assert ClientStore(tmp_path).check(server.listing(as_of=5)) is None
    assert on_disk(one) == ["tap/a/000003", "tap/a/000005"]  # the oldest is pruned by whoever


def test_what_the_server_does_not_name_does_not_count(tmp_path):
    """An undone round left a newer file behind, or a client that had none has one."""
    store = ClientStore(tmp_path)
    _, first = turn(store, 0, {}, 10)
    turn(store, 4, first, 14)
    before, later = turn(store, 7, first, 17)
    assert before == 10
    assert turn(store, 8, {}, 18)[0] is None
    assert turn(ClientStore(tmp_path), 9, later, 19)[0] == 17


def test_a_server_remembers_the_two_newest_versions(tmp_path):
    server = ClientStore(tmp_path)
    for version in range(50):
        server.note("a", {"tap": (version, f"sum{version}")})
    assert server.newest("a", ["tap"], as_of=49) == {"tap": (49, "sum49")}
    assert server.newest("a", ["tap"], as_of=48) == {"tap": (48, "sum48")}
    assert server.newest("a", ["tap"], as_of=47) == {}


def test_a_released_client_takes_no_memory(tmp_path):
    store = ClientStore(tmp_path)
    for number in range(20):
        turn(store, number, {}, number)
    assert store._files._written.nbytes == 0
    assert not store._known


def test_a_folder_is_entered_when_its_workers_have_gone(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    files = [work_beside(tmp_path), work_beside(tmp_path)]  # workers do not exclude each other
    with pytest.raises(TapflError, match=r"workers of another process are still at work.*0.1 s"):
        nobody_at_work(tmp_path, patience=0.1)
    files.pop().close()
    threading.Timer(0.3, files.pop().close).start()
    started = time.monotonic()
    with RunFolder(tmp_path, resume=True):
        assert time.monotonic() - started > 0.2
        assert not (tmp_path / WORKERS).exists()


@pytest.mark.long
def test_a_killed_worker_holds_nothing(tmp_path):
    code = ("import sys, time, pathlib, tapfl.engine.folder as folder\n"
            "file = folder.work_beside(pathlib.Path(sys.argv[1]))\n"
            "print('held', flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)],
                          stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        with pytest.raises(TapflError):
            nobody_at_work(tmp_path, patience=0.1)
        worker.kill()
    nobody_at_work(tmp_path, patience=5)


def test_a_failed_start_with_workers_leaves_no_folder(tmp_path):
    folder = RunFolder(tmp_path / "run", resume=False).__enter__()
    work_beside(folder.path).close()
    folder.__exit__(KeyError, KeyError(), None)
    assert not (tmp_path / "run").exists()
