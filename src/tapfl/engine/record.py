"""run.json: what a run is, what it was made with, and how far it is. One owner, one shape."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
import resource
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field

from tapfl import __version__
from tapfl.config import MAX_THREADS, CheckpointConfig, Config, SpeedConfig
from tapfl.data.layout import FederationFile
from tapfl.engine.files import write_json
from tapfl.engine.promise import Promise
from tapfl.errors import TapflError
from tapfl.events import RowsDropped
from tapfl.reading import check

FILE = "run.json"
FORMAT = 2
MAX_BYTES = 64 << 20
ELSEWHERE = "on the clients' machines"  # where a server's record says that data are
RESULT_ROOMS = ("settings", "kernels", "privacy", "data", "model", "federated", "personal",
                "evaluation", "engine")


class Times(BaseModel):
    """How long a federated run took, in seconds: its rounds, and what came after them.

    ``final`` is what all clients' final models took, with their evaluation; ``per_client_final``
    what making a method's final model took a client on average, without. Work that two methods
    share counts for the first.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    rounds: float
    final: float
    per_client_final: dict[str, float]

    @classmethod
    def of(cls, rounds: float, clients: Sequence[Mapping[str, float]]) -> Times:
        """Put together what clients reported; the whole of it stands under ``""``."""
        methods = {method for client in clients for method in client if method}
        return cls(rounds=rounds, final=sum(client.get("", 0.0) for client in clients),
                   per_client_final={
                       method: sum(client.get(method, 0.0) for client in clients) / len(clients)
                       for method in sorted(methods)})


class StartedModel(BaseModel):
    """The W that a federated run went on from: after which round, and its checksum."""

    model_config = ConfigDict(extra="forbid")

    round: int
    sha256: str


class Started(BaseModel):
    """What a run went on from: the other run's ``id``, and which ``clients`` it knew.

    ``taken`` says, on a node, that its clients' earlier state has been copied. ``privacy`` is what
    that run promised, by federated run, where this one has noise.
    """

    model_config = ConfigDict(extra="forbid")

    run: str
    clients: list[str]
    models: dict[str, StartedModel] = {}
    taken: bool = False
    privacy: dict[str, Promise] = {}


class RunRecord(BaseModel):
    """The record of a run.

    ``models`` says which method's model ``predict`` takes by default, ``second_models`` for which
    methods clients keep X beside W, ``shared`` which federated runs end with one model for all
    clients. ``data`` says where each task's samples come from,
    ``dropped`` which rows could not be used. ``times`` are those of each federated run,
    ``privacy`` what its noise promised. ``began`` is set while a process is at work. ``id`` tells
    runs apart: on a node it is that of the server's run. ``left`` says since which round each
    federated run did without a client. ``own_code`` has a checksum of every module of the user's
    own; ``mixed`` says which code has changed between the parts of a resumed run.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_assignment=True)

    format: int = FORMAT
    id: str = ""
    start: Started | None = None
    left: dict[str, dict[str, int]] = {}
    config: Config
    seed: int
    threads: int = Field(ge=1, le=MAX_THREADS)
    finished: bool = False
    seconds: float = 0.0
    began: float | None = None
    clients: int
    models: dict[str, str]
    second_models: list[str] = []
    shared: list[str] = []
    federation: FederationFile
    federation_sha256: str
    classes: dict[str, list[str]]
    data: dict[str, str]
    data_sha256: dict[str, list[str]]
    dropped: list[dict[str, Any]] = []
    metrics: dict[str, Any] = {}
    weights: str
    random_weights: bool
    environment: dict[str, Any]
    own_code: dict[str, str] = {}
    mixed: list[str] = []
    computing: dict[str, Any]
    parameters: dict[str, Any]
    memory: dict[str, int] = {}
    times: dict[str, Times] = {}
    privacy: dict[str, Promise] = {}

    @property
    def code(self) -> dict[str, str]:
        """Checksums of the code that results depend on: tapfl's, and the user's own modules'."""
        return {"tapfl": str(self.environment.get("code")), **self.own_code}

    def save(self, folder: Path) -> None:
        """Write run.json."""
        write_json(folder / FILE, self.model_dump(mode="json"))


def read_record(folder: Path) -> RunRecord:
    """Read the record of a run."""
    path = folder / FILE
    values = read_object(path)
    number = values.get("format")
    if number != FORMAT:
        raise TapflError(f"{path}: made by another version of tapfl (format {number}, expected "
                         f"{FORMAT})")
    return check(RunRecord, values, str(path))


def run_id(folder: Path) -> str:
    """Return the id of the run in a folder, or a new one for a run to come."""
    return read_record(folder).id if (folder / FILE).is_file() else uuid.uuid4().hex


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("too large")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TapflError(f"{path}: not a readable record ({error})") from None
    if not isinstance(values, dict):
        raise TapflError(f"{path}: not a readable record (expected a JSON object, got "
                         f"{type(values).__name__})")
    return values


def fixed_settings(config: Config) -> Config:
    """Return a configuration without what may change when a run is continued.

    That is where it computes and what it keeps, not what it computes. A mirror of the data may have
    moved; what it holds is what counts.
    """
    return config.model_copy(update={
        "speed": SpeedConfig(), "checkpoint": CheckpointConfig(),
        "data": config.data.model_copy(update={"folder": None})})


def check_unchanged(folder: Path, before: Config, now: Config, advice: str,
                    ignored: Iterable[str] = ()) -> None:
    """Refuse to go on with a run of another configuration; ``ignored`` keys may differ, too."""
    old, new = (fixed_settings(c).model_dump(exclude=set(ignored)) for c in (before, now))
    for section, value in new.items():
        if old[section] != value:
            raise TapflError(f"{folder}: this run was started with another '{section}' "
                             f"({old[section]}); {advice}")


def dropped(event: RowsDropped) -> dict[str, Any]:
    """Return what a record says of rows that could not be used."""
    return {"where": event.where, "dropped": event.dropped, "rows": event.rows,
            "reasons": [dict(reason) for reason in event.reasons]}


def killed_after(folder: Path, began: float) -> float:
    """Return how long a piece of the run took that could not say it itself: to its last event."""
    with contextlib.suppress(OSError):
        return max(0.0, (folder / "events.jsonl").stat().st_mtime - began)
    return 0.0


def environment(device: str) -> dict[str, Any]:
    """Return the versions and the hardware that a run had."""
    facts = {"tapfl": __version__, "code": code_digest(), "python": platform.python_version(),
             "torch": torch.__version__, "transformers": transformers.__version__,
             "numpy": numpy.__version__, "device": device, "threads": torch.get_num_threads()}
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


@functools.cache
def code_digest() -> str:
    """Return a checksum of the code that results depend on: all rooms up to this one."""
    package, whole = resources.files("tapfl"), hashlib.sha256()
    for room in ("", *RESULT_ROOMS):
        for path in sorted((package / room).iterdir(), key=lambda path: path.name):
            if path.name.endswith(".py"):
                whole.update(f"{room}/{path.name}\n".encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def memory(device: str) -> dict[str, int]:
    """Return the most memory the process has used so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    facts = {"peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.startswith("cuda"):
        facts["peak_cuda"] = torch.cuda.max_memory_allocated()
    return facts
