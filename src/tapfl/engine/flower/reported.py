"""What clients report: events and results. A server takes those that are due, and no others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tapfl.data.federation import Member
from tapfl.engine.flower.frames import FrameError
from tapfl.engine.flower.headers import (
    TEXT,
    ReportPart,
    RowHeader,
    among,
    checked,
    first_fault,
    once,
    same,
)
from tapfl.engine.messages import Report, Row
from tapfl.evaluation.metrics import GENERAL, METRIC_ORDER, metric_kind
from tapfl.events import Curve, Diverged, Event, Logged, Note, OfClient, PersonalLosses, Replacement

DEEP = 50  # levels of a note's values
_KINDS: dict[str, type[OfClient]] = {
    cls.kind: cls for cls in (Replacement, PersonalLosses, Curve, Diverged, Note)}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for kind, cls in _KINDS.items()}


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
    among(values, known, f"event '{kind}': unknown {{}}")
    if _deep(values, DEEP):
        raise FrameError(f"event '{kind}': more than {DEEP} levels of values")
    try:
        # As JSON: only there a strict check takes an object for a dataclass.
        found: OfClient = _ADAPTERS[kind].validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise FrameError(f"event '{kind}': {first_fault(error)}") from None
    return found


def row_of(values: dict[str, Any], due: Due) -> Row:
    """Return a row of results, if it is one of this client's."""
    row = checked(RowHeader, values)
    same(row.client, due.member.id, "client")
    same(row.seed, due.seed, "seed")
    among([row.method], due.evaluated, "results of {}, which is no method of this run")
    among([row.task], due.member.tasks, "results of {}, which is no task of this client")
    same(row.dataset, row.task, "data set")
    _metrics([row.metric])
    return {**row.model_dump(), "value": float("nan") if row.value is None else row.value}


def reports_of(parts: Sequence[ReportPart], due: Due) -> list[Report]:
    """Return the reports within an answer, each of them due."""
    among((part.round for part in parts), due.awaited, "a report of round {}, which is not due")
    once((part.round for part in parts), "a report of round {}")
    return [Report(due.member.id, part.round, events_of(part.events, due, part.round))
            for part in parts]


def events_of(found: Sequence[Mapping[str, Any]], due: Due,
              round_: int | None = None) -> list[Event]:
    """Return a client's events of a round; in the end they may look back on any."""
    events = [event_of(record) for record in found]
    for event in events:
        same(event.client, due.member.id, "client")
        among([event.method], due.methods, "an event of {}, which is no method of this run")
        among(_tasks(event), due.member.tasks, "an event of {}, which is no task of this client")
        _metrics(event.values if isinstance(event, Curve) else ())
        if not all(text.isprintable() and len(text) <= TEXT for text in _texts(event)):
            raise FrameError(f"event '{event.kind}': a text that cannot be shown")
        if round_ is not None:
            same(event.round, round_, "an event of round")
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
