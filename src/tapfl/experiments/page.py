"""A whole reproduction as one HTML page: answers first, then tables, charts, and the main runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfl.engine.record import RunRecord, read_record
from tapfl.errors import TapflError
from tapfl.experiments.index import (
    FILE,
    Index,
    IndexedExperiment,
    IndexedPart,
    read_index,
    tables_alone,
)
from tapfl.experiments.results import read_seed
from tapfl.experiments.write import OURS, first_metrics, verdict_table
from tapfl.experiments.written import (
    NAMES,
    VERDICT,
    AxisChart,
    Panel,
    WrittenPart,
    axis_charts,
    best_counts,
    read_written,
    round_curves,
    verdict_counts,
)
from tapfl.report import html
from tapfl.report.gather import Gathered, gather
from tapfl.report.html_results import SIGNS, STYLES, VERDICTS, sheet_table
from tapfl.report.markup import Cell, Html, counted, folded, join, table, tag
from tapfl.report.sheets import PAPER
from tapfl.report.svg import Series, legend, line_chart
from tapfl.report.verdict import compare

RIVAL = "fedavg+post2"  # TAP's hardest comparison: as many steps, and no second stage
FEW = 4  # pairs of methods that a sentence can hold
SHOWN = ("learning", "replacements", "map", "samples", "cost", "warnings")  # of the main runs
GAIN = re.compile(r"[+-]\d+(\.\d+)?")


@dataclass(frozen=True)
class Reproduction:
    """What a folder holds: an index, the tables that are written, verdicts, and the main runs.

    ``judged`` are verdicts for experiments whose tables have none, by the part's title.
    """

    folder: Path
    index: Index
    written: Mapping[str, Sequence[WrittenPart]]
    judged: Mapping[str, Sequence[WrittenPart]]
    records: Mapping[str, RunRecord]
    main: Gathered | None
    notes: tuple[str, ...]


def write_reproduction(folder: Path, out: Path | None = None, samples: bool = True) -> Path:
    """Write the page of a reproduction; return where it is."""
    return html.write_page(render(read_reproduction(folder), samples), out or folder / html.FILE)


def read_reproduction(folder: Path) -> Reproduction:
    """Read the tables of a reproduction, and as much of its runs as is there."""
    notes = []
    index = read_index(folder)
    if index is None:
        index = tables_alone(folder)
        notes.append(f"there is no {FILE} here: which runs the tables come from is not known. The "
                     "same tapfl reproduce command writes it, and runs nothing that is there")
    written = {name: read_written(folder / f"{name}.csv") for name in index.experiments
               if (folder / f"{name}.csv").is_file()}
    records: dict[str, RunRecord] = {}
    for name in sorted({run for each in index.experiments.values() for part in each.parts
                        for found in part.runs.values() for run, _ in found.values()}):
        try:
            records[name] = read_record(folder / "runs" / name)
        except TapflError as error:
            notes.append(f"a run cannot be read: {error}")
    judged = {name: _judge(folder, each, records) for name, each in index.experiments.items()
              if each.layout == "table"}
    main = _main_runs(folder, index, records, notes)
    return Reproduction(folder, index, written, judged, records, main, tuple(notes))


def _judge(folder: Path, experiment: IndexedExperiment,
           records: Mapping[str, RunRecord]) -> list[WrittenPart]:
    """Compare our methods with the others of every part that has all its runs."""
    found = []
    for part in experiment.parts:
        runs = {run for each in part.runs.values() for run, _ in each.values()}
        ours = [method for method in OURS if method in part.methods]
        if part.missing or not ours or not runs or runs - set(records):
            continue
        seeds = [read_seed(sources) for sources in part.sources(folder)]
        rows = [row for method in ours for row in verdict_table(first_metrics(compare(
            seeds, method, [other for other in part.methods if other != method])))]
        if rows:
            found.append(WrittenPart(part.title, tuple(rows[0]), tuple(rows), None))
    return found


def _main_runs(folder: Path, index: Index, records: Mapping[str, RunRecord],
               notes: list[str]) -> Gathered | None:
    """Read the runs that made TAP's model in the first part that has one: a run for each seed."""
    parts = [part for name in sorted(index.experiments, key=lambda name: name != "main")
             for part in index.experiments[name].parts]
    for part in parts:
        names = list(dict.fromkeys(found["tap"][0] for found in part.runs.values()
                                   if "tap" in found and found["tap"][0] in records))
        if names:
            paths = [folder / "runs" / name for name in names]
            try:
                return gather(paths)
            except TapflError as error:  # runs of one plan may differ in the methods they have
                notes.append(f"of the main runs, only the first is shown: {error}")
            try:
                return gather(paths[:1])
            except TapflError as error:
                notes.append(f"the main run cannot be shown: {error}")
                return None
    return None


