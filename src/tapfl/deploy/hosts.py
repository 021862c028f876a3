"""Which node may host which clients: ``clients.yaml`` among the server's keys.

A registered key lets a node in; this file says whose data it may speak for:

    radiology: [radiology]      # the key nodes/radiology.pub has the client radiology
    laboratory: [blood, tissue]

Without the file any registered node may host any client that is not connected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pydantic import RootModel

from tapfl.errors import TapflError, nearest
from tapfl.reading import check, parse_yaml, read_text

FILE = "clients.yaml"
Hosts = Mapping[str, Sequence[str]]  # the clients of each key, by its name


class _Clients(RootModel[dict[str, list[str]]]):
    """The file's content."""


def read_hosts(keys: Path, clients: Collection[str]) -> Hosts | None:
    """Return the clients that each node may host; None where nobody has said so."""
    path = keys / FILE
    if not path.is_file():
        return None
    hosts = check(_Clients, parse_yaml(read_text(str(path)), str(path)), str(path)).root
    known = [public.stem for public in sorted((keys / "nodes").glob("*.pub"))]
    for name, own in hosts.items():
        if name not in known:
            raise TapflError(f"{path}: {name}: no key of that name among {keys / 'nodes'}"
                             + nearest(name, known))
        for client in own:
            if client not in clients:
                raise TapflError(f"{path}: {name}: unknown client '{client}'"
                                 + nearest(client, clients))
    listed = {client for own in hosts.values() for client in own}
    lost = [client for client in clients if client not in listed]
    if lost:
        raise TapflError(f"{path}: no node has the client '{lost[0]}'; expected every client of "
                         "the federation")
    return hosts
