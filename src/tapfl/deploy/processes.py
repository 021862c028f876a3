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
from typing import Any

from tapfl.engine.process import end_with_parent, identity, is_running
from tapfl.errors import TapflError

RECORD = "processes.json"
OWNER = "owner.json"  # the command that started them, and would start them again
FRAME = " \t│╭╮╰╯─"  # around the errors of Flower's commands
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
        (folder / OWNER).write_text(json.dumps({"the command": identity()}), encoding="utf-8")

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process, perhaps once more; what it prints is appended to its log.

        It ends with this one, however this one ends.
        """
        if name in self._children:  # it has ended, but what it started may be there still
            kill_group(self._children[name].pid, signal.SIGKILL)
        with self.log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._environment, start_new_session=True, preexec_fn=end_with_parent)
        with contextlib.suppress(OSError):  # a full disk: it is known to this process, if to none
            whole = self.folder / f"{RECORD}.partial"
            whole.write_text(json.dumps({name: identity(child.pid) for name, child
                                         in self._children.items()}), encoding="utf-8")
            whole.replace(self.folder / RECORD)

    def run(self, command: Sequence[str], what: str, timeout: float = 120.0) -> str:
        """Run a command to its end; return what it printed."""
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  env=self._environment, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise TapflError(f"{what}: no end within {timeout:g} s") from None
        if done.returncode:
            lines = [line.strip(FRAME) for line in (done.stderr or done.stdout).splitlines()]
            last = [line for line in lines if line][-2:]
            raise TapflError(f"{what} failed: {' '.join(last) or f'status {done.returncode}'}")
        return done.stdout

    def log(self, name: str) -> Path:
        """Return where a process's output goes."""
        return self.folder / f"{name}.log"

    def ended(self) -> dict[str, int]:
        """Return the processes that have ended, with their status."""
        return {name: status for name, child in self._children.items()
                if (status := child.poll()) is not None}

    def last_words(self, name: str) -> str:
        """Return the last line that a process printed."""
        with contextlib.suppress(OSError):
            with self.log(name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""

    def listens(self, name: str, port: int, patience: float = 60.0) -> bool:
        """Return when a process listens at a port of this machine, or has ended."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return True
            if name in self.ended():
                return False
            time.sleep(0.1)
        raise TapflError(f"{name} does not listen at port {port} after {patience:g} s; "
                         f"{self.log(name)} may say why")

    def stop(self) -> None:
        """End all of them: kindly first."""
        stop_groups([identity(child.pid) for child in self._children.values()])
        for child in self._children.values():
            child.wait()
        self._children.clear()
        for name in (RECORD, OWNER):
            (self.folder / name).unlink(missing_ok=True)


def recorded(folder: Path, file: str = RECORD) -> dict[str, dict[str, Any]]:
    """Return what a folder's processes are, of those that are running."""
    try:
        found = json.loads((folder / file).read_text(encoding="utf-8"))
        return {str(name): who for name, who in found.items() if is_running(who)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def stop_owner(folder: Path) -> list[str]:
    """Ask the command that works in a folder to end, with all it has started; wait for it.

    It is no leader of a group, but may well be in that of a shell.
    """
    running = recorded(folder, OWNER)
    for who in running.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(who["pid"], signal.SIGTERM)
        until = time.monotonic() + 3 * GRACE
        while is_running(who) and time.monotonic() < until:
            time.sleep(0.05)
    return list(running)


def stop_recorded(folder: Path) -> list[str]:
    """End what an earlier process has left running; return the names."""
    running = recorded(folder)
    stop_groups(list(running.values()))
    (folder / RECORD).unlink(missing_ok=True)
    return list(running)


def stop_groups(leaders: Sequence[dict[str, Any]]) -> None:
    """End processes, with the groups that they lead: ask, wait, and insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for leader in leaders:
            kill_group(leader["pid"], number)
        until = time.monotonic() + GRACE
        while number == signal.SIGTERM and time.monotonic() < until:
            if not any(is_running(leader) for leader in leaders):
                break
            time.sleep(0.05)


def kill_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process and its group, if they are still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


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
