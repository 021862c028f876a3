"""Federations: which clients there are, their tasks, and their share of each data set."""

from __future__ import annotations

import re
from fractions import Fraction
from importlib import resources
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from tapfl.config import FederationConfig, Section, check, is_file, parse_yaml, read_text
from tapfl.errors import TapflError, nearest
from tapfl.tasks import Task, check_name


def _fraction(value: object) -> Fraction:
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9}|/0*[1-9]\d{0,8})?", str(value)):
        raise ValueError("expected a share such as 1, 0.5 or 1/3")
    share = Fraction(str(value))
    if not 0 < share <= 1:
        raise ValueError("a share lies above 0 and is at most 1")
    return share


Share = Annotated[Fraction, BeforeValidator(_fraction), PlainSerializer(str)]


class TaskEntry(Section):
    """A task in a federation file."""

    kind: str
    modalities: list[str]
    classes: int = Field(0, ge=0, le=1_000_000)


class ClientEntry(Section):
    """A kind of client: its name and, for each of its tasks, its share of the group's data."""

    name: str
    tasks: dict[str, Share] = Field(min_length=1)


class FederationFile(Section):
    """Who holds what, for one group of clients."""

    tasks: dict[str, TaskEntry] = Field(min_length=1)
    clients: list[ClientEntry] = Field(min_length=1)

    def task_table(self) -> dict[str, Task]:
        """Return the tasks by name."""
        return {name: Task(name, e.kind, tuple(e.modalities), e.classes)
                for name, e in self.tasks.items()}


def layout_names() -> list[str]:
    """Return the names of the shipped layouts."""
    return sorted(p.name.removesuffix(".yaml")
                  for p in (resources.files("tapfl") / "presets" / "layouts").iterdir())


def load_federation(config: FederationConfig) -> FederationFile:
    """Read the layout or the file that the configuration names, and check that it adds up."""
    if config.file is not None:
        if not is_file(config.file):
            raise TapflError(f"federation.file: no such file: {config.file}")
        text, where = read_text(config.file), config.file
    elif config.layout in layout_names():
        where = f"layouts/{config.layout}.yaml"
        text = (resources.files("tapfl") / "presets" / where).read_text()
    else:
        raise TapflError(f"federation.layout: unknown layout '{config.layout}'"
                         + nearest(config.layout, layout_names()))
    federation = check(FederationFile, parse_yaml(text, where), where)
    try:
        federation.task_table()
        _check_clients(federation)
    except TapflError as error:
        raise TapflError(f"{where}: {error}") from None
    return federation


def _check_clients(federation: FederationFile) -> None:
    seen: set[str] = set()
    held = dict.fromkeys(federation.tasks, Fraction(0))
    for client in federation.clients:
        check_name(client.name, "client")
        if client.name in seen:
            raise TapflError(f"client '{client.name}' is there twice")
        seen.add(client.name)
        for task, share in client.tasks.items():
            if task not in federation.tasks:
                raise TapflError(f"client '{client.name}': unknown task '{task}'"
                                 + nearest(task, federation.tasks))
            held[task] += share
    for task, total in held.items():
        if total > 1:
            raise TapflError(f"task '{task}': the clients' shares add up to {total}, more than 1")
        if total == 0:
            raise TapflError(f"task '{task}' is held by no client")
