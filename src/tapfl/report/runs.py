"""Finished runs to compare methods in: seeds of one configuration."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapfl.engine.record import FILE, RunRecord, read_record
from tapfl.engine.results import no_results, read_results
from tapfl.engine.scores import FOLDER as SCORES
from tapfl.engine.scores import SampleScores, read_scores, score_file
from tapfl.errors import TapflError
from tapfl.evaluation.metrics import GENERAL

# Runs that differ in these alone go together: none of them is part of what is compared.
MAY_DIFFER = ("seed", "threads", "speed", "checkpoint")
SCORING = ("metrics", "bertscore_model", "bertscore_layer", "max_new_tokens")  # of ``evaluation``


@dataclass(frozen=True)
class Run:
    """A finished run: where it is, its record, and the rows of its results."""

    path: Path
    record: RunRecord
    rows: list[dict[str, Any]]

    @functools.cached_property
    def values(self) -> dict[tuple[str, str, str, str], float]:
        """Results by method, client, task and metric."""
        return {(r["method"], r["client"], r["task"], r["metric"]): r["value"] for r in self.rows}

    @functools.cached_property
    def methods(self) -> list[str]:
        """The methods that there are results of."""
        return list(dict.fromkeys(row["method"] for row in self.rows))

    def scores(self, methods: Sequence[str]) -> SampleScores:
        """Return the score of every test sample; nothing where the run has kept none."""
        found = read_scores(self.path, methods)
        if found is None:
            return {}
        _check_scores(self.path, self.rows, found)
        return found

    def draws_tests(self, task: str) -> bool:
        """Return whether a client's test data depend on the seed: label skew deals them out."""
        entry = self.record.federation.tasks.get(task)
        return (self.record.config.federation.dirichlet is not None and entry is not None
                and entry.kind.endswith("classification") and task not in self._brought)

    def shares_tests(self, task: str) -> bool:
        """Return whether all clients of a task are tested on the same samples."""
        return task not in self._brought and not self.draws_tests(task)

    @functools.cached_property
    def _brought(self) -> Collection[str]:
        """Tasks whose data the clients have brought: nothing is dealt out."""
        return self.record.federation.own_data(Path()).clients


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read finished runs that differ in nothing but their seeds."""
    found: list[Run] = []
    for folder in folders:
        run = _read_run(folder)
        for before in found:
            if before.record.seed == run.record.seed:
                raise TapflError(f"{folder}: has seed {run.record.seed}, as {before.path}; "
                                 "expected runs of different seeds")
        if found:
            _check_same(found[0], run)
        found.append(run)
    return found


def _read_run(folder: Path) -> Run:
    if not (folder / FILE).is_file():
        raise TapflError(f"{folder}: no run here ({FILE} is missing)")
    record = read_record(folder)
    if not record.finished or not (folder / "results.csv").is_file():
        raise TapflError(f"{folder}: this run is not finished; continue it with tapfl run "
                         f"--resume --out {folder}")
    rows = read_results(folder / "results.csv")
    if not rows:
        raise no_results(folder)
    return Run(folder, record, rows)


def _check_same(first: Run, run: Run) -> None:
    """Refuse a run of another configuration."""
    for key, (old, new) in differences(first.record, run.record).items():
        raise TapflError(f"{run.path}: another configuration than {first.path}: '{key}' differs "
                         f"({new} and {old}); expected runs that differ in the seed alone")


def differences(first: RunRecord, other: RunRecord) -> dict[str, tuple[Any, Any]]:
    """Return what makes two runs more than seeds of one configuration: both values, by key."""
    old, new = _configuration(first), _configuration(other)
    return {key: (old.get(key), new[key]) for key in new if new[key] != old.get(key)}


def _configuration(record: RunRecord) -> dict[str, Any]:
    """Return what must be equal: files may lie elsewhere, but must hold the same."""
    values = record.config.model_dump(mode="json", exclude=set(MAY_DIFFER))
    values["evaluation"] = {key: values["evaluation"][key] for key in SCORING}
    values["data"].pop("folder")
    values["federation"].pop("file")
    values["start"] = values["start"] is not None  # each seed goes on from a run of its own
    return values | {"federation_sha256": record.federation_sha256, "metrics": record.metrics}


def _check_scores(folder: Path, rows: Sequence[Mapping[str, Any]], scores: SampleScores) -> None:
    """Refuse scores that are not those that the results are means of, or not all of them."""
    there = {key[:2] for key in scores}
    methods = {method for method, _ in there}
    for row in rows:
        if (row["method"] in methods and (row["method"], row["client"]) not in there
                and row["samples"] and not row["metric"].startswith(GENERAL)):
            raise TapflError(f"{score_file(folder, row['method'], row['client'])} is missing; "
                             f"remove {folder / SCORES} to do without scores of single samples")
        key = (row["method"], row["client"], row["task"], row["metric"])
        values = scores.get(key)
        if values is not None and (len(values) != row["samples"] or not np.isclose(
                values.mean(dtype=np.float64), row["value"], rtol=1e-3, atol=1e-3,
                equal_nan=True)):
            raise TapflError(f"{folder}: the scores of {key[0]}, client {key[1]}, {key[2]} "
                             f"({key[3]}) are not those of results.csv")
