"""The figures of a run, or of several seeds, for a paper; and its tables as LaTeX beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tapfl.engine.files import replacing
from tapfl.errors import TapflError
from tapfl.evaluation.metrics import LOWER_IS_BETTER, metric_kind, short
from tapfl.model.summary import MIB
from tapfl.report.footprint import render as render_rows
from tapfl.report.footprint import rows as footprint_rows
from tapfl.report.gather import Gathered
from tapfl.report.html_learning import block_map, curve_lines, loss_lines, replacement_lines
from tapfl.report.html_results import DRAWN
from tapfl.report.paper import dataset_name, method_name
from tapfl.report.plotting import (
    COLOURS,
    HELPED,
    HURT,
    SAME,
    TWO,
    Lines,
    Look,
    line_panels,
    look,
    looks_of,
    panel_height,
    save,
    short_text,
    style,
)
from tapfl.report.tables import render as render_table
from tapfl.report.verdict import ClientOutcome

MAP_SQUARE = 0.11  # inches
MOST_COLUMNS = 25  # of a map, for one column of a paper


def write_figures(gathered: Gathered, folder: Path) -> list[Path]:
    """Write all figures that a run has something for, and its tables; return their files."""
    if not gathered.finished:
        raise TapflError(f"{gathered.paths[0]}: this run is not finished; figures need its results")
    with style():
        paths = [path for draw in (_learning, _replacements, _helped, _map, _footprint)
                 for path in draw(gathered, folder)]
    return paths + _tables(gathered, folder)


def _learning(gathered: Gathered, folder: Path) -> list[Path]:
    """How W and the personal models learned, task by task."""
    charts = curve_lines(gathered) or loss_lines(gathered)
    found = [Lines(dataset_name(task), label, lines) for (task, label), lines in charts.items()]
    if not found:
        return []
    names = list(dict.fromkeys(name for panel in found for name in panel.lines))
    # ``W of fedavg`` looks as fedavg does everywhere.
    methods = {name: name.rpartition(" of ")[2].replace("local training", "local")
               for name in names}
    known = looks_of(list(methods.values()))

    def label(name: str) -> str:
        whose, of, method = name.rpartition(" of ")
        return f"{whose}{of}{method_name(method)}"

    return _line_figure(folder, "learning", found, {n: known[m] for n, m in methods.items()},
                        label=label)


def _replacements(gathered: Gathered, folder: Path) -> list[Path]:
    """Cumulative replacements by task, a panel for each method."""
    by_method = replacement_lines(gathered)
    found = [Lines(method_name(method), "replacements", lines)
             for method, lines in by_method.items()]
    tasks = sorted({task for panel in found for task in panel.lines})
    return _line_figure(folder, "replacements", found,
                        {task: look(place) for place, task in enumerate(tasks)}, steps=True,
                        label=dataset_name)


def _line_figure(folder: Path, name: str, found: Sequence[Lines], looks: dict[str, Look],
                 steps: bool = False, label: Callable[[str], str] = str) -> list[Path]:
    if not found:
        return []
    return save(folder, name, lambda figure, width: line_panels(figure, width, found, "round",
                                                                looks, steps, label),
                panel_height(len(found), 0.0), panel_height(len(found), TWO))


def _helped(gathered: Gathered, folder: Path) -> list[Path]:
    """Who was helped: two dots for every client and task, joined by a line."""
    found, paths = gathered.verdict, []
    for name, lower in (("helped", False), ("helped-mse", True)):
        outcomes = [c for c in (found.clients if found else ())
                    if (metric_kind(c.metric) in LOWER_IS_BETTER) == lower
                    and math.isfinite(c.mean) and math.isfinite(c.baseline)]
        outcomes.sort(key=lambda c: (c.mean - c.baseline) * (-1 if lower else 1))
        if len(outcomes) > DRAWN:  # as on the page: those who gained and lost most
            outcomes = [*outcomes[:DRAWN // 2], *outcomes[-DRAWN // 2:]]
        if outcomes and found is not None:
            height = 0.7 + 0.11 * len(outcomes)
            methods = (found.method, found.alternative)
            paths += save(folder, name, _pairs(outcomes, methods), height, height)
    return paths


def _pairs(outcomes: Sequence[ClientOutcome], methods: tuple[str, str]) -> Any:
    looks = looks_of(methods)

    def draw(figure: Any, width: float) -> None:
        axes = figure.subplots()
        for place, c in enumerate(outcomes):
            color = {"helped": HELPED, "hurt": HURT}.get(c.outcome, SAME)
            axes.plot([c.baseline, c.mean], [place, place], color=color, linewidth=1.2, zorder=1)
        rows = range(len(outcomes))
        for name, values, filled in ((methods[1], [c.baseline for c in outcomes], False),
                                     (methods[0], [c.mean for c in outcomes], True)):
            color = looks[name].color
            axes.scatter(values, rows, s=9, label=short_text(method_name(name), 30), zorder=2,
                         linewidths=0.7, edgecolors=color, facecolors=color if filled else "white")
        axes.set_yticks(rows, [short_text(f"{c.client}, {c.task}", 30) for c in outcomes],
                        fontsize=5)
        axes.set_ylim(-0.8, len(outcomes) - 0.2)
        metrics = dict.fromkeys(short(c.metric) for c in outcomes)
        axes.set_xlabel(" or ".join(metrics) + "; lines: green helped, orange hurt")
        figure.legend(loc="outside upper center", ncols=2)

    return draw


def _map(gathered: Gathered, folder: Path) -> list[Path]:
    """Blocks by clients: the stronger a square, the more often it was averaged."""
    found = block_map(gathered)
    if found is None:
        return []
    rows, columns = found.rows, found.columns
    values = [[found.averaged.get((row, column), math.nan) for column in columns] for row in rows]

    def draw(figure: Any, width: float) -> None:
        axes = figure.subplots()
        axes.grid(False)
        image = axes.pcolormesh(values, cmap="Blues", vmin=0, edgecolors="white", linewidth=0.4)
        axes.invert_yaxis()
        size = 5 if len(columns) <= MOST_COLUMNS or width > 5 else 3.5
        axes.set_xticks(_middles(columns), [short_text(c, 14) for c in columns], rotation=90,
                        fontsize=size)
        axes.set_yticks(_middles(rows), [short_text(r, 34) for r in rows], fontsize=5)
        if len(columns) <= MOST_COLUMNS or width > 5:
            most = max(found.averaged.values(), default=0) or 1
            for (row, column), count in found.replaced.items():
                if count >= 0.5:
                    dark = found.averaged[row, column] > 0.55 * most
                    axes.text(columns.index(column) + 0.5, rows.index(row) + 0.5, f"{count:.0f}",
                              fontsize=3.5, ha="center", va="center",
                              color="white" if dark else "black")
        figure.colorbar(image, ax=axes, shrink=0.6, pad=0.01, label="times averaged")

    height = 0.8 + MAP_SQUARE * len(rows)
    return save(folder, "map", draw, height, height)


def _middles(names: Sequence[str]) -> list[float]:
    return [place + 0.5 for place in range(len(names))]


def _footprint(gathered: Gathered, folder: Path) -> list[Path]:
    """What a client holds and what a round sends, without TAP and with it."""
    if not gathered.footprints:
        return []
    first = gathered.footprints[0]
    mean = first.mean
    sent = [traffic for run, traffic in first.traffic.items() if run == gathered.federated]
    bars = [("parameters, millions", {"without TAP": mean["total"] / 1e6,
                                      "with TAP": mean["tap_total"] / 1e6}),
            ("MiB a round", {name: traffic.per_round(value) / MIB
                             for traffic in sent
                             for name, value in (("up", traffic.up), ("down", traffic.down))})]

    def draw(figure: Any, width: float) -> None:
        shown = [bar for bar in bars if bar[1]]
        for axes, (label, values) in zip(figure.subplots(1, len(shown), squeeze=False).flat, shown,
                                         strict=True):
            drawn = axes.bar(list(values), list(values.values()), width=0.6, color=[
                COLOURS[1], COLOURS[0]][:len(values)])
            axes.bar_label(drawn, fmt="%.3g", fontsize=6)
            axes.set_ylabel(label)
            axes.margins(y=0.15)
            axes.grid(False)

    return save(folder, "footprint", draw, 1.5, 1.6)


def _tables(gathered: Gathered, folder: Path) -> list[Path]:
    """Write the tables of results and costs as LaTeX (package booktabs)."""
    kinds = {name: task.kind for name, task in gathered.record.federation.tasks.items()}
    rows = [row for run in gathered.runs for row in run.rows]
    texts = {"results.tex": render_table(rows, None, "latex", kinds=kinds)}
    if gathered.footprints:
        texts["footprint.tex"] = render_rows(footprint_rows(gathered.footprints), "latex")
    return write_texts(folder, texts)


def write_texts(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Write some text files; return their paths."""
    paths = []
    for name, content in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(content + "\n", encoding="utf-8")
        paths.append(folder / name)
    return paths
