"""What a server and a client say to each other, as frames.

Blocks travel as one body: a safetensors buffer with one flat tensor a block, so that any type
survives. Nothing that comes in is trusted: headers have a schema, events must be ones that a client
may report, and blocks must be those that were expected, with their sizes and types.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

from tapfl.blocks import BlockState
from tapfl.data.federation import Member
from tapfl.engine.flower.frames import LARGE, Frame, FrameError, pack
from tapfl.engine.messages import Final, Kind, Report, Row, Update
from tapfl.evaluation.metrics import GENERAL, METRIC_ORDER, metric_kind
from tapfl.events import Curve, Diverged, Event, Logged, Note, OfClient, PersonalLosses, Replacement

VERSION = 1  # of what is said here; both sides must have the same
SLACK = 1 << 20  # bytes of a body beside its blocks
TEXT = 2000  # the longest name or reason
MANY = 100_000
DEEP = 50  # levels of a note's values

Text = Annotated[str, Field(max_length=TEXT, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Number = float | None  # null stands for what is not finite
Compression = Literal["none", "zlib"]


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Announced(_Header):
    """A client that a node hosts; ``known`` to the run that this one goes on from."""

    id: Text
    tasks: list[Text] = Field(max_length=1000)
    samples: int = Field(ge=1)
    known: bool = False


class Hello(_Header):
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


class Asked(_Header):
    """A server's ask of one client."""

    kind: Kind
    run: Text  # the federated run, by its method's name
    client: Text
    round: int = Field(ge=0)
    kept: list[int]
    awaited: list[int] = []
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""  # of the server's run
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
    losses: dict[Text, Number]
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
    seconds: dict[Text, Annotated[float, Field(ge=0)]]


class _Row(_Header):
    seed: int
    method: Text
    client: Text
    task: Text
    dataset: Text
    metric: Text
    value: Number
    samples: int = Field(ge=1)


@dataclass(frozen=True)
class Due:
    """What an answer may speak of, and nothing else.

    ``round`` is the one that was asked for, ``awaited`` those whose reports are still to come.
    ``methods`` are those of the federated run, ``evaluated`` those that have results.
    """

    member: Member
    round: int
    awaited: Collection[int]
    methods: Collection[str]
    evaluated: Collection[str]
    seed: int


H = TypeVar("H", bound=_Header)
_KINDS: dict[str, type[OfClient]] = {
    cls.kind: cls for cls in (Replacement, PersonalLosses, Curve, Diverged, Note)}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for kind, cls in _KINDS.items()}


def ask_frame(asked: Asked, blocks: BlockState) -> bytes:
    """Return a server's ask."""
    return pack(asked.model_dump(), _packed(blocks, asked.compression))


def read_ask(frame: Frame, initial: BlockState,
             expected: Sequence[str]) -> tuple[Asked, BlockState]:
    """Return an ask and its blocks, as a client of this method expects them."""
    asked = _checked(Asked, frame[0])
    for round_ in asked.awaited:
        if not 0 <= round_ < asked.round:
            raise FrameError(f"asked for the report of round {round_} in round {asked.round}")
    blocks = _blocks(frame[1], initial, expected, asked.compression)
    fault = blocks.not_finite()
    if fault is not None:
        raise FrameError(fault)
    return asked, blocks


def update_frame(update: Update, round_: int, reports: Sequence[ReportPart],
                 compression: Compression) -> bytes:
    """Return a client's update, with reports of earlier rounds."""
    losses = {task: value if _finite(value) else None for task, value in update.losses.items()}
    header = UpdateHeader(
        client=update.client, round=round_, samples=update.samples, losses=losses,
        fault=update.fault and update.fault[:TEXT], events=records(update.events),
        reports=list(reports), compression=compression)
    return pack(header.model_dump(), _packed(update.blocks, compression))


def read_update(frame: Frame, due: Due, initial: BlockState,
                expected: Sequence[str]) -> tuple[Update, list[Report]]:
    """Return a client's update; what cannot be read raises FrameError."""
    header = _checked(UpdateHeader, frame[0])
    _same(header.client, due.member.id, "client")
    _same(header.round, due.round, "round")
    _among(header.losses, due.member.tasks, "losses of {}, which is no task of this client")
    blocks = _blocks(frame[1], initial, expected, header.compression)
    losses = {task: float("nan") if value is None else value
              for task, value in header.losses.items()}
    update = Update(due.member.id, blocks, header.samples, losses, header.fault,
                    _events(header.events, due, due.round))
    return update, _reports(header.reports, due)


def final_frame(final: Final, reports: Sequence[ReportPart]) -> bytes:
    """Return a client's results; the files it keeps are its own affair."""
    rows = [{**row, "value": row["value"] if _finite(row["value"]) else None}
            for row in final.rows]
    header = FinalHeader(client=final.client, rows=rows, events=records(final.events),
                         reports=list(reports), seconds=dict(final.seconds))
    return pack(header.model_dump())


def read_final(frame: Frame, due: Due) -> tuple[Final, list[Report]]:
    """Return a client's results; what cannot be read raises FrameError."""
    header = _checked(FinalHeader, frame[0])
    _same(header.client, due.member.id, "client")
    _among(header.seconds, {"", *due.methods}, "seconds of {}, which is no method of this run")
    rows = [_row(values, due) for values in header.rows]
    _once(((row["method"], row["task"], row["metric"]) for row in rows), "results of {}")
    final = Final(due.member.id, rows, _events(header.events, due), seconds=header.seconds)
    return final, _reports(header.reports, due)


