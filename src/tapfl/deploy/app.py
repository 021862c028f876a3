"""The run itself, Flower's ServerApp: submitted, watched, and submitted again if it dies.

Flower starts it, so it is no child of ours: it writes down which process it is. A run that ends
with a word, good or bad, has ended; one that ends without goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapfl.deploy.processes import GRACE
from tapfl.deploy.supervise import AGAIN, Backoff, Say
from tapfl.engine.process import is_running
from tapfl.errors import TapflError

START = 120.0  # seconds for Flower to start it
TRIES = 5  # in succession
FILE = "serverapp.json"


class App:
    """A run under way: ``submit`` hands it to Flower, ``path`` says which process it is then."""

    def __init__(self, submit: Callable[[], None], path: Path, say: Say,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._submit, self._path, self._say, self._clock = submit, path, say, clock
        self._backoff = Backoff(TRIES)
        self._seen_gone = False

    def begin(self) -> None:
        """Hand it to Flower."""
        self._path.unlink(missing_ok=True)
        self._seen_gone = False
        self._backoff.started(self._clock())
        self._submit()

    def lost(self, why: str) -> None:
        """It cannot go on: end what is left of it, and submit it again."""
        stop_app(self._path.parent)
        if self._backoff.due is None:
            self._ended(why)

    def look(self) -> None:
        """Submit it again if it is gone and that is due."""
        now, backoff = self._clock(), self._backoff
        if backoff.due is not None:
            if now >= backoff.due:
                try:
                    self.begin()
                except TapflError as error:  # the SuperLink may just be starting
                    self._ended(str(error))
        elif self._gone(now):
            if self._seen_gone:  # twice: its last words have been read in between
                self._ended("the run's process is gone")
            self._seen_gone = True

    def _gone(self, now: float) -> bool:
        who = _process(self._path)
        return now - self._backoff.since > START if who is None else not is_running(who)

    def _ended(self, how: str) -> None:
        pause = self._backoff.ended(self._clock())
        if pause is None:
            raise TapflError(f"{how}, as {TRIES} times before")
        self._say(f"{how}; submitting{AGAIN}{pause:g} s")


def stop_app(folder: Path) -> None:
    """End a ServerApp that an earlier start has left running: kindly first."""
    who = _process(folder / FILE)
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GRACE
        if who is not None and is_running(who):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(who["pid"], number)
            while is_running(who) and time.monotonic() < until:
                time.sleep(0.05)


def _process(path: Path) -> dict[str, Any] | None:
    """Return which process it is; None as long as none has said so."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        who = json.loads(path.read_text(encoding="utf-8"))
        return {"pid": int(who["pid"]), "started": str(who["started"])}
    return None
