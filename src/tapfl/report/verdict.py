"""What runs say: is a method better than another, and whom did federation help?

Several runs are several seeds of one configuration. Everything is in terms of the *gain*: the
difference between two methods, above 0 where the first is better, whatever the metric.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tapfl.engine.scores import SampleScores
from tapfl.errors import TapflError, nearest
from tapfl.evaluation.bootstrap import (
    MARGIN_MSE,
    MARGIN_POINTS,
    Floats,
    Interval,
    Verdict,
    interval,
    judge,
    margin,
)
from tapfl.evaluation.metrics import GENERAL, LOWER_IS_BETTER, metric_kind, metric_place
from tapfl.evaluation.significance import ALPHA, ENOUGH, Paired, holm, paired, student_quantile
from tapfl.methods import alone_among
from tapfl.report.runs import Run, read_runs

Outcome = Literal["helped", "hurt", "not told apart"]
OUTCOMES: tuple[Outcome, ...] = ("helped", "not told apart", "hurt")


@dataclass(frozen=True)
class Comparison:
    """Two methods on a data set: means, the gain with its interval, and what that says.

    ``pairs`` compares client by client and seed by seed as if all were independent; ``p`` is its
    test, corrected by Holm for all comparisons of the report. The verdict rests on the interval.
    """

    method: str
    against: str
    dataset: str
    metric: str
    mean: float
    baseline: float
    gain: Interval
    margin: float
    verdict: Verdict
    pairs: Paired
    p: float


@dataclass(frozen=True)
class ClientOutcome:
    """A client on a task: its gain by federation, and ``p`` corrected for all clients."""

    client: str
    task: str
    metric: str
    mean: float
    baseline: float
    gain: Interval
    effect: float
    p: float
    outcome: Outcome


@dataclass(frozen=True)
class VerdictReport:
    """All of it. ``sampled`` says whether scores of single samples were at hand."""

    method: str
    against: tuple[str, ...]
    seeds: tuple[int, ...]
    comparisons: tuple[Comparison, ...]
    alternative: str  # what clients would have without this method: that outcomes compare with
    clients: tuple[ClientOutcome, ...]
    sampled: bool

    @property
    def counts(self) -> dict[str, int]:
        """How many clients were helped, hurt, or not told apart, counted by task."""
        found = Counter(each.outcome for each in self.clients)
        return {outcome: found[outcome] for outcome in OUTCOMES}

    def as_json(self) -> dict[str, Any]:
        """Return the report for a JSON file; what is not a number is null."""
        found: dict[str, Any] = plain(asdict(self) | {"counts": self.counts})
        return found


def plain(value: Any) -> Any:
    """Return a value for a JSON file: what is not a number is null."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdict(folders: Sequence[Path], method: str | None = None, against: Sequence[str] = (),
            points: float = MARGIN_POINTS, mse: float = MARGIN_MSE) -> VerdictReport:
    """Return how a method compares with others in one or several runs (seeds).

    By default it is the run's preferred personal model, against local training and the federated
    model; ``against`` names more. ``points`` and ``mse`` are the margins of equivalence.
    """
    runs = read_runs(folders)
    known, models = runs[0].methods, runs[0].record.models
    method = method or models.get("personal")
    if method is None:
        raise TapflError(f"{folders[0]}: the run has no personal model; name one with --method "
                         f"(there are: {', '.join(known)})")
    for name, option in ((method, "--method"), *((name, "--against") for name in against)):
        if name not in known:
            raise TapflError(f"{option}: the run has no '{name}'" + nearest(name, known))
    others = [name for name in dict.fromkeys([*usual_rivals(runs[0], method), *against])
              if name != method]
    if not others:
        raise TapflError(f"{folders[0]}: nothing to compare '{method}' with; name a method with "
                         f"--against (there are: {', '.join(known)})")
    gains = Gains(runs, method, [run.scores([method, *others]) for run in runs])
    return VerdictReport(
        method, tuple(others), tuple(run.record.seed for run in runs),
        _comparisons(gains, others, points, mse), others[0], _client_outcomes(gains, others[0]),
        all(gains.scores))


def usual_rivals(run: Run, method: str | None) -> list[str]:
    """Return what a method is always compared with: local training and the federated model."""
    usual = (alone_among(run.record.config, run.methods), run.record.models.get("federated"))
    return [name for name in usual if name is not None and name in run.methods and name != method]


def compare(runs: Sequence[Run], method: str, others: Sequence[str]) -> tuple[Comparison, ...]:
    """Return how a method compares with others, data set by data set."""
    gains = Gains(runs, method, [run.scores([method, *others]) for run in runs])
    return _comparisons(gains, others, MARGIN_POINTS, MARGIN_MSE)


def client_outcomes(runs: Sequence[Run], method: str, against: str) -> tuple[ClientOutcome, ...]:
    """Return who is better off with a method than with another, the most helped first."""
    gains = Gains(runs, method, [run.scores([method, against]) for run in runs])
    return _client_outcomes(gains, against)


