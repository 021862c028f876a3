"""Start again what has ended by itself, ever later while it keeps ending.

Flower lets nobody in with the key of a node that was killed for about 50 seconds, and a machine
that restarts has its network late: so nothing is given up at once, and nothing is tried in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tapfl.deploy.processes import Processes
from tapfl.errors import TapflError

FIRST, MOST = 1.0, 30.0  # seconds before a first and before a late restart
STEADY = 60.0  # seconds after which a process that runs is well again
AGAIN = " it again in "  # in every line that says so
BAD_INPUT = 2  # the exit status of tapfl's own commands: the same again would not help

Say = Callable[[str], None]
Command = Sequence[str] | Callable[[], Sequence[str]]  # the latter is made anew for every start


@dataclass
class Backoff:
    """How long to wait before the next start of what has ended; after ``tries`` it is given up."""

    tries: int | None = None  # in succession; None is without end
    since: float = 0.0  # the last start
    starts: int = 0
    failures: int = 0
    due: float | None = None  # the next start

    def started(self, now: float) -> None:
        """It has been started."""
        self.since, self.due, self.starts = now, None, self.starts + 1

    def ended(self, now: float) -> float | None:
        """It has ended: return how long to wait, or None if that has happened too often."""
        self.failures = 1 if now - self.since >= STEADY else self.failures + 1
        if self.tries is not None and self.failures > self.tries:
            return None
        pause: float = min(FIRST * 2 ** min(self.failures - 1, 10), MOST)
        self.due = now + pause
        return pause


class Supervisor:
    """Keeps processes running; ``look`` has to be called every now and then."""

    def __init__(self, processes: Processes, say: Say,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.processes, self._say, self._clock = processes, say, clock
        self._kept: dict[str, tuple[Command, int | None, Backoff]] = {}

    def keep(self, name: str, command: Command, port: int | None = None,
             tries: int | None = None) -> None:
        """Start a process and keep it running; with ``port``, return when it listens there."""
        self._start(name, command)
        backoff = Backoff(tries)
        backoff.started(self._clock())
        self._kept[name] = command, port, backoff
        if port is not None and not self.processes.listens(name, port):
            raise TapflError(f"{name} has ended at once; {self.processes.log(name)} says why")

    def look(self) -> list[str]:
        """Start again what has ended and is due; return the names of those."""
        now, again = self._clock(), []
        for name, status in self.processes.ended().items():
            command, port, backoff = self._kept[name]
            if backoff.due is None:
                self._ended(name, backoff, status, now)
            elif now >= backoff.due:
                backoff.started(now)
                self._start(name, command)
                if port is None or self.processes.listens(name, port):
                    again.append(name)
        return again

    def _start(self, name: str, command: Command) -> None:
        self.processes.start(name, command() if callable(command) else command)

    def _ended(self, name: str, backoff: Backoff, status: int, now: float) -> None:
        log = self.processes.log(name)
        if status == BAD_INPUT and backoff.starts == 1:
            last = self.processes.last_words(name).removeprefix("tapfl: ")
            raise TapflError(f"{name}: {last or f'no reason given, see {log}'}")
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        pause = backoff.ended(now)
        if pause is None:
            raise TapflError(f"{name} {how}, as {backoff.tries} times before; {log} may say why")
        self._say(f"{name} {how} ({log} may say why); starting{AGAIN}{pause:g} s")
