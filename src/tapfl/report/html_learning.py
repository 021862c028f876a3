"""The way to the results in a report: curves or losses, replacements, the map of the federation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tapfl.data.participants import parse_id
from tapfl.evaluation.metrics import metric_place, short
from tapfl.methods import LOCAL
from tapfl.model.summary import MIB
from tapfl.report.footprint import Traffic
from tapfl.report.gather import Gathered, owned_blocks
from tapfl.report.markup import Cell, Html, folded, join, number, table, tag
from tapfl.report.svg import Series, Square, legend, line_chart, shade_map
from tapfl.report.timeline import Line, cumulative, means

MOST_COLUMNS, MOST_ROUNDS = 50, 200  # rounds in a picture and in a table; beyond, some share one
MOST_CLIENTS = 40  # columns of the map; beyond, clients of a kind share one


def learning(gathered: Gathered) -> Html:
    """Return how W and the personal models learned, task by task."""
    timeline = gathered.timeline
    if timeline.curves:
        charts = curve_lines(gathered)
        note = ("W and X on a fixed sample of the clients' test data, means over the round's "
                "clients{}.")
    else:
        charts = loss_lines(gathered)
        note = ("Training losses, means over the round's clients{}. The run kept no curves of "
                "metrics; evaluation.every in the configuration makes them.")
    if not charts:
        return tag("p", "No losses were recorded.", class_="empty")
    looks = _looks(name for lines in charts.values() for name in lines)
    seeds = f" and {len(gathered.records)} seeds" if len(gathered.records) > 1 else ""
    last = timeline.last_round() + 1
    drawn = [_lines(f"learn-{place}", task, label, lines, looks, last, label)
             for place, ((task, label), lines) in enumerate(charts.items())]
    return join([tag("p", note.format(seeds)), legend(looks), tag("div", *drawn, class_="figures")])


def curve_lines(gathered: Gathered) -> dict[tuple[str, str], dict[str, Line]]:
    """Return the curves of every task, in the metric that speaks for it."""
    metrics: dict[str, str] = {}
    for _, task, metric in sorted(gathered.timeline.curves, key=lambda key: metric_place(key[2])):
        metrics.setdefault(task, metric)
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for (method, task, metric), values in gathered.timeline.curves.items():
        if metrics[task] == metric:
            found.setdefault((task, short(metric)), {})[_whose(gathered, method)] = means(values)
    return dict(sorted(found.items()))


def loss_lines(gathered: Gathered) -> dict[tuple[str, str], dict[str, Line]]:
    """Return the training losses of every task."""
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for kept in (gathered.timeline.losses, gathered.timeline.personal):
        for (method, task), values in kept.items():
            found.setdefault((task, "loss"), {})[_whose(gathered, method)] = means(values)
    return dict(sorted(found.items()))


def _whose(gathered: Gathered, method: str) -> str:
    if method == LOCAL:
        return "local training"
    return f"W of {method}" if method in gathered.timeline.rounds else f"X of {method}"


def _looks(names: Iterable[str]) -> dict[str, int]:
    return {name: look for look, name in enumerate(dict.fromkeys(names))}


def replacements(gathered: Gathered) -> Html:
    """Return the cumulative replacements by task, a chart for each variant of TAP."""
    timeline, seeds = gathered.timeline, len(gathered.records)
    if not timeline.replacements:
        return tag("p", "No blocks were replaced." if gathered.finished else "None so far.",
                   class_="empty")
    by_method = replacement_lines(gathered)
    looks = _looks(task for lines in by_method.values() for task in lines)
    last = timeline.last_round() + 1
    drawn = [_lines(f"replaced-{place}", method, "cumulative replacements", lines, looks, last,
                    "replacements", steps=True)
             for place, (method, lines) in enumerate(by_method.items())]
    each = " (means over seeds)" if seeds > 1 else ""
    return join([
        tag("p", "How often clients took W's blocks of a task for their X, up to each round"
                 f"{each}. The first one of each client and task counts."),
        legend(looks), tag("div", *drawn, class_="figures")])


def replacement_lines(gathered: Gathered) -> dict[str, dict[str, Line]]:
    """Return the cumulative replacements of every method, task by task."""
    timeline, seeds = gathered.timeline, len(gathered.records)
    found: dict[str, dict[str, Line]] = {}
    for (method, task), counts in sorted(timeline.replacements.items()):
        found.setdefault(method, {})[task] = cumulative(counts, timeline.last_round(), seeds)
    return found


def _lines(id_: str, title: str, what: str, lines: Mapping[str, Line], looks: Mapping[str, int],
           last: int, y_label: str, steps: bool = False) -> Html:
    """Return a chart over the rounds up to the last, with its data below."""
    series = [Series(name, points, looks[name]) for name, points in lines.items()]
    ends = ", ".join(f"{name} ends at {points[-1][1]:.4g}" for name, points in lines.items()
                     if points)
    drawn = line_chart(id_, f"{title}: {what}", ends, series, "round", y_label, steps,
                       x_range=(0.0, float(last)))
    return tag("figure", tag("figcaption", tag("strong", title), f" {what}"), drawn,
               folded("Data", _data(f"{title}: {what}", lines), id_=f"{id_}-data"))


def _data(title: str, lines: Mapping[str, Line]) -> Html:
    columns = {name: dict(points) for name, points in lines.items()}
    places = sorted({x for points in columns.values() for x in points})
    return table(title, ["round", *columns], [
        [Cell(f"{x:g}", x), *(_value(points.get(x)) for points in columns.values())]
        for x in places], sortable=False)


def _value(value: float | None) -> Cell:
    if value is None or math.isnan(value):
        return Cell("" if value is None else "not a number", math.nan)
    return Cell(f"{value:.5g}", value)


# The map


Counts = dict[tuple[str, str], float]  # by block and column of the map


@dataclass(frozen=True)
class BlockMap:
    """How often clients' blocks were averaged and replaced; ``together``: clients share columns."""

    columns: list[str]
    averaged: Counts
    replaced: Counts
    together: bool

    @property
    def rows(self) -> list[str]:
        """All blocks that somebody owns."""
        return sorted({block for block, _ in self.averaged})


