"""Every method against the best one of each data set: which of them to take, on evidence.

The best method is the one with the best mean over clients and seeds, by the metric that speaks for
the data set. It is found on the same results that the others are compared with it on: that a method
is worse than the best says more than that a method is the best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapfl.errors import TapflError
from tapfl.evaluation.bootstrap import MARGIN_MSE, MARGIN_POINTS
from tapfl.evaluation.constant import CONSTANT
from tapfl.evaluation.significance import ALPHA, holm
from tapfl.report.paper import DATASETS
from tapfl.report.runs import Run, read_runs
from tapfl.report.verdict import Comparison, Gains, compare_on, plain, sign, task_metrics

BEST = "best"
EVERY_METHOD = "every method against the best of each data set"
STANDINGS = (BEST, "equivalent", "not told apart", "worse")


def holds(each: Comparison) -> bool:
    """Return whether "worse" also holds when the number of comparisons is taken into account."""
    return each.verdict == "worse" and each.p < ALPHA


@dataclass(frozen=True)
class Leader:
    """The method with the best mean on a data set, and how the others compare with it."""

    dataset: str
    metric: str
    method: str
    mean: float
    others: tuple[Comparison, ...]

    def standing(self, method: str) -> str:
        """Return how a method stands, in a word; a star behind it: also after correction."""
        if method == self.method:
            return BEST
        return next((each.verdict + "*" * holds(each) for each in self.others
                     if each.method == method), "")

    def of(self, standing: str) -> list[Comparison]:
        """Return the methods that stand to the best one like this."""
        return [each for each in self.others if each.verdict == standing]


@dataclass(frozen=True)
class Standings:
    """How all methods stand on all data sets; ``sampled`` is as in a verdict."""

    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    leaders: tuple[Leader, ...]
    sampled: bool

    def count(self, method: str, standing: str) -> int:
        """Return on how many data sets a method stands like this."""
        return sum(leader.standing(method).rstrip("*") == standing for leader in self.leaders)

    def good(self, method: str) -> int:
        """Return on how many data sets a method is the best, or equivalent to the best."""
        return self.count(method, BEST) + self.count(method, "equivalent")

    @property
    def ranked(self) -> list[str]:
        """The methods, the most often good one first."""
        return sorted(self.methods, key=lambda method: (
            -self.good(method), self.count(method, "worse"), -self.count(method, BEST)))

    def as_json(self) -> dict[str, Any]:
        """Return the standings for a JSON file; what is not a number is null."""
        found: dict[str, Any] = plain(asdict(self) | {"counts": {
            method: {standing: self.count(method, standing) for standing in STANDINGS}
            for method in self.ranked}})
        return found


def standings(folders: Sequence[Path], points: float = MARGIN_POINTS,
              mse: float = MARGIN_MSE) -> Standings:
    """Return how every method of one or several runs (seeds) stands to the best."""
    return standings_of(read_runs(folders), points, mse)


def standings_of(runs: Sequence[Run], points: float = MARGIN_POINTS,
                 mse: float = MARGIN_MSE) -> Standings:
    """Return how every method of runs that have been read stands to the best."""
    methods = methods_to_compare(runs[0])
    if len(methods) < 2:
        raise TapflError(f"{runs[0].path}: the run has one method, {methods[0]}; expected several "
                         "to compare")
    scores = [run.scores(methods) for run in runs]
    gains = {name: Gains(runs, name, scores) for name in methods}
    found = (_leader(gains, *column, points, mse) for column in _columns(runs[0]))
    leaders = [leader for leader in found if leader is not None]
    corrected = iter(holm([each.pairs.p for leader in leaders for each in leader.others]))
    return Standings(
        tuple(run.record.seed for run in runs), tuple(methods),
        tuple(dataclasses.replace(leader, others=tuple(
            dataclasses.replace(each, p=next(corrected)) for each in leader.others))
            for leader in leaders), all(scores))


def standings_rows(found: Standings) -> list[dict[str, str]]:
    """Return a row for every method: its counts, and how it stands on each data set."""
    return [{"method": method, **{each: str(found.count(method, each)) for each in STANDINGS},
             **{leader.dataset: leader.standing(method) for leader in found.leaders}}
            for method in found.ranked]


def methods_to_compare(run: Run) -> list[str]:
    """Return a run's methods without the constant answer, which is nobody's model."""
    return [name for name in run.methods if name != CONSTANT]


def _columns(run: Run) -> list[tuple[str, str, str]]:
    """Return every task with the metric that speaks for it, and its data set; the paper's first."""
    datasets = {row["task"]: row["dataset"] for row in run.rows}
    order = {name: place for place, name in enumerate(DATASETS)}
    return sorted(((task, metric, datasets[task]) for task, metric in task_metrics(run.rows)),
                  key=lambda column: order.get(column[2], len(order)))


def _leader(gains: Mapping[str, Gains], task: str, metric: str, dataset: str, points: float,
            mse: float) -> Leader | None:
    """Return who leads on a data set; nobody does where no mean is finite."""
    means = {}
    for name, each in gains.items():
        clients = each.clients(name, task, metric)
        if clients:
            means[name] = float(each.values(name, clients, task, metric).mean())
    finite = {name: sign(metric) * mean for name, mean in means.items() if np.isfinite(mean)}
    if not finite:
        return None
    best = max(finite, key=lambda name: finite[name])
    others = tuple(compare_on(gains[name], best, task, metric, dataset, points, mse)
                   for name in means if name != best and gains[name].clients(best, task, metric))
    return Leader(dataset, metric, best, means[best], others)
