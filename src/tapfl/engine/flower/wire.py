"""What a server and a client say to each other, as frames.

Blocks travel as one body: a safetensors buffer with one flat tensor a block, so that any type
survives. Nothing that comes in is trusted: headers have a schema, events must be ones that a client
may report, and blocks must be those that were expected, with their sizes and types.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

from tapfl.blocks import BlockState
from tapfl.data.federation import Member
from tapfl.engine.flower.frames import Frame, FrameError, pack
from tapfl.engine.messages import Final, Kind, Report, Row, Update
from tapfl.events import Curve, Diverged, Event, Logged, Note, OfClient, PersonalLosses, Replacement

VERSION = 1  # of what is said here; both sides must have the same
SLACK = 1 << 20  # bytes of a body beside its blocks
TEXT = 2000  # the longest name or reason
MANY = 100_000

Text = Annotated[str, Field(max_length=TEXT)]
Number = Annotated[float, Field(allow_inf_nan=True)]
Compression = Literal["none", "zlib"]


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Announced(_Header):
    """A client that a node hosts."""

    id: Text
    tasks: list[Text] = Field(max_length=1000)
    samples: int = Field(ge=1)


class Hello(_Header):
    """What a node says of itself when it joins: its clients, and what must be equal everywhere."""

    kind: Literal["hello"] = "hello"
    version: int
    tapfl: Text
    code: Text
    torch: Text
    threads: int
    config: Text
    weights: Text
    clients: list[Announced] = Field(max_length=MANY)


class Asked(_Header):
    """A server's ask of one client."""

    kind: Kind
    run: Text  # the federated run, by its method's name
    client: Text
    round: int = Field(ge=0)
    kept: list[int]
    awaited: list[int] = []
    compression: Compression = "none"


class Refusal(_Header):
    """A client cannot do what was asked."""

    kind: Literal["refusal"] = "refusal"
    reason: Text


class ReportPart(_Header):
    """A report within an answer."""

    round: int = Field(ge=0)
    events: list[dict[str, Any]] = Field(max_length=MANY)


class UpdateHeader(_Header):
    """An update without its blocks."""

    kind: Literal["update"] = "update"
    client: Text
    round: int
    samples: int = Field(ge=1)
    losses: dict[Text, Number | None]  # JSON has no infinity: null stands for what is not finite
    fault: Text | None
    events: list[dict[str, Any]] = Field(max_length=MANY)
    reports: list[ReportPart] = Field(max_length=MANY)
    compression: Compression = "none"


class FinalHeader(_Header):
    """A client's results."""

    kind: Literal["final"] = "final"
    client: Text
    rows: list[dict[str, Any]] = Field(max_length=MANY)
    events: list[dict[str, Any]] = Field(max_length=MANY)
    reports: list[ReportPart] = Field(max_length=MANY)
    seconds: dict[Text, float]


class _Row(_Header):
    seed: int
    method: Text
    client: Text
    task: Text
    dataset: Text
    metric: Text
    value: Number | None
    samples: int


H = TypeVar("H", bound=_Header)
_KINDS: dict[str, type[OfClient]] = {
    cls.kind: cls for cls in (Replacement, PersonalLosses, Curve, Diverged, Note)}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for kind, cls in _KINDS.items()}
_HEADERS: dict[str, type[_Header]] = {
    "hello": Hello, "update": UpdateHeader, "final": FinalHeader, "refusal": Refusal}


def ask_frame(asked: Asked, blocks: BlockState) -> bytes:
    """Return a server's ask."""
    return pack(asked.model_dump(), _packed(blocks, asked.compression))


def read_ask(frame: Frame, initial: BlockState,
             expected: Sequence[str]) -> tuple[Asked, BlockState]:
    """Return an ask and its blocks, as a client of this method expects them."""
    asked = _checked(Asked, frame[0])
    return asked, _blocks(frame[1], initial, expected, asked.compression)


def update_frame(update: Update, round_: int, reports: Sequence[ReportPart],
                 compression: Compression) -> bytes:
    """Return a client's update, with reports of earlier rounds."""
    losses = {task: value if _finite(value) else None for task, value in update.losses.items()}
    header = UpdateHeader(
        client=update.client, round=round_, samples=update.samples, losses=losses,
        fault=update.fault and update.fault[:TEXT], events=records(update.events),
        reports=list(reports), compression=compression)
    return pack(header.model_dump(), _packed(update.blocks, compression))


def read_update(frame: Frame, member: Member, round_: int, initial: BlockState,
                expected: Sequence[str]) -> tuple[Update, list[Report]]:
    """Return a client's update; what cannot be read raises FrameError."""
    header = _checked(UpdateHeader, frame[0])
    _same(header.client, member.id, "client")
    _same(header.round, round_, "round")
    if not set(header.losses) <= set(member.tasks):
        raise FrameError(f"losses of {sorted(set(header.losses) - set(member.tasks))[0]!r}, "
                         "which is no task of this client")
    blocks = _blocks(frame[1], initial, expected, header.compression)
    losses = {task: float("nan") if value is None else value
              for task, value in header.losses.items()}
    update = Update(member.id, blocks, header.samples, losses, header.fault,
                    _events(header.events, member))
    return update, _reports(header.reports, member, round_)


