"""A node's resident process: python -m tapfl.deploy.resident FILE, as `deploy client` starts it.

A process of its own, so that the node survives it: whoever kills it, for want of memory say, finds
it started again, while Flower's SuperNode stays connected.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tapfl.config import Config
from tapfl.errors import TapflError
from tapfl.reading import check


class Home(BaseModel):
    """Where clients live: their data by ``config``, what they keep in ``out``."""

    model_config = ConfigDict(extra="forbid")

    config: Config
    clients: tuple[str, ...]
    out: Path
    socket: Path
    allow: tuple[str, ...] = ()
    device: str = "auto"
    modules: Path | None = None


def main(path: Path) -> None:
    """Answer messages until the process is stopped."""
    import json

    import torch

    from tapfl.engine.flower.resident import Resident
    from tapfl.engine.flower.serving import listen, serve
    from tapfl.engine.run import pick_device

    home = check(Home, json.loads(path.read_text(encoding="utf-8")), str(path))
    torch.set_num_threads(home.config.thread_count)
    with contextlib.ExitStack() as stack:
        resident = Resident(home.config, home.clients, home.out, device=pick_device(home.device),
                            allow=home.allow, modules=home.modules)
        stack.callback(resident.close)
        server = stack.enter_context(listen(home.socket))
        serve(resident, server, _say)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to end
        print(text, flush=True)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        main(Path(sys.argv[1]))
    except TapflError as error:
        print(f"tapfl: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
