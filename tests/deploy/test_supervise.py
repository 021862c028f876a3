"""What ends is started again, later and later; what cannot work is given up with its reason."""

import json
import os
import signal
import sys
import time

import pytest

from tapfl.deploy.processes import Processes, free_port, recorded, stop_recorded
from tapfl.deploy.supervise import FIRST, MOST, STEADY, Backoff, Supervisor
from tapfl.engine.process import identity, is_running
from tapfl.errors import TapflError

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def supervised(tmp_path):
    clock, said = Clock(), []
    supervisor = Supervisor(Processes(tmp_path), said.append, clock)
    yield supervisor, clock, said
    supervisor.processes.stop()


def ended(supervisor, name):
    for _ in range(500):
        if name in supervisor.processes.ended():
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} goes on")


def test_pauses_grow_up_to_a_bound_and_begin_anew_after_a_while():
    backoff, now = Backoff(), 0.0
    pauses = []
    for _ in range(8):
        backoff.started(now)
        pauses.append(backoff.ended(now + 1))
    assert pauses == [FIRST, 2, 4, 8, 16, MOST, MOST, MOST]
    backoff.started(now)
    assert backoff.ended(now + STEADY) == FIRST


def test_tries_are_counted_in_succession():
    backoff = Backoff(tries=2)
    backoff.started(0.0)
    assert [backoff.ended(1.0) for _ in range(3)] == [1.0, 2.0, None]
    backoff.started(0.0)
    assert backoff.ended(STEADY) == FIRST


def test_a_killed_process_is_started_again_when_its_time_has_come(supervised, tmp_path):
    supervisor, clock, said = supervised
    supervisor.keep("sleeper", SLEEPS)
    first = recorded(tmp_path)["sleeper"]["pid"]
    assert supervisor.look() == []
    os.kill(first, signal.SIGKILL)
    ended(supervisor, "sleeper")
    assert supervisor.look() == []
    assert said == [f"sleeper was killed by signal 9 ({tmp_path / 'sleeper.log'} may say why); "
                    "starting it again in 1 s"]
    assert supervisor.look() == []  # said once
    clock.now += 1
    assert supervisor.look() == ["sleeper"]
    assert recorded(tmp_path)["sleeper"]["pid"] != first
    assert len(said) == 1


def test_a_command_may_be_made_anew_for_every_start(supervised, tmp_path):
    supervisor, clock, _ = supervised
    words = iter(["one", "two"])
    supervisor.keep("says", lambda: ["sh", "-c", f"echo {next(words)}; exit 1"])
    for _ in range(2):
        ended(supervisor, "says")
        supervisor.look()
        clock.now += 1
    ended(supervisor, "says")
    assert (tmp_path / "says.log").read_text() == "one\ntwo\n"


def test_what_a_dead_process_has_started_ends_before_the_next_start(supervised, tmp_path):
    supervisor, clock, _ = supervised
    supervisor.keep("parent", ["sh", "-c", f"sleep 60 & echo $! > {tmp_path / 'child'}; sleep 60"])
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().strip():
        time.sleep(0.01)
    os.kill(recorded(tmp_path)["parent"]["pid"], signal.SIGKILL)
    ended(supervisor, "parent")
    supervisor.look()
    clock.now += 1
    child = identity(int((tmp_path / "child").read_text()))
    assert is_running(child)
    supervisor.look()
    for _ in range(500):
        if not is_running(child):
            break
        time.sleep(0.01)
    assert not is_running(child)


def test_bad_input_at_the_first_start_is_the_reason_to_give_up(supervised):
    supervisor, _, _ = supervised
    supervisor.keep("node", [
        "sh", "-c", "echo some; echo 'tapfl: x.yaml: no such file' >&2; exit 2"])
    ended(supervisor, "node")
    with pytest.raises(TapflError, match=r"^node: x\.yaml: no such file$"):
        supervisor.look()


def test_what_ends_too_often_is_given_up(supervised):
    supervisor, clock, said = supervised
    supervisor.keep("broken", ["sh", "-c", "exit 3"], tries=2)

    def again_and_again():
        for _ in range(10):
            ended(supervisor, "broken")
            supervisor.look()
            clock.now += 10

    with pytest.raises(TapflError, match="broken ended with status 3, as 2 times before"):
        again_and_again()
    assert len(said) == 2


def test_a_process_that_never_listens_is_an_error(supervised):
    supervisor, _, _ = supervised
    with pytest.raises(TapflError, match="server has ended at once"):
        supervisor.keep("server", ["sh", "-c", "exit 1"], port=free_port())


def test_what_a_killed_supervisor_leaves_is_found_by_the_next_one(tmp_path):
    processes = Processes(tmp_path)
    processes.start("sleeper", SLEEPS)
    who = recorded(tmp_path)["sleeper"]
    assert stop_recorded(tmp_path) == ["sleeper"]
    processes.stop()
    (tmp_path / "processes.json").write_text(json.dumps({"other": who | {"started": "1"}}))
    assert stop_recorded(tmp_path) == []  # the id is another's now


def test_children_end_with_a_parent_that_is_killed(tmp_path):
    code = ("import sys, time; from pathlib import Path; from tapfl.deploy.processes import "
            f"Processes; p = Processes(Path({str(tmp_path)!r})); "
            f"p.start('sleeper', {SLEEPS!r}); time.sleep(60)")
    own = Processes(tmp_path / "own")
    own.start("parent", [sys.executable, "-c", code])
    while not recorded(tmp_path):
        assert not own.ended()
        time.sleep(0.02)
    os.kill(recorded(tmp_path / "own")["parent"]["pid"], signal.SIGKILL)
    for _ in range(500):
        if not recorded(tmp_path):
            break
        time.sleep(0.01)
    assert recorded(tmp_path) == {}
    own.stop()
