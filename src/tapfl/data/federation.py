"""Federations: the clients that take part, and their share of each data set."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import overload

import numpy as np

from tapfl.config import FederationConfig
from tapfl.data.batches import ClientData, Rows, TaskData
from tapfl.data.layout import ClientEntry, FederationFile
from tapfl.data.participants import client_id, hint, id_at, place_of, places, taking_part
from tapfl.data.skew import deal
from tapfl.data.sources import Pair, Splits
from tapfl.errors import TapflError


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
        self._whole, self._places = file, places(file, config)
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
        """Return how many of a client's samples of a task are held out: one at least."""
        kept = max(1, int(count * self.config.holdout)) if self.config.holdout else 0
        if kept and kept >= count:
            raise TapflError(
                f"federation.holdout: client '{id_at(place, self._whole, self.config)}' has "
                f"{count} sample(s) of '{task}', too few to hold out {self.config.holdout:g}")
        return kept

    def id_of(self, index: int) -> str:
        """Return a client's id: its kind's name and, where there are several, its group."""
        return id_at(self._places[index], self._whole, self.config)

    def find(self, id_: str) -> Client:
        """Return a client by its id."""
        place = place_of(id_, self._whole, self.config)
        if place is None or place not in self._places:
            raise TapflError(f"unknown client '{id_}'"
                             + hint(id_, self._whole, self.config, self._places))
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