def federation_map(gathered: Gathered) -> Html:
    """Return clients by blocks: who owns what, how often it was averaged and replaced."""
    found = block_map(gathered)
    if found is None:
        return tag("p", "Nothing was federated: there is no map to draw." if gathered.finished
                   else "Nothing was averaged so far.", class_="empty")
    return _draw_map(gathered, found.rows, found.columns, found.averaged, found.replaced,
                     found.together)


def block_map(gathered: Gathered) -> BlockMap | None:
    """Count what happened to the blocks of the federated run, if there was one."""
    run, seeds = gathered.federated, len(gathered.records)
    if run is None:
        return None
    owned = owned_blocks(gathered.record)
    groups = gathered.record.config.federation.groups
    together = len(owned) > MOST_CLIENTS
    column_of = {client: parse_id(client, groups)[1] if together else client for client in owned}
    personal = gathered.record.models.get("personal") or ""
    averaged: dict[tuple[str, str], int] = {}
    replaced: dict[tuple[str, str], int] = {}
    for client, blocks in owned.items():
        for block in blocks:
            key = (block, column_of[client])
            averaged[key] = averaged.get(key, 0) + gathered.timeline.averaged[run, block, client]
            replaced[key] = (replaced.get(key, 0)
                             + gathered.timeline.replaced_blocks[personal, block, client])
    return BlockMap(list(dict.fromkeys(column_of.values())), _means(averaged, seeds),
                    _means(replaced, seeds), together)


def _means(counts: Mapping[tuple[str, str], int], seeds: int) -> Counts:
    return {key: count / seeds for key, count in counts.items()}


