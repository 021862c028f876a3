"""tapfl: personalised federated learning of multi-modal, multi-task foundation models.

    import tapfl
    config = tapfl.load_config("quickstart", ["train.rounds=10"])
    rows = tapfl.run(config, "runs/mine")
    model = tapfl.load("runs/mine", client="g0-1")
    print(model.predict("agnews", text="shares rise after the merger"))
"""

from __future__ import annotations

import os
from typing import Any

# Threads that wait for each other spin, by default for milliseconds. Where other work has one of
# the cores that is most of the time. So many turns are some microseconds, and as fast elsewhere.
# libgomp (torch's threads on Linux) reads it once, when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"
__all__ = ["TapflError", "__version__", "export", "load", "load_config", "run"]

_HOMES = {"run": "tapfl.engine.run", "load_config": "tapfl.config", "TapflError": "tapfl.errors",
          "load": "tapfl.use.load", "export": "tapfl.use.export"}


def __dir__() -> list[str]:
    """Show the public names, though they are imported when they are used."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import the public names when they are used, so that importing tapfl costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tapfl' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
