"""What a run's noise promises its clients: planned before it, and as it came out."""

from __future__ import annotations

import decimal
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from tapfl.blocks import BlockState, Ownership
from tapfl.config import Config, PrivacyConfig
from tapfl.data.federation import Member
from tapfl.data.participants import load_federation, tasks_of
from tapfl.engine.released import Released
from tapfl.federated.server import Server
from tapfl.privacy.accountant import Releases, epsilon, needed_noise

Exchanged = Callable[[Member], Sequence[str]]
UP = decimal.Context(prec=3, rounding=decimal.ROUND_CEILING)


class Promise(BaseModel):
    """What one federated run promised.

    ``epsilon`` is the largest of any client, ``client`` the one it belongs to; None stands for an
    infinite one: no noise, no promise. ``releases`` are each client's blocks and rounds. Where
    the cohort is secret, each client may have been in every round, and ``cohort`` says by what
    chance: its size, of how many others. ``earlier`` is what the run promised that it went on from.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    privacy: PrivacyConfig
    epsilon: float | None
    client: str
    releases: dict[str, tuple[int, int]]
    cohort: tuple[int, int] | None = None
    earlier: Promise | None = None

    @property
    def noise(self) -> float:
        """The noise's standard deviation, as a multiple of the clip."""
        return 0.0 if self.privacy.mode == "none" else self.privacy.noise

    def of(self, client: str) -> list[Releases]:
        """Return what a client took part in."""
        blocks, rounds = self.releases.get(client, (0, 0))
        replaced = self.privacy.mode == "local" or self.cohort is not None
        return [*(self.earlier.of(client) if self.earlier else ()),
                Releases(self.noise, blocks, rounds, replaced, self.cohort)]


def promise(config: Config, members: Sequence[Member], exchanged: Exchanged,
            released: Released, earlier: Promise | None = None) -> Promise:
    """Return what a federated run promises."""
    blocks = {member.id: len(exchanged(member)) for member in members}
    rounds: Mapping[str, int] = released.clients
    cohort = None
    if config.privacy.secret_cohort:
        # Sampling hides a client among the others: what changes is its update for any of theirs.
        blocks = dict.fromkeys(blocks, max(blocks.values()))
        rounds = dict.fromkeys(blocks, released.rounds)
        # A client knows whether it was drawn itself, so the others were drawn from one fewer.
        others = max(1, (released.fewest or len(members)) - 1)
        cohort = min(config.train.cohort, others), others
    found = Promise(privacy=config.privacy, epsilon=None, client="", cohort=cohort, earlier=earlier,
                    releases={id_: (count, rounds.get(id_, 0)) for id_, count in blocks.items()})
    return found.model_copy(update=_worst([found], config.privacy.delta))


def unknown(clients: Iterable[str]) -> Promise:
    """Return what a run promised these clients that has none on record."""
    return Promise(privacy=PrivacyConfig(), epsilon=None, client="",
                   releases=dict.fromkeys(clients, (1, 1)))


def planned(config: Config) -> Promise:
    """Return what FedAvg would promise with a configuration, before anything is run."""
    file = load_federation(config.federation)
    ownership = Ownership(file.task_table(), config.backbone.kind)
    members = [Member(id_, index, tuple(tasks), 1)
               for index, (id_, tasks) in enumerate(tasks_of(file, config.federation).items())]
    server = Server(BlockState({}, {}), len(members), config.train.cohort, config.seed)
    released = Released()
    for round_ in range(config.train.rounds):
        released.begin([members[i].id for i in server.cohort(round_)], len(members))
    return promise(config, members, lambda member: sorted({
        block for task in member.tasks for block in ownership.blocks_of_task(task)}), released)


def noise_for(found: Sequence[Promise], target: float) -> float:
    """Return the noise of all at which no client's epsilon is above a target; 0: none is needed."""
    releases = {_of(found, client) for each in found for client in each.releases}
    return max((needed_noise(each, found[0].privacy.delta, target) for each in releases
                if any(part.blocks and part.rounds for part in each)), default=0.0)


def together(promises: Mapping[str, Promise], delta: float) -> str:
    """Say what several federated runs on the same data promise: their releases add up."""
    found = _worst(list(promises.values()), delta)["epsilon"]
    stated = rounded_up(found) if isinstance(found, float) else "infinite"
    return f"all federated runs here together: epsilon {stated} at delta {delta:g}"


def _of(promises: Sequence[Promise], client: str) -> tuple[Releases, ...]:
    return tuple(part for each in promises for part in each.of(client))


def _worst(promises: Sequence[Promise], delta: float) -> dict[str, float | str | None]:
    """Return the client with the largest epsilon; equal releases are computed once."""
    known: dict[tuple[Releases, ...], float] = {}
    worst, client = -1.0, ""
    for id_ in dict.fromkeys(id_ for each in promises for id_ in each.releases):
        releases = _of(promises, id_)
        if releases not in known:
            known[releases] = epsilon(releases, delta)
        if known[releases] > worst:
            worst, client = known[releases], id_
    return {"epsilon": worst if math.isfinite(worst) else None, "client": client}


def rounded_up(value: float) -> str:
    """Return a number to three digits, never less than it is: less would not be a bound."""
    return f"{float(UP.create_decimal(value)):.3g}"


def in_words(name: str, found: Promise) -> str:
    """Return a promise as a sentence."""
    if found.epsilon is None and found.noise and found.earlier:
        return (f"{name}: it goes on from a run that promised nothing (without noise, or not "
                "complete), so nothing is promised")
    if found.epsilon is None:
        return f"{name}: no noise, so nothing is promised"
    blocks, rounds = found.releases[found.client]
    where = "each client" if found.privacy.mode == "local" else "the server"
    drawn = " of a secret cohort" if found.cohort else ""
    before = ", with what it goes on from" if found.earlier else ""
    return (f"{name}: epsilon {rounded_up(found.epsilon)} at delta {found.privacy.delta:g} for a "
            f"client's whole contribution{before} (client {found.client}: {rounds} rounds{drawn}, "
            f"{blocks} blocks; noise {found.noise:g} x clip {found.privacy.clip:g}, "
            f"added by {where})")


def expected_contributors(members: Sequence[Member], exchanged: Exchanged,
                          cohort: int) -> dict[str, float]:
    """Return how many clients of a cohort exchange each block, on average."""
    owners = Counter(name for member in members for name in exchanged(member))
    share = min(cohort, len(members)) / len(members)
    return {name: share * count for name, count in sorted(owners.items())}
