"""The headers of messages: what may stand in them, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tapfl.engine.flower.frames import LARGE, FrameError
from tapfl.engine.messages import Kind

VERSION = 1  # of what is said here; both sides must have the same
SLACK = 1 << 20  # bytes of a body beside its blocks
TEXT = 2000  # the longest name or reason
MANY = 100_000

Text = Annotated[str, Field(max_length=TEXT, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Number = float | None  # null stands for what is not finite
Compression = Literal["none", "zlib"]


class Header(BaseModel):
    """Values of these types under these names, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Announced(Header):
    """A client that a node hosts; ``known`` to the run that this one goes on from."""

    id: Text
    tasks: list[Text] = Field(max_length=1000)
    samples: int = Field(ge=1)
    known: bool = False


class Hello(Header):
    """What a node says of itself when it joins: its clients, and what must be equal everywhere.

    ``start`` is the id of the run that it goes on from, as far as it took part in one.
    """

    kind: Literal["hello"] = "hello"
    version: int
    tapfl: Text
    code: Text
    torch: Text
    threads: int
    config: Text
    weights: Text
    start: Text = ""
    clients: list[Announced] = Field(max_length=MANY)


class Asked(Header):
    """A server's ask of one client."""

    kind: Kind
    run: Text  # the federated run, by its method's name
    client: Text
    round: int = Field(ge=0)
    kept: list[int]
    awaited: list[int] = []
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""  # of the server's run
    compression: Compression = "none"


class Refusal(Header):
    """A client cannot do what was asked."""

    kind: Literal["refusal"] = "refusal"
    reason: Text


class ReportPart(Header):
    """A report within an answer."""

    round: int = Field(ge=0)
    events: list[dict[str, Any]] = Field(max_length=MANY)


class UpdateHeader(Header):
    """An update without its blocks."""

    kind: Literal["update"] = "update"
    client: Text
    round: int
    samples: int = Field(ge=1)
    losses: dict[Text, Number]
    fault: Text | None
    events: list[dict[str, Any]] = Field(max_length=MANY)
    reports: list[ReportPart] = Field(max_length=MANY)
    compression: Compression = "none"


class FinalHeader(Header):
    """A client's results."""

    kind: Literal["final"] = "final"
    client: Text
    rows: list[dict[str, Any]] = Field(max_length=MANY)
    events: list[dict[str, Any]] = Field(max_length=MANY)
    reports: list[ReportPart] = Field(max_length=MANY)
    seconds: dict[Text, Annotated[float, Field(ge=0)]]


class RowHeader(Header):
    """A row of a client's results."""

    seed: int
    method: Text
    client: Text
    task: Text
    dataset: Text
    metric: Text
    value: Number
    samples: int = Field(ge=1)


H = TypeVar("H", bound=Header)


def checked(model: type[H], values: dict[str, Any]) -> H:
    """Return values as what they should be; else say what is wrong first."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise FrameError(first_fault(error)) from None


def first_fault(error: ValidationError) -> str:
    """Return the first thing that is wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:100]
    return f"{place!r}: {first['msg']}" if place else first["msg"]


def same(found: object, expected: object, what: str) -> None:
    """Refuse what is not as expected."""
    if found != expected:
        raise FrameError(f"{what} {str(found)[:100]!r}, expected {expected!r}")


def among(found: Iterable[Any], allowed: Collection[Any], what: str) -> None:
    """Refuse the first that is not allowed; ``{}`` in ``what`` is its place."""
    for each in found:
        if each not in allowed:
            raise FrameError(what.format(repr(each)[:100]))


def once(found: Iterable[Any], what: str) -> None:
    """Refuse what is there twice; ``{}`` in ``what`` is its place."""
    seen = set()
    for each in found:
        if each in seen:
            raise FrameError(what.format(repr(each)[:100]) + ", twice")
        seen.add(each)


def can_be_sent(value: float) -> bool:
    """Return whether a number can be sent; NaN is none."""
    return abs(value) <= LARGE
