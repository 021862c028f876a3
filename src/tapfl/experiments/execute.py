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

from tapfl.config import Config
from tapfl.errors import TapflError

POLL = 0.2  # seconds
GRACE = 60.0  # seconds that a run gets to write its last whole round down


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


def places(devices: Sequence[str], jobs: int | None) -> list[Place]:
    """Return where runs can go: ``jobs`` of them on each device.

    A CPU takes one for each core, with one thread each, unless told otherwise: the models are
    small, and two threads for one run bring less than two runs.
    """
    if jobs is not None and jobs < 1:
        raise TapflError(f"--jobs {jobs}: expected at least 1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (
        os.cpu_count() or 1)
    found = []
    for device in devices:
        if device != "cpu" and device.partition(":")[0] != "cuda":
            raise TapflError(f"--devices {device}: expected cpu, cuda or cuda:N")
        if device.partition(":")[2] and not device.partition(":")[2].isdigit():
            raise TapflError(f"--devices {device}: expected a number after the colon")
        count = jobs or (cores if device == "cpu" else 1)
        threads = max(1, cores // count) if device == "cpu" else None
        found += [Place(device, threads) for _ in range(count)]
    return found


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
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tapfl", "run"]
    if job.resumes:
        command += ["--resume"]
    else:
        job.file.write_text(yaml.safe_dump(job.config.model_dump(mode="json"), sort_keys=False))
        command += [str(job.file)]
        command += ["--threads", str(place.threads)] if place.threads else []
    command += ["--out", str(job.folder), "--device", place.device.partition(":")[0]]
    command += ["--modules", str(job.modules)] if job.modules else []
    env = dict(os.environ)
    if place.device.partition(":")[2]:
        env["CUDA_VISIBLE_DEVICES"] = place.device.partition(":")[2]
    with job.log.open("ab") as log:
        place.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                         stderr=subprocess.STDOUT)
    place.job, place.started = job, time.monotonic()


def _ended(place: Place) -> bool:
    return place.process is not None and place.process.poll() is not None


def _outcome(place: Place) -> Outcome:
    assert place.job is not None
    assert place.process is not None
    code, fault = place.process.returncode, None
    if code:
        lines = place.job.log.read_text(errors="replace").strip().splitlines()
        fault = f"exit status {code}: {lines[-1] if lines else 'no message'}"
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
