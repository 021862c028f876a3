"""Runs in processes of their own: some at a time, ended with their parent, one failure alone."""

import multiprocessing
import os
import signal
import sys
import time

import pytest
import yaml

from tapfl.config import Config
from tapfl.engine.record import RunRecord, Times
from tapfl.errors import TapflError
from tapfl.experiments import execute as module
from tapfl.experiments.execute import (
    Job,
    Place,
    check_devices,
    execute,
    expected_seconds,
    places,
)
from tests.experiment import tiny_experiment

# Waits for a signal, and writes down that it came.
WAITS = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[1], "told").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(30)
"""
DEAF = WAITS.replace("signal.signal(signal.SIGTERM, stop)",
                     "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """Let a job run the script under its folder's name, with the common folder as argument."""
    found = {}
    monkeypatch.setattr(module, "POLL", 0.01)
    monkeypatch.setattr(module, "_command", lambda place, job: [
        sys.executable, "-S", "-c", found[job.folder.name], str(tmp_path)])
    return found


def job(tmp_path, name):
    return Job(tmp_path / "runs" / name, Config(seed=5))


def wait_for(path, seconds=20.0):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.01)


def test_one_that_fails_does_not_stop_the_others(tmp_path, scripts):
    scripts |= {"good": "print('fine')", "silent": "import os; os._exit(3)",
                "bad": "import sys; print('first'); sys.exit('tapfl: no such data')",
                "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"}
    seen = []
    jobs = [job(tmp_path, name) for name in ("bad", "silent", "killed", "good")]
    outcomes = execute(jobs, [Place("cpu")], lambda s: seen.append((len(s.done), s.waiting)))
    faults = {each.job.folder.name: each.fault for each in outcomes}
    assert faults == {"bad": "exit status 1; last line: tapfl: no such data",
                      "silent": "exit status 3; last line: none",
                      "killed": "killed by signal 9; last line: none", "good": None}
    assert jobs[0].log.read_text() == "first\ntapfl: no such data\n"
    assert Config.model_validate(yaml.safe_load(jobs[0].file.read_text())) == jobs[0].config
    assert seen[0] == (0, 3)
    assert seen[-1] == (4, 0)
    assert all(each.seconds > 0 for each in outcomes)


def test_a_log_goes_on_and_may_hold_anything(tmp_path, scripts):
    scripts["raw"] = "import sys; sys.stdout.buffer.write(b'\\xff\\n'); sys.exit(1)"
    for _ in range(2):
        (outcome,) = execute([job(tmp_path, "raw")], [Place("cpu")])
        assert outcome.fault == "exit status 1; last line: \N{REPLACEMENT CHARACTER}"
    assert outcome.job.log.read_bytes() == b"\xff\n" * 2


def test_a_run_does_not_read_what_is_typed(tmp_path, scripts):
    scripts["reads"] = "import sys; print(repr(sys.stdin.read()))"
    (end, typed), kept = os.pipe(), os.dup(0)
    os.write(typed, b"typed")
    os.close(typed)
    os.dup2(end, 0)
    try:
        (outcome,) = execute([job(tmp_path, "reads")], [Place("cpu")])
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(end)
    assert outcome.job.log.read_text() == "''\n"


@pytest.mark.parametrize("count", [1, 2])
def test_no_more_at_a_time_than_there_are_places(tmp_path, scripts, count):
    names = ("a", "b", "c")
    scripts |= dict.fromkeys(names, "import time; time.sleep(0.15)")
    running = []
    execute([job(tmp_path, name) for name in names], [Place("cpu") for _ in range(count)],
            lambda status: running.append(len(status.running)))
    assert max(running) == count


@pytest.mark.parametrize("seconds", [0, 0.4])
def test_a_stop_is_passed_on(tmp_path, scripts, seconds):
    """A run has time to write its round down."""
    scripts["waits"] = WAITS.replace("def stop(*_):", f"def stop(*_):\n    time.sleep({seconds})")

    def stop(status):
        if (tmp_path / "ready").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute([job(tmp_path, "waits")], [Place("cpu")], stop)
    assert (tmp_path / "told").exists()


def test_a_run_that_does_not_stop_is_killed(tmp_path, scripts, monkeypatch):
    scripts["deaf"] = DEAF
    monkeypatch.setattr(module, "GRACE", 0.2)
    where = [Place("cpu")]

    def stop(status):
        if (tmp_path / "ready").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute([job(tmp_path, "deaf")], where, stop)
    assert where[0].process.wait(5) == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
@pytest.mark.filterwarnings("ignore:This process")  # it has threads; this one does nothing else
def test_runs_end_when_the_parent_is_killed(tmp_path, scripts):
    scripts["waits"] = WAITS
    parent = multiprocessing.get_context("fork").Process(
        target=execute, args=([job(tmp_path, "waits")], [Place("cpu")]))
    parent.start()
    wait_for(tmp_path / "ready")
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    wait_for(tmp_path / "told")


def test_ctrl_c_reaches_the_parent_alone(tmp_path, scripts):
    scripts["group"] = "import os; print(os.getpid() == os.getpgid(0))"
    each = job(tmp_path, "group")
    execute([each], [Place("cpu")])
    assert each.log.read_text() == "True\n"


def test_a_place_that_cannot_be_written(tmp_path, scripts):
    (tmp_path / "runs").touch()
    with pytest.raises(TapflError, match=r"runs: cannot start a run here"):
        execute([job(tmp_path, "any")], [Place("cpu")])


