"""One training step of every kind of client: of W, of X with a teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tapfl.bench.flops import StepFlops
from tapfl.bench.measure import Report, changed, matmul_rate, once, peak_memory
from tapfl.config import Config
from tapfl.data.batches import TaskBatch, TaskData, Texts
from tapfl.data.federation import Client
from tapfl.engine.build import RESIDENT_SHARE, Experiment, build
from tapfl.errors import TapflError, nearest
from tapfl.federated.method import FedAvg
from tapfl.federated.stepper import Objective
from tapfl.federated.training import task_objective
from tapfl.personal.tap import Distillation

SMALL_BATCH = 16  # on a CPU
COLUMNS = ["client", "tasks", "step", "ms", "samples/s", "TFLOP", "TFLOP/s", "of matmul",
           "peak GiB"]


def run(config: Config, device: str, quick: bool = False, batch: int | None = None,
        kinds: list[str] | None = None, steps: int | None = None, compile: bool = False,
        tokens: int | None = None, micro_batch: int | str | None = None,
        memory_cap: int | None = None) -> Report:
    """Time the steps of local trainings as a run takes them: drawing included, one after another.

    ``tokens`` gives every text that length, in place of the data's own.
    """
    if memory_cap:
        config = cap_memory(config, device, memory_cap)
    if micro_batch:
        config = changed(config, {"speed.micro_batch": micro_batch})
    experiment = prepare(config, device, quick, batch, compile)
    context = experiment.context
    if tokens:
        for split in experiment.federation.splits.values():
            _set_lengths(split[0], tokens, context.foundation.max_text)
    method = FedAvg(context)
    rate = matmul_rate(device, context.foundation.dtype, 256 if quick else None)
    flops = StepFlops(context.config, context.tasks)
    distillation = Distillation(method.teacher, context)
    steps = steps or (1 if quick else 20 if device.startswith("cuda") else 3)
    rows = []
    for client in chosen(experiment, kinds):
        for name, objective in (("W or X", task_objective), ("X, taught", distillation)):
            seconds, drawn, peak = _steps(method, client, objective, steps)
            work = sum(flops.step(p, objective is distillation) for p in drawn) / len(drawn)
            samples = sum(part.samples for part in drawn[0])
            rows.append({
                "client": client.id, "tasks": " ".join(client.tasks), "step": name,
                "ms": seconds * 1e3, "samples/s": samples / seconds, "TFLOP": work / 1e12,
                "TFLOP/s": work / seconds / 1e12, "of matmul": work / seconds / rate,
                "peak GiB": peak / 2**30})
    return Report(
        "step: training steps of every kind of client",
        {"batch size": context.config.train.batch_size, "steps": steps,
         "matmul TFLOP/s": rate / 1e12, "layers": context.foundation.execution_modes,
         "graphs": context.uses_cuda_graphs, **({"tokens": tokens} if tokens else {}),
         **({"memory cap GB": memory_cap} if memory_cap else {}), **_pieces(method)},
        COLUMNS, rows,
        "W and X train alike; a taught X also runs its teacher forward.")


def cap_memory(config: Config, device: str, gigabytes: int) -> Config:
    """Let this process use so much of the GPU's memory; return the configuration for it."""
    if not device.startswith("cuda"):
        raise TapflError("--memory-cap: expected --device cuda; the memory of a CPU has no cap")
    total = torch.cuda.get_device_properties(device).total_memory
    if gigabytes * 1e9 > total:
        raise TapflError(f"--memory-cap: expected at most {int(total / 1e9)}, which the GPU has")
    torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total)
    if config.speed.resident_gb is not None:
        return config
    return changed(config, {"speed.resident_gb": RESIDENT_SHARE * gigabytes})


def _pieces(method: FedAvg) -> dict[str, Any]:
    """Return how minibatches were split: as set, or what was found by trying."""
    setting, micro = method.context.config.speed.micro_batch, method.context.stepper(
        method.network).micro
    found = {" ".join(tasks): size for tasks, size in micro.sizes.items()}
    return {} if setting is None else {"micro batch": f"auto {found}" if micro.auto else setting}


def prepare(config: Config, device: str, quick: bool, batch: int | None,
            compile: bool) -> Experiment:
    """Return an experiment to measure, with one client of every kind."""
    values: dict[str, Any] = {"federation.groups": 1, "federation.clients": None}
    if compile:
        values["speed.compile"] = True
    small = 4 if quick else SMALL_BATCH if device == "cpu" else None
    if batch or small:
        values["train.batch_size"] = batch or small
    if quick or (device == "cpu" and config.data.train is None):
        values |= {"data.train": 40 if quick else 400, "data.test": 4}
    return build(changed(config, values), device)


def chosen(experiment: Experiment, kinds: Sequence[str] | None) -> list[Client]:
    """Return the clients to measure."""
    federation = experiment.federation
    known = [federation.id_of(i) for i in range(len(federation))]
    for kind in kinds or ():
        if kind not in known:
            raise TapflError(f"--kinds: unknown client '{kind}'" + nearest(kind, known))
    return [c for c in federation if not kinds or c.id in kinds]


def trainer(method: FedAvg, client: Client, objective: Objective,
            steps: int) -> Callable[[], list[list[TaskBatch]]]:
    """Return what takes a client's steps, always the same ones, and returns the minibatches."""
    context = method.context
    stepper = context.stepper(method.network)
    size = context.config.train.batch_size
    method.network.train()

    def train() -> list[list[TaskBatch]]:
        stepper.restart(method.owned(client), 1e-4)
        drawn = []
        for parts in client.data.minibatches(steps, size, np.random.default_rng(0)):
            stepper.step(objective, parts)
            drawn.append(parts)
        return drawn

    return train


def _steps(method: FedAvg, client: Client, objective: Objective,
           steps: int) -> tuple[float, list[list[TaskBatch]], int]:
    """Return the seconds of a step, the minibatches, and the peak of memory."""
    device = method.context.device
    train = trainer(method, client, objective, steps)
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    train()
    peak = peak_memory(device)  # of plain steps: a captured one hides what it holds
    if cuda:
        train()  # what was seen once is captured now
    drawn, seconds = once(train, device)
    return seconds / steps, drawn, peak


def _set_lengths(data: TaskData, tokens: int, limit: int) -> None:
    if data.text is not None:
        tokens = min(tokens, limit)
        ids = torch.randint(5, 100, (len(data.text.lengths), tokens), dtype=torch.int32)
        data.text = Texts(ids, np.full(len(ids), tokens))
        data.text.to(data.device)
