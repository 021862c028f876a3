"""What a run costs: a client's parameters and memory, stage 2, traffic. Beside the paper's table.

Everything comes from run.json and events.jsonl; parameters are counted again from the recorded
configuration, client by client, without weights.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.engine.record import RunRecord, read_record
from tapfl.errors import TapflError
from tapfl.events import RoundEnded
from tapfl.methods import federated_runs, method_specs
from tapfl.model.summary import GIB, MIB, PAPER, kind_of, mean_client, summarize
from tapfl.report.formats import latex_row, latex_text, markdown_text
from tapfl.report.timeline import FILE, read_events

BYTES = 4  # of a parameter that trains, and travels: fp32
NUMBER = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")
COLUMNS = ("run", "model", "setting", "mean parameters", "trainable %", "memory GiB",
           "stage 2 s/client", "up MiB/round", "down MiB/round", "round s", "host GiB", "GPU GiB")


@dataclass(frozen=True)
class Traffic:
    """What a federated run sent in its rounds, in bytes.

    ``by_round`` are the bytes of the updates that counted, block by block, in every round;
    ``blocks`` are their sums. ``blocks_down`` is what cohorts received, block by block: a client
    receives the blocks that it sends. One that never sent an update is missing there.
    """

    rounds: int
    seconds: float
    up: int
    down: int
    blocks: Mapping[str, int]
    by_round: Sequence[Mapping[str, int]]
    blocks_down: Mapping[str, int]

    def per_round(self, total: float) -> float:
        """Return a mean over the rounds."""
        return total / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Footprint:
    """The costs of one run.

    ``mean`` is the mean client, as in the paper's table: without TAP, and under ``tap_`` with its
    second copy of what trains. ``means`` are those of federated runs whose method has blocks of its
    own, as FedDAT's adapters; all of these count as trainable. They are empty where a run has not
    recorded who holds them. ``blocks`` are the bytes of every block. ``traffic`` belongs to a
    federated run, ``seconds`` (of a client's final model) to a method. ``personal`` has the methods
    with a personalizer on each federated run, ``twice`` those whose clients keep a second copy.
    """

    name: str
    foundation: str
    mean: Mapping[str, float]
    means: Mapping[str, Mapping[str, float]]
    blocks: Mapping[str, int]
    memory: Mapping[str, int]
    traffic: Mapping[str, Traffic]
    seconds: Mapping[str, float]
    personal: Mapping[str, Sequence[str]]
    twice: frozenset[str]
    paper: Mapping[str, float] | None

    @property
    def added(self) -> float:
        """TAP's additional parameters: those of the mean client."""
        return self.mean["tap_total"] - self.mean["total"]


def footprint(folder: Path) -> Footprint:
    """Put together what a complete run has cost."""
    record = read_record(folder)
    if not record.finished:
        raise TapflError(f"{folder}: this run is not complete; finish it with: "
                         f"tapfl run --resume --out {folder}")
    summary = summarize(record.config, record.federation)
    blocks = {block: BYTES * count for block, count in _parameters(record).items()}
    runs = federated_runs(method_specs(record.config))
    return Footprint(
        folder.resolve().name, record.config.foundation.name, summary["mean"],
        {run: _with_more(summary["clients"], more.get("held", {}))
         for run, more in record.parameters.get("methods", {}).items()}, blocks,
        record.memory, _traffic(folder, [run.name for run in runs], blocks),
        {method: value for times in record.times.values()
         for method, value in times.per_client_final.items()},
        {run.name: [spec.name for spec in run.personal] for run in runs},
        frozenset(record.second_models), summary["paper"])


def _with_more(clients: Sequence[Mapping[str, Any]], held: Mapping[str, int]) -> dict[str, float]:
    """Return the mean client that also holds a method's own blocks."""
    if any(kind_of(client["tasks"]) not in held for client in clients):
        return {}
    more = [held[kind_of(client["tasks"])] for client in clients]
    return mean_client([{"total": client["total"] + n, "trainable": client["trainable"] + n,
                         "with_tap": client["with_tap"] + 2 * n}
                        for client, n in zip(clients, more, strict=True)])


def _parameters(record: RunRecord) -> dict[str, int]:
    """Return the size of every block, with those that single methods have beside the others."""
    found = dict(record.parameters["blocks"])
    for more in record.parameters.get("methods", {}).values():
        found |= more["blocks"]
    return found


def _traffic(folder: Path, runs: Iterable[str], blocks: Mapping[str, int]) -> dict[str, Traffic]:
    """Add up what the rounds of every federated run have sent."""
    rounds: dict[str, list[Mapping[str, Any]]] = {run: [] for run in runs}

    def take(event: Mapping[str, Any]) -> None:
        if event["event"] == RoundEnded.kind:
            _sent([event], blocks)  # a damaged one is found here, where its line is known
            rounds[event["method"]].append(event)

    read_events(folder / FILE, take)
    return {run: _sent(each, blocks) for run, each in rounds.items()}


def _sent(rounds: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> Traffic:
    """Return what the rounds of one federated run have sent."""
    by_round = [{block: len(clients) * sizes[block]
                 for block, clients in event["contributors"].items()} for event in rounds]
    up = Counter[str]()
    for each in by_round:
        up.update(each)
    turns = Counter(client for event in rounds for client in event["cohort"])
    owners: dict[str, set[str]] = {}
    for event in rounds:
        for block, clients in event["contributors"].items():
            owners.setdefault(block, set()).update(clients)
    down = {block: sizes[block] * sum(turns[client] for client in clients)
            for block, clients in owners.items()}
    return Traffic(len(rounds), sum(float(event["seconds"]) for event in rounds),
                   sum(int(event["bytes_up"]) for event in rounds),
                   sum(int(event["bytes_down"]) for event in rounds), up, by_round, down)


# For people

Row = dict[str, str]


def rows(footprints: Sequence[Footprint]) -> list[Row]:
    """Return the paper's memory table for some runs, and the paper's own rows at the end."""
    found = [row for each in footprints for row in _rows(each)]
    papers = {each.foundation: each.paper for each in footprints if each.paper is not None}
    for name in papers:
        paper = PAPER[name]
        found += [_sizes("paper", name, "no TAP", paper, ""),
                  {**_sizes("paper", name, "TAP", paper, "tap_"),
                   "stage 2 s/client": f"{paper['tap_seconds']:.2f}"}]
    return found


def _rows(each: Footprint) -> list[Row]:
    """Return a row for every federated run, and one for every personalizer on it."""
    peak = {column: f"{each.memory[key] / GIB:.2f}" if key in each.memory else ""
            for column, key in (("host GiB", "peak_rss"), ("GPU GiB", "peak_cuda"))}
    found = []
    for run, traffic in each.traffic.items():
        sent = peak | ({"up MiB/round": f"{traffic.per_round(traffic.up) / MIB:.1f}",
                        "down MiB/round": f"{traffic.per_round(traffic.down) / MIB:.1f}",
                        "round s": f"{traffic.per_round(traffic.seconds):.2f}"}
                       if traffic.rounds else {})
        mean = each.means.get(run, each.mean)
        found.append({**_sizes(each.name, each.foundation, run, mean, ""), **sent})
        for method in each.personal[run]:
            took = f"{each.seconds[method]:.2f}" if method in each.seconds else ""
            kind = "tap_" if method in each.twice else ""
            found.append({**_sizes(each.name, each.foundation, method, mean, kind),
                          "stage 2 s/client": took, **sent})
    return found


def _sizes(run: str, model: str, setting: str, mean: Mapping[str, float], kind: str) -> Row:
    named = {**dict.fromkeys(COLUMNS, ""), "run": run, "model": model, "setting": setting}
    if not mean:
        return named
    return {**named, "mean parameters": f"{mean[f'{kind}total']:,.0f}",
            "trainable %": f"{mean[f'{kind}trainable_percent']:.2f}",
            "memory GiB": f"{mean[f'{kind}gib']:.4f}"}


def block_rows(each: Footprint) -> list[Row]:
    """Return a row for every block: its size, and what a round sends of it on average."""
    found = []
    for run, traffic in each.traffic.items():
        for name, sent in sorted(traffic.blocks.items()):
            found.append({"run": each.name, "federated run": run, "block": name,
                          "MiB": f"{each.blocks[name] / MIB:.3f}",
                          "up MiB/round": f"{traffic.per_round(sent) / MIB:.3f}",
                          "down MiB/round":
                              f"{traffic.per_round(traffic.blocks_down[name]) / MIB:.3f}"})
    return found


def render(table: Sequence[Row], form: str) -> str:
    """Return rows as ``markdown``, ``latex`` or ``csv``."""
    columns = list(table[0]) if table else list(COLUMNS)
    lines = [columns, *([row[column] for column in columns] for row in table)]
    if form == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [[cell.replace(",", "") if NUMBER.fullmatch(cell) else cell for cell in line]
             for line in lines])
        return out.getvalue().rstrip("\n")
    if form == "latex":
        return "\n".join([f"\\begin{{tabular}}{{{'l' * min(3, len(columns))}"
                          f"{'r' * max(0, len(columns) - 3)}}}", r"\toprule", _latex(lines[0]),
                          r"\midrule", *map(_latex, lines[1:]), r"\bottomrule",
                          r"\end{tabular}"])
    if form != "markdown":
        raise TapflError(f"--format {form}: expected markdown, latex or csv")
    text = ["| " + " | ".join(map(markdown_text, line)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(columns), *text[1:]])


def _latex(cells: Sequence[str]) -> str:
    return latex_row([latex_text(cell) for cell in cells])