def read_hello(frame: Frame) -> Hello:
    """Return a node's hello; one of another version may have any other form."""
    if frame[0].get("kind") != "hello":
        raise FrameError("it does not say hello")
    version = frame[0].get("version")
    if version != VERSION:
        raise FrameError(f"messages of version {str(version)[:50]}, the server has {VERSION}")
    return _checked(Hello, frame[0])


def read_refusal(frame: Frame) -> str | None:
    """Return why a client refused what it was asked for, if it did."""
    if frame[0].get("kind") != "refusal":
        return None
    return _checked(Refusal, frame[0]).reason


def records(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return events as JSON objects."""
    return [event.record() for event in events if isinstance(event, Logged)]


def event_of(record: Mapping[str, Any]) -> OfClient:
    """Return the event that a client reports, if it is one that clients may report."""
    kind = record.get("event")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise FrameError(f"an event of kind {str(kind)[:50]!r} is none of a client's")
    values = {key: value for key, value in record.items() if key != "event"}
    known = {f.name for f in dataclasses.fields(_KINDS[kind])}
    _among(values, known, f"event '{kind}': unknown {{}}")
    if _deep(values, DEEP):
        raise FrameError(f"event '{kind}': more than {DEEP} levels of values")
    try:
        # As JSON: only there a strict check takes an object for a dataclass.
        found: OfClient = _ADAPTERS[kind].validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise FrameError(f"event '{kind}': {_first(error)}") from None
    return found


def _row(values: dict[str, Any], due: Due) -> Row:
    row = _checked(_Row, values)
    _same(row.client, due.member.id, "client")
    _same(row.seed, due.seed, "seed")
    _among([row.method], due.evaluated, "results of {}, which is no method of this run")
    _among([row.task], due.member.tasks, "results of {}, which is no task of this client")
    _same(row.dataset, row.task, "data set")
    _metrics([row.metric])
    return {**row.model_dump(), "value": float("nan") if row.value is None else row.value}


def _reports(parts: Sequence[ReportPart], due: Due) -> list[Report]:
    _among((part.round for part in parts), due.awaited, "a report of round {}, which is not due")
    _once((part.round for part in parts), "a report of round {}")
    return [Report(due.member.id, part.round, _events(part.events, due, part.round))
            for part in parts]


def _events(found: Sequence[Mapping[str, Any]], due: Due, round_: int | None = None) -> list[Event]:
    """Return a client's events of a round; in the end they may look back on any."""
    events = [event_of(record) for record in found]
    for event in events:
        _same(event.client, due.member.id, "client")
        _among([event.method], due.methods, "an event of {}, which is no method of this run")
        _among(_tasks(event), due.member.tasks, "an event of {}, which is no task of this client")
        _metrics(event.values if isinstance(event, Curve) else ())
        if not all(text.isprintable() and len(text) <= TEXT for text in _texts(event)):
            raise FrameError(f"event '{event.kind}': a text that cannot be shown")
        if round_ is not None:
            _same(event.round, round_, "an event of round")
        elif not 0 <= event.round <= due.round:
            raise FrameError(f"an event of round {event.round}, expected 0 to {due.round}")
    return list(events)


def _tasks(event: OfClient) -> Iterable[str]:
    """Return the tasks that an event speaks of."""
    match event:
        case Replacement() | Curve():
            return [event.task]
        case PersonalLosses():
            return event.losses
        case Diverged():
            return event.tasks
    return ()


def _texts(event: OfClient) -> Iterable[str]:
    """Return the words of an event that people are shown; a note's values are data."""
    match event:
        case Replacement():
            return event.blocks
        case Diverged():
            return [event.reason]
    return ()


def _metrics(names: Iterable[str]) -> None:
    """Refuse what no evaluation on a node's own data makes."""
    for name in names:
        if name.startswith(GENERAL) or metric_kind(name) not in METRIC_ORDER:
            raise FrameError(f"metric {name[:50]!r}, expected one of {', '.join(METRIC_ORDER)}")


def _deep(value: Any, levels: int) -> bool:
    """Return whether plain JSON has more levels than these."""
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level if isinstance(outer, dict | list)
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return bool(level)


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
        raise FrameError(f"block {name[:100]!r} is " + ("missing" if name in expected
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
    if not engine.eof or engine.unused_data:
        raise FrameError(f"its blocks are compressed, but not in one piece of at most {limit} "
                         "bytes")
    return data


def _checked(model: type[H], values: dict[str, Any]) -> H:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise FrameError(_first(error)) from None


def _first(error: ValidationError) -> str:
    """Return the first thing that is wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:100]
    return f"{place!r}: {first['msg']}" if place else first["msg"]


def _same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise FrameError(f"{what} {str(found)[:100]!r}, expected {expected!r}")


def _among(found: Iterable[Any], allowed: Collection[Any], what: str) -> None:
    """Refuse the first that is not allowed; ``{}`` in ``what`` is its place."""
    for each in found:
        if each not in allowed:
            raise FrameError(what.format(repr(each)[:100]))


def _once(found: Iterable[Any], what: str) -> None:
    seen = set()
    for each in found:
        if each in seen:
            raise FrameError(what.format(repr(each)[:100]) + ", twice")
        seen.add(each)


def _finite(value: float) -> bool:
    """Return whether a number can be sent; NaN is none."""
    return abs(value) <= LARGE
