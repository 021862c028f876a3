"""What a round costs as the federation grows: it should stay the same."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapfl.bench.measure import Report, changed
from tapfl.config import Config
from tapfl.data.synthetic import SHAPES
from tapfl.errors import TapflError

COLUMNS = ["clients", "round s", "idle round ms", "start s", "peak MB", "disk MB"]
BATCH = 8
EACH = BATCH // 2  # samples of each task that a client holds

# Clients of one kind, with as many samples in every size, so that every round trains the same.
FEDERATION = """\
tasks:
  agnews: {{kind: text_classification, modalities: [text], classes: 4}}
  commongen: {{kind: text_generation, modalities: [text]}}
clients:
  - {{name: reader, tasks: {{agnews: {share}, commongen: {share}}}}}
"""


def run(config: Config, device: str, quick: bool = False, clients: Sequence[int] | None = None,
        rounds: int | None = None) -> Report:
    """Run rounds of TAP in federations of different sizes, each in a process of its own."""
    sizes = list(clients or ((30, 60) if quick else (30, 100, 1000, 10_000)))
    most = SHAPES["commongen"].train // EACH
    if max(sizes) > most:
        raise TapflError(f"--clients {max(sizes)}: expected at most {most}, so that every client "
                         "has data")
    warmup, measured = (1, 2) if quick else (3, rounds or 12)
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "federation.yaml"
            file.write_text(FEDERATION.format(share=f"{size}/{max(sizes)}"))
            one = changed(config, _settings(size, max(sizes), str(file), warmup + measured))
            found = _apart({"config": one.model_dump(mode="json"), "device": device,
                            "folder": folder, "warmup": warmup})
        rows.append({"clients": size, **found})
    return Report(
        "scale: a round as the number of clients grows",
        {"method": "tap", "cohort": 2, "local steps": one.train.local_steps, "batch size": BATCH,
         "rounds": measured, "samples per task": EACH * max(sizes),
         "peak is of": "GPU memory" if device.startswith("cuda") else "resident memory"},
        COLUMNS, rows,
        "Medians over the rounds; an idle round is FedAvg's without training. All sizes load the "
        f"same data, and a client holds {EACH} samples of each of two tasks. Disk: the whole "
        "folder after the last round.")


def _settings(size: int, largest: int, file: str, rounds: int) -> dict[str, Any]:
    """Return what makes federations of different sizes comparable."""
    return {"methods": ["tap"], "federation.file": file, "federation.groups": size,
            "federation.clients": None, "federation.holdout": 0, "federation.dirichlet": None,
            "tap.criterion": "training", "data.source": "synthetic",
            "data.train": EACH * largest, "data.test": 8,
            "train.cohort": 2, "train.batch_size": BATCH, "train.local_steps": 2,
            "train.rounds": rounds}


def _apart(order: dict[str, Any]) -> dict[str, float]:
    """Measure in a fresh process, whose memory is its own."""
    done = subprocess.run([sys.executable, "-m", "tapfl.bench.scale_one"], input=json.dumps(order),
                          capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise TapflError(f"bench scale: {lines[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
