"""Run an experiment from its configuration: what `tapfl run` and `tapfl.run` do."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tapfl.config import Config
from tapfl.data.participants import load_federation
from tapfl.engine.checkpoints import Checkpoints
from tapfl.engine.departures import Departures
from tapfl.engine.eventlog import EventLog
from tapfl.engine.files import Label, write_state
from tapfl.engine.folder import RunFolder, drop_models, fresh_folder, no_run
from tapfl.engine.messages import Clients, Row
from tapfl.engine.promise import expected_contributors, in_words, promise, together
from tapfl.engine.record import (
    RunRecord,
    check_unchanged,
    killed_after,
    memory,
    read_record,
)
from tapfl.engine.registry import Plan, plan
from tapfl.engine.released import FILE as RELEASED
from tapfl.engine.released import Released
from tapfl.engine.results import read_results, write_results
from tapfl.engine.rounds import Rounds
from tapfl.engine.site import Here, MakeSite
from tapfl.engine.start import Start, started
from tapfl.errors import TapflError
from tapfl.evaluation.constant import CONSTANT
from tapfl.events import ClientFinished, Event, Message, RoundEnded, Subscriber, nobody
from tapfl.federated.aggregation import find_aggregation
from tapfl.federated.method import FederatedMethod
from tapfl.federated.server import Server
from tapfl.methods import folder_name, names_own_code
from tapfl.model.summary import kind_of, parameters
from tapfl.privacy.accountant import accounting


def run(config: Config, out: Path | str | None = None, *, resume: bool = False,
        device: str = "auto", notify: Subscriber = nobody,
        modules: Path | None = None, site: MakeSite = Here) -> list[Row]:
    """Run an experiment into the folder ``out`` (a new one below ``runs``); return its results.

    ``resume`` goes on from the newest checkpoint there, if there is one. ``notify`` is called with
    every event. ``modules`` is where a user's own methods are imported from: by default the current
    folder, but a run that is resumed imports nothing that its caller has not named. ``site`` makes
    the place where the clients are: this process by default.
    """
    out = fresh_folder(Path("runs") / "run") if out is None else Path(out)
    device = pick_device(device)
    if resume and modules is None and names_own_code(config):
        raise TapflError(f"{out}: the run has methods of your own; name the folder that they are "
                         "imported from with --modules DIR")
    plans = plan(config, modules, installed=not resume)
    if _has_noise(plans):
        accounting()  # it is missed now rather than in the end
    with RunFolder(out, resume) as folder:
        record = None if folder.is_new else _continued(out, config)
        if record and record.finished and (out / "results.csv").is_file():
            notify(Message(f"{out}: this run is complete"))
            if not record.config.checkpoint.models:  # it may have ended while it removed them
                drop_models(out)
            return read_results(out / "results.csv")
        with _threads(record.threads if record else config.thread_count):
            return _Run(config, plans, folder, record, device, notify, site).run()


class _Run:
    """An experiment under way in its folder."""

    def __init__(self, config: Config, plans: list[Plan], folder: RunFolder,
                 record: RunRecord | None, device: str, notify: Subscriber,
                 site: MakeSite) -> None:
        self.config, self.plans, self.folder, self.device = config, plans, folder, device
        self.out, self.notify, self.make_site = folder.path, notify, site
        self.started, self.began = time.perf_counter(), time.time()
        self.resumed, self._under_way = record is not None, False
        if record is None and config.start is not None:
            self._origin.inherit()
        self.record = self._start(record)

    @functools.cached_property
    def _origin(self) -> Start:
        """The run that this one goes on from; once it has, nobody asks for it again."""
        return Start(self.config, self.out)

    def run(self) -> list[Row]:
        """Run every plan; write the results."""
        rows: list[Row] = []
        record = self.record
        # It is put together again from what each federated run has kept.
        events = self.out / "events.jsonl"
        before = events.read_bytes() if events.is_file() else b""
        events.write_bytes(b"")
        try:
            for each in self.plans:
                rows += self._federated_run(each)
                _free(self.device)
        except TapflError:
            if not self._under_way:  # nothing could be continued: leave things as they were
                events.write_bytes(before)
            raise
        finally:
            record.began = None
            record.seconds += time.perf_counter() - self.started
            record.memory = memory(self.device)
            # Whatever ended the run matters more than a disk that does not take its record.
            with contextlib.suppress(TapflError):
                record.save(self.out)
        order = {name: i for i, name in enumerate([*self.config.methods, CONSTANT])}
        rows.sort(key=lambda row: order[row["method"]])
        write_results(self.out / "results.csv", rows)
        record.finished = True
        record.save(self.out)
        if not self.config.checkpoint.models:
            drop_models(self.out)
        return rows

    def _start(self, before: RunRecord | None) -> RunRecord:
        """Reach the clients and write down what the run is, before the first round."""
        self.site = self.make_site(self.config, self.device, self.out, self.notify)
        facts = self.site.facts(self.plans) | {
            "config": self.config, "began": self.began,
            "federation_sha256": federation_digest(self.config)}
        if before is None:
            if self.config.start is not None:
                self._origin.origin.check(self.config, facts["federation"], facts["classes"])
            record = RunRecord(threads=torch.get_num_threads(),
                               start=started(self.config, self.out), **facts)
        else:
            _compare(self.out, before, facts)
            record = before.model_copy(update=facts)
            self._note_changes(before, record)
        record.save(self.out)
        self.site.started()
        return record

    def _note_changes(self, before: RunRecord, now: RunRecord) -> None:
        """Say and record which code has changed since the run was started."""
        changed = [name for name in now.code if before.code.get(name) != now.code[name]]
        now.mixed = sorted({*before.mixed, *changed})
        if changed:
            self.notify(Message(f"{self.out}: the code of {', '.join(changed)} has changed since "
                                "this run was started; its results come from both versions"))

    def _federated_run(self, each: Plan) -> list[Row]:
        folder = self.out / "state" / folder_name(each.name)
        log = EventLog(self.out / "events.jsonl", folder / "events.jsonl")
        with contextlib.closing(log), self.site.open(each, folder) as (method, clients):
            self._record_method(each.name, method)
            rounds = self._rounds(each, folder, method, clients, log)
            goes_on = self._goes_on(each, method, rounds)
            rows = rounds.run(resume=self.resumed or goes_on)
            if _has_noise(self.plans):  # one without noise tells all that the others hide
                self._promise(each, method, rounds)
            if rounds.times is not None:
                self.record.times[each.name] = rounds.times
            for client, since in rounds.departures.since.items():
                self.record.left.setdefault(client, {})[each.name] = since
            exchanges = any(method.exchanged(m) for m in self.site.kinds)
            if exchanges and self.config.checkpoint.models:
                write_state(self.out / "models" / folder_name(each.name) / "server.safetensors",
                            Label(each.name, "", each.config.train.rounds), rounds.server.blocks,
                            {})
            return rows

    def _goes_on(self, each: Plan, method: FederatedMethod, rounds: Rounds) -> bool:
        """Return whether a federated run goes on from another run's state; if so, take that."""
        if self.record.start is None or rounds.checkpoints.newest >= 0:
            return False
        if _has_noise(self.plans) and any(method.exchanged(m) for m in self.site.kinds):
            # It is on record before anything goes on.
            self.record.start.privacy[each.name] = self._origin.promised(each)
            self.record.save(self.out)
        model = self._origin.begin(each, method, rounds)
        if model is not None:
            self.record.start.models[each.name] = model
            self.record.save(self.out)
        return model is not None

    def _rounds(self, each: Plan, folder: Path, method: FederatedMethod, clients: Clients,
                log: EventLog) -> Rounds:
        config, members = each.config, self.site.members
        expected = expected_contributors(members, method.exchanged, config.train.cohort)
        server = Server(method.initial, len(members), config.train.cohort, config.seed,
                        max_update_norm=config.federation.max_update_norm,
                        max_samples=config.federation.max_samples,
                        aggregation=find_aggregation(config, expected),
                        secret=config.privacy.secret_cohort)

        def notify(event: Event) -> None:
            self._under_way = True
            if isinstance(event, RoundEnded | ClientFinished):
                self.folder.keep()
            self.notify(event)

        return Rounds(each.name, config, members, server, method.exchanged, clients,
                      Checkpoints(folder / "checkpoints", each.name), log, folder / "final", notify,
                      Departures(self.out, folder),
                      Released(folder / RELEASED if _has_noise(self.plans) else None))

    def _promise(self, each: Plan, method: FederatedMethod, rounds: Rounds) -> None:
        """Record what the noise promised, in this federated run and in all so far."""
        privacy, start = self.record.privacy, self.record.start
        privacy[each.name] = promise(
            each.config, self.site.members, method.exchanged, rounds.released,
            start.privacy.get(each.name) if start else None)
        self.notify(Message(f"privacy: {in_words(each.name, privacy[each.name])}"))
        if len(privacy) > 1:
            self.notify(Message(f"privacy: {together(privacy, each.config.privacy.delta)}"))
        self.record.save(self.out)

    def _record_method(self, name: str, method: FederatedMethod) -> None:
        """Record the blocks that a method has beside the common ones, as FedDAT's adapters.

        ``held`` says how many of their parameters a client has, by its tasks.
        """
        known = self.record.parameters["blocks"]
        more = {block: parameters(module)
                for block, module in sorted(method.network.blocks.items()) if block not in known}
        if more:
            held = {kind_of(member.tasks): sum(more.get(block, 0) for block in {
                *method.owned(member), *method.private(member)}) for member in self.site.members}
            self.record.parameters.setdefault("methods", {})[name] = {
                "more": sum(more.values()), "blocks": more, "held": held}
        if method.shares_final_model and name not in self.record.shared:
            self.record.shared.append(name)
        self.record.save(self.out)


