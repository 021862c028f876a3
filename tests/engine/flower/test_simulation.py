"""A simulation in worker processes makes the run that one process makes."""

import functools
import json
import os
import subprocess
import sys
from collections import deque

import pytest
import yaml

from tapfl.engine.flower.dispatch import Gone
from tapfl.engine.flower.simulation import Simulation, simulation
from tapfl.engine.flower.station import make_station
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.events import Message, RoundEnded
from tapfl.use.load import load
from tests.engine.flower.memory import Killed, while_alive
from tests.engine.test_departures import Leaving
from tests.engine.test_start import longer
from tests.experiment import read_events, tiny_experiment

METHODS = ["tap", "fedper"]
MORE = ["fedavg", "fedavg+post", "tap", "feddat+tap", "perfedavg", "local"]


class Here:
    """A pool whose workers are stations in this process; ``dies`` says at which calls one ends.

    A worker does one call at a time. The last worker with something to do goes first, so that
    answers come in another order than turns are handed out.
    """

    def __init__(self, size, dies=()):
        self.size, self.dies, self.calls = size, set(dies), 0
        self.stations, self.queues, self.answers, self.renewed = {}, {}, {}, []
        self.most = 0

    def start(self, order, notify):
        self.order = order | {"share": self.size}
        self.queues = {worker: deque() for worker in range(self.size)}

    def send(self, worker, name, *arguments):
        ticket = (worker, name, object())
        self.queues[worker].append((ticket, name, arguments))
        self.most = max(self.most, len(self.queues[worker]))
        return ticket

    def wait(self, tickets):
        assert tickets
        while not any(ticket in self.answers for ticket in tickets):
            self.work(max(worker for worker, queue in self.queues.items() if queue))
        return [ticket for ticket in tickets if ticket in self.answers][:1]

    def work(self, worker):
        ticket, name, arguments = self.queues[worker].popleft()
        self.calls += name in ("ask", "after", "rest")
        if self.calls in self.dies and name in ("ask", "after", "rest"):
            self.dies.remove(self.calls)
            if worker in self.stations:
                self.stations.pop(worker).leave()
            for lost in [ticket, *(t for t, _, _ in self.queues[worker])]:
                self.answers[lost] = Gone("killed")
            self.queues[worker].clear()
            return
        if worker not in self.stations:
            self.stations[worker] = make_station(self.order)
        self.answers[ticket] = getattr(self.stations[worker], name)(*arguments)

    def get(self, ticket):
        self.wait([ticket])
        said = self.answers.pop(ticket)
        if isinstance(said, Gone):
            raise said
        return said

    def renew(self, worker):
        self.renewed.append(worker)


def through(pool, config, out, **more):
    return run(config, out, device="cpu", site=functools.partial(Simulation, pool, None), **more)


def events(folder):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in read_events(folder)]


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes()
            for name in ("models", "scores", "samples", "labels.json", "results.csv")
            for path in [folder / name, *(folder / name).rglob("*")] if path.is_file()}


def record(folder):
    values = json.loads((folder / "run.json").read_text())
    values["environment"].pop("workers", None)
    return {key: value for key, value in values.items()
            if key not in ("id", "seconds", "memory", "times", "began")}


def state(folder):
    return {str(path.relative_to(folder)) for path in (folder / "state").rglob("*.safetensors")}


def assert_same(one, other):
    assert files(one) == files(other)
    assert events(one) == events(other)
    assert record(one) == record(other)
    assert state(one) == state(other)


def setting(folder, methods=METHODS):
    return tiny_experiment(folder, methods=methods,
                           evaluation={"every": 2, "sample": 2, "max_new_tokens": 2},
                           train={"rounds": 4, "cohort": 3, "local_steps": 1},
                           data={"train": 12, "test": 2}, post={"steps": 1})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulation")
    run(setting(folder), folder / "alone", device="cpu")
    return folder


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_run_is_the_same(alone, workers):
    pool = Here(workers)
    out = alone / f"workers{workers}"
    through(pool, setting(alone), out)
    assert_same(alone / "alone", out)
    assert not pool.answers  # nothing is left over
    assert pool.most <= 3  # X of one turn, W and X of the next: no more waits at a worker
    model = load(out, client="shapes")
    assert model.predict("agnews", text="shares rise") is not None


