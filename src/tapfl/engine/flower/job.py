"""What a server is to run: a file beside its folder, so that Flower needs to know its path only."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tapfl.config import Config
from tapfl.engine.files import write_json
from tapfl.engine.flower.elsewhere import Elsewhere
from tapfl.engine.flower.frames import one_line
from tapfl.engine.flower.nodes import Patience, Transport
from tapfl.engine.flower.wire import Compression
from tapfl.engine.process import identity
from tapfl.engine.record import read_object
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.events import Event, Logged, Message, RoundEnded, Subscriber
from tapfl.reading import check


class Job(BaseModel):
    """A run of a server; ``log`` is where it says what it does, besides the run's events."""

    model_config = ConfigDict(extra="forbid")

    config: Config
    out: Path
    log: Path
    device: str = "cpu"
    modules: Path | None = None
    compression: Compression = "none"
    patience: Patience = Patience()

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


def carry_out(job: Job, transport: Transport) -> None:
    """Run a job over a transport, or go on with it where it was interrupted."""
    say = Log(job.log)
    write_json(job.process, identity())
    site = functools.partial(Elsewhere, transport, job.patience, compression=job.compression)
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

    def __init__(self, path: Path, also: Subscriber | None = None) -> None:
        self._path, self._also = path, also

    def __call__(self, event: Event) -> None:
        """Write a line for what an operator wants to know."""
        line = _line(event)
        if line is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if self._also is not None:
            self._also(event)


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
