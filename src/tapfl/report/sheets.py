"""What a table of results shows: columns by family, their averages, and ranks.

A family is one kind of task, as in the paper's tables. Means and deviations are over all clients of
all seeds; the deviation divides by their number (n).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapfl.evaluation.constant import CONSTANT
from tapfl.evaluation.metrics import GENERAL, LOWER_IS_BETTER, metric_kind, metric_place
from tapfl.report.paper import DATASETS, PLAIN_AVERAGES, published
from tapfl.tasks import IMAGE_GENERATION, KINDS, TEXT_CLASSIFICATION, TEXT_GENERATION

Rows = Sequence[Mapping[str, Any]]  # as read_results returns them
Table = dict[tuple[str, str], dict[str, "Cell"]]  # (dataset, metric) -> method -> cell

UNRANKED = 0
PAPER = "paper"
OURS = ""
OTHER = "classification"  # of images or texts: results alone do not say


@dataclass(frozen=True)
class Cell:
    """A method on a data set: the mean, the deviation (an average has none), rank (1 is best)."""

    mean: float
    spread: float | None
    clients: int
    rank: int


@dataclass(frozen=True)
class Column:
    """A metric on a data set; an average over a family has its kind in place of the data set."""

    dataset: str
    metric: str
    kind: str
    average: bool = False

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller value is better."""
        return metric_kind(self.metric) in LOWER_IS_BETTER

    @property
    def group(self) -> str:
        """The table that the column belongs to: the paper has one of images and one of texts."""
        return self.kind.partition("_")[0]


@dataclass(frozen=True)
class Line:
    """A method's cells, measured or published (``source`` is PAPER); ``apart`` is not ranked."""

    method: str
    source: str
    cells: Mapping[Column, Cell]
    apart: bool = False


@dataclass(frozen=True)
class Sheet:
    """One table to draw."""

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]


def tabulate(rows: Rows) -> Table:
    """Group results by data set and metric; rank the methods in each."""
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        column = values.setdefault((row["dataset"], row["metric"]), {})
        column.setdefault(row["method"], []).append(float(row["value"]))
    return {key: _ranked({m: Cell(statistics.fmean(v), _spread(v), len(v), UNRANKED)
                          for m, v in methods.items()}, key[1])
            for key, methods in values.items()}


def _spread(values: Sequence[float]) -> float:
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan


def _ranked(cells: Mapping[str, Cell], metric: str) -> dict[str, Cell]:
    """Rank cells; a mean that is not finite, and the constant answer, have no rank.

    Where all are equal there is no best.
    """
    rivals = [cell.mean for method, cell in cells.items()
              if method != CONSTANT and math.isfinite(cell.mean)]
    ordered = sorted(set(rivals), reverse=metric_kind(metric) not in LOWER_IS_BETTER)
    if len(ordered) == 1 < len(rivals):
        ordered = []
    return {method: Cell(cell.mean, cell.spread, cell.clients,
                         UNRANKED if method == CONSTANT or cell.mean not in ordered
                         else ordered.index(cell.mean) + 1)
            for method, cell in cells.items()}


def build(rows: Rows, methods: Sequence[str], paper: str | None = None, averages: bool = False,
          kinds: Mapping[str, str] | None = None) -> Sheet:
    """Return everything there is to show, as one wide table.

    ``kinds`` says what kind of task each data set is, for those that the paper does not have.
    """
    shown = {*methods, CONSTANT}
    rows = [row for row in rows if row["method"] in shown]  # nobody else takes a rank
    cells = _shown(tabulate(rows))
    table = {_column(dataset, metric, kinds or {}): column
             for (dataset, metric), column in cells.items()}
    order = {dataset: i for i, dataset in enumerate(dict.fromkeys(row["dataset"] for row in rows))}
    place = {**{d: i - len(DATASETS) for i, d in enumerate(DATASETS)},
             **{d: i for d, i in order.items() if d not in DATASETS}}
    table = dict(sorted(table.items(), key=lambda item: (
        _family(item[0]), place[item[0].dataset], item[0].metric.startswith(GENERAL),
        metric_place(item[0].metric), item[0].metric)))
    if averages:
        table = _with_averages(table, plain=paper in PLAIN_AVERAGES)
    printed = _published(paper, table, methods) if paper else {}
    lines = []
    for method in sorted(dict.fromkeys(methods), key=lambda m: m == CONSTANT):
        lines.append(Line(method, OURS, {c: column[method] for c, column in table.items()
                                         if method in column}, method == CONSTANT))
        beside = {c: column[method] for c, column in printed.items() if method in column}
        if beside:
            lines.append(Line(method, PAPER, beside))
    return Sheet(tuple(table), tuple(lines))


