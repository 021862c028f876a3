"""What a server and a client say to each other, as frames: a header, and blocks as its body.

Nothing that comes in is trusted: headers have a schema (``headers``), events and results must be
ones that are due (``reported``), and blocks must be those that were expected (``bodies``).
"""

from __future__ import annotations

from collections.abc import Sequence

from tapfl.blocks import BlockState
from tapfl.engine.flower.bodies import blocks_of, packed
from tapfl.engine.flower.frames import Frame, FrameError, one_line, pack
from tapfl.engine.flower.headers import (
    TEXT,
    VERSION,
    Asked,
    Compression,
    FinalHeader,
    Hello,
    Refusal,
    ReportPart,
    UpdateHeader,
    among,
    can_be_sent,
    checked,
    once,
    same,
)
from tapfl.engine.flower.reported import Due, events_of, records, reports_of, row_of
from tapfl.engine.messages import Final, Report, Update


def ask_frame(asked: Asked, blocks: BlockState) -> bytes:
    """Return a server's ask."""
    return pack(asked.model_dump(), packed(blocks, asked.compression))


def read_ask(frame: Frame, initial: BlockState,
             expected: Sequence[str]) -> tuple[Asked, BlockState]:
    """Return an ask and its blocks, as a client of this method expects them."""
    asked = checked(Asked, frame[0])
    for round_ in asked.awaited:
        if not 0 <= round_ < asked.round:
            raise FrameError(f"asked for the report of round {round_} in round {asked.round}")
    blocks = blocks_of(frame[1], initial, expected, asked.compression)
    fault = blocks.not_finite()
    if fault is not None:
        raise FrameError(fault)
    return asked, blocks


def update_frame(update: Update, round_: int, reports: Sequence[ReportPart],
                 compression: Compression) -> bytes:
    """Return a client's update, with reports of earlier rounds."""
    losses = {task: value if can_be_sent(value) else None for task, value in update.losses.items()}
    header = UpdateHeader(
        client=update.client, round=round_, samples=update.samples, losses=losses,
        fault=update.fault and update.fault[:TEXT], events=records(update.events),
        reports=list(reports), compression=compression)
    return pack(header.model_dump(), packed(update.blocks, compression))


def read_update(frame: Frame, due: Due, initial: BlockState,
                expected: Sequence[str]) -> tuple[Update, list[Report]]:
    """Return a client's update; what cannot be read raises FrameError."""
    header = checked(UpdateHeader, frame[0])
    same(header.client, due.member.id, "client")
    same(header.round, due.round, "round")
    among(header.losses, due.member.tasks, "losses of {}, which is no task of this client")
    blocks = blocks_of(frame[1], initial, expected, header.compression)
    losses = {task: float("nan") if value is None else value
              for task, value in header.losses.items()}
    fault = None if header.fault is None else one_line(header.fault)
    update = Update(due.member.id, blocks, header.samples, losses, fault,
                    events_of(header.events, due, due.round))
    return update, reports_of(header.reports, due)


def final_frame(final: Final, reports: Sequence[ReportPart]) -> bytes:
    """Return a client's results; the files it keeps are its own affair."""
    rows = [{**row, "value": row["value"] if can_be_sent(row["value"]) else None}
            for row in final.rows]
    header = FinalHeader(client=final.client, rows=rows, events=records(final.events),
                         reports=list(reports), seconds=dict(final.seconds))
    return pack(header.model_dump())


def read_final(frame: Frame, due: Due) -> tuple[Final, list[Report]]:
    """Return a client's results; what cannot be read raises FrameError."""
    header = checked(FinalHeader, frame[0])
    same(header.client, due.member.id, "client")
    among(header.seconds, {"", *due.methods}, "seconds of {}, which is no method of this run")
    rows = [row_of(values, due) for values in header.rows]
    once(((row["method"], row["task"], row["metric"]) for row in rows), "results of {}")
    final = Final(due.member.id, rows, events_of(header.events, due), seconds=header.seconds)
    return final, reports_of(header.reports, due)


def read_hello(frame: Frame) -> Hello:
    """Return a node's hello; one of another version may have any other form."""
    if frame[0].get("kind") != "hello":
        raise FrameError("it does not say hello")
    version = frame[0].get("version")
    if version != VERSION:
        raise FrameError(f"messages of version {str(version)[:50]}, the server has {VERSION}")
    return checked(Hello, frame[0])


def read_refusal(frame: Frame) -> str | None:
    """Return why a client refused what it was asked for, if it did."""
    if frame[0].get("kind") != "refusal":
        return None
    return checked(Refusal, frame[0]).reason
