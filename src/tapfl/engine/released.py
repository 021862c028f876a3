"""What a federated run's clients have been asked for, in all attempts: noise has to cover it all.

A round that is run again after a crash is released twice, each time with noise of its own. So what
is written here before a round begins is never taken back, whatever the run goes back to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tapfl.engine.files import read_checked_json, write_checked_json
from tapfl.errors import TapflError

FILE = "released.json"


class Released:
    """How many rounds were begun, with how many each client, and the ``fewest`` that were there.

    Without a ``path`` it is only counted.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        found = read_checked_json(path) if path else None
        if path and path.exists() and found is None:
            raise TapflError(f"{path}: damaged (its checksum does not match), so nobody could say "
                             "what the noise promises; start the run anew")
        known = found or {}
        self.rounds = int(known.get("rounds", 0))
        self.fewest: int | None = known.get("fewest")
        self.clients = Counter[str](known.get("clients", {}))

    def begin(self, cohort: Sequence[str], there: int) -> None:
        """Count a round with these clients; they were drawn from those who are ``there``."""
        self.rounds += 1
        self.fewest = there if self.fewest is None else min(self.fewest, there)
        self.clients.update(cohort)
        if self._path:
            write_checked_json(self._path, {"rounds": self.rounds, "fewest": self.fewest,
                                            "clients": dict(self.clients)})
