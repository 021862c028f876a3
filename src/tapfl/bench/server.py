"""How fast the server averages, next to how fast the machine copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tapfl.bench.measure import Report, timed
from tapfl.blocks import BlockAverage, BlockState
from tapfl.config import Config
from tapfl.data.participants import load_federation, taking_part
from tapfl.model.network import build_network

DISTINCT = 4  # updates that are cycled through: memory does not grow with the count of clients
COLUMNS = ["clients", "ms", "GB/s", "share of copy", "extra MB"]


def run(config: Config, device: str, quick: bool = False,
        clients: Sequence[int] | None = None) -> Report:
    """Average updates of all the server's blocks from more and more clients."""
    updates = _updates(config, device)
    size, blocks = updates[0].nbytes, len(updates[0])
    copy = _copy_rate(updates, device, repeats=3 if quick else 20)
    rows = []
    for count in clients or ((2, 10) if quick else (2, 10, 100, 1000)):
        seconds, held = _measured(updates, count, device, 1 if quick or count > 100 else 5)
        # The first update is copied: read and written. Each of the others is read, the mean is
        # read and written.
        rate = size * (2 + 3 * (count - 1)) / seconds
        rows.append({"clients": count, "ms": seconds * 1e3, "GB/s": rate / 1e9,
                     "share of copy": rate / copy, "extra MB": held / 1e6})
    return Report(
        "server: averaging clients' updates block by block",
        {"blocks": blocks, "update MB": size / 1e6, "copy GB/s": copy / 1e9}, COLUMNS, rows,
        "Bytes read and written a second; copying is one tensor of an update's size into another. "
        "Extra: what the average holds in addition to the updates.")


def _updates(config: Config, device: str) -> list[BlockState]:
    """Return some random updates of all blocks of the server's model."""
    file = load_federation(config.federation)
    tasks = taking_part(file, config.federation).task_table()
    plan = BlockState.extract(build_network(config, tasks, device="meta").blocks)
    return [BlockState({name: torch.randn(value.shape, device=device)
                        for name, value in plan.items()}, plan.shapes) for _ in range(DISTINCT)]


def _measured(updates: Sequence[BlockState], count: int, device: str,
              repeats: int) -> tuple[float, int]:
    """Return the seconds of averaging so many updates, and the bytes held in addition to them."""
    mean: list[BlockState] = []

    def average() -> None:
        mean.clear()
        mean.append(_average(updates, count))

    if not device.startswith("cuda"):
        return timed(average, device, repeats), mean[0].nbytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = timed(average, device, repeats)
    return seconds, torch.cuda.max_memory_allocated() - before


def _average(updates: Sequence[BlockState], count: int) -> BlockState:
    mean = BlockAverage()
    for index in range(count):
        mean.add(updates[index % len(updates)], 1 + index % 7)
    return mean.result()


def _copy_rate(updates: Sequence[BlockState], device: str, repeats: int) -> float:
    """Return the bytes/s of copying each update as one tensor, read and written."""
    sources = [torch.cat(list(update.values())) for update in updates]
    target = torch.empty_like(sources[0])

    def copy() -> None:
        for source in sources:
            target.copy_(source)

    return 2 * len(sources) * updates[0].nbytes / timed(copy, device, repeats, warmup=2)
