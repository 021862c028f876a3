"""A client's machine: the resident process, and Flower's SuperNode that brings it messages.

This process only watches over the two, and starts again whichever ends.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfl.config import Config
from tapfl.deploy.processes import Processes, executable, free_port, stop_recorded
from tapfl.deploy.resident import Home
from tapfl.deploy.supervise import Supervisor
from tapfl.errors import TapflError

POLL = 0.5


@dataclass(frozen=True)
class Node:
    """What a node needs to take part: its clients, its server, the keys for both."""

    config: Config
    clients: Sequence[str]
    out: Path
    superlink: str
    certificate: Path  # of the authority that signed the server's
    key: Path
    allow: Sequence[str]
    device: str = "auto"
    modules: Path | None = None

    def run(self, say: Callable[[str], None]) -> None:
        """Take part until the process is stopped."""
        for path, what in ((self.certificate, "the authority's certificate (ca.pem)"),
                           (self.key, "the node's private key")):
            if not path.is_file():
                raise TapflError(f"{path}: no such file; expected {what}")
        flower = self.out.with_name(f"{self.out.name}.flower")
        stop_recorded(flower)
        with contextlib.ExitStack() as stack:
            # A short path: sockets have no long ones.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tapfl-")))
            processes = Processes(flower, {"FLWR_HOME": str((flower / "home").resolve())})
            stack.callback(processes.stop)
            supervisor = Supervisor(processes, say)
            supervisor.keep("resident", self._resident(flower, place / "resident"))
            while not (place / "resident").exists():  # it reads its data first
                supervisor.look()
                time.sleep(POLL)
            # Its own port may be another's when it is started again.
            supervisor.keep("supernode", lambda: self._supernode(place / "resident"))
            say(f"ready: {', '.join(self.clients)} for {self.superlink}")
            while True:
                supervisor.look()
                time.sleep(POLL)

    def _resident(self, folder: Path, socket: Path) -> list[str]:
        home = Home(config=self.config, clients=tuple(self.clients), out=self.out, socket=socket,
                    allow=tuple(self.allow), device=self.device, modules=self.modules)
        path = folder / "resident.json"
        path.write_text(home.model_dump_json(), encoding="utf-8")
        return [sys.executable, "-m", "tapfl.deploy.resident", str(path)]

    def _supernode(self, socket: Path) -> list[str]:
        return [executable("flower-supernode"), "--superlink", self.superlink,
                "--root-certificates", str(self.certificate.resolve()),
                "--auth-supernode-private-key", str(self.key.resolve()),
                "--host", "127.0.0.1", "--port", str(free_port()),
                "--node-config", f"socket={json.dumps(str(socket))}"]
