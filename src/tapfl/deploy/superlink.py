"""Flower's server, the SuperLink, as a deployment uses it: on loopback, with TLS and node keys.

Its port carries the Fleet API, which nodes use, and the Control API, which submits runs: whoever
reaches that executes code on every node. So it never leaves this machine; what nodes elsewhere
reach is a proxy that passes the Fleet API alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from tapfl.deploy.processes import executable, free_port
from tapfl.deploy.supervise import Supervisor
from tapfl.errors import TapflError

NAME = "tapfl"  # of the connection in Flower's configuration
APP = """[project]
name = "tapfl-federation"
version = "1.0.0"
description = "A federation of tapfl"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tapfl"

[tool.flwr.app.components]
serverapp = "tapfl.engine.flower.server_app:app"
clientapp = "tapfl.engine.flower.client_app:app"

[tool.flwr.app.config]
job = ""
"""
# The path that is passed on is the one that was looked at: with a URI of its own, proxy_pass sends
# what is left of it after '..' and escapes. A request is whole before Flower gets it, which would
# hold it in memory before it asks who has sent it.
PROXY = """# Passes Flower's Fleet API and nothing else.
{user}daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_max_body_size {limit}m;
  client_body_timeout 180s;
  proxy_read_timeout 180s;
  proxy_buffering off;
  server {{
    listen {address} ssl;
    ssl_certificate {keys}/server.pem;
    ssl_certificate_key {keys}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    location /v1/fleet/ {{
      proxy_pass https://127.0.0.1:{port}/v1/fleet/;
      proxy_ssl_trusted_certificate {keys}/ca.pem;
      proxy_ssl_verify on;
      proxy_ssl_name localhost;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
    }}
    location / {{ return 403; }}
  }}
}}
"""
TRIES = 10  # in succession to start what has ended
BODY_LIMIT = 16  # MiB of a request: Flower sends large arrays in pieces of a few MB


class SuperLink:
    """A SuperLink under way, and perhaps the proxy before it."""

    def __init__(self, supervisor: Supervisor, keys: Path, port: int | None = None) -> None:
        self._supervisor, self._processes = supervisor, supervisor.processes
        self._folder, self._keys = self._processes.folder.resolve(), keys.resolve()
        self.port = port or self._port()

    def _port(self) -> int:
        """Return the port of the last start: nodes that are out there look for it again."""
        path = self._folder / "port"
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text(encoding="utf-8"))
        port = free_port()
        path.write_text(f"{port}\n", encoding="utf-8")
        return port

    def start(self) -> None:
        """Start it, and let the commands of Flower know where it is."""
        home = self._folder / "flower"
        (home / "app").mkdir(parents=True, exist_ok=True)
        if not (home / "superlink.db").is_file():
            (home / "registered.json").unlink(missing_ok=True)  # it has forgotten them
        (home / "app" / "pyproject.toml").write_text(APP, encoding="utf-8")
        (home / "config.toml").write_text(
            f"[superlink]\ndefault = {json.dumps(NAME)}\n\n[superlink.{NAME}]\n"
            f"address = \"127.0.0.1:{self.port}\"\n"
            f"root-certificates = {json.dumps(str(self._keys / 'ca.pem'))}\n", encoding="utf-8")
        self._supervisor.keep("superlink", [
            executable("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port),
            "--ssl-ca-certfile", str(self._keys / "ca.pem"),
            "--ssl-certfile", str(self._keys / "server.pem"),
            "--ssl-keyfile", str(self._keys / "server.key"), "--enable-supernode-auth",
            "--database", str(home / "superlink.db"), "--disable-runtime-dependency-installation"],
            self.port, TRIES)

    def register(self) -> dict[str, int | None]:
        """Let every node in whose public key is among the keys; return their ids by name.

        A key keeps its id. One that was registered by somebody else has an id that is not known.
        """
        home = self._folder / "flower"
        path = home / "registered.json"  # Flower's own list does not show keys
        try:
            known: dict[str, int | None] = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            known = {}
        ids = {}
        for public in sorted((self._keys / "nodes").glob("*.pub")):
            key = " ".join(public.read_text(encoding="utf-8").split()[:2])
            if key not in known:
                known[key] = self._register(public)
                path.write_text(json.dumps(known), encoding="utf-8")
            ids[public.stem] = known[key]
        return ids

    def _register(self, path: Path) -> int | None:
        try:
            said = self._processes.run(
                [executable("flwr"), "supernode", "register", str(path), NAME, "--name", path.stem,
                 "--format", "json"], f"registering node '{path.stem}'")
        except TapflError as error:  # it is there from an earlier start
            if "already" not in str(error):
                raise
            return None
        return int(json.loads(said)["node-id"])

    def submit(self, job: Path) -> None:
        """Start the server's half of the federation."""
        app = self._folder / "flower" / "app"
        self._processes.run([executable("flwr"), "run", str(app), NAME, "--run-config",
                             f"job={json.dumps(str(job.resolve()))}"], "submitting the run")

    def publish(self, address: str) -> None:
        """Start a proxy at an address that others can reach; it passes the Fleet API alone."""
        nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
        if nginx is None:
            raise TapflError("deploy: a public address needs nginx: apt-get install nginx-light")
        folder = self._folder / "proxy"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "nginx.conf"
        # Root's nginx would work as somebody who may not enter this folder.
        user = "user root;\n" if os.geteuid() == 0 else ""
        path.write_text(PROXY.format(folder=folder, keys=self._keys, port=self.port, user=user,
                                     address=address, limit=BODY_LIMIT), encoding="utf-8")
        self._supervisor.keep("proxy", [
            nginx, "-p", str(folder), "-c", str(path), "-e", str(folder / "error.log")],
            int(address.rpartition(":")[2]), TRIES)
