"""What a server and its clients say to each other, in one process or over a network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from tapfl.blocks import BlockState
from tapfl.data.federation import Member
from tapfl.events import Event

Row = dict[str, Any]  # of results.csv
Kind = Literal["train", "evaluate", "finish"]


@dataclass(frozen=True)
class Ask:
    """What is asked of the clients.

    ``round`` is the round under way, or the number of rounds when all are over. ``kept``
    are the rounds that the server may go back to: those of its checkpoints. ``awaited`` are the
    rounds whose reports the server still waits for, by client.
    """

    kind: Kind
    round: int
    kept: tuple[int, ...]
    awaited: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What a client's training made of the blocks it exchanges.

    ``fault`` is what the client's own check found: such an update does not count.
    """

    client: str
    blocks: BlockState
    samples: int
    losses: Mapping[str, float]
    fault: str | None = None
    events: Sequence[Event] = ()


@dataclass(frozen=True)
class Report:
    """What happened on a client after its update in a round: to its personal models.

    It may come at once, or with the client's next answer.
    """

    client: str
    round: int
    events: Sequence[Event] = ()


@dataclass(frozen=True)
class Final:
    """A client's results, and what happened while its final models were made.

    ``models``, ``scores`` and ``samples`` are the files that the client keeps, by method, with
    their checksums (under ``""`` the samples themselves, the others are predictions for them);
    ``models`` is None where the run keeps none. ``seconds`` is how long each final model took to be
    made, by method, and under ``""`` how long all of it took.
    """

    client: str
    rows: Sequence[Row]
    events: Sequence[Event] = ()
    models: Mapping[str, str] | None = field(default_factory=dict)
    scores: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NoAnswer:
    """A client that was asked and did not answer."""

    client: str
    reason: str


Answer = Update | Report | Final | NoAnswer


class Clients(Protocol):
    """How a server reaches its clients: the seam between the two programs."""

    def ask(self, ask: Ask, whom: Iterable[tuple[Member, BlockState]]) -> Iterator[Answer]:
        """Send each member its blocks; yield the answers as they come, in any order."""

    def settle(self, round_: int) -> list[Any]:
        """Return when what clients keep as of a round is safe: what a checkpoint lists of it."""

    def keeps(self, member: Member, models: Mapping[str, str], scores: Mapping[str, str],
              samples: Mapping[str, str]) -> bool:
        """Return whether a client still has the files that it reported in the end."""

    def check(self, listed: Sequence[Any]) -> str | None:
        """Say what is wrong with what a checkpoint lists, if anything is; else go on from it."""

    def adopt(self, folder: Path, listed: Sequence[Any] | None,
              clients: Sequence[str]) -> list[Any]:
        """Take over what these clients kept in another run; return what a checkpoint lists of it.

        ``folder`` is the other federated run's, ``listed`` what its checkpoint lists, if anything.
        """
