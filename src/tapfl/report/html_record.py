"""What a run is and what it cost, in a report: progress, warnings, footprint, configuration."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

import yaml

from tapfl.engine.record import RunRecord
from tapfl.methods import federated_runs, method_specs, names_own_code
from tapfl.model.summary import GIB, MIB
from tapfl.report.footprint import Footprint
from tapfl.report.footprint import rows as footprint_rows
from tapfl.report.gather import Gathered
from tapfl.report.markup import Cell, Html, folded, join, number, table, tag, text

INCIDENTS_SHOWN = 200


def progress(gathered: Gathered) -> Html:
    """Return how far a run is that has no results yet."""
    record, timeline = gathered.record, gathered.timeline
    runs = federated_runs(method_specs(record.config))
    lines = []
    for run in runs:
        here, rounds = timeline.rounds[run.name], run.config.train.rounds
        done = here + _before(record, run.name)
        took = timeline.seconds[run.name] / here if here else math.nan
        left = (rounds - done) * took if here else math.nan
        bar = tag("progress", value=float(done), max=float(rounds),
                  aria_label=f"{run.name}: {done} of {rounds} rounds")
        methods = [s.name for s in (*([run.plain] if run.plain else []), *run.personal)]
        lines.append([run.name, Cell(join([bar, f" {done} of {rounds}"]), float(done)),
                      number(took, 2) if here else Cell("", math.nan),
                      number(left, 0) if here else Cell("", math.nan), ", ".join(methods)])
    over = all(timeline.rounds[run.name] + _before(record, run.name) >= run.config.train.rounds
               for run in runs)
    return join([tag("p", "This run is not finished: it has no results yet."
                     + (" All rounds are over; final models are made and evaluated." if over
                        else ""), class_="verdict"),
                 table("Federated runs, one after the other", [
                     "federated run", "rounds", "seconds a round", "seconds left", "methods"],
                       lines)])


def _before(record: RunRecord, run: str) -> int:
    """Return how many rounds another run had behind it, from which this one goes on."""
    models = record.start.models if record.start else {}
    return models[run].round + 1 if run in models else 0


def warnings(gathered: Gathered) -> Html:
    """Return what a reader must know, and every incident."""
    if not gathered.warnings:
        return tag("p", "None.")
    parts: list[Html] = [tag("ul", *(tag("li", each) for each in gathered.warnings))]
    reasons = [[f"seed {record.seed}", lost.get("where"), reason.get("reason"),
                reason.get("count"), reason.get("rows")]
               for record in gathered.records for lost in record.dropped
               for reason in lost.get("reasons", [])]
    if reasons:
        parts.append(folded("Rows left out", table("Why rows were left out", [
            "run", "where", "reason", "rows", "the first ones"], reasons), id_="dropped"))
    incidents = gathered.timeline.incidents
    if incidents:
        more = (f" (the first {INCIDENTS_SHOWN} of {len(incidents)})"
                if len(incidents) > INCIDENTS_SHOWN else "")
        parts.append(folded("Refused, missing and diverged", table(
            f"Incidents{more}", ["kind", "seed", "method", "round", "client", "reason"],
            [[i.kind, Cell(i.seed, i.seed), i.method, Cell(i.round + 1, i.round), i.client,
              i.reason] for i in incidents[:INCIDENTS_SHOWN]]), id_="incidents"))
    return join(parts)


def costs(gathered: Gathered) -> Html:
    """Return the footprint, time and memory."""
    parts: list[Html] = []
    if gathered.footprints:
        parts.append(_footprint(gathered.footprints[:1]))
    if len(gathered.footprints) > 1:
        parts.append(folded("Footprint of the other seeds", _footprint(gathered.footprints[1:]),
                            id_="footprints"))
    lines: list[list[object]] = []
    for path, record in zip(gathered.paths, gathered.records, strict=True):
        lines.append([
            path.resolve().name, Cell(record.seed, record.seed), number(record.seconds, 0),
            *(number(record.memory[key] / GIB, 2) if key in record.memory else Cell("", math.nan)
              for key in ("peak_rss", "peak_cuda")),
            Cell("; ".join(f"{name}: {times.rounds:.0f} s rounds, {times.final:.0f} s final models"
                           for name, times in record.times.items()), style="long")])
    parts.append(table("Time and memory of the process", [
        "run", "seed", "seconds", "host GiB", "GPU GiB", "by federated run"], lines))
    return join(parts)


def _footprint(footprints: Sequence[Footprint]) -> Html:
    rows = footprint_rows(footprints)
    return table(
        "What a client holds (fp32, of the mean client), what a round sends, and how long it "
        "takes. A method that trains X in every round keeps a second copy of what trains.",
        list(rows[0]),
        [[_figure(row[column], place) for place, column in enumerate(row)] for row in rows])


def _figure(shown: str, place: int) -> Cell:
    """Return a cell of the footprint's table: its first three columns are words."""
    if place < 3:
        return Cell(shown)
    try:
        return Cell(shown, float(shown.replace(",", "")))
    except ValueError:
        return Cell(shown, math.nan)


def versions(gathered: Gathered) -> Html:
    """Return what the runs were made with, and how large the model is."""
    record = gathered.record
    facts: dict[str, object] = {str(key): value for key, value in record.environment.items()}
    facts |= {f"code of {module}": checksum for module, checksum in record.own_code.items()}
    facts |= {"weights": record.weights, "clients": record.clients}
    for name in ("total", "trainable"):
        if isinstance(record.parameters.get(name), int):
            count = record.parameters[name]
            facts[f"{name} parameters"] = f"{count:,} ({4 * count / MIB:,.1f} MiB in fp32)"
    facts |= {f"data of {task}": where for task, where in record.data.items()}
    return table(f"Versions, hardware and data (seed {record.seed})", ["what", "value"],
                 [[key, value] for key, value in facts.items()], sortable=False)


def again(gathered: Gathered) -> Html:
    """Return the command that makes the runs again, and the configuration that it takes."""
    record = gathered.record
    config = record.config.model_copy(update={"threads": record.threads})
    lines = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False,
                           allow_unicode=True).splitlines()
    written = tag("pre", tag("code", Html("\n".join(text(line) for line in lines))),
                  id="configuration", tabindex="0")
    notes = ["Save the configuration below as config.yaml first."]
    if record.config.federation.file:
        notes.append("It names a federation file, which must be there.")
    if record.config.start:
        notes.append("It goes on from another run (start), which must be there.")
    return join([tag("p", " ".join(notes)),
                 tag("pre", tag("code", command(gathered)), tabindex="0"),
                 folded("Configuration", written, id_="config")])


def command(gathered: Gathered) -> str:
    """Return the command that makes the runs again from their configuration."""
    record: RunRecord = gathered.record
    out = gathered.paths[0].resolve().name or "again"
    words = ["tapfl", "run", "config.yaml"]
    if len(gathered.seeds) > 1:
        words += ["--seeds", ",".join(map(str, gathered.seeds)), "--out", "runs/again"]
    else:
        words += ["--seed", str(record.seed), "--out", f"runs/{out}-again"]
    if names_own_code(record.config):
        words += ["--modules", "DIR"]
    return shlex.join(words)
