"""Layouts: who holds what, as a federation file says it."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer, Tag

from tapfl.config import Section
from tapfl.data.custom import DataEntry, OwnData
from tapfl.errors import TapflError, nearest
from tapfl.tasks import Task, check_name

SERVER = "server"


def _fraction(value: object) -> Fraction:
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9}|/0*[1-9]\d{0,8})?", str(value)):
        raise ValueError("expected a share such as 1, 0.5 or 1/3")
    share = Fraction(str(value))
    if not 0 < share <= 1:
        raise ValueError("a share is above 0 and at most 1")
    return share


Share = Annotated[Fraction, BeforeValidator(_fraction), PlainSerializer(str)]
# What a client holds of a task: a share of its data set, or data of its own.
Holding = Annotated[
    Annotated[Share, Tag("share")] | Annotated[DataEntry, Tag("data")],
    Discriminator(lambda value: "data" if isinstance(value, dict | DataEntry) else "share")]


class TaskEntry(Section):
    """A task in a federation file; ``classes`` is their number, or their names.

    ``data`` is where its samples are; without it they come from the configuration's source, or
    every client that has the task has its own.
    """

    kind: str
    modalities: list[str]
    classes: Annotated[int, Field(ge=0, le=1_000_000)] | list[str] = 0
    data: DataEntry | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The classes' names, where they are given."""
        return tuple(self.classes) if isinstance(self.classes, list) else ()


class ClientEntry(Section):
    """A kind of client: its name and, for each of its tasks, its share or its own data."""

    name: str
    tasks: dict[str, Holding] = Field(min_length=1)


class FederationFile(Section):
    """Who holds what, for one group of clients."""

    tasks: dict[str, TaskEntry] = Field(min_length=1)
    clients: list[ClientEntry] = Field(min_length=1)

    def task_table(self) -> dict[str, Task]:
        """Return the tasks by name."""
        return {name: Task(name, e.kind, tuple(e.modalities),
                           e.classes if isinstance(e.classes, int) else len(e.classes))
                for name, e in self.tasks.items()}

    def own_data(self, folder: Path) -> OwnData:
        """Return which data the file names itself, by task and by client."""
        clients: dict[str, dict[str, DataEntry]] = {}
        for client in self.clients:
            for task, holding in client.tasks.items():
                if isinstance(holding, DataEntry):
                    clients.setdefault(task, {})[client.name] = holding
        return OwnData(folder, {n: e.names for n, e in self.tasks.items() if e.names},
                       {n: e.data for n, e in self.tasks.items() if e.data}, clients)


def check_clients(federation: FederationFile) -> None:
    """Refuse a file whose clients and shares do not fit its tasks."""
    seen: set[str] = set()
    held = dict.fromkeys(federation.tasks, Fraction(0))
    for client in federation.clients:
        check_name(client.name, "client")
        if client.name.lower() == SERVER:
            raise TapflError(f"client '{client.name}': this name is the server's")
        if client.name in seen:
            raise TapflError(f"client '{client.name}' is there twice")
        seen.add(client.name)
        for task, holding in client.tasks.items():
            if task not in federation.tasks:
                raise TapflError(f"client '{client.name}': unknown task '{task}'"
                                 + nearest(task, federation.tasks))
            held[task] += 0 if isinstance(holding, DataEntry) else holding
    own = federation.own_data(Path())
    for task, entry in federation.tasks.items():
        if len(set(entry.names)) != len(entry.names):
            raise TapflError(f"task '{task}': two classes have the same name")
        if task in own.clients and (held[task] or task in own.tasks):
            raise TapflError(f"task '{task}': either its clients bring data of their own, all of "
                             "them, or they hold shares of one data set")
    for task, total in held.items():
        if task in own.clients:
            continue
        if total > 1:
            raise TapflError(f"task '{task}': the clients' shares add up to {total}, more than 1")
        if total == 0:
            raise TapflError(f"task '{task}' is held by no client")
