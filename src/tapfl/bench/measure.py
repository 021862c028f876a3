"""What benchmarks share: clocks, the machine's own rates to compare with, and their report."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from tapfl.config import Config
from tapfl.engine.record import memory
from tapfl.errors import TapflError
from tapfl.reading import check

T = TypeVar("T")


@dataclass
class Report:
    """What a benchmark found: ``rows`` have a value for every one of the ``columns``."""

    title: str
    facts: dict[str, Any]
    columns: list[str]
    rows: list[dict[str, Any]]
    note: str = ""


# Clocks

def timed(function: Callable[[], object], device: str, repeats: int = 5, warmup: int = 1) -> float:
    """Return the median of the seconds that a call takes, its work on the device included."""
    for _ in range(warmup):
        function()
    if device.startswith("cuda"):
        return statistics.median(_cuda_seconds(function) for _ in range(repeats))
    return statistics.median(once(function, device)[1] for _ in range(repeats))


def once(function: Callable[[], T], device: str) -> tuple[T, float]:
    """Return what a single call returns, and the seconds until all its work is done."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else int
    wait()
    started = time.perf_counter()
    result = function()
    wait()
    return result, time.perf_counter() - started


def _cuda_seconds(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                  for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


# The machine

def matmul_rate(device: str, dtype: torch.dtype | None = None, size: int | None = None) -> float:
    """Return the FLOP/s of a square matrix product of random numbers, measured now.

    By default 8192 wide in bf16 on a GPU and 1024 wide in fp32 on a CPU.
    """
    cuda = device.startswith("cuda")
    dtype = dtype or (torch.bfloat16 if cuda else torch.float32)
    size = size or (8192 if cuda else 1024)
    # Zeros would be multiplied faster: they draw less power.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / timed(lambda: torch.mm(a, b, out=out), device, repeats=20, warmup=5)


def peak_memory(device: str) -> int:
    """Return the most bytes this process has held: of the GPU's memory, or of the machine's."""
    if device.startswith("cuda"):
        return memory(device)["peak_cuda"]
    status = Path("/proc/self/status")
    if status.is_file():
        # What getrusage reports for a new process includes what its parent held.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return memory(device)["peak_rss"]


def machine(device: str) -> dict[str, Any]:
    """Return where and when this is measured."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _processor()
    return {"device": device, "name": name, "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds")}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


# The configuration

def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values, by their dotted keys."""
    dumped = config.model_dump(mode="json")
    for key, value in values.items():
        *sections, last = key.split(".")
        place = dumped
        for section in sections:
            place = place[section]
        place[last] = value
    return check(Config, dumped, "bench")


# The report

def show(report: Report) -> None:
    """Print a report as a table, after the facts it was measured under."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    print(report.title)
    print(", ".join(f"{key} {_text(value)}" for key, value in report.facts.items()))
    table = Table()
    for column in report.columns:
        words = any(isinstance(row[column], str) for row in report.rows)
        table.add_column(Text(column), justify="left" if words else "right")
    for row in report.rows:
        table.add_row(*(Text(_text(row[column])) for column in report.columns))
    Console().print(table)
    if report.note:
        print(report.note)


def _text(value: Any) -> str:
    """Return a value as text; numbers with three significant digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or abs(value) < 1e-3:
        return f"{value:.2g}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def write(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    try:
        path.write_text(json.dumps(asdict(report), indent=1) + "\n")
    except OSError as error:
        raise TapflError(f"--json {path}: cannot be written ({error.strerror})") from None
