"""What a report shows, read from the folders of one run or of several seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tapfl.blocks import Ownership
from tapfl.data.participants import client_ids, parse_id
from tapfl.engine.labels import TaskLabels, read_labels
from tapfl.engine.record import FILE, RunRecord, read_record
from tapfl.errors import TapflError
from tapfl.evaluation.constant import CONSTANT
from tapfl.methods import LOCAL
from tapfl.report.footprint import Footprint, footprint
from tapfl.report.markup import counted
from tapfl.report.runs import Run, read_runs
from tapfl.report.standings import Standings, methods_to_compare, standings_of
from tapfl.report.timeline import Timeline, read_timeline
from tapfl.report.verdict import (
    ClientOutcome,
    VerdictReport,
    client_outcomes,
    usual_rivals,
    verdict,
)


@dataclass(frozen=True)
class Gathered:
    """Everything that a report is made of. A run under way has a record and events, no more.

    ``verdict`` compares the method in question, by default the personal model, with local training,
    or with the federated model where there is none; ``beside`` are the clients compared with the
    federated model. ``standings`` compares all methods, where there are more than two. ``labels``
    are those of the first run, by client and task.
    """

    paths: tuple[Path, ...]
    records: tuple[RunRecord, ...]
    runs: tuple[Run, ...]
    timeline: Timeline
    verdict: VerdictReport | None
    beside: tuple[ClientOutcome, ...]
    footprints: tuple[Footprint, ...]
    warnings: tuple[str, ...]
    labels: Mapping[str, Mapping[str, TaskLabels]] = field(default_factory=dict)
    standings: Standings | None = None

    @property
    def record(self) -> RunRecord:
        """The first run's record; seeds differ in nothing that a report shows once."""
        return self.records[0]

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the order given."""
        return [record.seed for record in self.records]

    @property
    def finished(self) -> bool:
        """Whether there are results."""
        return bool(self.runs)

    @property
    def federated(self) -> str | None:
        """The federated run that a map is drawn of: the record's choice, or the first."""
        chosen = self.record.models.get("federated")
        return chosen if chosen in self.timeline.rounds else next(
            (name for name in self.timeline.rounds if name != LOCAL), None)


def seed_folders(folder: Path) -> list[Path]:
    """Return the runs below a folder that `tapfl run --seeds` has written, in order of seeds."""
    found = [path for path in folder.glob("seed*") if path.name[4:].isdecimal()
             and (path / FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name[4:]))


def gather(folders: Sequence[Path], method: str | None = None,
           against: Sequence[str] = ()) -> Gathered:
    """Read finished runs that are seeds of one configuration, or one run that is under way.

    ``method`` and ``against`` are as for ``verdict``.
    """
    if not folders:
        raise TapflError("report: expected the folder of a run")
    under_way = len(folders) == 1 and _is_under_way(folders[0])
    runs = () if under_way else tuple(read_runs(folders))
    records = tuple(run.record for run in runs) or (read_record(folders[0]),)
    timeline = read_timeline(
        [(path, record.seed) for path, record in zip(folders, records, strict=True)], under_way)
    warnings: list[str] = []
    judged, beside = _judge(runs, method, against)
    footprints = _footprints(runs, timeline, warnings)
    warnings[:0] = _warnings(records, runs, timeline, judged)
    return Gathered(tuple(folders), records, runs, timeline, judged, beside, footprints,
                    tuple(warnings), read_labels(folders[0]),
                    standings_of(runs) if runs and len(methods_to_compare(runs[0])) > 2 else None)


def _is_under_way(folder: Path) -> bool:
    if not (folder / FILE).is_file():
        raise TapflError(f"{folder}: no run here ({FILE} is missing)")
    return not read_record(folder).finished


def _judge(runs: Sequence[Run], method: str | None, against: Sequence[str],
           ) -> tuple[VerdictReport | None, tuple[ClientOutcome, ...]]:
    """Compare a method with what clients would have without it, if there is anything."""
    if not runs:
        return None, ()
    models = runs[0].record.models
    chosen, federated = method or models.get("personal"), models.get("federated")
    others = usual_rivals(runs[0], chosen)
    if not (method or against) and (chosen not in runs[0].methods or not others):
        return None, ()
    found = verdict([run.path for run in runs], method, against)
    beside = (client_outcomes(runs, found.method, str(federated))
              if federated in others and found.alternative != federated else ())
    return found, beside


def _footprints(runs: Sequence[Run], timeline: Timeline,
                warnings: list[str]) -> tuple[Footprint, ...]:
    """Return what the runs have cost, as far as their records say it."""
    if not runs or not timeline.events or "blocks" not in runs[0].record.parameters:
        return ()
    try:
        return tuple(footprint(run.path) for run in runs)
    except TapflError as error:  # weights may be gone, for one
        warnings.append(f"the footprint could not be counted: {error}")
        return ()


def _warnings(records: Sequence[RunRecord], runs: Sequence[Run], timeline: Timeline,
              judged: VerdictReport | None) -> list[str]:
    """Return what a reader must know before trusting a figure."""
    found = []
    if runs and len(runs) == 1:
        found.append("one seed: nothing is said of how another would turn out")
    if records[0].random_weights:
        found.append("the foundation was not pre-trained: its weights are random")
    if judged and not judged.sampled:
        found.append("no scores of single samples were kept: intervals rest on clients and seeds")
    for record in records:
        found += [f"seed {record.seed}, {lost.get('where')}: {lost.get('dropped')} of "
                  f"{lost.get('rows')} rows were left out" for lost in record.dropped]
    wrong = sum(not math.isfinite(row["value"]) for run in runs for row in run.rows)
    if wrong:
        found.append(f"{counted(wrong, 'result')} not finite")
    kinds = Counter(each.kind for each in timeline.incidents)
    nouns = {"refused": "refused update", "missing": "missing answer",
             "diverged": "diverged training"}
    found += [f"{counted(count, nouns[kind])} (listed below)" for kind, count in kinds.items()]
    if runs and not timeline.events:
        found.append("no events were found: there are no losses, replacements and traffic to show")
    found += [f"seed {record.seed}: the code of {', '.join(record.mixed)} changed while the run "
              "was interrupted" for record in records if record.mixed]
    differing = [name for name in records[0].code
                 if len({record.code.get(name) for record in records}) > 1]
    if differing:
        found.append(f"the runs were made by different versions of the code of "
                     f"{', '.join(differing)}")
    return found


def holding(record: RunRecord, client: str, task: str) -> str:
    """Return a client's share of a task's data in its group, as the federation says it."""
    _, name = parse_id(client, record.config.federation.groups)
    for entry in record.federation.clients:
        if entry.name == name and task in entry.tasks:
            share = entry.tasks[task]
            return "own data" if hasattr(share, "model_dump") else str(share)
    return ""


def owned_blocks(record: RunRecord) -> dict[str, list[str]]:
    """Return the blocks of every client, in the order of the federation."""
    tasks, known = record.federation.task_table(), record.parameters.get("blocks", {})
    ownership = Ownership(tasks, record.config.backbone.kind)
    config, kinds = record.config.federation, {e.name: e for e in record.federation.clients}
    blocks = {name: [b for b in ownership.blocks_of(None, entry.tasks) if not known or b in known]
              for name, entry in kinds.items()}
    return {client: blocks[parse_id(client, config.groups)[1]]
            for client in client_ids(record.federation, config)}


def methods_of(gathered: Gathered) -> list[str]:
    """Return the methods with results, the constant answer last."""
    known = gathered.runs[0].methods
    return sorted(known, key=lambda method: method == CONSTANT)
