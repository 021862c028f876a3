"""Put an experiment together: the frozen base, the data, the clients. Once for all methods."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tapfl.config import Config
from tapfl.data.custom import OwnData
from tapfl.data.federation import Federation, Member
from tapfl.data.hub import SETS
from tapfl.data.layout import FederationFile
from tapfl.data.participants import client_count, load_federation, parse_id, taking_part
from tapfl.data.sources import load_data
from tapfl.evaluation.evaluate import Evaluator
from tapfl.events import Subscriber, nobody
from tapfl.federated.context import Context
from tapfl.methods import federated_runs, method_specs
from tapfl.model.foundation import Foundation, build_foundation, load_tokenizer
from tapfl.tasks import TEXT_GENERATION

WORTH_COMPILING = 5000  # steps: below, compiling takes longer than it saves
RESIDENT_SHARE = 0.4  # of the GPU's memory, for images


@dataclass(frozen=True)
class Experiment:
    """What all methods of a run share."""

    context: Context
    federation: Federation
    tokenizer: Any

    @property
    def own(self) -> OwnData:
        """Which data the federation file names."""
        return own_data(self.context.config, self.federation.file)

    @property
    def kinds(self) -> list[Member]:
        """A client of every kind."""
        config, members = self.context.config.federation, self.federation.members
        if config.clients is None:  # thousands, maybe; those of the first group are all there are
            return members[:len(self.federation.file.clients)]
        return list({parse_id(m.id, config.groups)[1]: m for m in members}.values())

    def metrics(self, evaluator: Evaluator) -> dict[str, Any]:
        """Return what the metrics of text depend on; what one lacks shows before round one."""
        writes = any(task.kind == TEXT_GENERATION for task in self.context.tasks.values())
        return evaluator.facts() if writes else {}

    def sources(self) -> dict[str, str]:
        """Return where the samples of each task come from."""
        own, source = self.own, self.context.config.data.source
        found = {}
        for task in self.federation.tasks:
            if task in own.clients:
                found[task] = "files of each client's own"
            elif task in own.tasks:
                entry = own.tasks[task]
                found[task] = f"hub: {entry.hub}" if entry.hub else f"files: {entry.path}"
            else:
                found[task] = f"hub: {SETS[task].id}" if source == "hub" else source
        return found

    def digests(self) -> dict[str, list[str]]:
        """Return checksums of real data; what is made from a seed follows from the settings."""
        real = {*self.own.tasks, *self.own.clients}
        return {name: [train.digest(), test.digest()]
                for name, train, test in self.federation.data_sets()
                if self.context.config.data.source == "hub" or name.partition("/")[0] in real}

    def classes(self) -> dict[str, list[str]]:
        """Return the names of each task's classes, where they have names."""
        return {name.partition("/")[0]: list(test.classes)
                for name, _, test in self.federation.data_sets() if test.classes}


def build(config: Config, device: str, notify: Subscriber = nobody) -> Experiment:
    """Return the experiment; ``notify`` is called as data are prepared."""
    file = load_federation(config.federation)
    part = taking_part(file, config.federation)
    context, tokenizer = build_model(config, device)
    splits = load_data(config, context.tasks, tokenizer, context.foundation.max_text, device,
                       resident_bytes(config, device), own_data(config, part), notify)
    federation = Federation(file, splits, config.federation, config.seed)
    federation.check()
    return Experiment(context, federation, tokenizer)


def build_model(config: Config, device: str) -> tuple[Context, Any]:
    """Return what methods are made with, and the tokenizer: all that needs no data."""
    file = load_federation(config.federation)
    tasks = taking_part(file, config.federation).task_table()
    modalities = sorted({m for task in tasks.values() for m in task.modalities})
    foundation = build_foundation(config.foundation, modalities,
                                  config.backbone.layers_per_stage, device)
    set_speed(foundation, config, device, client_count(file, config.federation))
    return Context(config, tasks, foundation, device), load_tokenizer(config.foundation)


def own_data(config: Config, file: FederationFile) -> OwnData:
    """Return which data the federation file names; its paths begin in its folder."""
    named = config.federation.file
    return file.own_data(Path(named).parent if named else Path())


def set_speed(foundation: Foundation, config: Config, device: str, clients: int) -> None:
    """Cast the base and set how its layers compute, as the configuration says."""
    cuda = device.startswith("cuda")
    native = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision == "bf16" or (config.precision == "auto" and native):
        foundation.to(torch.bfloat16)
    if cuda:
        foundation.speed_up(config.speed, compiles(config, clients))


def compiles(config: Config, clients: int) -> bool:
    """Return whether to compile: asked for, and the run is long enough to gain from it."""
    if not config.speed.compile or planned_steps(config, clients) < WORTH_COMPILING:
        return False
    cache = Path.home() / ".cache" / "tapfl" / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    return True


def planned_steps(config: Config, clients: int) -> int:
    """Return how many training steps the methods take together, roughly."""
    steps = 0
    for run in federated_runs(method_specs(config)):
        train = run.config.train
        rounds = train.rounds * min(train.cohort, clients) * train.local_steps
        steps += rounds * (1 + len(run.personal))
        steps += sum(clients * spec.config.post.steps for spec in run.personal)
    return steps


def resident_bytes(config: Config, device: str) -> float:
    """Return how many bytes of images may stay on the device."""
    if not device.startswith("cuda"):
        return float("inf")
    if config.speed.resident_gb is not None:
        return config.speed.resident_gb * 1e9
    return RESIDENT_SHARE * torch.cuda.get_device_properties(device).total_memory
