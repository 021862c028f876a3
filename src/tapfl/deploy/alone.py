"""A node's resident process alone, for a SuperNode that somebody else starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tapfl.config import Config
from tapfl.engine.flower.resident import Resident
from tapfl.engine.flower.serving import listen, serve


def run_alone(config: Config, clients: Sequence[str], out: Path, socket: Path, *,
              allow: Collection[str], device: str, modules: Path | None,
              say: Callable[[str], None]) -> None:
    """Answer the messages that come through a Unix socket, until the process is stopped."""
    with contextlib.ExitStack() as stack:
        resident = Resident(config, clients, out, device=device, allow=allow, modules=modules,
                            notify=lambda event: say(str(event)))
        stack.callback(resident.close)
        server = stack.enter_context(listen(socket.resolve()))
        stack.callback(socket.unlink, missing_ok=True)
        say(f"ready: {', '.join(clients)}; node-config of the SuperNode: "
            f"socket=\"{socket.resolve()}\"")
        serve(resident, server, say)
