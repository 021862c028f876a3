"""What happened in a run or in several seeds of it, from events.jsonl, ready to be drawn."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError
from tapfl.events import (
    Curve,
    Diverged,
    Left,
    Missing,
    PersonalLosses,
    Refused,
    Replacement,
    RoundEnded,
)

FILE = "events.jsonl"
INCIDENTS = (Refused.kind, Missing.kind, Diverged.kind)
Line = list[tuple[float, float]]  # points (round, value)
Values = dict[int, list[float]]  # by round; of several clients and seeds


@dataclass(frozen=True)
class Incident:
    """Something that went wrong with a client in a round."""

    seed: int
    kind: str
    method: str
    round: int
    client: str
    reason: str


@dataclass(frozen=True)
class Departure:
    """A client that takes no part in a federated run from a round on."""

    seed: int
    method: str
    round: int
    client: str


@dataclass
class Timeline:
    """Events of all seeds, by what they are about."""

    rounds: Counter[str] = field(default_factory=Counter)  # of all seeds together
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    losses: dict[tuple[str, str], Values] = field(default_factory=dict)  # W by run and task
    personal: dict[tuple[str, str], Values] = field(default_factory=dict)  # X by method and task
    curves: dict[tuple[str, str, str], Values] = field(default_factory=dict)  # and by metric
    replacements: dict[tuple[str, str], Counter[int]] = field(default_factory=dict)
    replaced: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # and by client
    averaged: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # run, block, client
    replaced_blocks: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    incidents: list[Incident] = field(default_factory=list)
    left: list[Departure] = field(default_factory=list)
    events: int = 0

    def add(self, event: Mapping[str, Any], seed: int) -> None:
        """Take an event in."""
        kind, method, round_ = str(event["event"]), str(event["method"]), int(event["round"])
        self.events += 1
        if kind == RoundEnded.kind:
            self._add_round(event, method, round_)
        elif kind == PersonalLosses.kind:
            _collect(self.personal, method, round_, event["losses"])
        elif kind == Curve.kind:
            for metric, value in event["values"].items():
                values = self.curves.setdefault((method, str(event["task"]), str(metric)), {})
                values.setdefault(round_, []).append(float(value))
        elif kind == Replacement.kind:
            client, task = str(event["client"]), str(event["task"])
            self.replacements.setdefault((method, task), Counter())[round_] += 1
            self.replaced[method, client, task] += 1
            self.replaced_blocks.update((method, str(b), client) for b in event["blocks"])
        elif kind == Left.kind:
            self.left.append(Departure(seed, method, round_, str(event["client"])))
        elif kind in INCIDENTS:
            self.incidents.append(Incident(seed, kind, method, round_, str(event["client"]),
                                           str(event["reason"])))

    def _add_round(self, event: Mapping[str, Any], method: str, round_: int) -> None:
        self.rounds[method] += 1
        self.seconds[method] += float(event["seconds"])
        _collect(self.losses, method, round_, event["losses"])
        for block, clients in event["contributors"].items():
            self.averaged.update((method, str(block), str(client)) for client in clients)

    def last_round(self) -> int:
        """Return the last round that something happened in."""
        return max((round_ for values in self.losses.values() for round_ in values), default=0)


def _collect(into: dict[tuple[str, str], Values], method: str, round_: int,
             losses: Mapping[str, Any]) -> None:
    for task, loss in losses.items():
        into.setdefault((method, str(task)), {}).setdefault(round_, []).append(
            math.nan if loss is None else float(loss))


def read_timeline(folders: Sequence[tuple[Path, int]], under_way: bool = False) -> Timeline:
    """Read the events of runs, given with their seeds; a run without any has nothing to show."""
    timeline = Timeline()
    for folder, seed in folders:
        if (folder / FILE).is_file():
            read_events(folder / FILE, functools.partial(timeline.add, seed=seed), under_way)
    return timeline


def read_events(path: Path, take: Callable[[Mapping[str, Any]], None],
                under_way: bool = False) -> None:
    """Hand every event to ``take``; what it cannot take is no event of a run."""
    for event, where in event_lines(path, under_way):
        try:
            take(event)
        except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            raise TapflError(f"{where}: not an event of a run "
                             f"({type(error).__name__}: {error})") from None


def event_lines(path: Path, under_way: bool = False) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield events, and where they stand; of a run under way the last may be half written."""
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                if under_way and not line.endswith("\n"):
                    return
                event = json.loads(line)
                if not isinstance(event, dict):
                    raise ValueError(f"expected a JSON object, got {type(event).__name__}")
                yield event, f"{path}, line {number}"
    except (OSError, ValueError, RecursionError) as error:
        raise TapflError(f"{path}, line {number}: not the events of a run ({error})") from None


def means(values: Values, most: int = 400) -> Line:
    """Return the mean of every round, of clients and seeds alike; long runs in equal pieces."""
    if not values:
        return []
    width = max(1, math.ceil((max(values) + 1) / most))
    pieces: dict[int, list[float]] = defaultdict(list)
    for round_, found in values.items():
        pieces[round_ // width].extend(found)
    return [((piece + 0.5) * width + 0.5, math.fsum(found) / len(found))
            for piece, found in sorted(pieces.items())]


def cumulative(counts: Mapping[int, int], last: int, seeds: int) -> Line:
    """Return how many there were up to every round, of a seed on average."""
    total, points = 0, [(0.0, 0.0)]
    for round_ in sorted(counts):
        total += counts[round_]
        points.append((float(round_ + 1), total / seeds))
    if points[-1][0] < last + 1:
        points.append((float(last + 1), total / seeds))
    return points
