"""Processes, as those who start them must know them: which one it is, and whose child."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

_C = ctypes.CDLL(None) if sys.platform == "linux" else None
_PARENT_DEATH_SIGNAL = 1  # of prctl


def end_with_parent() -> None:
    """In a new process: end as by SIGTERM when the parent is gone, even if it was killed."""
    if _C is not None:
        _C.prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def identity(pid: int | None = None) -> dict[str, Any]:
    """Return what tells a process, this one by default, from a later one with the same id."""
    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "started": _stat(pid, 22)}


def is_running(who: dict[str, Any]) -> bool:
    """Return whether a process of an ``identity`` is there, and not just to be collected."""
    pid = int(who["pid"])
    return _stat(pid, 3) not in (None, "Z") and _stat(pid, 22) == who["started"]


def _stat(pid: int, field: int) -> str | None:
    """Return a field of /proc/PID/stat, from the third on: the second may hold anything."""
    with contextlib.suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[field - 3]
    return None