@dataclass(frozen=True)
class Gains:
    """What a method gains over others, run by run."""

    runs: Sequence[Run]
    method: str
    scores: Sequence[SampleScores]

    def clients(self, against: str, task: str, metric: str) -> list[str]:
        """Return the clients that have both results in every run, in the order of the first."""
        return [row["client"] for row in self.runs[0].rows
                if (row["method"], row["task"], row["metric"]) == (self.method, task, metric)
                and all((name, row["client"], task, metric) in run.values
                        for run in self.runs for name in (self.method, against))]

    def values(self, name: str, clients: Sequence[str], task: str, metric: str) -> Floats:
        """Return a method's results: a row per run, a column per client."""
        return np.array([[run.values[name, client, task, metric] for client in clients]
                         for run in self.runs])

    def samples(self, against: str, client: str, task: str, metric: str) -> list[Floats] | None:
        """Return, run by run, a client's gain on every test sample, where scores were kept."""
        found = []
        for scores in self.scores:
            mine, theirs = (scores.get((name, client, task, metric))
                            for name in (self.method, against))
            if mine is None or theirs is None or len(mine) != len(theirs):
                return None
            found.append(sign(metric) * (mine.astype(np.float64) - theirs))
        return found


def sign(metric: str) -> int:
    """Return what turns a difference into a gain."""
    return -1 if metric_kind(metric) in LOWER_IS_BETTER else 1


# Data sets


def _comparisons(gains: Gains, others: Sequence[str], points: float,
                 mse: float) -> tuple[Comparison, ...]:
    columns = dict.fromkeys((row["task"], row["metric"], row["dataset"])
                            for row in gains.runs[0].rows if row["method"] == gains.method)
    found = [compare_on(gains, against, task, metric, dataset, points, mse)
             for against in others for task, metric, dataset in columns
             if gains.clients(against, task, metric)]
    corrected = holm([each.pairs.p for each in found])
    return tuple(dataclasses.replace(each, p=p)
                 for each, p in zip(found, corrected, strict=True))


def compare_on(gains: Gains, against: str, task: str, metric: str, dataset: str, points: float,
               mse: float) -> Comparison:
    """Compare two methods on a data set; ``p`` is not corrected yet."""
    clients = gains.clients(against, task, metric)
    mine, theirs = (gains.values(name, clients, task, metric) for name in (gains.method, against))
    difference = sign(metric) * (mine - theirs)
    by_client = [gains.samples(against, client, task, metric) for client in clients]
    known = [each for each in by_client if each is not None]
    samples = list(zip(*known, strict=True)) if len(known) == len(clients) else None
    gain = interval(difference, samples, gains.runs[0].shares_tests(task))
    within = margin(metric, float(theirs.mean()), points, mse)
    pairs = paired(difference)
    return Comparison(gains.method, against, dataset, metric, float(mine.mean()),
                      float(theirs.mean()), gain, within, judge(gain, within), pairs, pairs.p)


# Clients


def _client_outcomes(gains: Gains, against: str) -> tuple[ClientOutcome, ...]:
    """Return who was helped and who was hurt, the most helped first."""
    found = []
    for task, metric in task_metrics(gains.runs[0].rows):
        for client in gains.clients(against, task, metric):
            mine, theirs = (gains.values(name, [client], task, metric)
                            for name in (gains.method, against))
            samples = _samples_of_client(gains, against, client, task, metric)
            test = paired(sign(metric) * (mine - theirs) if samples is None else samples)
            found.append((client, task, metric, float(mine.mean()), float(theirs.mean()), test))
    corrected = holm([test.p for *_, test in found])
    outcomes = [
        ClientOutcome(client, task, metric, mean, baseline, _interval_of(test), test.effect, p,
                      _outcome(test.mean, p))
        for (client, task, metric, mean, baseline, test), p in zip(found, corrected, strict=True)]
    return tuple(sorted(outcomes, key=lambda each: (
        OUTCOMES.index(each.outcome), math.inf if math.isnan(each.effect) else -each.effect)))


def task_metrics(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return for every task the metric that speaks for it, on the client's own test data."""
    metrics: dict[str, list[str]] = {}
    for row in rows:
        if not row["metric"].startswith(GENERAL):
            metrics.setdefault(row["task"], []).append(row["metric"])
    return [(task, min(each, key=metric_place)) for task, each in metrics.items()]


def _samples_of_client(gains: Gains, against: str, client: str, task: str,
                       metric: str) -> Floats | None:
    """Return a client's gain on every test sample: the mean over seeds where these share them."""
    found = gains.samples(against, client, task, metric)
    if found is None:
        return None
    if gains.runs[0].draws_tests(task) or len({len(each) for each in found}) > 1:
        return np.concatenate(found)
    return np.asarray(np.mean(found, axis=0))


def _interval_of(test: Paired) -> Interval:
    """Return the mean of paired differences with its 95% interval."""
    few = test.deviation == 0 and test.pairs < ENOUGH
    if test.pairs < 2 or few or not math.isfinite(test.deviation):
        return Interval(test.mean, math.nan, math.nan)
    half = student_quantile(ALPHA, test.pairs - 1) * test.error
    return Interval(test.mean, test.mean - half, test.mean + half)


def _outcome(gain: float, p: float) -> Outcome:
    if not p < ALPHA:
        return "not told apart"
    return "helped" if gain > 0 else "hurt"
