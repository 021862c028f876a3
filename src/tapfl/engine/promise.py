"""What a run's noise promises its clients: planned before it, and as it came out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from tapfl.blocks import BlockState, Ownership
from tapfl.config import Config, PrivacyConfig
from tapfl.data.federation import Member
from tapfl.data.participants import load_federation, tasks_of
from tapfl.federated.server import Server
from tapfl.privacy.accountant import Releases, epsilon, needed_noise

Exchanged = Callable[[Member], Sequence[str]]


class Promise(BaseModel):
    """What one federated run promised.

    ``epsilon`` is the largest of any client, ``client`` the one it belongs to; None stands for an
    infinite one: no noise, no promise. ``releases`` are each client's blocks and rounds. Where
    the cohort is secret, each client may have been in every round, and ``cohort`` says by what
    chance: its size, of how many clients.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    privacy: PrivacyConfig
    epsilon: float | None
    client: str
    releases: dict[str, tuple[int, int]]
    cohort: tuple[int, int] | None = None

    def of(self, client: str) -> Releases:
        """Return what a client took part in."""
        blocks, rounds = self.releases.get(client, (0, 0))
        replaced = self.privacy.mode == "local" or self.cohort is not None
        return Releases(self.privacy.noise, blocks, rounds, replaced, self.cohort)


def promise(config: Config, members: Sequence[Member], exchanged: Exchanged,
            cohorts: Iterable[Sequence[str]]) -> Promise:
    """Return what a federated run promises; ``cohorts`` are the clients of each of its rounds."""
    privacy, rounds = config.privacy, list(cohorts)
    taken = Counter(client for cohort in rounds for client in cohort)
    secret = privacy.secret_cohort
    found = Promise(
        privacy=privacy, epsilon=None, client="",
        cohort=(min(config.train.cohort, len(members)), len(members)) if secret else None,
        releases={m.id: (len(exchanged(m)), len(rounds) if secret else taken[m.id])
                  for m in members})
    return found.model_copy(update=_worst([found], privacy.delta))


def planned(config: Config) -> Promise:
    """Return what FedAvg would promise with a configuration, before anything is run."""
    file = load_federation(config.federation)
    ownership = Ownership(file.task_table(), config.backbone.kind)
    members = [Member(id_, index, tuple(tasks), 1)
               for index, (id_, tasks) in enumerate(tasks_of(file, config.federation).items())]
    server = Server(BlockState({}, {}), len(members), config.train.cohort, config.seed)
    cohorts = [[members[i].id for i in server.cohort(round_)]
               for round_ in range(config.train.rounds)]
    return promise(config, members, lambda member: sorted({
        block for task in member.tasks for block in ownership.blocks_of_task(task)}), cohorts)


def noise_for(found: Promise, target: float) -> float:
    """Return the noise at which no client's epsilon is above a target."""
    releases = {found.of(client) for client in found.releases}
    return max(needed_noise([each], found.privacy.delta, target) for each in releases
               if each.blocks and each.rounds)


def together(promises: Mapping[str, Promise], delta: float) -> str:
    """Say what several federated runs on the same data promise: their releases add up."""
    found = _worst(list(promises.values()), delta)["epsilon"]
    stated = f"{found:.3g}" if isinstance(found, float) else "infinite"
    return f"all federated runs on these data together: epsilon {stated} at delta {delta:g}"


def _worst(promises: Sequence[Promise], delta: float) -> dict[str, float | str | None]:
    """Return the client with the largest epsilon; equal releases are computed once."""
    known: dict[tuple[Releases, ...], float] = {}
    worst, client = -1.0, ""
    for id_ in dict.fromkeys(id_ for each in promises for id_ in each.releases):
        releases = tuple(each.of(id_) for each in promises)
        if releases not in known:
            known[releases] = epsilon(releases, delta)
        if known[releases] > worst:
            worst, client = known[releases], id_
    return {"epsilon": worst if math.isfinite(worst) else None, "client": client}


def in_words(name: str, found: Promise) -> str:
    """Return a promise as a sentence."""
    if found.epsilon is None:
        return f"{name}: no noise, so nothing is promised"
    blocks, rounds = found.releases[found.client]
    where = "each client" if found.privacy.mode == "local" else "the server"
    drawn = " of a secret cohort" if found.cohort else ""
    return (f"{name}: epsilon {found.epsilon:.3g} at delta {found.privacy.delta:g} for a client's "
            f"whole contribution (client {found.client}: {rounds} rounds{drawn}, {blocks} blocks; "
            f"noise {found.privacy.noise:g} x clip {found.privacy.clip:g}, added by {where})")


def expected_contributors(members: Sequence[Member], exchanged: Exchanged,
                          cohort: int) -> dict[str, float]:
    """Return how many clients of a cohort exchange each block, on average."""
    owners = Counter(name for member in members for name in exchanged(member))
    share = min(cohort, len(members)) / len(members)
    return {name: share * count for name, count in sorted(owners.items())}
