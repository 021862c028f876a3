"""A node's own folder: a run's folder for its clients alone, complete without the server."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tapfl.config import NEW
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.departures import leavers
from tapfl.engine.files import on_disk, read_checked_json, replacing, write_checked_json
from tapfl.engine.flower.answered import FOLDER, Answered
from tapfl.engine.flower.reported import records
from tapfl.engine.folder import RunFolder
from tapfl.engine.messages import Final, Row
from tapfl.engine.origin import Origin
from tapfl.engine.record import RunRecord, Started, check_unchanged, memory, read_record
from tapfl.engine.registry import Plan
from tapfl.engine.results import write_results
from tapfl.engine.run import federation_digest
from tapfl.engine.site import Here
from tapfl.engine.start import started
from tapfl.errors import TapflError
from tapfl.evaluation.constant import CONSTANT
from tapfl.methods import federated_runs, folder_name, method_specs


class OwnFolder:
    """What a node writes down of its clients: run.json, results.csv, events.jsonl."""

    def __init__(self, path: Path, here: Here, plans: Sequence[Plan]) -> None:
        self.path, self._here, self._plans = path, here, plans
        self._started = time.perf_counter()
        self._stack = contextlib.ExitStack()  # the folder is this process's until it is closed
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(RunFolder(path, resume=(path / "run.json").is_file()))
            self._record = self._begin(folder.is_new)
            folder.keep()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Leave the folder to others."""
        self._stack.close()

    def _begin(self, new: bool) -> RunRecord:
        config = self._here.config
        facts = self._here.facts(self._plans) | {
            "config": config, "federation_sha256": federation_digest(config)}
        if new:
            # Its id is that of the server's run, once that has asked for something.
            record = RunRecord(threads=torch.get_num_threads(), start=started(config, self.path),
                               **facts | {"id": ""})
        else:
            before = read_record(self.path)
            check_unchanged(self.path, before.config, config, "give the node another folder")
            for key, what in (("data_sha256", "data"), ("weights", "weights")):
                if getattr(before, key) != facts[key]:
                    raise TapflError(f"{self.path}: this folder was made with other {what}")
            record = before.model_copy(update=facts)
        if record.start is not None and not record.start.taken:
            self._take_earlier(record.start, facts)
            record.start.taken = True
        record.save(self.path)
        self._here.started()
        return record

    def _take_earlier(self, start: Started, facts: Mapping[str, Any]) -> None:
        """Copy what the node's clients kept in its earlier folder."""
        config = self._here.config
        if config.start in (None, NEW):
            return
        origin = Origin(Path(str(config.start)))
        origin.check(config, facts["federation"], facts["classes"])
        for run in federated_runs(method_specs(config)):
            if run.name not in origin.runs:
                continue
            origin.check_run(run)
            before = ClientStore(origin.folder(run.name) / "clients")
            now = ClientStore(self.path / "state" / folder_name(run.name) / "clients")
            for owner in (run.name, *(spec.name for spec in run.personal)):
                for client in start.clients:
                    now.take(before.folder, before.kept(owner, client))
            answered = Answered(now.folder.parent / FOLDER, run.name)
            for client in start.clients:
                answered.take(origin.folder(run.name) / FOLDER, client)

    @property
    def start(self) -> Started | None:
        """What this folder's clients went on from."""
        return self._record.start

    def belongs_to(self, run: str) -> None:
        """Remember which run of the server's these clients take part in."""
        if self._record.id != run:
            self._record.id = run
            self._record.save(self.path)

    def finished(self, run: str, final: Final, journal: Sequence[Mapping[str, Any]]) -> None:
        """Keep a client's results, and bring the folder's files up to date."""
        write_checked_json(self._final(run, final.client), {
            "rows": list(final.rows), "events": [*journal, *records(final.events)]})
        gone = set(leavers(self.path))
        done = [(plan.name, member.id, self._read(plan.name, member.id))
                for plan in self._plans for member in self._here.members if member.id not in gone]
        whole = [found for _, _, found in done if found is not None]
        names = [*self._here.config.methods, CONSTANT]
        rows: list[Row] = [row for found in whole for row in found["rows"]]
        write_results(self.path / "results.csv",
                      sorted(rows, key=lambda row: names.index(row["method"])))
        self._write_events([event for found in whole for event in found["events"]])
        self._record.finished = len(whole) == len(done)
        self._record.seconds = time.perf_counter() - self._started
        self._record.memory = memory(self._here.device)
        self._record.save(self.path)

    def _read(self, run: str, client: str) -> dict[str, Any] | None:
        return read_checked_json(self._final(run, client))

    def _final(self, run: str, client: str) -> Path:
        return self.path / "state" / folder_name(run) / "final" / f"{client}.json"

    def _write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        path = self.path / "events.jsonl"
        with on_disk(path), replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(event) + "\n" for event in events),
                                 encoding="utf-8")