@pytest.mark.long
def test_a_run_goes_on_and_a_client_leaves_as_in_one_process(alone, tmp_path):
    config = longer(setting(alone), 6, alone / "alone")
    here, there = tmp_path / "here", tmp_path / "there"
    run(config, here, device="cpu", notify=Leaving(here, 4, "news"))
    through(Here(2), config, there, notify=Leaving(there, 4, "news"))
    assert_same(here, there)
    assert [event["round"] for event in events(there) if event["event"] == "left"] == [5, 4]
    assert json.loads((there / "run.json").read_text())["id"]


@pytest.mark.long
def test_the_run_is_the_same_whatever_the_method(tmp_path):
    config = setting(tmp_path, MORE)
    run(config, tmp_path / "alone", device="cpu")
    through(Here(3), config, tmp_path / "run")
    assert_same(tmp_path / "alone", tmp_path / "run")


@pytest.mark.parametrize("dies", [
    {1}, pytest.param({2, 9, 20, 33}, marks=pytest.mark.long)])
def test_a_dead_worker_changes_nothing(alone, tmp_path, dies):
    pool, said = Here(2, dies), []
    through(pool, setting(alone), tmp_path / "run", notify=said.append)
    assert len(pool.renewed) == len(dies)
    assert sum("has ended (killed)" in str(event) for event in said
               if isinstance(event, Message)) == len(dies)
    assert_same(alone / "alone", tmp_path / "run")


@pytest.mark.long
def test_a_client_whose_worker_dies_twice_is_missing(alone, tmp_path):
    config = setting(alone)
    pool = Here(1, {1, 2})
    through(pool, config, tmp_path / "run")
    missing = read_events(tmp_path / "run", "missing")
    assert len(missing) == 1
    assert "ended 2 times" in missing[0]["reason"]
    first = read_events(tmp_path / "run", "round")[0]
    assert missing[0]["client"] in first["cohort"]
    assert not any(missing[0]["client"] in who for who in first["contributors"].values())


@pytest.mark.long
def test_a_personal_model_that_is_lost_twice_stays_as_it_was(alone, tmp_path):
    """The second call is the training of X: W has been counted by then."""
    said = []
    through(Here(1, {2, 4}), setting(alone), tmp_path / "run", notify=said.append)
    lost = [str(event) for event in said if "has lost what its X" in str(event)]
    assert len(lost) == 1
    assert not read_events(tmp_path / "run", "missing")
    client = lost[0].split()[0]
    first = read_events(tmp_path / "run", "round")[0]
    assert any(client in who for who in first["contributors"].values())
    replaced = [e["round"] for e in read_events(tmp_path / "run", "replacement")
                if e["client"] == client]
    assert 0 not in replaced


@pytest.mark.long
@pytest.mark.parametrize("again", [3, None])
def test_a_killed_run_goes_on_with_other_workers(alone, tmp_path, monkeypatch, again):
    """Also in one process; what was left behind after the checkpoint does not count."""
    config = setting(alone)

    def kill(event):
        if isinstance(event, RoundEnded) and event.round == 2 and event.method == "fedper":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("tapfl.engine.rounds.Rounds.commit", while_alive)
        with pytest.raises(Killed):
            through(Here(2), config, tmp_path / "run", notify=kill)
    if again is None:
        run(config, tmp_path / "run", device="cpu", resume=True)
    else:
        through(Here(again), config, tmp_path / "run", resume=True)
    assert_same(alone / "alone", tmp_path / "run")


@pytest.mark.long
def test_states_of_an_undone_round_do_not_count(alone, tmp_path, monkeypatch):
    """A client whose undone round is not repeated goes on from what the checkpoint lists."""
    config = setting(alone)
    runs = {}
    for name in ("once", "undone"):
        out = tmp_path / name
        if name == "undone":
            def kill(event):
                if isinstance(event, RoundEnded) and event.round == 2:
                    raise Killed

            with monkeypatch.context() as patch:
                patch.setattr("tapfl.engine.rounds.Rounds.commit", while_alive)
                with pytest.raises(Killed):
                    through(Here(1), config, out, notify=kill)
        else:
            with pytest.raises(KeyboardInterrupt):
                through(Here(1), config, out, notify=_stop_after(1))
        # The first client of round 3 is missing: its worker ends twice.
        through(Here(1, {1, 2}), config, out, resume=True)
        runs[name] = files(out)
        assert len(read_events(out, "missing")) == 1
    assert runs["once"] == runs["undone"]


