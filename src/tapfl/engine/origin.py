"""A stored run that another one starts from: what it has, and whether that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.layout import FederationFile
from tapfl.data.participants import client_ids, parse_id
from tapfl.engine.checkpoints import Checkpoints
from tapfl.engine.files import Label, read_state
from tapfl.engine.record import ELSEWHERE, FILE, RunRecord, read_record
from tapfl.errors import TapflError
from tapfl.methods import RunSpec, federated_runs, folder_name, method_specs

SAME = ("foundation", "backbone", "decoder")  # sections that W's shapes and meaning depend on
RANKS = ("encoder_rank", "attention_rank", "expert_rank")


@dataclass(frozen=True)
class Stored:
    """The W of a federated run after a round; ``listed`` is what its clients keep, where known."""

    round: int
    blocks: BlockState
    sha256: str
    norms: Mapping[str, Any]
    listed: Sequence[Any] | None


class Origin:
    """The folder of a run, which is only read."""

    def __init__(self, path: Path) -> None:
        if not (path / FILE).is_file():
            raise TapflError(f"start: {path}: no run here ({FILE} is missing)")
        self.path = path
        self.record: RunRecord = read_record(path)
        self.runs: dict[str, RunSpec] = {
            run.name: run for run in federated_runs(method_specs(self.record.config))}
        self.clients = set(client_ids(self.record.federation, self.record.config.federation))

    def folder(self, run: str) -> Path:
        """Return where the state of a federated run is."""
        return self.path / "state" / folder_name(run)

    def stored(self, run: str) -> Stored:
        """Return the newest W of a federated run that is whole."""
        faults = []
        for found in Checkpoints(self.folder(run) / "checkpoints", run).newest_first():
            if not isinstance(found, str):
                round_, blocks, notes = found
                elsewhere = ELSEWHERE in self.record.data.values()
                return Stored(round_, blocks, str(notes["blocks"]), notes["norms"],
                              None if elsewhere else notes["clients"])
            faults.append(found)
        path = self.path / "models" / folder_name(run) / "server.safetensors"
        if path.is_file() and run in self.runs:
            rounds = self.runs[run].config.train.rounds
            blocks, _, digest = read_state(path, Label(run, "", rounds))
            return Stored(rounds - 1, blocks, digest, {}, None)
        raise TapflError(faults[0] if faults else
                         f"{self.path}: has no stored model of '{run}'; it has not come to it, or "
                         "kept none (checkpoint.models: false), or was interrupted and had no "
                         "checkpoints (checkpoint.every: null), or its state was removed")

    # Whether it fits

    def check(self, config: Config, file: FederationFile,
              classes: Mapping[str, Sequence[str]]) -> None:
        """Refuse a configuration that cannot go on from this run."""
        before = self.record.config
        for key in SAME:
            self._same(key, getattr(before, key), getattr(config, key))
        for key in RANKS:
            self._same(f"lora.{key}", getattr(before.lora, key), getattr(config.lora, key))
        self._same("seed", before.seed, config.seed)
        tasks, known = file.task_table(), self.record.federation.task_table()
        for name in [name for name in tasks if name in known]:
            self._same(f"task '{name}'", known[name], tasks[name])
            if name in self.record.classes and name in classes:
                self._same(f"classes of task '{name}'", list(self.record.classes[name]),
                           list(classes[name]))
        now = _kinds(file)
        before_kinds, groups = _kinds(self.record.federation), before.federation.groups
        for client in client_ids(file, config.federation):
            if client in self.clients:
                had = before_kinds[parse_id(client, groups)[1]]
                lost = had - now[parse_id(client, config.federation.groups)[1]]
                if lost:
                    raise TapflError(f"start: {self.path}: client '{client}' had the task "
                                     f"'{min(lost)}' there; expected that it still has it")

    def check_run(self, run: RunSpec) -> None:
        """Refuse a federated run whose methods are others here under the same names."""
        there = self.runs[run.name]
        self._same(f"method '{run.name}'", there.federated, run.federated)
        personal = {spec.name: spec.personalizer for spec in there.personal}
        for spec in run.personal:
            self._same(f"method '{spec.name}'", personal.get(spec.name, spec.personalizer),
                       spec.personalizer)

    def _same(self, what: str, before: object, now: object) -> None:
        if before != now:
            raise TapflError(f"start: {what}: {self.path} was made with {before}, this run has "
                             f"{now}; expected the same")

    def merged(self, stored: Stored, initial: BlockState) -> BlockState:
        """Return W as it goes on: the stored blocks, and fresh ones where there are none."""
        there = stored.blocks.subset([name for name in stored.blocks if name in initial])
        fault = there.misfit(initial.to("cpu")) or there.not_finite()
        if fault is not None:
            raise TapflError(f"start: {self.path}: {fault}")
        return BlockState({**initial.to("cpu"), **there}, initial.shapes)

    def known(self, clients: Iterable[str]) -> list[str]:
        """Return those of some clients that were clients of this run."""
        return [client for client in clients if client in self.clients]


def _kinds(file: FederationFile) -> dict[str, set[str]]:
    return {entry.name: set(entry.tasks) for entry in file.clients}