# The page


def render(found: Reproduction, samples: bool = True) -> str:
    """Return the page."""
    sections = [("answers", "Answers", _answers(found))]
    sections += [(f"of-{name}", f"{name}: {each.question}", _experiment(found, name, each))
                 for name, each in found.index.experiments.items()]
    if found.main is not None:
        names = ", ".join(path.name for path in found.main.paths)
        about = tag("p", f"Of the main runs: {names}.", class_="empty")
        sections += [(id_, heading, join([about, content]))
                     for id_, heading, content in html.sections_of(found.main, samples)
                     if id_ in SHOWN]
    sections.append(("runs", "Runs", _runs(found)))
    return html.whole_page(found.folder.resolve().name, _about(found), sections)


def _about(found: Reproduction) -> Html:
    experiments = found.index.experiments.values()
    facts = [counted(len(experiments), "experiment"), counted(len(found.records), "run")]
    settings = dict.fromkeys(f"{e.model} at the scale {e.scale}" for e in experiments if e.model)
    seeds = dict.fromkeys(seed for e in experiments for part in e.parts for seed in part.runs)
    facts += [*settings, *([f"seeds {', '.join(seeds)}"] if seeds else [])]
    return tag("p", ", ".join(facts))


def _answers(found: Reproduction) -> Html:
    """Return every question with its answer, and what is missing."""
    index = found.index.experiments
    missing = [name for name in index if name not in found.written]
    parts: list[Html] = []
    if missing or any(each.missing for each in index.values()):
        parts.append(tag("p", f"This reproduction is not finished: {len(index) - len(missing)} of "
                         f"{counted(len(index), 'experiment')} are written. The same command goes "
                         "on.", class_="verdict"))
    parts.append(table("Every question with its answer", ["experiment", "question", "answer",
                                                          "models there"], [
        [name, each.question, Cell(sentence(found, name), name, "wide"),
         Cell(f"{each.models - each.missing} of {each.models}" if each.models else "",
              each.models - each.missing if each.models else math.nan)]
        for name, each in index.items()]))
    if found.notes:
        parts.append(tag("ul", *(tag("li", note) for note in found.notes)))
    return join(parts)


def sentence(found: Reproduction, name: str) -> Html:
    """Return what an experiment's tables say, in a sentence."""
    parts = found.written.get(name)
    if parts is None:
        return join(["Not written yet: some of its runs are missing."])
    experiment = found.index.experiments[name]
    if experiment.layout == "footprint":
        return join([_cost(parts)])
    if experiment.layout == "replacements":
        return join([_replaced(part) for part in parts])
    counts = verdict_counts([*parts, *found.judged.get(name, ())])
    said: list[object] = []
    best, ranked = best_counts(parts)
    if ranked and experiment.layout in ("table", "verdicts"):
        most = max(best.values())
        names = [method for method, count in best.items() if count == most]
        said += ["Most often best: ", tag("strong", ", ".join(names)),
                 f" ({most} of {counted(ranked, 'measure')}{' each' if len(names) > 1 else ''}). "]
    return join([*said, *_verdicts(counts)])


def _verdicts(counts: Mapping[tuple[str, str], Counter[str]]) -> list[object]:
    """Say how pairs of methods compare; where there are many, ours alone, or all together."""
    if len(counts) <= FEW:
        return [word for pair, each in counts.items() for word in _said(*pair, each)]
    said: list[object] = []
    for method in OURS:
        pairs = {against: each for (name, against), each in counts.items() if name == method}
        if len(pairs) > 1:
            said += _said(method, counted(len(pairs), "other method"),
                          sum(pairs.values(), Counter()))
        if RIVAL in pairs:
            said += _said(method, RIVAL, pairs[RIVAL])
    return said or _said("the first method", f"the second in {counted(len(counts), 'pair')}",
                         sum(counts.values(), Counter()))


