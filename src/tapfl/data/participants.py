"""Participants: the layout that a configuration names, and the clients of it that take part.

A client's *place* is its number among all clients of the layout, whether they take part or not.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib import resources

from tapfl.config import FederationConfig
from tapfl.data.layout import FederationFile, check_clients
from tapfl.errors import TapflError, nearest
from tapfl.reading import check, is_file, parse_yaml, read_text

HINTS = 100  # clients that an unknown id is compared with


def layout_names() -> list[str]:
    """Return the names of the shipped layouts."""
    return sorted(p.name.removesuffix(".yaml")
                  for p in (resources.files("tapfl") / "presets" / "layouts").iterdir())


def load_federation(config: FederationConfig) -> FederationFile:
    """Read the layout or the file that the configuration names, and check that it adds up."""
    if config.file is not None:
        if not is_file(config.file):
            raise TapflError(f"federation.file: no such file: {config.file}")
        text, where = read_text(config.file), config.file
    elif config.layout in layout_names():
        where = f"layouts/{config.layout}.yaml"
        text = (resources.files("tapfl") / "presets" / where).read_text()
    else:
        raise TapflError(f"federation.layout: unknown layout '{config.layout}'"
                         + nearest(config.layout, layout_names()))
    federation = check(FederationFile, parse_yaml(text, where), where)
    try:
        federation.task_table()
        check_clients(federation)
    except TapflError as error:
        raise TapflError(f"{where}: {error}") from None
    places(federation, config)  # `federation.clients` may name some that are nobody
    if config.dirichlet is not None and not _can_be_skewed(federation, config.groups):
        raise TapflError(f"federation.dirichlet: no two clients of {where} share a classification "
                         "data set, so there are no labels to skew; expected null")
    return federation


def _can_be_skewed(file: FederationFile, groups: int) -> bool:
    """Return whether clients share a data set that has labels."""
    tasks = file.task_table()
    holders = Counter(task for entry in file.clients for task, share in entry.tasks.items()
                      if isinstance(share, Fraction) and tasks[task].is_classification)
    return any(count * groups > 1 for count in holders.values())


def client_id(group: int, name: str, groups: int) -> str:
    """Return the id of a kind of client in a group; ``parse_id`` is its inverse."""
    return name if groups == 1 else f"g{group}-{name}"


def tasks_of(file: FederationFile, config: FederationConfig) -> dict[str, list[str]]:
    """Return the tasks of every client that takes part, by id, in the roster's order."""
    kinds = {entry.name: list(entry.tasks) for entry in file.clients}
    return {id_: kinds[parse_id(id_, config.groups)[1]] for id_ in client_ids(file, config)}


def parse_id(id_: str, groups: int) -> tuple[int, str]:
    """Return the group and the name in an id; what is no id has neither."""
    if groups == 1:
        return 0, id_
    found = re.fullmatch(r"g(0|[1-9][0-9]{0,8})-(.+)", id_)
    return (int(found[1]), found[2]) if found else (0, "")


def client_ids(file: FederationFile, config: FederationConfig) -> Iterator[str]:
    """Iterate over the ids of the clients that take part, in the federation's order."""
    chosen = None if config.clients is None else set(config.clients)
    for group in range(config.groups):
        for entry in file.clients:
            id_ = client_id(group, entry.name, config.groups)
            if chosen is None or id_ in chosen:
                yield id_


def client_count(file: FederationFile, config: FederationConfig) -> int:
    """Return how many clients take part."""
    return (config.groups * len(file.clients) if config.clients is None
            else len(set(config.clients)))


def taking_part(file: FederationFile, config: FederationConfig) -> FederationFile:
    """Return the kinds of clients that take part, and the tasks that these hold."""
    if config.clients is None:
        return file
    kinds = {parse_id(id_, config.groups)[1] for id_ in config.clients}
    clients = [entry for entry in file.clients if entry.name in kinds]
    held = {task for entry in clients for task in entry.tasks}
    return file.model_copy(update={"clients": clients, "tasks": {
        name: entry for name, entry in file.tasks.items() if name in held}})


def places(file: FederationFile, config: FederationConfig) -> Sequence[int]:
    """Return the places of the clients that take part; ``config`` may name some that are none."""
    everybody = range(config.groups * len(file.clients))
    if config.clients is None:
        return everybody
    found = set()
    for id_ in config.clients:
        place = place_of(id_, file, config)
        if place is None:
            raise TapflError(f"federation.clients: unknown client '{id_}'"
                             + hint(id_, file, config, everybody))
        if place in found:
            raise TapflError(f"federation.clients: '{id_}' is there twice")
        found.add(place)
    return sorted(found)


def place_of(id_: str, file: FederationFile, config: FederationConfig) -> int | None:
    """Return a client's number among all of the federation; None for an id that is nobody's."""
    group, name = parse_id(id_, config.groups)
    for kind, entry in enumerate(file.clients):
        if entry.name == name and group < config.groups:
            return group * len(file.clients) + kind
    return None


def id_at(place: int, file: FederationFile, config: FederationConfig) -> str:
    """Return the id of a place; ``place_of`` is its inverse."""
    group, kind = divmod(place, len(file.clients))
    return client_id(group, file.clients[kind].name, config.groups)


def hint(id_: str, file: FederationFile, config: FederationConfig, places: Sequence[int]) -> str:
    """Name a client that may be meant by an id that is nobody's."""
    # Its own group is the best hint; all clients together would take long to compare.
    group, kinds = parse_id(id_, config.groups)[0], len(file.clients)
    first = bisect.bisect_left(places, group * kinds) if group < config.groups else 0
    known = places[first:first + max(kinds, HINTS)]
    return nearest(id_, (id_at(place, file, config) for place in known))
