"""A server and three clients on loopback, as on machines of their own; faults may happen to them.

`Tap` stands between a node's Flower and its resident process: it knows when a client is asked, and
may change what the client answers.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tapfl.deploy.processes import free_port
from tapfl.engine.flower.frames import FrameError, receive, request, send, unpack
from tapfl.engine.process import identity, is_running

PYTHON = [sys.executable, "-m", "tapfl", "deploy"]


class Machines:
    """One federation; ``log`` has the time and the text of everything the server says."""

    def __init__(self, folder, config, clients, patience=()):
        self.folder, self.config, self.clients, self.patience = folder, config, clients, patience
        self.out, self.keys = folder / "server", folder / "keys"
        self.address, self.taps, self._children, self.log = f"127.0.0.1:{free_port()}", {}, {}, []
        self._read, self.stopped = 0, threading.Event()
        subprocess.run([*PYTHON, "keys", str(self.keys), "--nodes", ",".join(clients)], check=True,
                       stdout=subprocess.DEVNULL)

    def start(self):
        self.start_server()
        for client in self.clients:
            self.start_client(client)

    def start_server(self):
        self._start("server", [
            *PYTHON, "server", str(self.config), "--keys", str(self.keys), "--out", str(self.out),
            "--public", self.address, "--device", "cpu", *self.patience])

    def start_client(self, client, before=(), out=None):
        self._start(client, [
            *before, *PYTHON, "client", str(self.config), "--clients", client,
            "--out", str(out or self.home(client)), "--superlink", self.address,
            "--ca", str(self.keys / "ca.pem"), "--key", str(self.keys / f"nodes/{client}.key"),
            "--allow", "scores,losses,replacements,notes", "--device", "cpu"])

    def _start(self, name, command):
        with (self.folder / f"{name}.log").open("ab") as log:
            self._children[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                                    stderr=subprocess.STDOUT)

    def home(self, client):
        return self.folder / client / "own"

    def pid(self, what, client=None):
        """Return the process of server, superlink, proxy, serverapp, node, resident, supernode."""
        if what in ("server", "node"):
            return self._children[client or what].pid
        if what == "serverapp":
            return json.loads((self.out / "deploy" / "serverapp.json").read_text())["pid"]
        flower = self.home(client).with_name("own.flower") if client else self.out / "deploy"
        return json.loads((flower / "processes.json").read_text())[what]["pid"]

    def signal(self, number, what, client=None):
        os.kill(self.pid(what, client), number)

    def collect(self, name):
        """Wait for a process of ours that was killed."""
        return self._children[name].wait(60)

    def tap(self, client, before, after):
        """Stand before a client's resident, also before one that is started again."""
        path = self.home(client).with_name("own.flower") / "resident.json"

        def watch():
            while not self.stopped.is_set():
                with contextlib.suppress(OSError, ValueError, KeyError):
                    place = Path(json.loads(path.read_text())["socket"])
                    old = self.taps.get(client)
                    if place.is_socket() and (old is None or place != old.path
                                              or place.stat().st_ino != old.inode):
                        self.taps[client] = Tap(place, before, after)
                self.stopped.wait(0.1)

        threading.Thread(target=watch, daemon=True).start()

    def follow(self, until, patience):
        """Read what the server says until that is enough; return when, or None."""
        end = time.monotonic() + patience
        path = self.out / "deploy" / "log.jsonl"
        while time.monotonic() < end:
            if path.is_file():
                with path.open() as file:
                    file.seek(self._read)
                    while (line := file.readline()).endswith("\n"):
                        self._read = file.tell()
                        self.log.append((time.monotonic(), json.loads(line)))
                        if until(self.log[-1][1]):
                            return self.log[-1][0]
            time.sleep(0.1)
        return None

    def stop(self):
        self.stopped.set()
        for tap in self.taps.values():
            tap.close()
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGCONT)
                child.terminate()
        for child in self._children.values():
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
        subprocess.run([*PYTHON, "stop", str(self.out)], check=False, stdout=subprocess.DEVNULL)

    def left_over(self):
        """Return the processes that are still at work in this folder: there should be none."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (path / "cmdline").read_bytes() and is_running(
                        identity(int(path.name))):
                    found.append(int(path.name))
        return found


class Tap:
    """Passes messages on; ``before`` sees what is asked, ``after`` may change the answer."""

    def __init__(self, path, before, after):
        self.path, self.real = path, path.with_name("real")
        self.before, self.after = before, after
        path.rename(self.real)
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.bind(str(path))
        self.inode = path.stat().st_ino
        self.server.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                threading.Thread(target=self._pass, args=(connection,), daemon=True).start()

    def _pass(self, connection):
        with connection, contextlib.suppress(OSError, FrameError):
            data = receive(connection)
            asked = unpack(data)[0]
            self.before(asked)
            try:
                answer = request(self.real, data, 600)
            except (OSError, FrameError):
                self.close()  # the resident has died: what comes next is not ours
                raise
            send(connection, self.after(asked, answer))

    def close(self):
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self.inode:  # else the next resident is there
                self.path.unlink()
            self.server.close()
