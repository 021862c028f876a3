"""A verdict for people and for other programs: tables on a terminal, tidy rows."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError
from tapfl.evaluation.bootstrap import Interval
from tapfl.evaluation.metrics import digits, short
from tapfl.report.markup import counted
from tapfl.report.standings import BEST, EVERY_METHOD, STANDINGS, Standings, holds
from tapfl.report.verdict import ClientOutcome, Comparison, VerdictReport

SHOWN = 40  # clients on the screen; --csv writes them all
COLUMNS = ("what", "method", "against", "dataset", "client", "metric", "mean", "baseline", "gain",
           "low", "high", "margin", "effect", "better", "pairs", "p", "verdict")
GAIN = "gain [95% interval]"
STYLES = {"better": "green", "helped": "green", "worse": "red", "hurt": "red"}


def text(report: VerdictReport) -> str:
    """Return a report as a terminal shows it."""
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        for against in report.against:
            console.print(_comparisons(report, against), "")
        console.print(_clients(report), "")
    return "\n".join([str(captured.get()).rstrip("\n"), "", *_remarks(report)])


def _comparisons(report: VerdictReport, against: str) -> Any:
    """Draw a method against another, data set by data set."""
    from rich.text import Text

    drawn = _table(f"{report.method} against {against}, {counted(len(report.seeds), 'seed')}",
                   ("data set", "metric"), (GAIN, "pairs", "d", "p"), "verdict")
    for each in (c for c in report.comparisons if c.against == against):
        drawn.add_row(Text(each.dataset), Text(short(each.metric)),
                      _gain(each.gain, each.metric), f"{100 * each.pairs.better:.0f}%",
                      _number(each.pairs.effect), _p(each.p),
                      Text(each.verdict, STYLES.get(each.verdict, "")))
    return drawn


def _clients(report: VerdictReport) -> Any:
    """Draw who was helped and who was hurt."""
    from rich.text import Text

    drawn = _table(f"clients: {report.method} against {report.alternative}",
                   ("client", "task", "metric"), (GAIN, "p"), "outcome")
    rows: list[ClientOutcome | None] = list(report.clients)
    if len(rows) > SHOWN:  # the most helped, and the most hurt
        rows = [*rows[:SHOWN // 2], None, *rows[-SHOWN // 2:]]
    for each in rows:
        if each is None:
            drawn.add_row("…", *[""] * 5)
            continue
        drawn.add_row(Text(each.client), Text(each.task), Text(short(each.metric)),
                      _gain(each.gain, each.metric), _p(each.p),
                      Text(each.outcome, STYLES.get(each.outcome, "")))
    return drawn


def all_text(found: Standings) -> str:
    """Return how every method stands to the best of each data set, as a terminal shows it."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    counts = _table(f"{EVERY_METHOD}, {counted(len(found.seeds), 'seed')}", ("method",), STANDINGS)
    for method in found.ranked:
        counts.add_row(Text(method), *(str(found.count(method, each)) for each in STANDINGS))
    places = _table("by data set", ("data set", "metric"), (), BEST)
    for leader in found.leaders:
        lines = Text(f"{leader.method} {leader.mean:.{digits(leader.metric)}f}")
        for verdict in ("equivalent", "worse"):
            listed = ", ".join(each.method + "*" * holds(each) for each in leader.of(verdict))
            if listed:
                lines.append(f"\n{verdict}: {listed}", STYLES.get(verdict, ""))
        places.add_row(Text(leader.dataset), Text(short(leader.metric)), lines)
    with console.capture() as captured:
        console.print(counts, "", places, "")
    return "\n".join([
        str(captured.get()).rstrip("\n"), "",
        "best: the highest mean, of mse the lowest; not listed: not told apart from it",
        "*: also holds after correction for the number of comparisons (Holm)", *_doubts(found)])


def _table(title: str, names: Sequence[str], figures: Sequence[str], last: str = "") -> Any:
    """Return an empty table for 80 columns: where they are too few, the last one is wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False,
                  padding=0, min_width=len(title))
    for name in names:
        drawn.add_column(name, no_wrap=True)
    for name in figures:
        drawn.add_column(name, justify="right", no_wrap=True)
    if last:
        drawn.add_column(last)
    return drawn


def _remarks(report: VerdictReport) -> list[str]:
    """Return the count of clients, and how to read the tables."""
    clients = len({each.client for each in report.clients})
    lines = [", ".join(f"{outcome} {count}" for outcome, count in _counts(report).items())
             + f" of {len(report.clients)} ({clients} clients, counted by task)",
             "gain: above 0 is better; pairs: clients and seeds that are better",
             "d: gain in deviations; p: corrected for all rows (Holm)"]
    return [*lines, *_doubts(report)]


def _doubts(found: VerdictReport | Standings) -> list[str]:
    """Say what a reader must know before trusting an interval."""
    lines = []
    if len(found.seeds) == 1:
        lines.append("one seed: nothing is said of how another would turn out")
    if not found.sampled:
        lines.append("no scores of single samples were kept: intervals rest on clients and seeds "
                     "alone, and those of clients on seeds")
    return lines


def _counts(report: VerdictReport) -> dict[str, int]:
    return {outcome: report.counts[outcome] for outcome in ("helped", "hurt", "not told apart")}


def _gain(gain: Interval, metric: str) -> Any:
    from rich.text import Text

    places = digits(metric)
    around = ("" if math.isnan(gain.low)
              else f" [{gain.low:+.{places}f}; {gain.high:+.{places}f}]")
    return Text(f"{gain.mean:+.{places}f}{around}")


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:+.1f}"


def _p(value: float) -> str:
    return "" if math.isnan(value) else "<0.001" if value < 0.001 else f"{value:.3f}"


def tidy(report: VerdictReport) -> list[dict[str, Any]]:
    """Return the report as rows with the columns ``COLUMNS``: of data sets, then of clients."""
    return [*map(_dataset_row, report.comparisons),
            *(_client_row(report, each) for each in report.clients)]


def tidy_all(found: Standings) -> list[dict[str, Any]]:
    """Return standings as rows with the columns ``COLUMNS``; the best have nothing to gain."""
    rows = []
    for leader in found.leaders:
        rows.append(dict.fromkeys(COLUMNS, "") | {
            "what": "dataset", "method": leader.method, "dataset": leader.dataset,
            "metric": leader.metric, "mean": leader.mean, "verdict": BEST})
        rows += map(_dataset_row, leader.others)
    return rows


def write_tidy(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write tidy rows as CSV."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise TapflError(f"--csv {path}: cannot be written ({error.strerror})") from None


def _dataset_row(each: Comparison) -> dict[str, Any]:
    return {"what": "dataset", "method": each.method, "against": each.against,
            "dataset": each.dataset, "client": "", "metric": each.metric, "mean": each.mean,
            "baseline": each.baseline, "gain": each.gain.mean, "low": each.gain.low,
            "high": each.gain.high, "margin": each.margin, "effect": each.pairs.effect,
            "better": each.pairs.better, "pairs": each.pairs.pairs, "p": each.p,
            "verdict": each.verdict}


def _client_row(report: VerdictReport, each: ClientOutcome) -> dict[str, Any]:
    return {"what": "client", "method": report.method, "against": report.alternative,
            "dataset": each.task, "client": each.client, "metric": each.metric, "mean": each.mean,
            "baseline": each.baseline, "gain": each.gain.mean, "low": each.gain.low,
            "high": each.gain.high, "margin": "", "effect": each.effect, "better": "", "pairs": "",
            "p": each.p, "verdict": each.outcome}
