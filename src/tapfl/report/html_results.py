"""The results in a report: the verdict in a sentence, the main table, and whom it helped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tapfl.evaluation.bootstrap import Interval
from tapfl.evaluation.constant import CONSTANT
from tapfl.evaluation.metrics import GENERAL, LOWER_IS_BETTER, digits, metric_kind, short
from tapfl.report.gather import Gathered, holding, methods_of
from tapfl.report.label_mix import label_mix
from tapfl.report.markup import Cell, Html, counted, folded, join, number, table, tag
from tapfl.report.sheets import Column, Line, Sheet, build
from tapfl.report.svg import Gain, gain_chart
from tapfl.report.verdict import ClientOutcome, Comparison

VERDICTS = ("better", "worse", "equivalent", "not told apart")
SIGNS = {"better": "▲", "worse": "▼", "equivalent": "=", "not told apart": "?",
         "helped": "▲", "hurt": "▼"}
STYLES = {"better": "good", "helped": "good", "worse": "bad", "hurt": "bad"}
DRAWN = 40  # clients in a picture; the table has them all


def headline(gathered: Gathered) -> Html:
    """Return the verdict in a sentence or two."""
    found = gathered.verdict
    if found is None:
        return tag("p", "No personal model stands beside local training or a federated model here, "
                        "so there is no verdict: the table below has all results.",
                   class_="verdict")
    sentences: list[object] = []
    for against in found.against:
        compared = [c for c in found.comparisons
                    if c.against == against and not c.metric.startswith(GENERAL)]
        if compared:
            counts = ", ".join(
                f"{word} on {sum(c.verdict == word for c in compared)}" for word in VERDICTS
                if any(c.verdict == word for c in compared))
            sentences += [tag("strong", found.method), " against ", tag("strong", against),
                          f": {counts} of {counted(len(compared), 'measure')}. "]
    counts_of = found.counts
    clients = len({each.client for each in found.clients})
    sentences.append(
        f"Of {counted(len(found.clients), 'pair')} of a client and a task "
        f"({clients} of {counted(gathered.record.clients, 'client')}), "
        f"{counts_of['helped']} gained over {found.alternative}, {counts_of['hurt']} lost, and "
        f"{counts_of['not told apart']} cannot be told apart.")
    return tag("p", *sentences, class_="verdict")


def main_table(gathered: Gathered) -> Html:
    """Return methods by data sets: best bold, second underlined, with deviations."""
    rows = [row for run in gathered.runs for row in run.rows]
    own = [row for row in rows if not row["metric"].startswith(GENERAL)]
    others = [row for row in rows if row["metric"].startswith(GENERAL)]
    parts = [_sheet(gathered, own, "Results on the clients' own test data")]
    if others:
        parts.append(folded("Results on the test data of the task's other clients",
                            _sheet(gathered, others, "Results on other clients' test data"),
                            id_="general"))
    return join(parts)


def _sheet(gathered: Gathered, rows: Sequence[dict[str, object]], title: str) -> Html:
    kinds = {name: task.kind for name, task in gathered.record.federation.tasks.items()}
    sheet = build(rows, methods_of(gathered), averages=True, kinds=kinds)
    caption = (f"{title}: mean ± deviation over clients and {counted(len(gathered.runs), 'seed')}. "
               "Best in bold, second best underlined; ↑ larger is better, ↓ smaller is better.")
    return sheet_table(sheet, caption, [_method(gathered, line) for line in sheet.lines])


def sheet_table(sheet: Sheet, caption: str, names: Sequence[Cell]) -> Html:
    """Return a table of results: a line for each method, under these names."""
    return table(caption, ["method", *map(_heading, sheet.columns)],
                 [[name, *(_result(line, column) for column in sheet.columns)]
                  for name, line in zip(names, sheet.lines, strict=True)])


def _heading(column: Column) -> str:
    name = f"average {column.kind.replace('_', ' ')}" if column.average else column.dataset
    metric = short(column.metric.removeprefix(GENERAL))
    return f"{name} {metric}\u00a0{'↓' if column.lower_is_better else '↑'}"


def _method(gathered: Gathered, line: Line) -> Cell:
    remark = {gathered.record.models.get("personal"): "personal model",
              gathered.record.models.get("federated"): "federated model",
              CONSTANT: "one answer for all"}.get(line.method)
    return Cell(join([line.method, *([" ", tag("small", remark)] if remark else [])]), line.method)


def _result(line: Line, column: Column) -> Cell:
    cell = line.cells.get(column)
    if cell is None:
        return Cell("", math.nan)
    shown = number(cell.mean, digits(column.metric))
    mean = {1: tag("strong", shown.shown), 2: tag("u", shown.shown)}.get(cell.rank, shown.shown)
    spread = ("" if cell.spread is None or not math.isfinite(cell.spread)
              else tag("small", f" ±{cell.spread:.{digits(column.metric)}f}"))
    return Cell(join([mean, spread]), shown.value, {1: "best"}.get(cell.rank, ""))


def comparisons(gathered: Gathered) -> Html:
    """Return the personal model against the others, data set by data set."""
    found = gathered.verdict
    if found is None:
        return Html("")
    own = [c for c in found.comparisons if not c.metric.startswith(GENERAL)]
    others = [c for c in found.comparisons if c.metric.startswith(GENERAL)]
    note = ("Gain: above 0 is better, whatever the metric. The verdict rests on the 95% interval "
            "and on the margin within which methods count as equivalent; p is Holm-corrected "
            "for all rows.")
    parts = [_compared(own, f"{found.method} against other methods. {note}")]
    if others:
        parts.append(folded("The same on other clients' test data",
                            _compared(others, f"{found.method} on other clients' test data"),
                            id_="compared-general"))
    return join(parts)


def _compared(compared: Sequence[Comparison], caption: str) -> Html:
    return table(caption, ["against", "data set", "metric", "mean", "its mean", "gain",
                           "95% interval", "margin", "pairs better", "p", "verdict"],
                 [[c.against, c.dataset, short(c.metric), number(c.mean, digits(c.metric)),
                   number(c.baseline, digits(c.metric)), *_gain(c.gain, c.metric),
                   number(c.margin, digits(c.metric)),
                   Cell(f"{100 * c.pairs.better:.0f}%", c.pairs.better), _p(c.p),
                   _word(c.verdict)] for c in compared])


def _gain(gain: Interval, metric: str) -> tuple[Cell, Cell]:
    places = digits(metric)
    around = ("" if not math.isfinite(gain.low)
              else f"{gain.low:+.{places}f} to {gain.high:+.{places}f}")
    return number(gain.mean, places, sign=True), Cell(around, gain.low)


def _p(value: float) -> Cell:
    shown = "" if math.isnan(value) else "<0.001" if value < 0.001 else f"{value:.3f}"
    return Cell(shown, value)


def _word(word: str) -> Cell:
    return Cell(f"{SIGNS.get(word, '?')} {word}", word, STYLES.get(word, "same"))


# Clients


def clients(gathered: Gathered) -> Html:
    """Return who was helped and who was hurt, and what may explain it."""
    found = gathered.verdict
    if found is None:
        return Html("")
    pictures = [_gains(gathered, kind, [c for c in found.clients
                                        if (metric_kind(c.metric) in LOWER_IS_BETTER) == lower])
                for kind, lower in (("points", False), ("mse", True))]
    return join([tag("div", *pictures, class_="figures two"), _clients_table(gathered)])


def _gains(gathered: Gathered, kind: str, outcomes: Sequence[ClientOutcome]) -> Html:
    """Draw the gains of clients on one scale: points, or squared error."""
    if not outcomes or gathered.verdict is None:
        return Html("")
    ordered = sorted(outcomes, key=lambda c: -c.gain.mean if math.isfinite(c.gain.mean)
                     else math.inf)
    left_out = max(0, len(ordered) - DRAWN)
    if left_out:
        ordered = [*ordered[:DRAWN // 2], *ordered[-DRAWN // 2:]]
    against, scale = gathered.verdict.alternative, "points" if kind == "points" else "mse"
    title = f"Gain of {gathered.verdict.method} over {against} by client and task ({scale})"
    rows = [Gain(f"{c.client} · {c.task}", c.gain.mean, c.gain.low, c.gain.high,
                 c.outcome if c.outcome in ("helped", "hurt") else "") for c in ordered]
    drawn = gain_chart(f"gain-{kind}", title, "Marks are means with 95% intervals: triangles up "
                       "were helped, triangles down hurt, circles cannot be told apart. The table "
                       "of clients below has the figures.", rows, f"gain ({scale}), 0 is equal")
    note = f"; the {left_out} in the middle are left out" if left_out else ""
    return tag("figure", tag("figcaption", title + note),
               tag("div", drawn, class_="scroll", tabindex="0", role="group",
                   aria_label=title))


def _clients_table(gathered: Gathered) -> Html:
    found = gathered.verdict
    assert found is not None
    beside = {(c.client, c.task): c for c in gathered.beside}
    federated = gathered.record.models.get("federated")
    samples = {(row["client"], row["task"]): row["samples"] for row in gathered.runs[0].rows
               if not row["metric"].startswith(GENERAL)}
    averaged = _rounds_averaged(gathered)
    columns = ["client", "task", "metric", found.method, found.alternative, "gain",
               "95% interval", "p", "outcome",
               *([str(federated), f"gain over {federated}", f"against {federated}"]
                 if beside else []),
               "test samples", "share of the data",
               *(["training samples", "label mix"] if gathered.labels else []),
               "replacements", "rounds averaged"]
    caption = (f"Each client and task: {found.method} against {found.alternative}"
               + (f" and against {federated}" if beside else "")
               + ", with what may explain it. Replacements: how often TAP took W's blocks for the "
                 "task; rounds averaged: in how many W learned from the client (means over seeds). "
                 "The share is that of the client's group."
               + (" Label mix: a bar for each label of the client's training data, in the labels' "
                  f"order; it sorts by evenness (seed {gathered.record.seed})."
                  if gathered.labels else ""))
    return table(caption, columns, [
        [*_outcome(c), *(_against(beside.get((c.client, c.task))) if beside else ()),
         Cell(samples[c.client, c.task], samples[c.client, c.task]),
         holding(gathered.record, c.client, c.task),
         *(_labels(gathered, c) if gathered.labels else ()), *_reasons(gathered, c, averaged)]
        for c in found.clients])


def _outcome(c: ClientOutcome) -> list[object]:
    places = digits(c.metric)
    return [Cell(c.client, c.client), c.task, short(c.metric), number(c.mean, places),
            number(c.baseline, places), *_gain(c.gain, c.metric), _p(c.p), _word(c.outcome)]


def _against(c: ClientOutcome | None) -> list[object]:
    """Return what a client gains over the federated model."""
    if c is None:
        return [Cell("", math.nan), Cell("", math.nan), ""]
    places = digits(c.metric)
    return [number(c.baseline, places), number(c.gain.mean, places, sign=True), _word(c.outcome)]


def _reasons(gathered: Gathered, c: ClientOutcome, averaged: dict[str, int]) -> list[Cell]:
    seeds, method = len(gathered.runs), gathered.verdict.method if gathered.verdict else ""
    places = 0 if seeds == 1 else 1
    return [number(gathered.timeline.replaced[method, c.client, c.task] / seeds, places),
            number(averaged.get(c.client, 0) / seeds, places)]


def _labels(gathered: Gathered, c: ClientOutcome) -> list[Cell]:
    """Return how much a client has to train on, and of what."""
    found = gathered.labels.get(c.client, {}).get(c.task)
    names = gathered.record.classes.get(c.task, [])
    return [Cell("", math.nan) if found is None else number(found.samples, 0),
            label_mix(found, names)]


def _rounds_averaged(gathered: Gathered) -> dict[str, int]:
    """Return in how many rounds the server averaged something of each client."""
    found: dict[str, int] = {}
    for (run, _, client), count in gathered.timeline.averaged.items():
        if run == gathered.federated:
            found[client] = max(found.get(client, 0), count)
    return found
