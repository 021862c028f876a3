"""Clients that leave: who has asked to, and since which round each federated run does without them.

``RUN/leave.json`` says who leaves. Anybody may write it while the run goes on; the run reads it
before every round. Since when a federated run does without a client is written down before that
round begins, so that a run that was killed, and goes back, lets it leave in the same round again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from tapfl.data.participants import client_ids
from tapfl.engine.files import read_checked_json, write_checked_json
from tapfl.engine.record import FILE as RECORD
from tapfl.engine.record import read_record
from tapfl.errors import TapflError, nearest

FILE = "leave.json"
LOCK = ".leave.lock"
SINCE = "left.json"


def leave(run: Path, clients: Sequence[str]) -> list[str]:
    """Have clients leave a run, whether it is under way or not; return who had not left before."""
    if not (run / RECORD).is_file():
        raise TapflError(f"{run}: no run here ({RECORD} is missing)")
    record = read_record(run)
    known = list(client_ids(record.federation, record.config.federation))
    for client in clients:
        if client not in known:
            raise TapflError(f"{run}: unknown client '{client}'" + nearest(client, known))
    with FileLock(str(run / LOCK)):
        before = leavers(run)
        new = [client for client in dict.fromkeys(clients) if client not in before]
        if not set(known) - {*before, *new}:
            raise TapflError(f"{run}: nobody would be left; expected that one client stays")
        if new:
            inherit(run, [*before, *new])
    return new


def inherit(run: Path, clients: Iterable[str]) -> None:
    """Write down that these clients leave."""
    write_checked_json(run / FILE, {"clients": list(clients)})


def leavers(run: Path) -> list[str]:
    """Return who leaves a run, or has left it."""
    clients = _read(run / FILE).get("clients", [])
    if not isinstance(clients, list) or not all(isinstance(client, str) for client in clients):
        raise TapflError(f"{run / FILE}: expected a list 'clients' of names")
    return clients


class Departures:
    """Who has left one federated run, and since which round; ``run`` is the run's folder."""

    def __init__(self, run: Path, folder: Path) -> None:
        self.run, self._path = run, folder / SINCE
        known = _read(self._path)
        self.since: dict[str, int] = dict(known.get("since", {}))
        self._complete = bool(known.get("complete", False))

    def gone(self, round_: int) -> set[str]:
        """Return who takes no part in a round that is about to begin."""
        new = [] if self._complete else [
            client for client in leavers(self.run) if client not in self.since]
        if new:
            self.since |= dict.fromkeys(new, round_)
            self._write()
        return {client for client, since in self.since.items() if since <= round_}

    def just_left(self, round_: int) -> list[str]:
        """Return who takes no part for the first time in a round."""
        return sorted(client for client, since in self.since.items() if since == round_)

    def complete(self) -> None:
        """The federated run is over: who leaves now has had its part in it."""
        if not self._complete:
            self._complete = True
            self._write()

    def _write(self) -> None:
        write_checked_json(self._path, {"since": self.since, "complete": self._complete})


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found = read_checked_json(path)
    if found is None:
        raise TapflError(f"{path}: damaged (its checksum does not match); remove it, and name all "
                         "who leave again: tapfl leave RUN CLIENT...")
    return found
