"""A node's resident process: python -m tapfl.deploy.resident FILE, as `deploy client` starts it.

A process of its own, so that the node survives it: whoever kills it, for want of memory say, finds
it started again, while Flower's SuperNode stays connected. `deploy client --socket` is this process
alone, for a SuperNode that somebody else starts.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tapfl.config import Config
from tapfl.errors import TapflError
from tapfl.events import Event, Message, RowsDropped
from tapfl.reading import check


class Home(BaseModel):
    """Where clients live: their data by ``config``, what they keep in ``out``.

    Members of ``group`` reach the socket, too: a SuperNode under a user of its own, who sees
    nothing else of this node.
    """

    model_config = ConfigDict(extra="forbid")

    config: Config
    clients: tuple[str, ...]
    out: Path
    socket: Path
    group: str | None = None
    allow: tuple[str, ...] = ()
    device: str = "auto"
    modules: Path | None = None


def live(home: Home) -> None:
    """Answer messages until the process is stopped."""
    import torch

    from tapfl.engine.flower.resident import Resident
    from tapfl.engine.flower.serving import listen, serve
    from tapfl.engine.run import pick_device

    torch.set_num_threads(home.config.thread_count)
    with contextlib.ExitStack() as stack:
        resident = Resident(home.config, home.clients, home.out, device=pick_device(home.device),
                            allow=home.allow, modules=home.modules,
                            notify=_tell)
        stack.callback(resident.close)
        server = stack.enter_context(listen(home.socket))
        stack.callback(home.socket.unlink, missing_ok=True)
        if home.group is not None:
            open_to(home.group, home.socket)
        _say(f"ready: {', '.join(home.clients)} at {home.socket}")
        serve(resident, server, _say)


def open_to(group: str, socket: Path) -> None:
    """Let a group reach a socket."""
    try:
        shutil.chown(socket, group=group)
        socket.chmod(0o660)
    except LookupError:
        raise TapflError(f"--group {group}: no such group on this machine") from None
    except OSError as error:
        raise TapflError(f"--group {group}: {socket}: {error.strerror}") from None


def _tell(event: Event) -> None:
    if isinstance(event, Message | RowsDropped):
        _say(str(event))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to end
        print(text, flush=True)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        path = Path(sys.argv[1])
        live(check(Home, json.loads(path.read_text(encoding="utf-8")), str(path)))
    except TapflError as error:
        print(f"tapfl: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
