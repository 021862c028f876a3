"""Where the time of a training step goes, kernel by kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from torch.profiler import ProfilerActivity, profile

from tapfl.bench.measure import Report, once
from tapfl.bench.step import chosen, prepare, trainer
from tapfl.config import Config
from tapfl.federated.method import FedAvg
from tapfl.federated.training import task_objective

COLUMNS = ["client", "kernel", "calls", "ms", "of the step"]
TOP = 12  # kernels that are listed; the others are one row
NAME = 60  # characters of a kernel's name
OTHERS, ALL = "the others", "all kernels"


def run(config: Config, device: str, quick: bool = False, batch: int | None = None,
        kinds: list[str] | None = None, steps: int | None = None,
        compile: bool = False) -> Report:
    """Take steps of W as a run takes them, and add up what each kernel takes.

    On a CPU the operators of torch stand for kernels.
    """
    experiment = prepare(config, device, quick, batch, compile)
    context = experiment.context
    method = FedAvg(context)
    steps = steps or (1 if quick else 10 if device.startswith("cuda") else 2)
    rows = []
    for client in chosen(experiment, kinds):
        train = trainer(method, client, task_objective, steps)
        for _ in range(2):  # what was seen once is captured
            train()
        seconds = once(train, device)[1] / steps  # without a profiler, which slows steps down
        spent = _profiled(train, device)
        listed = sorted(spent.items(), key=lambda kernel: -kernel[1][1])
        others = [counted for _, counted in listed[TOP:]]
        for name, counted in (*listed[:TOP], (OTHERS, _sum(others)), (ALL, _sum(spent.values()))):
            calls, taken = counted[0] / steps, counted[1] / steps
            if calls:
                rows.append({"client": client.id, "kernel": name[:NAME], "calls": calls,
                             "ms": taken * 1e3, "of the step": taken / seconds})
    return Report(
        "kernels: where a training step goes",
        {"batch size": context.config.train.batch_size, "steps": steps,
         "layers": context.foundation.execution_modes, "graphs": context.uses_cuda_graphs},
        COLUMNS, rows,
        "Calls and milliseconds of one step of W. What all kernels leave of the step is the time "
        "between them.")


def _profiled(train: Callable[[], object], device: str) -> dict[str, tuple[int, float]]:
    """Return how often each kernel ran, and for how many seconds in all."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would say when it starts and stops
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        once(train, device)
    return {event.key: (event.count, taken / 1e6) for event in profiler.key_averages()
            if (taken := event.self_device_time_total if cuda else event.self_cpu_time_total) > 0}


def _sum(counted: Iterable[tuple[int, float]]) -> tuple[int, float]:
    found = list(counted)
    return sum(calls for calls, _ in found), sum(seconds for _, seconds in found)