def _stop_after(round_):
    def stop(event):
        if isinstance(event, RoundEnded) and event.round == round_:
            raise KeyboardInterrupt
    return stop


def test_a_worker_with_other_code_is_refused(alone, tmp_path, monkeypatch):
    pool = Here(2)
    monkeypatch.setattr("tapfl.engine.flower.station.code_digest", lambda: "other")
    with pytest.raises(TapflError, match="worker 1 has other code of tapfl: other, expected"):
        through(pool, setting(alone), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_error_in_a_worker_ends_the_run_as_it_would_here(alone, tmp_path, monkeypatch):
    monkeypatch.setattr("tapfl.engine.turn.ClientTurn.train",
                        lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(TapflError, match="No space left on device"):
        through(Here(2), setting(alone), tmp_path / "run")


# Ray itself

@pytest.fixture(scope="module")
def ray_missing_or_there():
    return pytest.importorskip("ray")


def test_without_ray(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TapflError, match="Ray is not installed here: pip install"), simulation(2):
        pass
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize(("workers", "gpus", "share"), [
    (4, 2, 0.5), (2, 2, 1), (1, 2, 1), (3, 2, 0.5), (5, 2, 1 / 3), (2, 1, 0.5), (3, 0, 0)])
def test_gpus_are_shared_in_whole_workers(workers, gpus, share):
    from tapfl.engine.flower.ray_pool import gpu_share

    assert gpu_share(workers, gpus) == pytest.approx(share)


KILLING = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tapfl.config import load_config
from tapfl.engine.flower.simulation import simulation
from tapfl.engine.run import run
from tapfl.events import RoundEnded

def kin(pid):
    rows = [line.split(None, 2) for line in subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout.splitlines()[1:]]
    family = {pid}
    for _ in range(4):
        family |= {int(row[0]) for row in rows if int(row[1]) in family}
    return [int(row[0]) for row in rows if int(row[0]) in family and "ray::Actor" in row[2]]

killed = []
def tell(event):
    print(event, flush=True)
    if isinstance(event, RoundEnded) and event.round == 1 and not killed:
        for _ in range(100):
            if workers := kin(os.getpid()):
                break
            time.sleep(0.1)
        else:
            sys.exit("no worker among\\n" + subprocess.run(
                ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout)
        killed.append(workers[0])
        os.kill(killed[0], signal.SIGKILL)

with simulation(2) as site:
    run(load_config(sys.argv[1], []), Path(sys.argv[2]), device="cpu", notify=tell, site=site)
assert killed
"""


@pytest.mark.long
@pytest.mark.usefixtures("ray_missing_or_there")
def test_on_ray_a_worker_is_killed(alone, tmp_path):
    """Two real workers, one of them killed with -9; the run is the same and nothing is left."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(setting(alone).model_dump(mode="json")))
    script = tmp_path / "killing.py"
    script.write_text(KILLING)
    done = subprocess.run([sys.executable, str(script), str(config), str(tmp_path / "run")],
                          capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "has ended" in done.stdout
    assert_same(alone / "alone", tmp_path / "run")
    assert not (tmp_path / "run" / ".workers").exists()


@pytest.mark.parametrize(("address", "reason"), [
    ("127.0.0.1:1", r"no Ray cluster can be reached there \(.*refused\)"),
    ("127.0.0.1:99999", "no Ray cluster can be reached there"),
    ("somewhere", "expected HOST:PORT, or auto"),
    ("ray://host:1", "expected HOST:PORT, or auto")])
def test_an_address_without_a_cluster(address, reason):
    with (pytest.raises(TapflError, match=f"--ray-address {address}: {reason}"),
          simulation(1, address)):
        pass
