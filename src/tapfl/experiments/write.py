"""Write an experiment down: NAME.md to read, NAME.tex for a paper, NAME.csv to compute with."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfl.engine.files import replacing
from tapfl.engine.record import read_record
from tapfl.errors import TapflError
from tapfl.evaluation.metrics import GENERAL, digits, metric_kind, metric_place
from tapfl.evaluation.significance import ALPHA, welch
from tapfl.experiments.catalogue import Experiment, Model, Part
from tapfl.experiments.plan import Plan
from tapfl.experiments.results import SeedOfPart, seeds_of
from tapfl.report.footprint import block_rows, footprint
from tapfl.report.footprint import render as render_rows
from tapfl.report.footprint import rows as footprint_rows
from tapfl.report.paper import SETTINGS, welch_shares
from tapfl.report.standings import (
    EVERY_METHOD,
    methods_to_compare,
    standings_of,
    standings_rows,
)
from tapfl.report.tables import render
from tapfl.report.verdict import Comparison, compare, sign

Table = list[dict[str, str]]
OURS = ("tap", "tap-soft", "tap-gap")  # whose verdicts against all others are given


@dataclass(frozen=True)
class Section:
    """A part in three formats."""

    title: str
    markdown: str
    latex: str
    csv: str


def write_experiment(plan: Plan, number: int, experiment: Experiment, model: Model, out: Path,
                     paper: bool = False) -> list[Path]:
    """Write the experiment's files; return their paths."""
    sections: list[Section] = []
    everything: list[SeedOfPart] = []
    for index, part in enumerate(experiment.parts):
        seeds = seeds_of(plan, number, index)
        everything += seeds
        setting = _setting(experiment, part, model) if paper else None
        sections += _LAYOUTS[experiment.layout](part, seeds, setting)
    if experiment.layout == "leads":
        sections.insert(0, _leads(plan, number, experiment))
    heading = f"{experiment.name}: {experiment.question}"
    texts = {
        "md": "\n\n".join([f"# {heading}",
                           f"{_provenance(everything)} {_FIGURES[experiment.layout]}",
                           *(f"## {s.title}\n\n{s.markdown}" for s in sections)]),
        "tex": "\n\n".join([f"% {heading}", *(f"% {s.title}\n{s.latex}" for s in sections)]),
        "csv": _joined_csv(sections)}
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for ending, text in texts.items():
        paths.append(out / f"{experiment.name}.{ending}")
        with replacing(paths[-1]) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    return paths


def _setting(experiment: Experiment, part: Part, model: Model) -> str | None:
    """Return which of the paper's figures stand beside a part, if there are any."""
    ending = experiment.paper if part.paper is None else part.paper
    setting = f"{model.paper}{ending}"
    return setting if ending is not None and setting in SETTINGS else None


def _provenance(seeds: Sequence[SeedOfPart]) -> str:
    """Say where the figures come from."""
    record = seeds[0].record
    facts = [read_record(folder) for folder in dict.fromkeys(
        folder for seed in seeds for folder, _ in seed.sources.values())]
    made = dict.fromkeys(
        f"tapfl {r.environment['tapfl']} (code {r.environment.get('code', 'unknown')[:6]}) with "
        f"torch {r.environment['torch']} on "
        + r.environment.get("gpu", f"CPU, {r.threads} thread(s)") for r in facts)
    base = " The foundation has random weights." if record.random_weights else ""
    numbers = dict.fromkeys(str(s.record.seed) for s in seeds)
    sizes = " or ".join(dict.fromkeys(str(s.record.clients) for s in seeds))
    return (f"Seed{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}; {sizes} clients, "
            f"{record.config.train.rounds} rounds, P = {record.config.post.steps}. Made by "
            f"{'; '.join(made)}.{base}")


def _joined_csv(sections: Sequence[Section]) -> str:
    """Return all parts as one CSV, with the part's title in a column of its own."""
    rows: list[dict[str, str]] = []
    for section in sections:
        rows += [{"part": section.title, **row} for row in csv.DictReader(
            section.csv.splitlines())]
    columns = dict.fromkeys(key for row in rows for key in row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(columns), lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def _section(title: str, table: Table) -> Section:
    return Section(title, *(render_rows(table, form) for form in ("markdown", "latex", "csv")))


def _filled(rows: Iterable[dict[str, str]]) -> Table:
    """Return rows that all have all columns."""
    rows = list(rows)
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, "") for key in columns} for row in rows]


