"""How many clients own each block of a federation, and how that changes as tasks are added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tapfl.blocks import Ownership
from tapfl.config import Config
from tapfl.data.layout import FederationFile
from tapfl.data.participants import client_ids, load_federation, parse_id, taking_part
from tapfl.model.network import build_network


@dataclass(frozen=True)
class Owned:
    """Blocks that FedAvg trains and exchanges, each with its K_r, and the number of clients."""

    owners: dict[str, int]
    clients: int


@dataclass(frozen=True)
class Ownerships:
    """Who owns what in a federation: kinds of clients, how many of each, and the model's blocks."""

    ownership: Ownership
    file: FederationFile
    counts: dict[str, int]  # clients of every kind

    def owned(self, tasks: Iterable[str] | None = None) -> Owned:
        """Return K_r of every block, where only some of the tasks are there.

        A client without any of them takes no part.
        """
        kept = set(self.file.tasks if tasks is None else tasks)
        owners: Counter[str] = Counter()
        clients = 0
        for entry in self.file.clients:
            held = [task for task in entry.tasks if task in kept]
            if held:
                clients += self.counts[entry.name]
                for block in self.ownership.blocks_of(None, held):
                    owners[block] += self.counts[entry.name]
        return Owned(dict(sorted(owners.items())), clients)

    def pairs(self) -> list[tuple[str, Owned]]:
        """Add the modality-task pairs one by one, in the file's order.

        A task brings its modalities. Each entry names what was added and tells who owns what then.
        """
        names = list(self.file.tasks)
        return [(pair_name(name, self.ownership), self.owned(names[:number + 1]))
                for number, name in enumerate(names)]


def pair_name(task: str, ownership: Ownership) -> str:
    """Return a modality-task pair's name."""
    return f"{'+'.join(ownership.task(task).modalities)} {task}"


def ownerships(config: Config) -> Ownerships:
    """Return who owns what; the model says which blocks it trains. Loads no weights and no data."""
    whole = load_federation(config.federation)
    file = taking_part(whole, config.federation)
    network = build_network(config, file.task_table(), device="meta")
    if config.federation.clients is None:  # thousands, maybe
        counts = {entry.name: config.federation.groups for entry in file.clients}
    else:
        counts = dict(Counter(parse_id(id_, config.federation.groups)[1]
                              for id_ in client_ids(whole, config.federation)))
    return Ownerships(network.ownership, file, counts)
