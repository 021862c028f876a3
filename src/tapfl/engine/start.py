"""A run that goes on from a stored one: its W, its clients' state, and who had left.

W's blocks that the stored run has are taken from there, the others are fresh. That is written down
as this run's first checkpoint, of the stored run's last round: the next round is the first one
here, and everything else is as after an interruption.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tapfl.config import NEW, Config
from tapfl.data.participants import client_ids, load_federation
from tapfl.engine.departures import inherit, leavers
from tapfl.engine.origin import Origin, Stored
from tapfl.engine.promise import Promise, unknown
from tapfl.engine.record import FILE, Started, StartedModel, read_record
from tapfl.engine.registry import Plan
from tapfl.engine.rounds import Rounds
from tapfl.errors import TapflError
from tapfl.federated.local import Local
from tapfl.federated.method import FederatedMethod
from tapfl.methods import RunSpec, federated_runs, method_specs


def started(config: Config, out: Path) -> Started | None:
    """Return what the run in a folder went on from, or what a new one is to go on from."""
    if config.start is None:
        return None
    if (out / FILE).is_file():
        return read_record(out).start
    if config.start == NEW:
        return Started(run="", clients=[])
    origin = Origin(Path(config.start))
    return Started(run=origin.record.id, clients=origin.known(_ids(config)))


def _ids(config: Config) -> Iterable[str]:
    return client_ids(load_federation(config.federation), config.federation)


class Start:
    """The beginning of a run in ``out`` that goes on from ``config.start``."""

    def __init__(self, config: Config, out: Path) -> None:
        if config.start in (None, NEW):
            raise TapflError(f"start: '{config.start}' is for a node of a deployment that has no "
                             "earlier folder; expected the folder of a run")
        self.config, self.out, self.origin = config, out, Origin(Path(str(config.start)))
        self._specs: dict[str, RunSpec] = {
            run.name: run for run in federated_runs(method_specs(config))}

    def inherit(self) -> None:
        """Keep those away who left the stored run."""
        ids = set(_ids(self.config))
        gone = [client for client in leavers(self.origin.path) if client in ids]
        if gone:
            inherit(self.out, gone)

    def check(self, plans: Iterable[Plan]) -> None:
        """Refuse federated runs that cannot go on from the stored run."""
        for plan in plans:
            if plan.name in self.origin.runs or not issubclass(plan.method, Local):
                self._fitting(plan)

    def _fitting(self, plan: Plan) -> Stored:
        """Return what is stored of a federated run, if this run's can go on from there."""
        if plan.name not in self.origin.runs:
            raise TapflError(f"start: {self.origin.path} has no federated run '{plan.name}', only "
                             f"{', '.join(self.origin.runs)}; leave its methods out")
        self.origin.check_run(self._specs[plan.name])
        stored = self.origin.stored(plan.name)
        done = stored.round + 1
        if plan.config.train.rounds < done:
            raise TapflError(
                f"train.rounds: {plan.config.train.rounds} for '{plan.name}', but {done} are "
                f"behind {self.origin.path}, where it starts; they count, expected {done} or more")
        return stored

    def promised(self, plan: Plan) -> Promise:
        """Return what the stored run's noise has promised."""
        return self.origin.record.privacy.get(plan.name) or unknown(self.origin.clients)

    def begin(self, plan: Plan, method: FederatedMethod, rounds: Rounds) -> StartedModel | None:
        """Take the stored W and the clients' state for this run's own, unless there is none.

        Where nothing is exchanged, clients that the stored run did not know begin from nothing.
        """
        known = self.origin.known(_ids(self.config))
        exchanges = any(method.exchanged(member) for member in rounds.members[:1])
        if not exchanges and not (known and plan.name in self.origin.runs):
            return None
        stored = self._fitting(plan)
        blocks = self.origin.merged(stored, method.initial)
        listed = rounds.clients.adopt(self.origin.folder(plan.name), stored.listed, known)
        rounds.begin_after(stored.round, blocks, {
            name: norms for name, norms in stored.norms.items() if name in blocks}, listed)
        return StartedModel(round=stored.round, sha256=stored.sha256)
