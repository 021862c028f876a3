"""Federations: which clients there are, their tasks, and their share of each data set."""

from __future__ import annotations

import bisect
import dataclasses
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Annotated, overload

import numpy as np
from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer, Tag

from tapfl.config import FederationConfig, Section
from tapfl.data.batches import ClientData, Rows, TaskData
from tapfl.data.custom import DataEntry, OwnData
from tapfl.data.skew import deal
from tapfl.data.sources import Pair, Splits
from tapfl.errors import TapflError, nearest
from tapfl.reading import check, is_file, parse_yaml, read_text
from tapfl.tasks import Task, check_name

SERVER = "server"
HINTS = 100  # clients that an unknown id is compared with


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
    _places(federation, config)
    return federation


def _check_clients(federation: FederationFile) -> None:
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


@dataclass(frozen=True)
class Member:
    """What a server may know of a client: who it is, its tasks, and |D_i|, its number of samples.

    Which blocks a client owns depends on this alone.
    """

    id: str
    index: int  # its place in the roster
    tasks: tuple[str, ...]
    samples: int


Holdings = Mapping[str, tuple[TaskData, Rows]]  # rows of a data set, by task


@dataclass(frozen=True)
class Client(Member):
    """A member with its data: what it trains on, and its rows of its tasks' test data."""

    data: ClientData
    tests: Holdings

    def with_holdout(self) -> Client:
        """Return the client with its held-out samples given back: all of its data trains."""
        return dataclasses.replace(self, data=self.data.whole())


