"""The folder of a run: one process at a time, and nothing left behind by a start that failed."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from filelock import FileLock, Timeout

from tapfl.engine.record import FILE
from tapfl.errors import TapflError

LOCK = ".lock"
WORKERS = ".workers"  # locked by every worker process of the run together
MADE = (FILE, "events.jsonl", "results.csv", "state", "models", "scores", "samples",
        "labels.json", "verdict.csv", "leave.json")  # what a run writes


def no_run(path: Path) -> TapflError:
    """Return why nothing can be resumed in a folder."""
    hint = ("; it holds runs of several seeds: give the preset or file and --seeds again"
            if any(path.glob(f"seed*/{FILE}")) else "")
    return TapflError(f"{path}: no run to resume here ({FILE} is missing){hint}")


class RunFolder:
    """A run's folder while a process is at work in it.

    A new folder goes again when the run fails before ``keep`` is called: the next try finds
    nothing in its way.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.resume = path, resume
        self._kept = False

    def __enter__(self) -> Self:
        with self._usable():
            self._made = not self.path.exists()
            if self._made and self.resume:
                raise no_run(self.path)
            if not self._made and not self.path.is_dir():
                raise TapflError(f"{self.path} is in the way: it is no run and not empty")
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(str(self.path / LOCK), timeout=0)
            self._lock.acquire()
        try:
            with self._usable():
                if (self.path / WORKERS).exists():  # those of a server that was killed end soon
                    nobody_at_work(self.path)
                self._check()
        except BaseException:
            self._leave()
            raise
        return self

    def _check(self) -> None:
        """Refuse a place that is taken; the lock is held."""
        self.is_new = not (self.path / FILE).is_file()
        if not self.is_new and not self.resume:
            raise TapflError(f"{self.path} already holds a run: continue it with --resume, "
                             "or choose another --out")
        # What a crash left of a start counts for nothing; a deployment has its own files here.
        own = {LOCK, WORKERS, f".{FILE}.partial", "deploy"}
        if self.is_new and any(p.name not in own for p in self.path.iterdir()):
            raise TapflError(f"{self.path} is in the way: it is no run and not empty")

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except Timeout:
            raise TapflError(f"{self.path}: another process is at work in this folder") from None
        except OSError as error:
            raise TapflError(f"--out {self.path}: cannot make or use this folder "
                             f"({error.strerror})") from None

    def keep(self) -> None:
        """There is something to go on from."""
        self._kept = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None and self.is_new and not self._kept:
            for name in MADE:  # the folder was empty: these are ours
                path = self.path / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self._leave()

    def _leave(self) -> None:
        """Unlock; a folder that this process made and that is empty again goes."""
        (self.path / LOCK).unlink(missing_ok=True)
        self._lock.release()
        if self._made:
            with contextlib.suppress(OSError):
                if [path.name for path in self.path.iterdir()] == [WORKERS]:
                    (self.path / WORKERS).unlink()
                self.path.rmdir()


def work_beside(folder: Path) -> IO[bytes]:
    """Say that a worker of the run writes into its folder: while the returned file is open."""
    file = (folder / WORKERS).open("ab")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def nobody_at_work(folder: Path, patience: float = 60.0) -> None:
    """Return when no worker writes there any more."""
    path, until = folder / WORKERS, time.monotonic() + patience
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TapflError(f"{folder}: workers of another process are still at work here "
                                     f"after {patience:g} s") from None
                time.sleep(0.05)
        path.unlink(missing_ok=True)


def drop_models(folder: Path) -> None:
    """Remove the models of a complete run, and the state that it could have been resumed from."""
    for name in ("models", "state"):
        shutil.rmtree(folder / name, ignore_errors=True)


def fresh_folder(folder: Path) -> Path:
    """Return the folder, or the next free one after it."""
    taken, number = folder, 1
    while taken.exists():
        number += 1
        taken = folder.with_name(f"{folder.name}-{number}")
    return taken
