"""The folder of a run: one process at a time, and nothing left behind by a start that failed."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from tapfl.engine.record import FILE
from tapfl.errors import TapflError

LOCK = ".lock"


class RunFolder:
    """A run's folder while a process is at work in it.

    A new folder goes again when the run fails before ``keep`` is called: the next try finds
    nothing in its way.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.resume = path, resume
        self._kept = False

    def __enter__(self) -> Self:
        self.is_new = not (self.path / FILE).is_file()
        if self.is_new:
            self._check_new()
        elif not self.resume:
            raise TapflError(f"{self.path} already holds a run: continue it with --resume, "
                             "or choose another --out")
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(str(self.path / LOCK), timeout=0)
            self._lock.acquire()
        except Timeout:
            raise TapflError(f"{self.path}: another process is at work in this folder") from None
        except OSError as error:
            raise TapflError(f"--out {self.path}: cannot make or use this folder "
                             f"({error.strerror})") from None
        return self

    def keep(self) -> None:
        """There is something to go on from."""
        self._kept = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None and self.is_new and not self._kept:
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name != LOCK:
                    entry.unlink(missing_ok=True)
        self._lock.release()
        (self.path / LOCK).unlink(missing_ok=True)
        if kind is not None and self.is_new and not self._kept and self._made:
            shutil.rmtree(self.path, ignore_errors=True)

    def _check_new(self) -> None:
        """Refuse a place that is taken by something else; what a crash left of a start may go."""
        rest = [p for p in self.path.iterdir() if p.name != LOCK
                and not p.name.endswith(".partial")] if self.path.is_dir() else []
        if self.path.exists() and (rest or not self.path.is_dir()):
            raise TapflError(f"{self.path} is in the way: it is no run and not empty")
        if self.resume and not self.path.is_dir():
            raise TapflError(f"{self.path}: no run to resume here ({FILE} is missing)")


def fresh_folder(folder: Path) -> Path:
    """Return the folder, or the next free one after it."""
    taken, number = folder, 1
    while taken.exists():
        number += 1
        taken = folder.with_name(f"{folder.name}-{number}")
    return taken