# Layouts: what is written of a part

def _table(part: Part, seeds: Sequence[SeedOfPart], setting: str | None) -> list[Section]:
    rows = [row for seed in seeds for row in seed.rows]
    return [Section(part.title, *(render(rows, part.methods, form, setting)
                                  for form in ("markdown", "latex", "csv")))]


def _compared(part: Part, seeds: Sequence[SeedOfPart], setting: str | None) -> list[Section]:
    """The table, then how every method stands to the best of each data set."""
    tables = _table(part, seeds, setting)
    if len(methods_to_compare(seeds[0])) < 3:
        return tables
    return [*tables, _section(f"{part.title}: {EVERY_METHOD}", standings_rows(standings_of(seeds)))]


def _verdicts(part: Part, seeds: Sequence[SeedOfPart], setting: str | None) -> list[Section]:
    """The table, then for each rule whether it is better than FedAvg + 2P."""
    against = "fedavg+post2"
    others = [method for method in part.methods if method not in (against, "fedavg")]
    found = [c for method in others for c in first_metrics(compare(seeds, method, [against]))]
    return [*_compared(part, seeds, setting),
            _section(f"{part.title}: against FedAvg + 2P", verdict_table(found))]


def _significance(part: Part, seeds: Sequence[SeedOfPart], setting: str | None) -> list[Section]:
    """The paper's Welch shares, then verdicts and tests from pairs."""
    sections = [_section("Share of metrics on which TAP is better by Welch's test, p < 0.05, as in "
                         "the paper", _welch_shares(part, seeds, setting))]
    for method in OURS:
        others = [other for other in part.methods if other != method]
        found = first_metrics(compare(seeds, method, others))
        sections += [
            _section(f"{method} against each method: verdicts", verdict_table(found)),
            _section(f"{method} against each method: tests of pairs, p corrected by Holm, effect "
                     "size d", _test_table(found))]
    return sections


def _welch_shares(part: Part, seeds: Sequence[SeedOfPart], setting: str | None = None) -> Table:
    values: dict[tuple[str, str, str], list[float]] = {}
    for seed in seeds:
        for row in seed.rows:
            if not row["metric"].startswith(GENERAL):
                key = (row["method"], row["dataset"], row["metric"])
                values.setdefault(key, []).append(row["value"])
    # As in the paper: METEOR and BERTScore count each, word overlap and exact match do not.
    columns = [key[1:] for key in values if key[0] == "tap"
               and metric_kind(key[2]) not in ("token_f1", "exact_match")]
    columns = columns or [key[1:] for key in values if key[0] == "tap"]

    published = welch_shares(setting) if setting else {}
    table = []
    for method in (other for other in part.methods if other != "tap"):
        missing = [column for column in columns if (method, *column) not in values]
        if missing:
            raise TapflError(f"{method}: its run has no {missing[0][1]} of {missing[0][0]}, which "
                             "tap's run has; the metrics of runs that are compared must agree")
        tests = [(welch(values["tap", *column], values[method, *column]), column[1])
                 for column in columns]
        told = [(t, metric) for t, metric in tests if not math.isnan(t.p)]  # one value has no p
        better = sum(t.p < ALPHA and sign(metric) * t.difference > 0 for t, metric in told)
        row = {"method": method, "TAP better %": f"{100 * better / len(told):.1f}" if told else "",
               "metrics": str(len(told))}
        if published:
            row["paper %"] = f"{published[method]:.1f}" if method in published else ""
        table.append(row)
    return table