def _said(method: str, against: str, counts: Counter[str]) -> list[object]:
    words = ", ".join(f"{word} {counts[word]}" for word in VERDICTS if counts[word])
    total = counted(sum(counts.values()), "comparison")
    return [tag("strong", method), f" against {against}: {words or 'nothing'} (of {total}). "]


def _cost(parts: Sequence[WrittenPart]) -> str:
    """Say what TAP adds to a client, from the first run that has it beside a federated model."""
    rows = [row for row in parts[0].rows if row.get("mean parameters")]
    plain = next((row for row in rows if not row.get("stage 2 s/client")), None)
    tap = next((row for row in rows if plain and row["run"] == plain["run"]
                and float(row["mean parameters"]) > float(plain["mean parameters"])), None)
    if plain is None or tap is None:
        return "There are no costs of TAP in the table."
    before, after = float(plain["mean parameters"]), float(tap["mean parameters"])
    return (f"The mean client holds {before:,.0f} parameters without TAP and {after:,.0f} with it "
            f"({100 * (after / before - 1):+.0f}%); the second stage takes "
            f"{tap['stage 2 s/client']} s a client; a round sends {plain.get('up MiB/round')} MiB "
            "to the server either way. ")


def _replaced(part: WrittenPart) -> str:
    _, curves = round_curves(part)
    total = sum(curve.values[-1] for curve in curves if curve.values)
    most = max(curves, key=lambda curve: curve.values[-1] if curve.values else 0.0)
    return (f"{part.title.rpartition(': ')[2]}: {total:.1f} replacements of all clients together"
            + (f", most for {most.name} ({most.values[-1]:.1f}). " if total else ". "))


def _experiment(found: Reproduction, name: str, experiment: IndexedExperiment) -> Html:
    """Return an experiment: the answer, its charts, its tables."""
    pieces: list[Html] = [tag("p", sentence(found, name), class_="verdict")]
    if experiment.missing:
        pieces.append(tag("p", f"{experiment.missing} of {counted(experiment.models, 'model')} are "
                          "missing:"))
        pieces.append(tag("ul", *(tag("li", _missing(part)) for part in experiment.parts
                                  if part.missing)))
    parts = found.written.get(name, ())
    if parts and experiment.missing:
        pieces.append(tag("p", "The tables below were written before: they are of earlier runs."))
    for place, chart in enumerate(axis_charts(found.index, name, found.written)):
        pieces.append(_axis_chart(f"axis-{name}-{place}", chart))
    if experiment.layout == "replacements":
        pieces.append(_replacement_charts(name, parts))
    judged = {part.title: part for part in found.judged.get(name, ())}
    for place, part in enumerate(parts):
        content = [_table(part)]
        if part.title in judged:
            content.append(_verdict_rows(judged[part.title], f"{part.title}: verdicts"))
        pieces.append(join(content) if place < 2 else folded(
            part.title, *content, id_=f"part-{name}-{place}"))
    if parts:
        pieces.append(tag("p", f"The same figures: {name}.md, {name}.tex and {name}.csv.",
                          class_="empty"))
    return join(pieces)


def _missing(part: IndexedPart) -> str:
    by_seed = [f"seed {seed}: {', '.join(m for m in part.methods if m not in there)}"
               for seed, there in part.runs.items() if set(part.methods) - set(there)]
    return f"{part.title}: {'; '.join(by_seed)}"


def _table(part: WrittenPart) -> Html:
    """Return a part's table, whatever it holds."""
    if part.verdicts:
        return _verdict_rows(part, part.title)
    if part.sheet is not None:
        names = [Cell(join([line.method, *([" ", tag("small", "published")]
                                           if line.source == PAPER else [])]), line.method)
                 for line in part.sheet.lines]
        return sheet_table(part.sheet, f"{part.title}: mean ± deviation over clients and seeds. "
                           "Best in bold, second best underlined; ↑ larger is better, ↓ smaller "
                           "is better.", names)
    return table(part.title, part.columns, [[_plain(cell, place) for place, cell in
                                             enumerate(row.values())] for row in part.rows])


def _plain(shown: str, place: int) -> Cell:
    try:
        value = float(shown)
    except ValueError:
        return Cell(shown) if place == 0 or shown else Cell("", math.nan)
    large = value.is_integer() and abs(value) >= 10_000
    return Cell(f"{value:,.0f}" if large else shown, value if math.isfinite(value) else math.nan)