def test_the_command_of_a_run(tmp_path):
    each = job(tmp_path, "a")
    new = [sys.executable, "-m", "tapfl", "run", str(each.file)]
    where = ["--no-report", "--out", str(each.folder), "--device"]
    assert module._command(Place("cpu", 3), each) == [*new, "--threads", "3", *where, "cpu"]
    assert module._command(Place("cuda:1"), each) == [*new, *where, "cuda"]
    each.config = each.config.model_copy(update={"threads": 1})  # as the configuration says
    assert module._command(Place("cpu", 3), each) == [*new, *where, "cpu"]
    begun = Job(each.folder, Config(), True, tmp_path)
    assert module._command(Place("cpu", 3), begun) == [
        *new, "--resume", *where, "cpu", "--modules", str(tmp_path)]


def test_the_devices_that_a_run_sees(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in module._environment(Place("cuda"))
    assert module._environment(Place("cuda:1"))["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")  # the second GPU of this process
    assert module._environment(Place("cuda:1"))["CUDA_VISIBLE_DEVICES"] == "6"
    assert module._environment(Place("cpu"))["CUDA_VISIBLE_DEVICES"] == "4, 6"
    assert module._environment(Place("cuda:2"))["CUDA_VISIBLE_DEVICES"] == "2"  # it is not there


def test_places(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)

    def found(*given):
        return [(each.device, each.threads) for each in places(*given)]

    assert found(["cpu"], None) == [("cpu", 1)] * 6
    assert found(["cpu"], 2) == [("cpu", 3)] * 2
    assert found(["cpu"], 9) == [("cpu", 1)] * 9
    assert found(["cuda:0", "cuda:1"], None) == [("cuda:0", None), ("cuda:1", None)]
    assert found(["cuda", "cuda"], 2) == [("cuda", None)] * 2
    assert found(["cpu"], 1, 1) == [("cpu", 1)]
    assert found(["cpu"], None, 3) == [("cpu", 3)] * 2
    assert found(["cpu"], None, 7) == [("cpu", 7)]
    assert found(["cuda"], None, 2) == [("cuda", 2)]


@pytest.mark.parametrize(("devices", "jobs", "message"), [
    (["gpu"], None, "--devices gpu: expected cpu, cuda or cuda:N"),
    ([""], None, "--devices : expected cpu"), (["cpu:1"], None, "--devices cpu:1: expected cpu"),
    (["cuda:x"], None, "a number after the colon"), (["cuda:²"], None, "a number after the colon"),
    (["cpu"], 0, "--jobs 0: expected at least 1")])
def test_wrong_places(devices, jobs, message):
    with pytest.raises(TapflError, match=message):
        places(devices, jobs)
    with pytest.raises(TapflError, match="--threads 0: expected at least 1"):
        places(["cpu"], None, 0)


def test_gpus_that_are_not_here(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_devices(places(["cpu", "cuda", "cuda:0"], 1))
    with pytest.raises(TapflError, match=r"--devices cuda:1: there is no such GPU here \(1 in all"):
        check_devices(places(["cuda:0", "cuda:1"], None))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(TapflError, match="--devices cuda: there is no such GPU"):
        check_devices(places(["cuda"], None))


def test_rounds_of_a_job(tmp_path):
    each = Job(tmp_path, Config(methods=["local", "fedavg", "tap"]))
    assert each.rounds() == 0
    assert each.total == 2 * each.config.train.rounds  # two federated runs
    (tmp_path / "events.jsonl").write_text('{"event": "round", "round": 0}\n{"event": "personal"}\n'
                                           '{"event": "round", "round": 1}\n')
    assert each.rounds() == 2


def test_the_expected_time_comes_from_rounds_ends_and_starts(tmp_path):
    """A run of two models that train beside W costs three times the rounds of one without."""
    def record(methods, rounds, final, start):
        times = {"fedavg": Times(rounds=rounds, final=final, per_client_final={})}
        return RunRecord.model_construct(config=tiny_experiment(tmp_path, methods=methods),
                                         seconds=rounds + final + start, times=times)

    # 4 rounds x 2 clients x 2 steps = 16 steps, 4 clients.
    alone = record(["fedavg"], 16.0, 8.0, 5.0)
    three = ["fedavg", "tap", "ditto"]
    wanted = [tiny_experiment(tmp_path, methods=three),
              tiny_experiment(tmp_path, methods=["fedavg", "fedavg+post"]),
              tiny_experiment(tmp_path, methods=["fedavg"], train={"rounds": 8}),
              tiny_experiment(tmp_path, methods=["fedavg", "fedavg+post2"]),
              tiny_experiment(tmp_path, methods=["fedavg"], train={"cohort": 4})]
    assert expected_seconds([alone], wanted) == pytest.approx(
        [5 + 3 * 16 + 3 * 8, 5 + 16 + 2 * 8, 5 + 32 + 8, 5 + 16 + 2 * 8, 5 + 32 + 8])
    # A clock that was set back, and runs without rounds, which tell nothing of theirs.
    assert expected_seconds([record(["fedavg"], 16.0, 8.0, -5.0)], wanted[:1]) == [3 * 16 + 3 * 8]
    short = tiny_experiment(tmp_path, methods=["fedavg"], train={"rounds": 0})
    none = alone.model_copy(update={"config": short})
    assert expected_seconds([none], [short]) == [5 + 8]
    # Several known runs: the rates of all of them together.
    known = [alone, record(three, 24.0, 24.0, 3.0)]
    steps, models, start = 40 / (16 + 48), 32 / (4 + 12), 4.0
    assert expected_seconds(known, wanted[:1]) == pytest.approx([start + 48 * steps + 12 * models])
