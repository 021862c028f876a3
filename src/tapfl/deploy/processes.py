"""Processes that belong to a deployment: started with logs, found again, stopped together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tapfl.engine.files import write_json
from tapfl.errors import TapflError

GRACE = 10.0  # seconds that a process has to end by itself
# Flower and Ray: say nothing to anybody, install nothing.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
         "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "RAY_USAGE_STATS_ENABLED": "0"}


class Processes:
    """Children of a deployment, each in a group of its own; ``folder`` has their logs and ids."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        # Flower starts commands of its own, which are installed beside this Python.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self._environment = {**os.environ, **QUIET, "PATH": path, **(environment or {})}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process; what it prints is appended to its log."""
        with self.log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment, start_new_session=True)
        write_json(self.folder / "processes.json", {
            name: {"pid": child.pid, "started": _started(child.pid)}
            for name, child in self._children.items()})

    def run(self, command: Sequence[str], what: str, timeout: float = 120.0) -> str:
        """Run a command to its end; return what it printed."""
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  env=self._environment, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise TapflError(f"{what}: no end within {timeout:g} s") from None
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise TapflError(f"{what} failed: {' '.join(last) or f'status {done.returncode}'}")
        return done.stdout

    def log(self, name: str) -> Path:
        """Return where a process's output goes."""
        return self.folder / f"{name}.log"

    def ended(self) -> dict[str, int]:
        """Return the processes that have ended, with their status."""
        return {name: status for name, child in self._children.items()
                if (status := child.poll()) is not None}

    def check(self) -> None:
        """Raise an error if one of them has ended by itself."""
        for name, status in self.ended().items():
            raise TapflError(f"{name} has ended with status {status}; {self.log(name)} says why")

    def wait_for_port(self, port: int, patience: float = 60.0) -> None:
        """Return when something listens at a port of this machine."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            self.check()
            time.sleep(0.1)
        raise TapflError(f"nothing listens at port {port} after {patience:g} s; the logs in "
                         f"{self.folder} may say why")

    def stop(self) -> None:
        """End all of them: kindly first."""
        stop_groups([child.pid for child in self._children.values()])
        for child in self._children.values():
            child.wait()
        self._children.clear()
        (self.folder / "processes.json").unlink(missing_ok=True)


def stop_recorded(folder: Path) -> list[str]:
    """End what an earlier process has left running; return the names."""
    try:
        recorded = json.loads((folder / "processes.json").read_text(encoding="utf-8"))
        alive = {name: int(each["pid"]) for name, each in recorded.items()
                 if _started(int(each["pid"])) == each["started"]}  # else the id is another's now
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    stop_groups(list(alive.values()))
    (folder / "processes.json").unlink(missing_ok=True)
    return list(alive)


def stop_groups(leaders: Sequence[int]) -> None:
    """End process groups: ask, wait, and insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, number)
        until = time.monotonic() + GRACE
        while number == signal.SIGTERM and time.monotonic() < until:
            if not any(_running(leader) for leader in leaders):
                return
            time.sleep(0.05)


def _running(pid: int) -> bool:
    """Return whether a process is there and not just waiting to be collected."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _started(pid: int) -> str | None:
    """Return when a process was started, which tells it from a later one with the same id."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def executable(name: str) -> str:
    """Return the path of a command that is installed beside this Python."""
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise TapflError(f"deploy: {name} is not installed here: pip install 'tapfl[flower]'")
    return str(path)
