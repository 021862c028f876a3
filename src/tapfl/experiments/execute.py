"""Run several runs, each in a process of its own, some at a time, on one or several devices."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tapfl.config import Config, usable_cores
from tapfl.data.participants import client_count, load_federation
from tapfl.engine.process import end_with_parent
from tapfl.engine.record import RunRecord
from tapfl.errors import TapflError
from tapfl.methods import federated_runs, method_specs

POLL = 0.2  # seconds
GRACE = 60.0  # seconds that a run gets to write its last whole round down
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class Job:
    """A run to make in a folder. ``resumes``: it was begun before."""

    folder: Path
    config: Config
    resumes: bool = False
    modules: Path | None = None

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def total(self) -> int:
        """How many rounds it has, over all its federated runs."""
        return self.config.train.rounds * len(federated_runs(method_specs(self.config)))

    @property
    def file(self) -> Path:
        """The run's configuration: `tapfl run FILE` makes it again."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    def rounds(self) -> int:
        """Return how many rounds are behind it, over all its federated runs."""
        path = self.folder / "events.jsonl"
        with contextlib.suppress(OSError), path.open("rb") as file:
            return sum(line.startswith(b'{"event": "round"') for line in file)
        return 0


@dataclass
class Place:
    """A device, or a part of one: one run at a time."""

    device: str
    threads: int | None = None
    job: Job | None = None
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0


@dataclass
class Outcome:
    """How a job ended: ``fault`` is the last line that a failed run printed."""

    job: Job
    seconds: float
    fault: str | None = None


@dataclass
class Status:
    """What is going on, for a display."""

    running: list[Job] = field(default_factory=list)
    done: list[Outcome] = field(default_factory=list)
    waiting: int = 0


def places(devices: Sequence[str], jobs: int | None, threads: int | None = None) -> list[Place]:
    """Return where runs can go: ``jobs`` of them on each device, with so many threads each.

    A CPU takes one for each core, with one thread each, unless told otherwise: the models are
    small, and two threads for one run bring less than two runs.
    """
    for option, number in (("--jobs", jobs), ("--threads", threads)):
        if number is not None and number < 1:
            raise TapflError(f"{option} {number}: expected at least 1")
    cores = usable_cores()
    found = []
    for device in dict.fromkeys(devices):
        if device != "cpu" and device.partition(":")[0] != "cuda":
            raise TapflError(f"--devices {device}: expected cpu, cuda or cuda:N")
        if device.partition(":")[2] and not device.partition(":")[2].isdecimal():
            raise TapflError(f"--devices {device}: expected a number after the colon")
        count = jobs or (max(1, cores // (threads or 1)) if device == "cpu" else 1)
        each = threads or (max(1, cores // count) if device == "cpu" else None)
        found += [Place(device, each) for _ in range(count)]
    return found


def expected_seconds(known: Sequence[RunRecord], wanted: Sequence[Config]) -> list[float]:
    """Return how long runs may take, judged by those that are done.

    Rounds cost by the models that train in them, the end by what is made and evaluated there.
    """
    sizes = [_sizes(record.config) for record in known]
    times = [(sum(t.rounds for t in record.times.values()),
              sum(t.final for t in record.times.values())) for record in known]
    rounds, final = (sum(time[i] for time in times) / max(1, sum(size[i] for size in sizes))
                     for i in (0, 1))
    start = sum(max(0.0, record.seconds - sum(time))
                for record, time in zip(known, times, strict=True)) / len(known)
    return [start + rounds * steps + final * models for steps, models in map(_sizes, wanted)]


def _sizes(config: Config) -> tuple[int, int]:
    """Return the steps of all models that train in rounds, and how many there are in the end."""
    train, specs = config.train, method_specs(config)
    clients = client_count(load_federation(config.federation), config.federation)
    # Post-training happens in the end; other personal models train beside W.
    beside = sum(spec.personalizer not in ("", "post", "post2") for spec in specs)
    steps = train.rounds * train.cohort * train.local_steps
    return steps * (len(federated_runs(specs)) + beside), clients * len(specs)


def check_devices(where: Sequence[Place]) -> None:
    """Refuse GPUs that are not here: every run would fail."""
    import torch

    count = torch.cuda.device_count()
    for place in where:
        kind, _, number = place.device.partition(":")
        if kind == "cuda" and int(number or 0) >= count:
            raise TapflError(f"--devices {place.device}: there is no such GPU here ({count} in "
                             "all)")


def execute(jobs: Sequence[Job], where: Sequence[Place],
            watch: Callable[[Status], None] = lambda status: None) -> list[Outcome]:
    """Run all jobs; one that fails does not stop the others. Return how each ended."""
    waiting, status = list(jobs), Status()
    with _stopping(where):
        while waiting or any(place.job for place in where):
            for place in where:
                if place.job is None and waiting:
                    _start(place, waiting.pop(0))
                elif place.job is not None and _ended(place):
                    status.done.append(_outcome(place))
            status.running = [place.job for place in where if place.job]
            status.waiting = len(waiting)
            watch(status)
            time.sleep(POLL)
    return status.done


def _start(place: Place, job: Job) -> None:
    try:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(job.config.model_dump(mode="json"), sort_keys=False)
        job.file.write_text(text, encoding="utf-8")
        with job.log.open("ab") as log:
            # A group of its own: Ctrl-C reaches this process alone, which ends its runs in order.
            place.process = subprocess.Popen(
                _command(place, job), env=_environment(place), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, process_group=0, preexec_fn=end_with_parent)
    except OSError as error:
        raise TapflError(f"{job.folder.parent}: cannot start a run here ({error})") from None
    place.job, place.started = job, time.monotonic()


def _command(place: Place, job: Job) -> list[str]:
    """Return the command of a run."""
    command = [sys.executable, "-m", "tapfl", "run", str(job.file)]
    if job.resumes:
        command += ["--resume"]
    elif place.threads and not job.config.threads:
        command += ["--threads", str(place.threads)]
    # One report is written of all of them.
    command += ["--no-report", "--out", str(job.folder), "--device",
                place.device.partition(":")[0]]
    return command + (["--modules", str(job.modules)] if job.modules else [])


def _environment(place: Place) -> dict[str, str]:
    """Return a run's environment: ``cuda:1`` is the second GPU that this process may use."""
    number = place.device.partition(":")[2]
    if not number:
        return dict(os.environ)
    mine = [each.strip() for each in os.environ.get(VISIBLE, "").split(",") if each.strip()]
    return {**os.environ, VISIBLE: mine[int(number)] if int(number) < len(mine) else number}


def _ended(place: Place) -> bool:
    return place.process is not None and place.process.poll() is not None


def _outcome(place: Place) -> Outcome:
    assert place.job is not None
    assert place.process is not None
    code, fault = place.process.returncode, None
    if code:
        lines = place.job.log.read_text(errors="replace").strip().splitlines()
        how = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
        fault = f"{how}; last line: {lines[-1] if lines else 'none'}"
    outcome = Outcome(place.job, time.monotonic() - place.started, fault)
    place.job = place.process = None
    return outcome


@contextlib.contextmanager
def _stopping(where: Sequence[Place]) -> Iterator[None]:
    """Whatever ends this process ends its runs, after their last whole round is written down."""
    try:
        yield
    finally:
        running = [p.process for p in where if p.process is not None and p.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
