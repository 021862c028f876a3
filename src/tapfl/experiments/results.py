"""What the runs of a plan have found, part by part and seed by seed, whatever run it is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.engine.record import read_record
from tapfl.engine.results import read_results
from tapfl.engine.scores import SampleScores, read_scores
from tapfl.evaluation.constant import CONSTANT
from tapfl.experiments.plan import Needed, Plan
from tapfl.report.runs import Run
from tapfl.report.timeline import event_lines

Source = tuple[Path, str]  # a run, and a method's name in it


@dataclass(frozen=True)
class SeedOfPart(Run):
    """A part's results for one seed; ``sources`` says which run has which method."""

    sources: dict[str, Source]

    def scores(self, methods: Sequence[str]) -> SampleScores:
        """Return the score of every test sample; nothing where a run has kept none."""
        found: SampleScores = {}
        for method in methods:
            folder, name = self.sources[method]
            kept = read_scores(folder, [name])
            if kept is None:
                return {}
            found |= {(method, *key[1:]): values for key, values in kept.items()}
        return found

    def events(self, method: str, kind: str) -> Iterator[dict[str, Any]]:
        """Yield a method's events of one kind."""
        folder, name = self.sources[method]
        for event, _ in event_lines(folder / "events.jsonl"):
            if (event.get("event"), event.get("method")) == (kind, name):
                yield event


def seeds_of(plan: Plan, experiment: int, part: int) -> list[SeedOfPart]:
    """Return a part's results, seed by seed, under the part's names of its methods."""
    return [read_seed(sources_of(plan, models)) for (e, p, _), models in plan.needed.items()
            if (e, p) == (experiment, part)]


def sources_of(plan: Plan, models: Sequence[Needed]) -> dict[str, Source]:
    """Return which run has which method of a part, as far as they are there."""
    return {model.spec.name: plan.there[model.key] for model in models if model.key in plan.there}


def read_seed(sources: dict[str, Source]) -> SeedOfPart:
    """Read a part's results for one seed from the runs that have its methods."""
    rows: list[dict[str, Any]] = []
    for method, (folder, name) in sources.items():
        rows += [{**row, "method": method} for row in read_results(folder / "results.csv")
                 if row["method"] == name]
    folder = next(iter(sources.values()))[0]
    rows += [row for row in read_results(folder / "results.csv") if row["method"] == CONSTANT]
    return SeedOfPart(folder, read_record(folder), rows, sources)
