"""Whether a finished run still has all that it wrote: tables of a part of it would be wrong."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from tapfl.data.participants import tasks_of
from tapfl.engine.record import RunRecord
from tapfl.engine.results import read_results
from tapfl.errors import TapflError, as_tapfl_error
from tapfl.evaluation.constant import CONSTANT
from tapfl.methods import federated_runs, method_specs
from tapfl.report.timeline import FILE, read_timeline
from tapfl.tasks import TEXT_GENERATION

RESULTS = "results.csv"


def check_whole(folder: Path, record: RunRecord) -> None:
    """Refuse a finished run whose results or events are missing, unreadable or cut off."""
    for name in (RESULTS, FILE):
        if not (folder / name).is_file():
            raise TapflError(f"{folder / name}: missing")
    _check_results(folder / RESULTS, record)
    rounds = read_timeline([(folder, record.seed)]).rounds
    for run in federated_runs(method_specs(record.config)):
        if rounds[run.name] < run.config.train.rounds:
            raise TapflError(f"{folder / FILE}: damaged: it has {rounds[run.name]} of the "
                             f"{run.config.train.rounds} rounds of {run.name}")


def _check_results(path: Path, record: RunRecord) -> None:
    """Refuse results that lack a line, or the end of the last one."""
    with as_tapfl_error(f"{path}: cannot be read"):
        whole = path.read_bytes().endswith(b"\n")
    if not whole:  # it may still be read: a shorter number is a number, too
        raise TapflError(f"{path}: damaged: its last line is cut off")
    found = {(row["method"], row["client"], row["task"], row["metric"])
             for row in read_results(path)}
    metrics: dict[tuple[str, str], set[str]] = {}  # all methods are scored alike
    for _, client, task, metric in found:
        metrics.setdefault((client, task), set()).add(metric)
    for client, tasks in tasks_of(record.federation, record.config.federation).items():
        for task in tasks if client not in record.left else ():
            written = record.federation.tasks[task].kind == TEXT_GENERATION
            methods = (*record.config.methods, *([CONSTANT] if written else ()))
            for method, metric in product(methods, sorted(metrics.get((client, task), {"score"}))):
                if (method, client, task, metric) not in found:
                    raise TapflError(f"{path}: damaged: it has no {metric} of {method} for "
                                     f"client {client} and task {task}")
