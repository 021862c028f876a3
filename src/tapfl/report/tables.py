"""The table at the end of a run: methods by tasks, mean and spread over clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapfl.evaluation.metrics import LOWER_IS_BETTER, PERCENT, SECONDARY, metric_kind

UNRANKED = 0


@dataclass(frozen=True)
class Cell:
    """A method on a data set: the mean over clients, the spread, and its rank (1 is best)."""

    mean: float
    spread: float
    clients: int
    rank: int

    def text(self, metric: str) -> str:
        """Return the cell as text, with as many digits as the metric deserves."""
        digits = 1 if metric_kind(metric) in PERCENT else 3
        return f"{self.mean:.{digits}f} ±{self.spread:.{digits}f}"


Table = dict[tuple[str, str], dict[str, Cell]]  # (dataset, metric) -> method -> cell


def tabulate(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Group results by data set and metric; rank the methods in each."""
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        column = values.setdefault((row["dataset"], row["metric"]), {})
        column.setdefault(row["method"], []).append(float(row["value"]))
    table: Table = {}
    for (dataset, metric), methods in values.items():
        means = {m: statistics.fmean(v) for m, v in methods.items()}
        # A mean that is not finite has no rank: nothing can be said of it but that.
        ordered = sorted({mean for mean in means.values() if math.isfinite(mean)},
                         reverse=metric_kind(metric) not in LOWER_IS_BETTER)
        table[dataset, metric] = {
            m: Cell(means[m], _spread(v), len(v),
                    ordered.index(means[m]) + 1 if means[m] in ordered else UNRANKED)
            for m, v in methods.items()}
    return table


def _spread(values: Sequence[float]) -> float:
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan


def markdown(rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> str:
    """Return the table as Markdown: best bold, second best underlined."""
    table = _shown(tabulate(rows))
    lines = ["| method | " + " | ".join(_title(d, _short(m)) for d, m in table) + " |",
             "|---" * (len(table) + 1) + "|"]
    marks = {1: ("**", "**"), 2: ("<u>", "</u>")}
    for method in methods:
        cells = []
        for (_, metric), column in table.items():
            cell = column.get(method)  # a client may lack what another has
            before, after = marks.get(cell.rank if cell else 0, ("", ""))
            cells.append(f"{before}{cell.text(metric) if cell else ''}{after}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown_tables(rows: Sequence[Mapping[str, Any]], methods: Sequence[str],
                    columns: int = 4) -> str:
    """Return the results as Markdown tables of so many data sets each."""
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    pieces = [set(datasets[i:i + columns]) for i in range(0, len(datasets), columns)]
    return "\n\n".join(markdown([row for row in rows if row["dataset"] in piece], methods)
                       for piece in pieces)


def show(rows: Sequence[Mapping[str, Any]], methods: Sequence[str], width: int = 4) -> None:
    """Print methods by tasks, one metric per task, ``width`` of them to a table."""
    from rich.console import Console
    from rich.table import Table as RichTable

    columns = list(_shown(tabulate(rows)).items())
    styles = {1: "bold", 2: "underline"}
    for start in range(0, len(columns), width):
        drawn = RichTable(title_justify="left", title=None if start else
                          "mean ± spread over clients; best bold, second underlined")
        drawn.add_column("method", no_wrap=True)
        for key, _ in columns[start:start + width]:
            drawn.add_column(_title(key[0], _short(key[1])), justify="right")
        for method in methods:
            cells = [(column.get(method), key[1]) for key, column in columns[start:start + width]]
            drawn.add_row(method, *(
                "" if c is None else
                f"[{styles[c.rank]}]{c.text(m)}[/]" if c.rank in styles else c.text(m)
                for c, m in cells))
        Console().print(drawn)
    for metric in sorted({key[1] for key, _ in columns if "(" in key[1]}):
        print(f"{_short(metric)}: {metric.partition('(')[2].rstrip(')').replace(',', ', layer ')}")


def _shown(table: Table) -> Table:
    """Omit what only results.csv shows: for each data set the best metrics there are stay."""
    better = {dataset for dataset, metric in table if metric_kind(metric) == "bertscore"}
    return {(dataset, metric): column for (dataset, metric), column in table.items()
            if metric_kind(metric) not in SECONDARY
            and not (dataset in better and metric_kind(metric) == "token_f1")}


def _short(metric: str) -> str:
    return metric.partition("(")[0]


def _title(dataset: str, metric: str) -> str:
    return f"{dataset} {metric} {'↓' if metric_kind(metric) in LOWER_IS_BETTER else '↑'}"
