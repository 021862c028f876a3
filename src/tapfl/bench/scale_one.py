"""One size of `tapfl bench scale`: its task on standard input, its results on standard output.

    python -m tapfl.bench.scale_one < order.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapfl.bench.measure import changed, peak_memory
from tapfl.config import Config
from tapfl.data.federation import Client
from tapfl.engine.run import run
from tapfl.events import Event, RoundEnded, RunStarted
from tapfl.federated.context import Losses
from tapfl.federated.method import FedAvg


class Idle(FedAvg):
    """Everything that a round does except training."""

    def train(self, client: Client, round_: int) -> Losses:
        """Leave the client's blocks as they are."""
        return {}


class Enough(Exception):
    """The last round is over; no final models are needed."""


class Clock:
    """Notes when the run begins and when every round ends."""

    def __init__(self) -> None:
        self.created = time.perf_counter()
        self.begun, self.ends, self.rounds = 0.0, [0.0], 0

    def __call__(self, event: Event) -> None:
        """Note the time."""
        if isinstance(event, RunStarted):  # model and data are there
            self.begun, self.rounds = time.perf_counter(), event.rounds
            self.ends = [self.begun]
        elif isinstance(event, RoundEnded):
            self.ends.append(time.perf_counter())
            if len(self.ends) > self.rounds:
                raise Enough

    def seconds(self, warmup: int) -> float:
        """Return the median of the rounds after the first few."""
        pairs = list(zip(self.ends, self.ends[1:], strict=False))[warmup:]
        return statistics.median(end - start for start, end in pairs)


def watched(config: Config, out: Path, device: str) -> Clock:
    """Run all rounds of an experiment and nothing after them."""
    clock = Clock()
    try:
        run(config, out, device=device, notify=clock)
    except Enough:
        return clock
    raise AssertionError("a run without rounds")


def measure(order: Mapping[str, Any]) -> dict[str, float]:
    """Run the rounds of TAP, then rounds without training."""
    config = Config.model_validate(order["config"])
    folder, device, warmup = Path(order["folder"]), str(order["device"]), int(order["warmup"])
    clock = watched(config, folder / "tap", device)
    peak = peak_memory(device)
    disk = sum(p.stat().st_size for p in (folder / "tap").rglob("*") if p.is_file())
    idle = watched(changed(config, {"methods": ["tapfl.bench.scale_one:Idle"]}),
                   folder / "idle", device)
    return {"round s": clock.seconds(warmup), "idle round ms": idle.seconds(warmup) * 1e3,
            "start s": clock.begun - clock.created, "peak MB": peak / 1e6, "disk MB": disk / 1e6}


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