def _verdict_rows(part: WrittenPart, caption: str) -> Html:
    """Return verdicts as words with their signs; a column sorts by its gains."""
    return table(f"{caption}. Above 0 the first method is better; verdicts rest on 95% intervals.",
                 part.columns, [[_verdict_cell(key, cell) for key, cell in row.items()]
                                for row in part.rows])


def _verdict_cell(key: str, cell: str) -> Cell:
    if key in NAMES:
        return Cell(cell, style="long" if key == "setting" else "")
    word, gain = VERDICT.search(cell), GAIN.search(cell)
    if word is None:
        return Cell(cell, math.nan)
    return Cell(f"{SIGNS[word[0]]} {cell}", float(gain[0]) if gain else math.nan,
                STYLES.get(word[0], "same"))


# Charts


def _axis_chart(id_: str, chart: AxisChart) -> Html:
    """Return families over the axis; data sets are folded away."""
    looks = {name: look for look, name in enumerate(dict.fromkeys(
        curve.name for panel in (*chart.families, *chart.datasets) for curve in panel.curves))}
    families = [_panel(f"{id_}-{i}", panel, chart, looks)
                for i, panel in enumerate(chart.families)]
    datasets = [_panel(f"{id_}-d{i}", panel, chart, looks)
                for i, panel in enumerate(chart.datasets)]
    title = f"{chart.title}: means over {chart.axis}" if chart.title else f"Means over {chart.axis}"
    return join([tag("p", f"{title}; averages of each kind of task."), legend(looks),
                 tag("div", *families, class_="figures"),
                 folded("By data set", tag("div", *datasets, class_="figures"), id_=f"{id_}-all")])


def _panel(id_: str, panel: Panel, chart: AxisChart, looks: Mapping[str, int]) -> Html:
    column = panel.column
    title = f"average {column.kind.replace('_', ' ')}" if column.average else column.dataset
    metric = column.metric.partition("(")[0]
    series = [Series(curve.name, list(enumerate(curve.values)), looks[curve.name])
              for curve in panel.curves]
    drawn = line_chart(id_, f"{title}: {metric}", _ends(panel), series, chart.axis, metric,
                       x_names=chart.places)
    arrow = "↓" if column.lower_is_better else "↑"
    return tag("figure", tag("figcaption", tag("strong", title), f" {metric} {arrow}"), drawn)


def _ends(panel: Panel) -> str:
    return ", ".join(f"{curve.name} from {curve.values[0]:.4g} to {curve.values[-1]:.4g}"
                     for curve in panel.curves)


def _replacement_charts(name: str, parts: Sequence[WrittenPart]) -> Html:
    drawn: list[Html] = []
    looks: dict[str, int] = {}
    for place, part in enumerate(parts):
        rounds, curves = round_curves(part)
        for curve in curves:
            looks.setdefault(curve.name, len(looks))
        series = [Series(curve.name, [(0.0, 0.0), *zip(rounds, curve.values, strict=True)],
                         looks[curve.name]) for curve in curves]
        method = part.title.rpartition(": ")[2]
        drawn.append(tag("figure", tag("figcaption", tag("strong", method)), line_chart(
            f"replaced-{name}-{place}", part.title, "The table below has the figures.", series,
            "round", "replacements", steps=True)))
    return join([legend(looks), tag("div", *drawn, class_="figures")])


def _runs(found: Reproduction) -> Html:
    """Return where every run is, and what it is used for."""
    used: dict[str, dict[str, None]] = {}
    for name, experiment in found.index.experiments.items():
        for part in experiment.parts:
            for there in part.runs.values():
                for run, _ in there.values():
                    used.setdefault(run, {})[name] = None
    if not used:
        return tag("p", f"Which runs there are is written in {FILE}, which is missing."
                   if not (found.folder / FILE).is_file() else "None yet.", class_="empty")
    rows: list[list[object]] = []
    for run, experiments in sorted(used.items()):
        record = found.records.get(run)
        rows.append([f"runs/{run}", *([
            Cell(record.seed, record.seed), ", ".join(record.config.methods),
            Cell(f"{record.seconds:.0f}", record.seconds),
            str(record.environment.get("code", ""))[:6]] if record else
            [Cell("", math.nan), "cannot be read", Cell("", math.nan), ""]),
            ", ".join(experiments)])
    return table(f"Runs below {found.folder.resolve()}", ["run", "seed", "methods", "seconds",
                                                          "code", "experiments"], rows)