class Federation(Sequence[Client]):
    """All clients that take part. Each is built on access: thousands cost nothing.

    What a client holds depends on the whole federation, also on clients that do not take part: a
    client's *place* is its number among all, its index the one among those that take part.
    ``file`` says what these hold.

    Shares of one data set, and label skew, are a simulation: the data set is loaded once and the
    clients are rows of it. A client with its own files is built from those alone.
    """

    def __init__(self, file: FederationFile, splits: Splits, config: FederationConfig,
                 seed: int) -> None:
        self.file, self.splits, self.config, self.seed = (
            taking_part(file, config), splits, config, seed)
        self.tasks = self.file.task_table()
        self._whole, self._places = file, _places(file, config)
        self._starts = _starts(file)
        self._orders = {task: _rng(seed, "order", task).permutation(len(train))
                        for task, (train, _) in splits.items()}
        self._skewed = {task: self._skew(task) for task in splits
                        if config.dirichlet is not None and self.tasks[task].is_classification}
        self._check()

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Client: ...
    @overload
    def __getitem__(self, index: slice) -> list[Client]: ...
    def __getitem__(self, index: int | slice) -> Client | list[Client]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = self._places[index]
        entry = self._entry(place)
        holdings, holdout, tests = [], [], {}
        for task in entry.tasks:
            train, test = self._data(place, task)
            rows, test_rows = self._rows(place, task)
            kept = self._held_out(place, task, len(rows))
            holdout.append((train, rows[:kept]))
            holdings.append((train, rows[kept:]))
            tests[task] = (test, test_rows)
        data = ClientData(holdings, holdout)
        return Client(self.id_of(index), index, tuple(entry.tasks), data.samples, data, tests)

    @property
    def members(self) -> Roster:
        """What a server may know of the clients, in the roster's order."""
        return Roster(self)

    def others(self, client: Member, task: str) -> list[tuple[TaskData, Rows]]:
        """Return the test data of the task's other clients: only a simulation has them."""
        test, own = self[client.index].tests[task]
        if task not in self.splits.brought:
            rest = np.ones(len(test), dtype=bool)
            rest[own] = False
            return [(test, np.flatnonzero(rest))]
        return [self[i].tests[task] for i in range(len(self))
                if i != client.index and task in self._entry(self._places[i]).tasks]

    def data_sets(self) -> Iterator[tuple[str, TaskData, TaskData]]:
        """Iterate over all training and test data: a task's, or a client's own of a task."""
        for task, (train, test) in self.splits.items():
            yield task, train, test
        for entry in self.file.clients:
            for task in entry.tasks:
                if task in self.splits.brought:
                    yield f"{task}/{entry.name}", *self.splits.of_client(task, entry.name)

    def check(self) -> None:
        """Refuse a federation in which a client has too little data; reads all data."""
        for place in self._places if self.config.holdout or self.splits.brought else ():
            for task in self._entry(place).tasks:
                self._held_out(place, task, len(self._rows(place, task)[0]))

    def _entry(self, place: int) -> ClientEntry:
        return self._whole.clients[place % len(self._whole.clients)]

    def _data(self, place: int, task: str) -> Pair:
        if task in self.splits.brought:
            return self.splits.of_client(task, self._entry(place).name)
        return self.splits[task]

    def _held_out(self, place: int, task: str, count: int) -> int:
        """Return how many of a client's samples of a task are held out."""
        kept = int(count * self.config.holdout)
        if self.config.holdout and not 0 < kept < count:
            raise TapflError(
                f"federation.holdout: client '{_id(place, self._whole, self.config)}' has {count} "
                f"sample(s) of '{task}', too few to hold out {self.config.holdout:g}")
        return kept

    def id_of(self, index: int) -> str:
        """Return a client's id: its kind's name and, where there are several, its group."""
        return _id(self._places[index], self._whole, self.config)

    def find(self, id_: str) -> Client:
        """Return a client by its id."""
        place = _place(id_, self._whole, self.config)
        if place is None or place not in self._places:
            raise TapflError(f"unknown client '{id_}'"
                             + _hint(id_, self._whole, self.config, self._places))
        return self[self._places.index(place)]

    def _rows(self, place: int, task: str) -> tuple[Rows, Rows]:
        """Return a client's rows of a task: for training, and its own test.

        All clients share the test data, unless their data differ in kind.
        """
        if task in self._skewed:
            return self._skewed[task][0][place], self._skewed[task][1][place]
        train, test = self._data(place, task)
        if task in self.splits.brought:
            return np.arange(len(train)), np.arange(len(test))
        start, stop = self._interval(place, task)
        order = self._orders[task]
        return order[int(start * len(order)):int(stop * len(order))], np.arange(len(test))

    def _interval(self, place: int, task: str) -> tuple[Fraction, Fraction]:
        """Return the part of a data set that a client holds, of 0 to 1."""
        group, kind = divmod(place, len(self._whole.clients))
        groups = self.config.groups
        start = group + self._starts[kind][task]
        share = self._whole.clients[kind].tasks[task]
        assert isinstance(share, Fraction)
        return start / groups, (start + share) / groups

    def _skew(self, task: str) -> tuple[dict[int, Rows], dict[int, Rows]]:
        """Return the rows of every client that holds a task: for training, and its own test."""
        assert self.config.dirichlet is not None
        everybody = range(self.config.groups * len(self._whole.clients))
        holders = [place for place in everybody if task in self._entry(place).tasks]
        widths = [self._interval(i, task) for i in holders]
        labels, test_labels = (data.labels.cpu().numpy() for data in self.splits[task]
                               if data.labels is not None)
        train, test = deal(
            self._orders[task], labels, test_labels,
            np.array([float(stop - start) for start, stop in widths]), self.config.dirichlet,
            _rng(self.seed, "dirichlet", task))
        return dict(zip(holders, train, strict=True)), dict(zip(holders, test, strict=True))

    def _check(self) -> None:
        """Refuse a federation in which a client would have no sample of a task."""
        if self.splits.brought and self.config.groups > 1:
            raise TapflError(f"federation.groups: {self.config.groups} groups of clients cannot "
                             "share the data that a client brings itself; expected 1")
        for entry in self.file.clients:
            for task, share in entry.tasks.items():
                if isinstance(share, Fraction):
                    size = len(self._orders[task])
                    if size * share < self.config.groups:
                        raise TapflError(
                            f"federation.groups: {self.config.groups} groups are too many for the "
                            f"{size} samples of '{task}': client "
                            f"'{client_id(0, entry.name, self.config.groups)}' would have none")


