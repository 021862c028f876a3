"""The server's machine: a SuperLink, perhaps a proxy, and the run that goes over them.

Everything but the run itself is below DIR/deploy: Flower's files, logs, which processes there are.
A server that was killed is started again with the same command: it ends what is left of the one
before, and goes on from its last checkpoint with the nodes that come back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tapfl.deploy.app import App, stop_app
from tapfl.deploy.hosts import Hosts
from tapfl.deploy.processes import Processes, stop_recorded
from tapfl.deploy.superlink import SuperLink
from tapfl.deploy.supervise import Supervisor
from tapfl.engine.flower.job import Job, Log
from tapfl.engine.flower.nodes import Host
from tapfl.errors import TapflError
from tapfl.events import Message

POLL = 0.5
BELOW = "deploy"  # the folder within a run's
LOG = "log.jsonl"


class Server:
    """A server under way in a run's folder; what ends below it is started again."""

    def __init__(self, out: Path, keys: Path, port: int | None = None,
                 public: str | None = None, hosts: Hosts | None = None) -> None:
        for name in ("ca.pem", "server.pem", "server.key"):
            if not (keys / name).is_file():
                raise TapflError(f"{keys / name}: no such file; make keys with: "
                                 f"tapfl deploy keys {keys}")
        self.out, self.folder = out, out / BELOW
        self._app: App | None = None
        stop_recorded(self.folder)
        stop_app(self.folder)
        processes = Processes(self.folder, {"FLWR_HOME": str((self.folder / "flower").resolve())})
        self.supervisor = Supervisor(processes, self._say)
        self.superlink = SuperLink(self.supervisor, keys, port)
        self._public, self._hosts = public, hosts
        self._ids: dict[str, int | None] = {}

    def __enter__(self) -> Server:
        try:
            self.superlink.start()
            self._ids = self.superlink.register()
            if self._public:
                self.superlink.publish(self._public)
        except BaseException:
            self.supervisor.processes.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        stop_app(self.folder)
        self.supervisor.processes.stop()

    @property
    def address(self) -> str:
        """Where nodes reach it."""
        return self._public or f"127.0.0.1:{self.superlink.port}"

    def begin(self, job: Job) -> Iterator[dict[str, Any]]:
        """Submit a run; return what it says, as it says it."""
        path = self.folder / "job.json"
        job.model_copy(update={"hosts": self._bound()}).save(path)
        position = job.log.stat().st_size if job.log.is_file() else 0  # of earlier starts
        self._app = App(lambda: self.superlink.submit(path), job.process, self._say)
        self._app.begin()
        return follow(job.log, self._look, position)

    def _bound(self) -> list[Host] | None:
        """Return which node may have which clients."""
        if self._hosts is None:
            return None
        bound = []
        for name, clients in self._hosts.items():
            node = self._ids[name]
            if node is None:
                raise TapflError(f"nodes/{name}.pub: registered by another command, so its node is "
                                 "not known; give that node a new key, or remove clients.yaml")
            bound.append(Host(node, name, tuple(clients)))
        return bound

    def _look(self) -> None:
        """Start again what has ended; a run does not survive its SuperLink."""
        again = self.supervisor.look()
        if self._app is not None:
            if "superlink" in again:
                self._app.lost("the run has lost its SuperLink")
            self._app.look()

    def _say(self, text: str) -> None:
        Log(self.folder / LOG)(Message(text))


def follow(log: Path, look: Callable[[], None], position: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the lines of a job's log until it has finished; what stopped it is an error.

    ``look`` is called every now and then.
    """
    while True:
        if log.is_file():
            with log.open(encoding="utf-8") as file:
                file.seek(position)
                while (line := file.readline()).endswith("\n"):
                    position = file.tell()
                    said = json.loads(line)
                    yield said
                    text = said.get("says", "")
                    if text == "finished":
                        return
                    if text.startswith("stopped: "):
                        raise TapflError(text.removeprefix("stopped: "))
        look()
        time.sleep(POLL)