def _has_noise(plans: Iterable[Plan]) -> bool:
    return any(each.config.privacy.mode != "none" for each in plans)


def _free(device: str) -> None:
    """Give back a finished method's network and captured steps, which refer to each other."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many CPU threads: results depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(device: str) -> str:
    """Return the device to run on; ``auto`` takes a GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise TapflError("--device cuda: no GPU can be used here; expected auto or cpu")
    if device not in ("cpu", "cuda"):
        raise TapflError(f"--device {device}: expected auto, cpu or cuda")
    return device


def stored_config(out: Path) -> Config:
    """Return the configuration of a run that was started in a folder."""
    if not (out / "run.json").is_file():
        raise no_run(out)
    return read_record(out).config


def _continued(out: Path, config: Config) -> RunRecord:
    """Return the record of the run that is to be continued, if the configuration is the same."""
    record = read_record(out)
    check_unchanged(out, record.config, config, "resume it without changing it")
    if record.federation_sha256 != federation_digest(config):
        raise TapflError(f"{out}: the federation file has changed since this run was started")
    if record.began is not None:
        record.seconds += killed_after(out, record.began)
    return record


def _compare(out: Path, before: RunRecord, facts: dict[str, Any]) -> None:
    """Refuse to go on with other data, metrics or weights than the run was started with."""
    for key, what in (("data_sha256", "data"), ("metrics", "metrics of text"),
                      ("weights", "weights")):
        if getattr(before, key) != facts[key]:
            raise TapflError(f"{out}: this run was started with other {what}; what it has so far "
                             "and what would come do not go together")


def federation_digest(config: Config) -> str:
    """Return a checksum of who holds what: a file can change between a crash and a resume."""
    file = load_federation(config.federation)
    return hashlib.sha256(file.model_dump_json().encode()).hexdigest()
