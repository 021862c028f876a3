"""Which model is meant, and where it is: in the folder of a run, or in an exported one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfl.blocks import BlockState
from tapfl.config import Config, Section
from tapfl.data.layout import ClientEntry, FederationFile
from tapfl.data.participants import HINTS, client_ids, parse_id
from tapfl.engine.files import Label, read_state
from tapfl.engine.record import FILE, RunRecord, read_object, read_record
from tapfl.errors import TapflError, nearest
from tapfl.methods import find_method, folder_name
from tapfl.reading import check, yaml_value
from tapfl.tasks import check_name

CARD = "tapfl.json"
WEIGHTS = "model.safetensors"
PERSONAL, FEDERATED = "personal", "federated"

# Weights that an export carries with it: the only places that a card can name in its own folder.
BASE, INSIDE = "base", "export:"
COPIES = tuple(INSIDE + part for part in ("model", "image", "text", "mini.safetensors"))


@dataclass(frozen=True)
class Card:
    """What is needed to use a model: how it was made, for whom, and where its blocks are."""

    config: Config
    file: FederationFile  # of one client: its tasks and nobody else's
    client: str
    method: str
    federated: str  # the federated method it stands on
    classes: Mapping[str, Sequence[str]]
    blocks: Path  # the file of its trained blocks
    label: Label | None = None  # whose they must be, where that is known

    def read_blocks(self) -> BlockState:
        """Read the model's blocks; a file that says it is another one's is refused."""
        return read_state(self.blocks, self.label)[0]

    def with_weights(self, weights: str | dict[str, str]) -> Card:
        """Return the card of the same model whose frozen base is found elsewhere."""
        parsed = yaml_value(weights, "--weights") if isinstance(weights, str) else weights
        values = self.config.model_dump(exclude={"methods", "variants"}) | {
            "methods": self.config.methods, "variants": {}}
        values["foundation"] |= {"weights": parsed}
        return dataclasses.replace(self, config=check(Config, values, "--weights"))


def card_of(folder: Path, client: str | None, model: str = PERSONAL,
            method: str | None = None) -> Card:
    """Find a client's model in the folder of a run."""
    if not (folder / FILE).is_file():
        raise TapflError(f"{folder}: neither a run ({FILE}) nor an exported model ({CARD})")
    record = read_record(folder)
    if not record.finished:
        raise TapflError(f"{folder}: this run is not complete; finish it with: "
                         f"tapfl run --resume --out {folder}")
    config, file = record.config, record.federation
    if not config.checkpoint.models:
        raise TapflError(f"{folder}: this run kept no models (checkpoint.models: false); expected "
                         "one that did")
    if client is None:
        raise TapflError(f"--client: expected one of {', '.join(_ids(config, file)[:12])}")
    check_name(client, "--client")
    entry = _entry(config, file, client)
    chosen = method or _chosen(record, model)
    run, spec = find_method(config, chosen)
    tasks = {name: file.tasks[name] for name in entry.tasks}
    own = spec.config if spec else run.config
    return Card(own,
                FederationFile(tasks=tasks, clients=[entry]), client, chosen, run.federated,
                {t: names for t, names in record.classes.items() if t in tasks},
                *_blocks(folder, record, chosen, client, own.train.rounds))


def exported_card(folder: Path) -> Card:
    """Read the card of a folder that ``tapfl export`` wrote."""
    where = str(folder / CARD)
    record = read_object(folder / CARD)
    for key in ("config", "federation", "client", "method", "federated", "classes"):
        if key not in record:
            raise TapflError(f"{where}: not the card of an exported model: has no '{key}'")
    if not isinstance(record["method"], str):
        raise TapflError(f"{where}: method: expected a name, got {record['method']!r:.80}")
    file = check(FederationFile, record["federation"], where)
    if len(file.clients) != 1 or set(file.clients[0].tasks) != set(file.tasks):
        raise TapflError(f"{where}: federation: expected one client that has all tasks")
    return Card(_within(check(Config, record["config"], where), folder),
                file,
                check_name(record["client"], "client"), record["method"],
                str(record["federated"]),
                check(_Classes, {"classes": record["classes"]}, where).classes, folder / WEIGHTS)


def _within(config: Config, folder: Path) -> Config:
    """Let weights that were copied into an export be found there."""
    def place(weights: str) -> str:
        return str(folder / BASE / weights.removeprefix(INSIDE)) if weights in COPIES else weights

    weights = config.foundation.weights
    found = ({m: place(w) for m, w in weights.items()} if isinstance(weights, dict)
             else place(weights))
    foundation = config.foundation.model_copy(update={"weights": found})
    return config.model_copy(update={"foundation": foundation})


class _Classes(Section):
    classes: dict[str, list[str]]


def _ids(config: Config, file: FederationFile) -> list[str]:
    return list(itertools.islice(client_ids(file, config.federation), HINTS * len(file.clients)))


def _entry(config: Config, file: FederationFile, client: str) -> ClientEntry:
    """Return the kind of a client; an id that is nobody's gets the nearest one."""
    federation = config.federation
    group, name = parse_id(client, federation.groups)
    if group >= federation.groups or client not in (federation.clients or (client,)):
        name = ""
    for entry in file.clients:
        if entry.name == name:
            return entry
    raise TapflError(f"--client: unknown client '{client}'" + nearest(client, _ids(config, file)))


def _chosen(record: RunRecord, model: str) -> str:
    """Return the run's method that a kind of model comes from: its record says which."""
    if model not in (PERSONAL, FEDERATED):
        raise TapflError(f"--model {model}: expected {PERSONAL} or {FEDERATED}")
    if model in record.models:
        return record.models[model]
    if model == FEDERATED:
        raise TapflError("--model federated: every client of this run learned alone")
    raise TapflError("--model personal: this run has no personalised method, only "
                     f"{', '.join(record.config.methods)}; choose one with --method, or --model "
                     "federated")


def _blocks(folder: Path, record: RunRecord, method: str, client: str,
            rounds: int) -> tuple[Path, Label]:
    """Return the file of a client's model and whose it must be: its own, or the server's."""
    models = folder / "models" / folder_name(method)
    own, common = models / f"{client}.safetensors", models / "server.safetensors"
    if own.is_file():
        return own, Label(method, client, rounds)
    if common.is_file() and method in record.shared:
        return common, Label(method, "", rounds)
    raise TapflError(f"{models}: the run kept no model of {client} there")
