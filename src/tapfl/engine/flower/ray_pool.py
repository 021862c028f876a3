"""Worker processes as Ray actors: on this machine, or on those of a Ray cluster.

Ray carries calls and keeps their order; plain values and bytes are all that travels. Without an
address it is our own: on loopback, with a token, without a dashboard, gone when we are.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tapfl.engine.flower.dispatch import Gone
from tapfl.engine.folder import nobody_at_work, work_beside
from tapfl.errors import TapflError
from tapfl.events import Message, Subscriber

FAILURES = 3  # of a worker in a row, before it has answered anything, end the run
ALWAYS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# Only on loopback; whoever may connect executes code, so a token is needed.
OWN = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token",
       "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_task_events_report_interval_ms": "0"}
PASSED_ON = ("TAPFL_", "HF_", "TRITON_")  # variables that a worker needs on another machine, too


class Ticket(NamedTuple):
    """A call under way: whose it is, and how Ray knows it."""

    worker: int
    reference: Any


class Actor:
    """What Ray runs in a process of its own: a station, made by the first call."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._station: Any = None

    def call(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Return what a station answers, or the line that says why it cannot."""
        try:
            return {"value": getattr(self._made(), name)(*arguments)}
        except TapflError as error:
            return {"fault": str(error)}

    def _made(self) -> Any:
        if self._station is None:
            for name, value in self._order["environment"].items():
                os.environ.setdefault(name, value)
            with _reachable(self._order["folder"]):
                os.chdir(self._order["folder"])  # relative paths mean the same as to the server
            with _reachable(self._order["out"]):
                self._beside = work_beside(Path(self._order["out"]))
            from tapfl.engine.flower.station import make_station

            self._station = make_station(self._order)
        return self._station


@contextlib.contextmanager
def _reachable(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TapflError(f"{path}: cannot be used on a worker's machine ({error.strerror}); "
                         "expected a folder that all machines share") from None


class RayPool:
    """Ray actors, each with a share of the GPUs where the run is on GPUs."""

    def __init__(self, workers: int | None, address: str | None) -> None:
        if workers is not None and workers < 1:
            raise TapflError(f"--workers {workers}: expected 1 or more")
        self._wanted, self._address = workers, address
        self._stack = contextlib.ExitStack()
        self._actors: list[Any] = []
        self._failures: list[int] = []
        self.size = 0

    def __enter__(self) -> Self:
        self._stack.enter_context(_environment(ALWAYS if self._address else ALWAYS | OWN))
        try:
            import ray
        except ImportError:
            self._stack.close()
            raise TapflError("--engine flower: Ray is not installed here: "
                             "pip install 'tapfl[flower]'") from None
        self._ray: Any = ray
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stack.close()

    def start(self, order: dict[str, Any], notify: Subscriber) -> None:
        """Reach Ray and start the workers; they load while the caller goes on."""
        gpus = _gpus() if order["device"] == "cuda" else 0
        self._connect(gpus)
        if self._address:
            gpus = self._check_cluster(order["device"])
        self.size = self._wanted or max(gpus, 1)
        share = gpu_share(self.size, gpus)
        self._order = order | {
            "share": self.size, "folder": str(Path.cwd()),
            "environment": {name: value for name, value in os.environ.items()
                            if name.startswith(PASSED_ON) and "TOKEN" not in name}}
        # What a worker computes with is its own affair: one CPU each is for the scheduler alone.
        self._remote = self._ray.remote(Actor).options(
            num_cpus=1 if self._address else 0, num_gpus=share, scheduling_strategy="SPREAD",
            max_restarts=0, max_task_retries=0)
        self._actors = [self._remote.remote(self._order) for _ in range(self.size)]
        self._failures = [0] * self.size
        self._stack.callback(self._end, Path(order["out"]))
        notify(Message(f"{self.size} worker(s)" + (f", {share:g} GPU each" if gpus else "")))

    def _connect(self, gpus: int) -> None:
        ray = self._ray
        if ray.is_initialized():  # by whoever calls us: theirs to end
            return
        try:
            if self._address:
                ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
            else:
                # A short path: sockets have no long ones.
                place = self._stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="tapfl-", ignore_cleanup_errors=True))
                ray.init(address="local", num_cpus=self._wanted or max(gpus, 1), num_gpus=gpus,
                         include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                         _node_ip_address="127.0.0.1", _temp_dir=place)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = f"--ray-address {self._address}" if self._address else "--engine flower"
            raise TapflError(f"{where}: Ray cannot be reached or started "
                             f"({_first_line(error)})") from None
        self._stack.callback(ray.shutdown)

    def _check_cluster(self, device: str) -> int:
        """Return how many GPUs a cluster has; one that is too small would never start."""
        there = self._ray.cluster_resources()
        cpus, gpus = int(there.get("CPU", 0)), int(there.get("GPU", 0))
        if device == "cuda" and not gpus:
            raise TapflError(f"--ray-address {self._address}: no GPU in this cluster")
        if cpus < (self._wanted or 1):
            raise TapflError(f"--workers {self._wanted}: the cluster has {cpus} CPUs, expected "
                             "one for each worker at least")
        return gpus if device == "cuda" else 0

    # A pool

    def send(self, worker: int, name: str, *arguments: Any) -> Ticket:
        """Have a worker's station do something; return a ticket for its answer."""
        return Ticket(worker, self._actors[worker].call.remote(name, *arguments))

    def wait(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        """Return some of these tickets, whose answers are there."""
        by_reference = {ticket.reference: ticket for ticket in tickets}
        ready, _ = self._ray.wait(list(by_reference), num_returns=1, fetch_local=False)
        return [by_reference[reference] for reference in ready]

    def get(self, ticket: Ticket) -> Any:
        """Return an answer; raise Gone if there will be none."""
        errors = self._ray.exceptions
        try:
            said = self._ray.get(ticket.reference)
        except errors.RayTaskError as error:  # an error of ours, with its trace
            raise error.as_instanceof_cause() from None
        except errors.RayError as error:
            raise Gone(_first_line(error)) from None
        if "fault" in said:
            raise TapflError(said["fault"])
        self._failures[ticket.worker] = 0
        return said["value"]

    def renew(self, worker: int) -> None:
        """Start a worker again that has ended."""
        self._failures[worker] += 1
        if self._failures[worker] >= FAILURES:
            raise TapflError(f"worker {worker + 1} has ended {FAILURES} times in a row without an "
                             "answer; is there memory for so many workers? continue with --resume")
        with contextlib.suppress(Exception):  # most likely it is not there any more
            self._ray.kill(self._actors[worker])
        self._actors[worker] = self._remote.remote(self._order)

    def _end(self, out: Path) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        self._actors = []
        with contextlib.suppress(TapflError, OSError):  # a run that failed may have no folder
            nobody_at_work(out)


def gpu_share(workers: int, gpus: int) -> float:
    """Return how much of a GPU a worker has: three on two GPUs have a half each, not two thirds."""
    return 1 / math.ceil(workers / gpus) if gpus else 0.0


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for Ray, which reads them when it is imported and started."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