def first_metrics(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons by the metric that speaks for each data set."""
    own = [c for c in comparisons if not c.metric.startswith(GENERAL)]
    best = {key: min(metric_place(c.metric) for c in own if (c.against, c.dataset) == key)
            for key in {(c.against, c.dataset) for c in own}}
    return [c for c in own if metric_place(c.metric) == best[c.against, c.dataset]]


def verdict_table(found: Sequence[Comparison]) -> Table:
    """Return a row for each pair of methods, a column for each data set."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for c in found:
        row = table.setdefault((c.method, c.against), {"method": c.method, "against": c.against})
        places = digits(c.metric)
        ends = ("too few scores for an interval" if math.isnan(c.gain.low) else
                f"{c.gain.low:+.{places}f}; {c.gain.high:+.{places}f}")
        row[c.dataset] = f"{c.verdict} {c.gain.mean:+.{places}f} [{ends}]"
    return _filled(table.values())


def _test_table(found: Sequence[Comparison]) -> Table:
    """Return the tests behind verdicts: pairs of clients and seeds as if all were independent."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for c in found:
        row = table.setdefault((c.method, c.against), {"method": c.method, "against": c.against})
        if not math.isnan(c.p):
            row[c.dataset] = f"p {c.p:.3f}" + (
                "" if math.isnan(c.pairs.effect) else f", d {c.pairs.effect:+.2f}")
        else:
            row[c.dataset] = "too few pairs"
    return _filled(table.values())


def _leads(plan: Plan, number: int, experiment: Experiment) -> Section:
    """By how much the first method of a pair is better, part by part: the experiment's answer."""
    table: Table = []
    for index, part in enumerate(experiment.parts):
        seeds = seeds_of(plan, number, index)
        for method, against in part.leads:
            row = {"setting": part.title, "method": method, "against": against}
            for c in first_metrics(compare(seeds, method, [against])):
                places = digits(c.metric)
                row[c.dataset] = f"{c.gain.mean:+.{places}f} ({c.verdict})"
            table.append(row)
    return _section("Leads: gain of the first method over the second", _filled(table))


def _footprint(part: Part, seeds: Sequence[SeedOfPart], setting: str | None) -> list[Section]:
    """The costs of the part's methods; its runs may have made others besides."""
    names = {seed.sources[method] for seed in seeds for method in part.methods}
    folders = dict.fromkeys(folder for folder, _ in sorted(names))
    others = {(folder.name, name) for folder in folders
              for name in read_record(folder).config.methods} - {
                  (folder.name, name) for folder, name in names}
    costs = [footprint(folder) for folder in folders]
    rows = [row for row in footprint_rows(costs) if (row["run"], row["setting"]) not in others]
    return [_section("Parameters, memory, time and traffic", rows),
            _section("Traffic by block", block_rows(costs[0]))]


def _replacements(part: Part, seeds: Sequence[SeedOfPart], setting: str | None) -> list[Section]:
    """Cumulative replacements by task after ten parts of the rounds; the mean over seeds."""
    rounds = seeds[0].record.config.train.rounds
    marks = sorted({max(1, rounds * tenth // 10) for tenth in range(1, 11)})
    sections = []
    for method in part.methods:
        counts: dict[str, list[int]] = {row["task"]: [] for row in seeds[0].rows}
        for seed in seeds:
            for event in seed.events(method, "replacement"):
                if event["round"] < rounds:
                    counts[event["task"]].append(event["round"])
        table = [{"task": task, **{f"round {mark}": f"{sum(r < mark for r in at) / len(seeds):.1f}"
                                   for mark in marks}} for task, at in counts.items()]
        sections.append(_section(f"Cumulative replacements: {method}", table))
    return sections


Layout = Callable[[Part, Sequence[SeedOfPart], str | None], list[Section]]
_LAYOUTS: dict[str, Layout] = {
    "table": _compared, "verdicts": _verdicts, "significance": _significance, "leads": _table,
    "footprint": _footprint, "replacements": _replacements}
# What the figures of a layout are.
_MEANS = "Mean ± deviation over clients and seeds."
_GAINS = ("Gains are above 0 where the first method is better; verdicts rest on their 95% "
          "intervals.")
_FIGURES = {"table": _MEANS, "verdicts": f"{_MEANS} {_GAINS}", "leads": f"{_MEANS} {_GAINS}",
            "significance": _GAINS, "footprint": "A row for each run and method.",
            "replacements": "Mean over seeds, of all clients together."}
