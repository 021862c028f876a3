"""Which model is meant, and where it is: in the folder of a run, or in an exported one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.config import Config
from tapfl.data.federation import ClientEntry, FederationFile, client_id, parse_id
from tapfl.engine.registry import SHORT
from tapfl.engine.store import slug
from tapfl.errors import TapflError, as_tapfl_error, nearest
from tapfl.reading import check
from tapfl.tasks import check_name

CARD = "tapfl.json"
WEIGHTS = "model.safetensors"
PERSONAL, FEDERATED = "personal", "federated"


@dataclass(frozen=True)
class Card:
    """What is needed to use a model: how it was made, for whom, and where its blocks are."""

    config: Config
    file: FederationFile  # of one client: its tasks and nobody else's
    client: str
    method: str
    classes: Mapping[str, Sequence[str]]
    weights: Path


def card_of(folder: Path, client: str | None, model: str = PERSONAL,
            method: str | None = None) -> Card:
    """Find a client's model in the folder of a run."""
    path = folder / "run.json"
    if not path.is_file():
        raise TapflError(f"{folder}: neither a run (run.json) nor an exported model ({CARD})")
    record = _read(path)
    if not record.get("finished"):
        raise TapflError(f"{folder}: this run is not complete; finish it with: "
                         f"tapfl run --resume --out {folder}")
    for key in ("config", "federation", "classes"):
        if key not in record:
            raise TapflError(f"{path}: has no '{key}'; it was made by an older version of tapfl")
    config = check(Config, record["config"], str(path))
    file = check(FederationFile, record["federation"], str(path))
    if client is None:
        raise TapflError(f"--client: expected one of {', '.join(_ids(config, file)[:12])}")
    entry = _entry(config, file, client)
    chosen = method or _chosen(config.methods, model)
    if chosen not in {*config.methods, *(half(m) for m in config.methods)}:
        raise TapflError(f"--method: the run has no '{chosen}'" + nearest(chosen, config.methods))
    tasks = {name: file.tasks[name] for name in entry.tasks}
    return Card(config, FederationFile(tasks=tasks, clients=[entry]), client, chosen,
                {t: names for t, names in record["classes"].items() if t in tasks},
                _weights(folder, chosen, client))


def exported_card(folder: Path) -> Card:
    """Read the card of a folder that ``tapfl export`` wrote."""
    record = _read(folder / CARD)
    where = str(folder / CARD)
    with as_tapfl_error(f"{where}: not the card of an exported model"):
        return Card(check(Config, record["config"], where),
                    check(FederationFile, record["federation"], where),
                    check_name(record["client"], "client"), str(record["method"]),
                    dict(record["classes"]), folder / WEIGHTS)


def _read(path: Path) -> dict[str, Any]:
    with as_tapfl_error(f"{path}: not a readable record"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _ids(config: Config, file: FederationFile) -> list[str]:
    groups = config.federation.groups
    return [client_id(group, c.name, groups)
            for group in range(min(groups, 100)) for c in file.clients]


def _entry(config: Config, file: FederationFile, client: str) -> ClientEntry:
    """Return the kind of a client; an id that is nobody's gets the nearest one."""
    group, name = parse_id(client, config.federation.groups)
    if group >= config.federation.groups:
        name = ""
    for entry in file.clients:
        if entry.name == name:
            return entry
    raise TapflError(f"--client: unknown client '{client}'" + nearest(client, _ids(config, file)))


def half(method: str) -> str:
    """Return the federated half of a method's name."""
    return SHORT.get(method, method).partition("+")[0]


def _chosen(methods: Sequence[str], model: str) -> str:
    """Return the run's method that a kind of model comes from."""
    if model not in (PERSONAL, FEDERATED):
        raise TapflError(f"--model {model}: expected {PERSONAL} or {FEDERATED}")
    own = [m for m in methods if "+" in SHORT.get(m, m)]
    chosen = "tap" if "tap" in own else own[-1] if own else None
    if model == FEDERATED:  # the W that the personal model has watched, or the first that there is
        shared = [m for m in map(half, [chosen] if chosen else methods) if m != "local"]
        if not shared:
            raise TapflError("--model federated: every client of this run learned alone")
        return shared[0]
    if chosen is None and len(methods) > 1 and set(methods) - {"local"}:
        raise TapflError("--model personal: this run has no personalised method, only "
                         f"{', '.join(methods)}; choose one with --method, or --model federated")
    return chosen or methods[0]


def _weights(folder: Path, method: str, client: str) -> Path:
    models = folder / "models" / slug(method)
    own, common = models / f"{client}.safetensors", models / "server.safetensors"
    found = own if own.is_file() else common
    if not found.is_file():
        raise TapflError(f"{models}: the run kept no model of {client} there")
    return found
