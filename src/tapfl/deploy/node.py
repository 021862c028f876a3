"""A client's machine: the resident process, and Flower's SuperNode that brings it messages."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfl.config import Config
from tapfl.deploy.processes import Processes, executable, free_port, stop_recorded
from tapfl.engine.flower.resident import Resident
from tapfl.engine.flower.serving import listen, serve
from tapfl.errors import TapflError

WAIT = 5.0  # seconds before a SuperNode that ended is started again


@dataclass(frozen=True)
class Node:
    """What a node needs to take part: its clients, its server, the keys for both."""

    config: Config
    clients: Sequence[str]
    out: Path
    superlink: str
    certificate: Path  # of the authority that signed the server's
    key: Path
    allow: Collection[str]
    device: str = "cpu"
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
            resident = Resident(self.config, self.clients, self.out, device=self.device,
                                allow=self.allow, modules=self.modules,
                                notify=lambda event: say(str(event)))
            stack.callback(resident.close)
            # A short path: sockets have no long ones.
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="tapfl-"))
            server = stack.enter_context(listen(Path(place) / "resident"))
            processes = Processes(flower, {"FLWR_HOME": str((flower / "home").resolve())})
            stack.callback(processes.stop)
            stopped = threading.Event()
            stack.callback(stopped.set)
            command = self._supernode(Path(place) / "resident")
            processes.start("supernode", command)
            threading.Thread(target=_keep_up, args=(processes, command, stopped, say),
                             daemon=True).start()
            say(f"ready: {', '.join(self.clients)} for {self.superlink}")
            serve(resident, server, say)

    def _supernode(self, socket: Path) -> list[str]:
        return [executable("flower-supernode"), "--superlink", self.superlink,
                "--root-certificates", str(self.certificate.resolve()),
                "--auth-supernode-private-key", str(self.key.resolve()),
                "--host", "127.0.0.1", "--port", str(free_port()),
                "--node-config", f"socket={json.dumps(str(socket))}"]


def _keep_up(processes: Processes, command: Sequence[str], stopped: threading.Event,
             say: Callable[[str], None]) -> None:
    """Start a SuperNode again that has ended, as when its server refused it for a while."""
    while not stopped.wait(1.0):
        for name, status in processes.ended().items():
            say(f"the SuperNode has ended with status {status} ({processes.log(name)} says why); "
                f"starting it again in {WAIT:g} s")
            if not stopped.wait(WAIT):
                processes.start(name, command)
