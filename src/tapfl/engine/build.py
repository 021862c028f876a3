"""Put an experiment together: the frozen base, the data, the clients. Once for all methods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tapfl.config import Config
from tapfl.data.custom import OwnData
from tapfl.data.federation import Federation, FederationFile, load_federation
from tapfl.data.sources import load_data
from tapfl.engine.watch import Watch
from tapfl.federated.context import Context
from tapfl.model.foundation import Foundation, build_foundation, load_tokenizer

WORTH_COMPILING = 5000  # steps: below, compiling takes longer than it saves
RESIDENT_SHARE = 0.4  # of the GPU's memory, for images


def build(config: Config, device: str, watch: Watch | None = None) -> tuple[Context, Any]:
    """Return the experiment and its tokenizer; ``watch`` is told of data being prepared."""
    file = load_federation(config.federation)
    tasks = file.task_table()
    modalities = sorted({m for task in tasks.values() for m in task.modalities})
    foundation = build_foundation(config.foundation, modalities,
                                  config.backbone.layers_per_stage, device)
    set_speed(foundation, config, device, config.federation.groups * len(file.clients))
    tokenizer = load_tokenizer(config.foundation)
    splits = load_data(config, tasks, tokenizer, foundation.max_text, device,
                       resident_bytes(config, device), own_data(config, file), watch)
    federation = Federation(file, splits, config.federation, config.seed)
    return Context(config, federation, foundation, device), tokenizer


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
    train, personal = config.train, sum("+" in m or "tap" in m for m in config.methods)
    rounds = train.rounds * min(train.cohort, clients) * train.local_steps
    return len(config.methods) * rounds + personal * clients * config.post.steps


def resident_bytes(config: Config, device: str) -> float:
    """Return how many bytes of images may stay on the device."""
    if not device.startswith("cuda"):
        return float("inf")
    if config.speed.resident_gb is not None:
        return config.speed.resident_gb * 1e9
    return RESIDENT_SHARE * torch.cuda.get_device_properties(device).total_memory
