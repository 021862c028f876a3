"""Who is not let in: a node without a registered key, TLS or the right authority, and a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

from machines import Machines

from tapfl.deploy.keys import make_keys
from tapfl.deploy.processes import FRAME, QUIET, free_port

BESIDE = Path(sys.executable).parent


def refusals(folder, config, clients):
    """Return a row of the table for each."""
    machines = Machines(folder, config, clients)
    make_keys(folder / "foreign", [], ["stranger"])
    try:
        machines.start_server()
        machines.follow(lambda said: said.get("says", "").startswith("waiting"), 60)
        own, foreign = machines.keys, folder / "foreign"
        tls = ["--root-certificates", str(own / "ca.pem")]
        key = ["--auth-supernode-private-key"]
        rows = [
            _node("a node with a key that is not registered", machines, folder,
                  [*tls, *key, str(foreign / "nodes/stranger.key")]),
            _node("a node without a key", machines, folder, tls),
            _node("a node that speaks plain text", machines, folder, ["--insecure"]),
            _node("a node that trusts another authority", machines, folder, [
                "--root-certificates", str(foreign / "ca.pem"), *key,
                str(own / f"nodes/{clients[0]}.key")]),
            _submitted(machines, folder)]
        machines.follow(lambda said: False, 2)
        if any(" joined with " in said.get("says", "") for _, said in machines.log):
            rows.append(("nobody joined", "FAILED: somebody did", "", ""))
    finally:
        machines.stop()
    return rows


def _environment(folder):
    return {**os.environ, **QUIET, "FLWR_HOME": str(folder / "home"),
            "PATH": f"{BESIDE}:{os.environ['PATH']}"}


def _node(what, machines, folder, options):
    """Start a SuperNode; it must not get in."""
    command = [str(BESIDE / "flower-supernode"), "--superlink", machines.address, "--host",
               "127.0.0.1", "--port", str(free_port()), "--max-retries", "2", *options]
    return _refused(what, command, folder, "SuperNode ID")


def _submitted(machines, folder):
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        "[superlink]\ndefault = \"public\"\n\n[superlink.public]\n"
        f"address = \"{machines.address}\"\n"
        f"root-certificates = {json.dumps(str(machines.keys / 'ca.pem'))}\n")
    app = machines.out / "deploy" / "flower" / "app"
    return _refused("a run submitted at the public port",
                    [str(BESIDE / "flwr"), "run", str(app), "public"], folder, "Successfully")


def _refused(what, command, folder, bad):
    """Run a command that must fail, and not by chance."""
    try:
        done = subprocess.run(command, env=_environment(folder), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=40, check=False)
        text, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        text, status = (error.stdout or b"").decode(errors="replace"), None
    words = ("error", "refused", "denied", "unauthorized", "401", "403", "failed", "certificate")
    lines = [line.strip(FRAME) for line in text.splitlines()
             if any(word in line.lower() for word in words)]
    with (folder / "refusals.log").open("a") as log:
        log.write(f"== {what}: status {status}\n{text}\n")
    if bad in text or status == 0:
        return what, "FAILED: it was let in", "", ""
    how = f"refused, status {status}" if status is not None else "refused; it kept trying for 40 s"
    return what, f"{how}: {lines[-1][:150] if lines else ''}".replace("|", "/"), "", "nothing"
