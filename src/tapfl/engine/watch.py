"""Watching a run: what a progress display is told. The base class watches in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Watch:
    """Told of everything that happens; shows nothing."""

    def data(self, name: str, done: int, total: int) -> None:
        """So many rows of a data set are decoded and tokenized; the next start finds them so."""

    def method(self, name: str, rounds: int, done: int, clients: int) -> None:
        """A federated run begins or goes on; so many rounds are behind it."""

    def round(self, round_: int, cohort: Sequence[str], losses: Mapping[str, float],
              replacements: int, refused: int) -> None:
        """A round is complete: its clients, the mean loss of each task, and what happened."""

    def client(self, client: str, done: int, clients: int) -> None:
        """A client has its final models, evaluated."""

    def say(self, message: str) -> None:
        """Something a person should read."""

    def close(self) -> None:
        """The run has ended, one way or another."""
