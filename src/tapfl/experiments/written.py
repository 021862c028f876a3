"""EXPERIMENT.csv read back: its tables, what they say in a sentence, and lines to draw."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfl.errors import TapflError
from tapfl.evaluation.constant import CONSTANT
from tapfl.evaluation.metrics import GENERAL
from tapfl.experiments.index import Index, IndexedExperiment
from tapfl.report.sheets import OURS, PAPER, UNRANKED, Cell, Column, Line, Sheet

Row = Mapping[str, str]
NAMES = ("method", "against", "setting")  # columns of a table of verdicts that hold none
VERDICT = re.compile(r"better|worse|equivalent|not told apart")
ROUND = re.compile(r"round (\d+)")


@dataclass(frozen=True)
class WrittenPart:
    """A part as the CSV has it; a table of results is also a ``sheet``."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    sheet: Sheet | None

    @property
    def verdicts(self) -> bool:
        """Whether its rows are pairs of methods, with a verdict for every data set."""
        return "against" in self.columns


@dataclass(frozen=True)
class Curve:
    """A method's means over the places of an axis; a place that it lacks is not a number."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """A column of the tables, drawn over an axis."""

    column: Column
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class AxisChart:
    """Panels over the same places: averages of families first, then data sets."""

    title: str
    axis: str
    places: tuple[str, ...]
    families: tuple[Panel, ...]
    datasets: tuple[Panel, ...]


def read_written(path: Path) -> list[WrittenPart]:
    """Read the parts of an experiment."""
    parts: dict[str, list[Row]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if None in row or None in row.values():
                    raise ValueError("a row is longer or shorter than the heading")
                parts.setdefault(row.pop("part"), []).append(row)
        return [_part(title, rows) for title, rows in parts.items()]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise TapflError(f"{path}: not the tables of an experiment ({type(error).__name__}: "
                         f"{error}); the same tapfl reproduce command writes them anew") from None


def _part(title: str, rows: Sequence[Row]) -> WrittenPart:
    # All parts share the file's columns; a part has those that it says something in.
    columns = tuple(key for key in rows[0] if any(row[key] for row in rows))
    kept = tuple({key: row[key] for key in columns} for row in rows)
    return WrittenPart(title, columns, kept, _sheet(rows) if "mean" in columns else None)


def _sheet(rows: Sequence[Row]) -> Sheet:
    lines: dict[tuple[str, str], dict[Column, Cell]] = {}
    for row in rows:
        average = row["dataset"] == "average"
        column = Column(row["kind"] if average else row["dataset"], row["metric"], row["kind"],
                        average)
        cell = Cell(float(row["mean"]), float(row["deviation"]) if row["deviation"] else None,
                    int(row["count"] or 0), int(row["rank"] or UNRANKED))
        source = PAPER if row["source"] == PAPER else OURS
        lines.setdefault((row["method"], source), {})[column] = cell
    columns = dict.fromkeys(column for cells in lines.values() for column in cells)
    return Sheet(tuple(columns), tuple(Line(method, source, cells, method == CONSTANT)
                                       for (method, source), cells in lines.items()))


# What tables say


def verdict_counts(parts: Sequence[WrittenPart]) -> dict[tuple[str, str], Counter[str]]:
    """Count the verdicts of every pair of methods, over all parts and data sets."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for part in parts:
        if part.verdicts:
            for row in part.rows:
                counts = found.setdefault((row["method"], row["against"]), Counter())
                counts.update(word[0] for key, cell in row.items()
                              if key not in NAMES
                              and (word := VERDICT.search(cell)))
    return found


def best_counts(parts: Sequence[WrittenPart]) -> tuple[Counter[str], int]:
    """Count on how many data sets and metrics each of our methods is best, and how many rank."""
    best: Counter[str] = Counter()
    ranked = 0
    for part in parts:
        if part.sheet is None:
            continue
        for column in part.sheet.columns:
            if column.average or column.metric.startswith(GENERAL):
                continue
            winners = [line.method for line in part.sheet.lines if line.source == OURS
                       and column in line.cells and line.cells[column].rank == 1]
            best.update(winners)
            ranked += bool(winners)
    return best, ranked


# Lines to draw


def axis_charts(index: Index, name: str,
                written: Mapping[str, Sequence[WrittenPart]]) -> list[AxisChart]:
    """Return what can be drawn over an experiment's axis."""
    experiment = index.experiments[name]
    if not experiment.axis or name not in written:
        return []
    beside = index.experiments.get(experiment.beside)
    entries = [*(_places(beside, written[experiment.beside])
                 if beside and experiment.beside in written else []),
               *_places(experiment, written[name])]
    charts: dict[str, list[tuple[str, Sheet]]] = {}
    for chart, place, sheet in entries:
        charts.setdefault(chart, []).append((place, sheet))
    methods = {method for part in experiment.parts
               for method in (("tap",) if part.places else part.methods)}
    return [_axis_chart(title, experiment.axis, found, methods)
            for title, found in charts.items() if len(found) > 1]


def _places(experiment: IndexedExperiment,
            parts: Sequence[WrittenPart]) -> list[tuple[str, str, Sheet]]:
    """Return the tables of an experiment with their places: (chart, place, table)."""
    by_title = {part.title: part.sheet for part in parts if part.sheet is not None}
    found = []
    for part in experiment.parts:
        sheet = by_title.get(part.title)
        if sheet is None:
            continue
        if part.places:  # methods are the places: each becomes a table of one line
            found += [(part.chart, place, Sheet(sheet.columns, (Line("tap", OURS, line.cells),)))
                      for method, place in part.places.items() for line in sheet.lines
                      if (line.method, line.source) == (method, OURS)]
        elif part.at:
            found.append((part.chart, part.at, sheet))
    return found


def _axis_chart(title: str, axis: str, found: Sequence[tuple[str, Sheet]],
                methods: set[str]) -> AxisChart:
    columns = [column for column in dict.fromkeys(c for _, sheet in found for c in sheet.columns)
               if not column.metric.startswith(GENERAL)]
    first: dict[str, str] = {}  # the metric that speaks for a data set stands first
    for column in columns:
        first.setdefault(column.dataset, column.metric)
    panels = [_panel(column, found, methods) for column in columns
              if first[column.dataset] == column.metric]
    averaged = {panel.column.kind for panel in panels if panel.column.average}
    return AxisChart(
        title, axis, tuple(place for place, _ in found),
        tuple(p for p in panels if p.column.average or p.column.kind not in averaged),
        tuple(p for p in panels if not p.column.average))


def _panel(column: Column, found: Sequence[tuple[str, Sheet]], methods: set[str]) -> Panel:
    cells = [{line.method: line.cells[column].mean for line in sheet.lines
              if line.source == OURS and column in line.cells} for _, sheet in found]
    names = dict.fromkeys(name for each in cells for name in each if name in methods)
    return Panel(column, tuple(
        Curve(name, tuple(each.get(name, math.nan) for each in cells)) for name in names))


def round_curves(part: WrittenPart) -> tuple[list[float], list[Curve]]:
    """Return the rounds of a table of cumulative replacements, and a line for every task."""
    rounds = [(float(found[1]), key) for key in part.columns if (found := ROUND.fullmatch(key))]
    return ([x for x, _ in rounds],
            [Curve(row["task"], tuple(float(row[key]) for _, key in rounds)) for row in part.rows])