def _draw_map(gathered: Gathered, rows: Sequence[str], columns: Sequence[str],
              averaged: Mapping[tuple[str, str], float],
              replaced: Mapping[tuple[str, str], float], together: bool) -> Html:
    most = max(averaged.values(), default=0) or 1
    squares = {
        (block, who): Square(count / most, f"{replaced[block, who]:.0f}"
                             if 0.5 <= replaced[block, who] < 1000 else "",
                             f"{block}, {who}: averaged {count:.3g} times, replaced "
                             f"{replaced[block, who]:.3g} times")
        for (block, who), count in averaged.items()}
    title = f"Map of the federation ({gathered.federated}): blocks by clients"
    drawn = shade_map("map", title, "A square: the client owns the block. The stronger its "
                      "colour, the more often it was averaged. A number: how often the personal "
                      "model took the block from W. The data below have all figures.",
                      rows, columns, squares)
    figures = table(f"{title}: averaged / replaced", ["block", *columns], [
        [block, *(Cell(f"{averaged[block, who]:.3g} / {replaced[block, who]:.3g}",
                       averaged[block, who]) if (block, who) in averaged else ""
                  for who in columns)] for block in rows])
    kinds = " Clients of a kind, in different groups, share a column." if together else ""
    return tag(
        "figure",
        tag("figcaption", "A square: the client owns the block. The stronger its colour, the more "
            f"often it was averaged, {most:.3g} times at most. A number: how often its X took the "
            f"block from W.{kinds}"),
        tag("div", drawn, class_="scroll", tabindex="0", role="group", aria_label=title),
        folded("Data", figures, id_="map-data"))


def blocks(gathered: Gathered) -> Html:
    """Return the bytes of every block, and what a round sends of it."""
    sizes = [(each, traffic, run) for each in gathered.footprints[:1]
             for run, traffic in each.traffic.items() if traffic.blocks]
    if not sizes:
        return Html("")
    rows = [[block, run, number(each.blocks[block] / MIB, 3),
             number(traffic.per_round(sent) / MIB, 3),
             number(traffic.per_round(traffic.blocks_down[block]) / MIB, 3)]
            for each, traffic, run in sizes for block, sent in sorted(traffic.blocks.items())]
    total = table(
        f"Size of every block and what a round sends of it to the server and back, on average "
        f"(seed {gathered.record.seed})",
        ["block", "federated run", "MiB", "up, MiB a round", "down, MiB a round"], rows)
    return folded("Bytes by block and round", total,
                  *(_sent(place, run, traffic) for place, (_, traffic, run) in enumerate(sizes)
                    if any(traffic.blocks.values())), id_="blocks")


def _sent(place: int, run: str, traffic: Traffic) -> Html:
    """Return what the updates of every round held of every block: a picture, and the figures."""
    names = sorted(traffic.blocks)
    drawn = _pieces(traffic.by_round, MOST_COLUMNS)
    most = max((sent for _, each in drawn for sent in each.values()), default=0) or 1
    squares = {(block, rounds): Square(each[block] / most, "", f"{block}, round {rounds}: "
                                       f"{each[block] / MIB:.3g} MiB")
               for rounds, each in drawn for block in names if each.get(block)}
    title = f"{run}: what the clients sent of every block in every round"
    chart = shade_map(f"sent-{place}", title, "The stronger a square's colour, the more bytes. The "
                      "data below have all figures.", names, [rounds for rounds, _ in drawn],
                      squares)
    figures = table(f"{run}, MiB to the server by round and block", ["round", *names], [
        [Cell(rounds), *(number(each.get(block, 0) / MIB, 3) for block in names)]
        for rounds, each in _pieces(traffic.by_round, MOST_ROUNDS)], sortable=False)
    return tag("figure", tag("figcaption", tag("strong", run), " what the clients sent of every "
                             f"block in every round, {most / MIB:.3g} MiB at most"),
               tag("div", chart, class_="scroll", tabindex="0", role="group", aria_label=title),
               folded("Data", figures, id_=f"sent-{place}-data"))


def _pieces(by_round: Sequence[Mapping[str, int]],
            most: int) -> list[tuple[str, Mapping[str, int]]]:
    """Return the bytes of every round with its number; rounds of long runs are added up."""
    width = max(1, math.ceil(len(by_round) / most))
    found: list[tuple[str, Mapping[str, int]]] = []
    for start in range(0, len(by_round), width):
        last = min(start + width, len(by_round))
        total = Counter[str]()
        for each in by_round[start:last]:
            total.update(each)
        found.append((str(last) if width == 1 else f"{start + 1}–{last}", total))
    return found