class Roster(Sequence[Member]):
    """The members of a federation, each built on access."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    def __len__(self) -> int:
        return len(self._federation)

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> list[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | list[Member]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        client = self._federation[index]
        return Member(client.id, client.index, client.tasks, client.samples)


def client_id(group: int, name: str, groups: int) -> str:
    """Return the id of a kind of client in a group; ``parse_id`` is its inverse."""
    return name if groups == 1 else f"g{group}-{name}"


def tasks_of(file: FederationFile, config: FederationConfig) -> dict[str, list[str]]:
    """Return the tasks of every client that takes part, by id, in the roster's order."""
    kinds = {entry.name: list(entry.tasks) for entry in file.clients}
    return {id_: kinds[parse_id(id_, config.groups)[1]] for id_ in client_ids(file, config)}


def parse_id(id_: str, groups: int) -> tuple[int, str]:
    """Return the group and the name in an id; what is no id has neither."""
    if groups == 1:
        return 0, id_
    found = re.fullmatch(r"g(0|[1-9][0-9]{0,8})-(.+)", id_)
    return (int(found[1]), found[2]) if found else (0, "")


def client_ids(file: FederationFile, config: FederationConfig) -> Iterator[str]:
    """Iterate over the ids of the clients that take part, in the federation's order."""
    chosen = None if config.clients is None else set(config.clients)
    for group in range(config.groups):
        for entry in file.clients:
            id_ = client_id(group, entry.name, config.groups)
            if chosen is None or id_ in chosen:
                yield id_


def client_count(file: FederationFile, config: FederationConfig) -> int:
    """Return how many clients take part."""
    return (config.groups * len(file.clients) if config.clients is None
            else len(set(config.clients)))


def taking_part(file: FederationFile, config: FederationConfig) -> FederationFile:
    """Return the kinds of clients that take part, and the tasks that these hold."""
    if config.clients is None:
        return file
    kinds = {parse_id(id_, config.groups)[1] for id_ in config.clients}
    clients = [entry for entry in file.clients if entry.name in kinds]
    held = {task for entry in clients for task in entry.tasks}
    return file.model_copy(update={"clients": clients, "tasks": {
        name: entry for name, entry in file.tasks.items() if name in held}})


def _places(file: FederationFile, config: FederationConfig) -> Sequence[int]:
    """Return the places of the clients that take part; ``config`` may name some that are none."""
    everybody = range(config.groups * len(file.clients))
    if config.clients is None:
        return everybody
    found = set()
    for id_ in config.clients:
        place = _place(id_, file, config)
        if place is None:
            raise TapflError(f"federation.clients: unknown client '{id_}'"
                             + _hint(id_, file, config, everybody))
        if place in found:
            raise TapflError(f"federation.clients: '{id_}' is there twice")
        found.add(place)
    return sorted(found)


def _place(id_: str, file: FederationFile, config: FederationConfig) -> int | None:
    """Return a client's number among all of the federation; None for an id that is nobody's."""
    group, name = parse_id(id_, config.groups)
    for kind, entry in enumerate(file.clients):
        if entry.name == name and group < config.groups:
            return group * len(file.clients) + kind
    return None


def _id(place: int, file: FederationFile, config: FederationConfig) -> str:
    group, kind = divmod(place, len(file.clients))
    return client_id(group, file.clients[kind].name, config.groups)


def _hint(id_: str, file: FederationFile, config: FederationConfig, places: Sequence[int]) -> str:
    """Name a client that may be meant by an id that is nobody's."""
    # Its own group is the best hint; all clients together would take long to compare.
    group, kinds = parse_id(id_, config.groups)[0], len(file.clients)
    first = bisect.bisect_left(places, group * kinds) if group < config.groups else 0
    known = places[first:first + max(kinds, HINTS)]
    return nearest(id_, (_id(place, file, config) for place in known))


def _starts(file: FederationFile) -> list[dict[str, Fraction]]:
    """Return where, in a group's data of a task, the part of each kind of client begins."""
    held = dict.fromkeys(file.tasks, Fraction(0))
    starts = []
    for entry in file.clients:
        starts.append({task: held[task] for task in entry.tasks})
        for task, share in entry.tasks.items():
            held[task] += share if isinstance(share, Fraction) else 0
    return starts


def _rng(seed: int, *words: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32("/".join(words).encode())])