def final_frame(final: Final, reports: Sequence[ReportPart]) -> bytes:
    """Return a client's results; the files it keeps are its own affair."""
    rows = [{**row, "value": row["value"] if _finite(row["value"]) else None}
            for row in final.rows]
    header = FinalHeader(client=final.client, rows=rows, events=records(final.events),
                         reports=list(reports), seconds=dict(final.seconds))
    return pack(header.model_dump())


def read_final(frame: Frame, member: Member, rounds: int) -> tuple[Final, list[Report]]:
    """Return a client's results; what cannot be read raises FrameError."""
    header = _checked(FinalHeader, frame[0])
    _same(header.client, member.id, "client")
    rows = [_row(values, member) for values in header.rows]
    final = Final(member.id, rows, _events(header.events, member), seconds=header.seconds)
    return final, _reports(header.reports, member, rounds)


def read_header(frame: Frame) -> _Header:
    """Return the header of an answer, whatever kind it is of."""
    kind = frame[0].get("kind")
    if kind not in _HEADERS:
        raise FrameError(f"an answer of kind {str(kind)[:50]!r}, expected one of "
                         f"{', '.join(sorted(_HEADERS))}")
    return _checked(_HEADERS[kind], frame[0])


def records(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return events as JSON objects."""
    return [event.record() for event in events if isinstance(event, Logged)]


def event_of(record: Mapping[str, Any]) -> OfClient:
    """Return the event that a client reports, if it is one that clients may report."""
    kind = record.get("event")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise FrameError(f"an event of kind {str(kind)[:50]!r} is none of a client's")
    values = {key: value for key, value in record.items() if key != "event"}
    unknown = set(values) - {f.name for f in dataclasses.fields(_KINDS[kind])}
    try:
        if unknown:
            raise ValueError(f"unknown '{min(unknown)[:50]}'")
        found: OfClient = _ADAPTERS[kind].validate_python(values)
    except ValueError as error:
        raise FrameError(f"event '{kind}': {_first(error)}") from None
    return found


def _row(values: dict[str, Any], member: Member) -> Row:
    row = _checked(_Row, values)
    _same(row.client, member.id, "client")
    if row.task not in member.tasks:
        raise FrameError(f"results of {row.task[:50]!r}, which is no task of this client")
    return {**row.model_dump(), "value": float("nan") if row.value is None else row.value}


def _reports(parts: Sequence[ReportPart], member: Member, before: int) -> list[Report]:
    for part in parts:
        if part.round >= before:
            raise FrameError(f"a report of round {part.round}, which is still to come")
    return [Report(member.id, part.round, _events(part.events, member)) for part in parts]


def _events(found: Sequence[Mapping[str, Any]], member: Member) -> list[Event]:
    events = [event_of(record) for record in found]
    for event in events:
        _same(event.client, member.id, "client")
    return list(events)


def _packed(blocks: BlockState, compression: Compression) -> bytes:
    body = bytes_of({name: value.detach().cpu().contiguous() for name, value in blocks.items()})
    return zlib.compress(body, 1) if compression == "zlib" else body


def _blocks(body: bytes, initial: BlockState, expected: Sequence[str],
            compression: Compression) -> BlockState:
    """Return the blocks of a body, which must be exactly the expected ones."""
    limit = sum(initial[name].nbytes for name in expected) + SLACK
    if compression == "zlib":
        body = _inflated(body, limit)
    if len(body) > limit:
        raise FrameError(f"{len(body)} bytes of blocks, at most {limit} are expected")
    try:
        found = tensors_of(body)
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FrameError(f"its blocks cannot be read ({error})") from None
    for name in sorted(set(found) ^ set(expected)):
        raise FrameError(f"block '{name[:100]}' is " + ("missing" if name in expected
                                                        else "none that this client exchanges"))
    state = BlockState(found, {name: initial.shapes[name] for name in found})
    fault = state.misfit(initial)
    if fault is not None:
        raise FrameError(fault)
    return state


def _inflated(body: bytes, limit: int) -> bytes:
    """Decompress, but no more than could be right."""
    engine = zlib.decompressobj()
    try:
        data = engine.decompress(body, limit + 1)
    except zlib.error as error:
        raise FrameError(f"its blocks cannot be decompressed ({error})") from None
    return data


def _checked(model: type[H], values: dict[str, Any]) -> H:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise FrameError(_first(error)) from None


def _first(error: ValueError) -> str:
    """Return the first thing that is wrong, on one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:100]
    return f"'{place}': {first['msg']}" if place else first["msg"]


def _same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise FrameError(f"{what} {str(found)[:100]!r}, expected {expected!r}")


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
