"""What a server is to run: a file beside its folder, so that Flower needs to know its path only."""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tapfl.config import Config, load_config
from tapfl.engine.files import write_json
from tapfl.engine.flower.elsewhere import Elsewhere
from tapfl.engine.flower.frames import one_line
from tapfl.engine.flower.headers import Compression
from tapfl.engine.flower.nodes import Host, Patience, Transport
from tapfl.engine.process import identity
from tapfl.engine.record import read_object
from tapfl.engine.run import run
from tapfl.errors import TapflError, nearest
from tapfl.events import Event, Logged, Message, RoundEnded
from tapfl.reading import check

Says = Callable[[str], None]


def nothing(text: str) -> None:
    """Say nothing."""


class Job(BaseModel):
    """A run of a server; ``log`` is where it says what it does, besides the run's events.

    ``hosts`` says which node may have which clients; None lets any node have any.
    """

    model_config = ConfigDict(extra="forbid")

    config: Config
    out: Path
    log: Path
    device: str = "cpu"
    modules: Path | None = None
    compression: Compression = "none"
    patience: Patience = Patience()
    hosts: list[Host] | None = None

    @property
    def process(self) -> Path:
        """The file that says which process carries it out."""
        return self.log.with_name("serverapp.json")

    def save(self, path: Path) -> None:
        """Write the file."""
        write_json(path, self.model_dump(mode="json"))


def read_job(path: Path) -> Job:
    """Read what ``save`` wrote."""
    return check(Job, read_object(path), str(path))


def job_of(settings: Mapping[str, Any]) -> Job:
    """Return the job that Flower's run-config asks for; an empty text counts as no value.

    ``job`` is a file that ``save`` wrote. Without one there are ``preset``, ``out``, ``set`` (words
    KEY=VALUE as in a shell), ``device``, ``compression`` and the fields of ``Patience``.
    """
    given = {key: value for key, value in settings.items() if value != ""}
    if "job" in given:
        return read_job(Path(str(given["job"])))
    waits = {field.name for field in dataclasses.fields(Patience)}
    known = {"preset", "out", "set", "device", "compression", *waits}
    for key in given:
        if key not in known:
            raise TapflError(f"run-config: unknown key '{key}'{nearest(key, known)}")
    out = Path(str(given.get("out", "")))
    if "preset" not in given or not out.is_absolute():
        raise TapflError("run-config: expected 'job', or 'preset' and an absolute path as 'out'")
    config = load_config(str(given["preset"]), _words(str(given.get("set", ""))))
    return check(Job, {
        "config": config.model_dump(), "out": out, "log": out / "deploy" / "log.jsonl",
        "patience": {key: given[key] for key in waits & set(given)},
        **{key: given[key] for key in ("device", "compression") if key in given}}, "run-config")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise TapflError(f"run-config: set: {error}") from None


def carry_out(job: Job, transport: Transport, also: Says = nothing) -> None:
    """Run a job over a transport, or go on with it where it was interrupted.

    ``also`` gets the lines of its log, in words.
    """
    say = Log(job.log, also)
    write_json(job.process, identity())
    site = functools.partial(Elsewhere, transport, job.patience, compression=job.compression,
                             hosts=job.hosts)
    resume = (job.out / "run.json").is_file()
    say(Message("goes on" if resume else "starts"))
    try:
        run(job.config, job.out, resume=resume, device=job.device, notify=say,
            modules=job.modules, site=site)
    except TapflError as error:
        say(Message(f"stopped: {error}"))
        raise
    except Exception as error:  # whoever has submitted it may try again
        say(Message(f"failed: {one_line(f'{type(error).__name__}: {error}')}"))
        raise
    say(Message("finished"))


class Log:
    """Writes what happens as lines of JSON: what `tapfl deploy status` reads."""

    def __init__(self, path: Path, also: Says = nothing) -> None:
        self._path, self._also = path, also

    def __call__(self, event: Event) -> None:
        """Write a line for what an operator wants to know."""
        line = _line(event)
        if line is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._also(in_words(line))


def _line(event: Event) -> dict[str, Any] | None:
    if isinstance(event, Message):
        return {"says": event.text}
    if isinstance(event, RoundEnded):
        return {"round": event.round, "method": event.method, "cohort": list(event.cohort),
                "bytes_up": event.bytes_up, "bytes_down": event.bytes_down,
                "seconds": event.seconds}
    if isinstance(event, Logged) and event.kind in ("missing", "refused", "diverged", "left"):
        return event.record()
    return None


def in_words(line: Mapping[str, Any]) -> str:
    """Return a line of a job's log for people."""
    if "says" in line:
        return str(line["says"])
    if "cohort" in line:
        return (f"{line['method']}: round {line['round'] + 1} · {' '.join(line['cohort'])} · "
                f"{line['seconds']:.1f} s · {line['bytes_up'] / 1e6:.2f} MB up")
    reason = f": {line['reason']}" if "reason" in line else ""
    return f"round {line['round'] + 1}: {line['client']}: {line['event']}{reason}"
