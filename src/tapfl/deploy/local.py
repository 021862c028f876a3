"""A whole deployment on this machine, to try it: a server and one node for each client."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tapfl.config import NEW, Config
from tapfl.deploy.keys import make_keys
from tapfl.deploy.processes import free_port
from tapfl.deploy.server import BELOW, Server
from tapfl.engine.flower.allow import ALLOW
from tapfl.engine.flower.headers import Compression
from tapfl.engine.flower.job import Job
from tapfl.engine.flower.nodes import Patience
from tapfl.errors import TapflError


def run_local(config: Config, groups: Sequence[Sequence[str]], out: Path, *,
              device: str = "cpu", proxy: bool = False, patience: Patience | None = None,
              compression: Compression = "none", modules: Path | None = None,
              say: Callable[[dict[str, Any]], None] = lambda said: None) -> None:
    """Run a federation over SuperLink and SuperNodes on loopback, with TLS and keys.

    ``groups`` are the clients of each node; everything may be reported to the server.
    """
    if (out / "results.csv").is_file():
        raise TapflError(f"{out}: this run is complete; choose another --out")
    folder = out / BELOW
    keys = folder / "keys"
    make_keys(keys, [], [group[0] for group in groups])
    configuration = folder / "config.yaml"
    configuration.write_text(_yaml(config), encoding="utf-8")
    public = f"127.0.0.1:{free_port()}" if proxy else None
    with Server(out, keys, public=public,
                hosts={group[0]: group for group in groups}) as server:
        for group in groups:
            own = [] if modules is None else ["--modules", str(modules)]
            server.supervisor.keep(f"node-{group[0]}", [
                sys.executable, "-m", "tapfl", "deploy", "client", str(configuration),
                "--clients", ",".join(group), "--out", str(folder / "nodes" / group[0]),
                "--superlink", server.address, "--ca", str(keys / "ca.pem"),
                "--key", str(keys / "nodes" / f"{group[0]}.key"), "--allow", ",".join(ALLOW),
                "--device", device, *own, *_earlier(config, group)])
        job = Job(config=config, out=out.resolve(), log=(folder / "log.jsonl").resolve(),
                  device=device, modules=modules, compression=compression,
                  patience=patience or Patience())
        for said in server.begin(job):
            say(said)


def _earlier(config: Config, group: Sequence[str]) -> list[str]:
    """Return where a node goes on: its earlier folder, or the run itself if all was in one process.

    Whether that is the right one is the server's to say.
    """
    if config.start is None:
        return []
    before = Path(config.start)
    folders = [before / BELOW / "nodes" / client for client in group]
    own = next((folder for folder in folders if folder.is_dir()), None)
    return ["--set", f"start={own or (NEW if (before / BELOW).is_dir() else before)}"]


def _yaml(config: Config) -> str:
    import yaml

    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text
