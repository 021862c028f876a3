"""What happens in a run, as values.

Turns and rounds return events; a run hands each one to its subscribers: the log, the progress
display, TensorBoard. A ``Logged`` event becomes a line of events.jsonl, the others are only shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Something that happened."""


Subscriber = Callable[[Event], None]


def nobody(event: Event) -> None:
    """Take no notice: the subscriber of whoever wants none."""


@dataclass(frozen=True)
class Logged(Event):
    """An event that a run keeps. ``method`` is the method's name in the results."""

    kind: ClassVar[str]

    method: str
    round: int

    def record(self) -> dict[str, Any]:
        """Return the JSON object that events.jsonl holds."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"event": self.kind, **fields}


@dataclass(frozen=True)
class RoundEnded(Logged):
    """A round is over: who took part, the tasks' mean losses, traffic, who contributed to what."""

    kind: ClassVar[str] = "round"

    cohort: Sequence[str]
    lr: float
    losses: Mapping[str, float]
    bytes_up: int
    bytes_down: int
    seconds: float
    contributors: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class OfClient(Logged):
    """An event of one client."""

    client: str


@dataclass(frozen=True)
class Refused(OfClient):
    """An update does not count: the client's own check or the server's found a fault in it."""

    kind: ClassVar[str] = "refused"

    reason: str


@dataclass(frozen=True)
class Missing(OfClient):
    """A client was asked and did not answer."""

    kind: ClassVar[str] = "missing"

    reason: str


@dataclass(frozen=True)
class Left(OfClient):
    """A client has left: from this round on it takes no part, and it has no final model."""

    kind: ClassVar[str] = "left"


@dataclass(frozen=True)
class Replacement(OfClient):
    """TAP moved a task's blocks of X to W's; ``initial`` marks the task's first one.

    ``share`` is how much of the way: 1 is the paper's replacement.
    """

    kind: ClassVar[str] = "replacement"

    task: str
    federated_loss: float | None
    personal_loss: float | None
    margin: float
    initial: bool
    blocks: Sequence[str]
    share: float = 1.0


@dataclass(frozen=True)
class PersonalLosses(OfClient):
    """The losses of a personal model in its local training."""

    kind: ClassVar[str] = "personal"

    losses: Mapping[str, float]


@dataclass(frozen=True)
class Curve(OfClient):
    """How good a model is on the way: its metrics on a sample of a client's test data.

    ``method`` is the federated run for W, which the client received in this round, or the method of
    its X, which this round has just trained.
    """

    kind: ClassVar[str] = "curve"

    task: str
    values: Mapping[str, float]
    samples: int


@dataclass(frozen=True)
class Diverged(OfClient):
    """A training ended in values that are not finite; ``tasks`` are those whose loss was not."""

    kind: ClassVar[str] = "diverged"

    tasks: Sequence[str]
    reason: str


@dataclass(frozen=True)
class Note(OfClient):
    """What a method of one's own wants to have in events.jsonl; ``values`` is plain JSON."""

    kind: ClassVar[str] = "note"

    values: Mapping[str, Any]


# Only shown

@dataclass(frozen=True)
class RunStarted(Event):
    """A federated run begins or goes on; ``done`` rounds are behind it."""

    method: str
    rounds: int
    done: int
    clients: int


@dataclass(frozen=True)
class ClientFinished(Event):
    """A client has its final models, evaluated."""

    client: str
    done: int
    clients: int


@dataclass(frozen=True)
class DataPrepared(Event):
    """So many rows of a data set are decoded and tokenized; the next start finds them so."""

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class RowsDropped(Event):
    """Rows of a file that cannot be used: how many, and why.

    ``reasons`` are objects with ``reason``, ``count`` and the first ``rows``; ``examples`` are
    pairs of a row's number and its reason.
    """

    where: str
    dropped: int
    rows: int
    reasons: Sequence[Mapping[str, Any]]
    examples: Sequence[tuple[int, str]]

    def __str__(self) -> str:
        named = "; ".join(f"row {number}: {reason}" for number, reason in self.examples)
        more = "; …" if self.dropped > len(self.examples) else ""
        return (f"{self.where}: {self.dropped} of {self.rows} rows are broken and left out "
                f"({named}{more})")


@dataclass(frozen=True)
class Message(Event):
    """Something a person should read."""

    text: str

    def __str__(self) -> str:
        return self.text
