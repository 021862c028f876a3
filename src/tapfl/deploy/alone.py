"""A node's resident process alone, for a SuperNode that somebody else starts."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tapfl.config import Config
from tapfl.engine.flower.resident import Resident
from tapfl.engine.flower.serving import listen, serve
from tapfl.errors import TapflError


def run_alone(config: Config, clients: Sequence[str], out: Path, socket: Path, *,
              group: str | None = None, allow: Collection[str], device: str, modules: Path | None,
              say: Callable[[str], None]) -> None:
    """Answer the messages that come through a Unix socket, until the process is stopped.

    Members of ``group`` reach the socket, too: a SuperNode under a user of its own, who sees
    nothing else of this node.
    """
    with contextlib.ExitStack() as stack:
        resident = Resident(config, clients, out, device=device, allow=allow, modules=modules,
                            notify=lambda event: say(str(event)))
        stack.callback(resident.close)
        server = stack.enter_context(listen(socket.resolve()))
        stack.callback(socket.unlink, missing_ok=True)
        if group is not None:
            _open_to(group, socket)
        say(f"ready: {', '.join(clients)}; node-config of the SuperNode: "
            f"socket=\"{socket.resolve()}\"")
        serve(resident, server, say)


def _open_to(group: str, socket: Path) -> None:
    try:
        shutil.chown(socket, group=group)
        socket.chmod(0o660)
    except LookupError:
        raise TapflError(f"--group {group}: no such group on this machine") from None
    except OSError as error:
        raise TapflError(f"--group {group}: {socket}: {error.strerror}") from None