def _shown(table: Table) -> Table:
    """Omit what a better metric makes needless: the F1 of words where there is BERTScore."""
    better = {dataset for dataset, metric in table if metric_kind(metric) == "bertscore"}
    return {(dataset, metric): column for (dataset, metric), column in table.items()
            if not (dataset in better and metric_kind(metric) == "token_f1")}


def _column(dataset: str, metric: str, kinds: Mapping[str, str]) -> Column:
    usual = {"mse": IMAGE_GENERATION, "accuracy": OTHER}.get(metric_kind(metric), TEXT_GENERATION)
    known = DATASETS[dataset][1] if dataset in DATASETS else usual
    return Column(dataset, metric, kinds.get(dataset, known))


def _family(column: Column) -> int:
    return KINDS.index(column.kind) if column.kind in KINDS else len(KINDS)


def _with_averages(table: Mapping[Column, dict[str, Cell]],
                   plain: bool) -> dict[Column, dict[str, Cell]]:
    """Add the average of every family after the columns of its group, as the paper does."""
    groups: dict[str, dict[Column, dict[str, Cell]]] = {}
    for column, cells in table.items():
        groups.setdefault(column.group, {})[column] = cells
    found: dict[Column, dict[str, Cell]] = {}
    for columns in groups.values():
        found |= columns
        for kind, metric in dict.fromkeys((c.kind, c.metric) for c in columns):
            family = [cells for c, cells in columns.items() if (c.kind, c.metric) == (kind, metric)]
            if len(family) > 1:
                found[Column(kind, metric, kind, average=True)] = _ranked(
                    _averages(family, plain or not _weighs_clients(kind)), metric)
    return found


def _weighs_clients(kind: str) -> bool:
    """Return whether a family's average weighs data sets by their clients.

    Rebuilt from the paper's figures: texts do, images do not.
    """
    return kind in (TEXT_CLASSIFICATION, TEXT_GENERATION)


def _averages(family: Sequence[Mapping[str, Cell]], plain: bool) -> dict[str, Cell]:
    """Return the average of every method that has all data sets of a family."""
    found = {}
    for method in family[0]:
        cells = [column[method] for column in family if method in column]
        if len(cells) == len(family):
            weights = [1 if plain else cell.clients for cell in cells]
            mean = sum(w * c.mean for w, c in zip(weights, cells, strict=True)) / sum(weights)
            found[method] = Cell(mean, None, sum(c.clients for c in cells), UNRANKED)
    return found


def _published(paper: str, columns: Iterable[Column],
               methods: Sequence[str]) -> dict[Column, dict[str, Cell]]:
    """Return the published figures of the methods and columns at hand, ranked among themselves."""
    figures = published(paper)
    found = {}
    for column in columns:
        # METEOR without synonyms, and scores on others' data, are not what the paper measured.
        key = column.metric.partition("(")[0]
        cells = {m: Cell(f.mean, f.deviation, 0, UNRANKED) for m in methods
                 if (f := figures.get((m, column.dataset, key))) is not None}
        found[column] = _ranked(cells, column.metric)
    return found


def split(sheet: Sheet, width: int, by_dataset: bool) -> list[Sheet]:
    """Cut a table into pieces of so many columns, or data sets; what fits stays whole.

    Pieces do not mix images and texts: the paper has one table of each.
    """
    def weight(columns: Sequence[Column]) -> int:
        return len({c.dataset for c in columns if not c.average}) if by_dataset else len(columns)

    if weight(sheet.columns) <= width:
        return [sheet]
    pieces: list[list[Column]] = [[]]
    for column in sheet.columns:
        last = pieces[-1]
        if last and (column.group != last[-1].group or weight([*last, column]) > width):
            pieces.append([])
        pieces[-1].append(column)
    return [_piece(sheet, columns) for columns in pieces]


def _piece(sheet: Sheet, columns: Sequence[Column]) -> Sheet:
    lines = (Line(line.method, line.source,
                  {c: cell for c, cell in line.cells.items() if c in columns}, line.apart)
             for line in sheet.lines)
    return Sheet(tuple(columns), tuple(line for line in lines if line.cells))
