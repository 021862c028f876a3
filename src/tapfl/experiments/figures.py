"""The figures of a reproduction for a paper: means over an axis, and those of its main runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tapfl.experiments.page import Reproduction
from tapfl.experiments.written import AxisChart, WrittenPart, axis_charts, round_curves
from tapfl.report import figures
from tapfl.report.paper import dataset_name, method_name, metric_name
from tapfl.report.plotting import TWO, Lines, line_panels, look, looks_of, panel_height, save, style


def write_figures(found: Reproduction, folder: Path) -> list[Path]:
    """Write what can be drawn of a reproduction, and its LaTeX tables; return the files."""
    paths = figures.write_figures(found.main, folder / "main-runs") if found.main else []
    with style():
        for name, experiment in found.index.experiments.items():
            charts = axis_charts(found.index, name, found.written)
            for place, chart in enumerate(charts):
                ending = f"-{place + 1}" if len(charts) > 1 else ""
                paths += _over_axis(folder, f"{name}{ending}", chart)
            if experiment.layout == "replacements" and name in found.written:
                paths += _replacements(folder, name, found.written[name])
    tables = {f"{name}.tex": path.read_text(encoding="utf-8").rstrip("\n")
              for name in found.written
              if (path := found.folder / f"{name}.tex").is_file()}
    return paths + figures.write_texts(folder, tables)


def _over_axis(folder: Path, name: str, chart: AxisChart) -> list[Path]:
    panels = [Lines(f"average {p.column.kind.replace('_', ' ')}" if p.column.average
                    else dataset_name(p.column.dataset), metric_name(p.column.metric),
                    {curve.name: list(enumerate(curve.values)) for curve in p.curves},
                    chart.places) for p in chart.families]
    looks = looks_of(list(dict.fromkeys(n for panel in panels for n in panel.lines)))
    return save(folder, name,
                lambda figure, width: line_panels(figure, width, panels, chart.axis, looks,
                                                  label=method_name),
                panel_height(len(panels), 0.0), panel_height(len(panels), TWO))


def _replacements(folder: Path, name: str, parts: Sequence[WrittenPart]) -> list[Path]:
    panels = []
    for part in parts:
        rounds, curves = round_curves(part)
        method = part.title.rpartition(": ")[2]
        panels.append(Lines(method_name(method), "replacements", {
            curve.name: [(0.0, 0.0), *zip(rounds, curve.values, strict=True)]
            for curve in curves}))
    tasks = sorted({task for panel in panels for task in panel.lines})
    looks = {task: look(place) for place, task in enumerate(tasks)}
    return save(folder, name, lambda figure, width: line_panels(figure, width, panels, "round",
                                                                looks, True, dataset_name),
                panel_height(len(panels), 0.0), panel_height(len(panels), TWO))
