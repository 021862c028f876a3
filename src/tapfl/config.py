"""The experiment, read from YAML and validated."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tapfl.errors import TapflError, nearest
from tapfl.reading import check, is_file, parse_yaml, read_text, yaml_value
from tapfl.settings.base import MANY, SAMPLES, SEED, WEIGHT, PathText, Section
from tapfl.settings.federation import (
    AggregationConfig,
    DataConfig,
    FederationConfig,
    PrivacyConfig,
)
from tapfl.settings.methods import (
    ApflConfig,
    DisentAFLConfig,
    DittoConfig,
    FedALAConfig,
    FedDATConfig,
    FedProxConfig,
    FedRepConfig,
    PerFedAvgConfig,
)
from tapfl.settings.model import BackboneConfig, DecoderConfig, FoundationConfig, LoraConfig
from tapfl.settings.running import CheckpointConfig, EvaluationConfig, SpeedConfig
from tapfl.settings.training import (
    GAP,
    HOLDOUT,
    LOSSES,
    PostConfig,
    TapConfig,
    TrainConfig,
    warm_up,
)
from tapfl.tasks import NAME

__all__ = [
    "GAP", "HOLDOUT", "LOSSES", "MANY", "MAX_THREADS", "NEW", "SAMPLES", "SEED", "WEIGHT",
    "CheckpointConfig", "Config", "DataConfig", "EvaluationConfig", "FederationConfig",
    "FoundationConfig", "PathText", "PrivacyConfig", "Section", "SpeedConfig", "TapConfig",
    "TrainConfig", "Variant", "load_config", "preset_names", "preset_summaries", "preset_text",
    "set_key", "usable_cores", "warm_up"]

MAX_THREADS = 1024
USUAL_THREADS = 8  # more gain little at these sizes
NEW = "new"  # where a node starts that has no earlier folder


class Variant(BaseModel):
    """A method with settings of its own, used in ``methods`` under its name.

    The other keys are sections of the configuration; they are merged over it, mapping by mapping,
    and then validated.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    of: str
    """The method that it varies."""


class Config(Section):
    """A whole experiment."""

    seed: int = Field(41, ge=0, le=SEED)
    """The experiment's seed: first weights, who holds which samples, cohorts, minibatches."""
    threads: int | None = Field(None, ge=1, le=MAX_THREADS)
    """How many CPU threads compute; the cores there are by default, eight at most. Results depend
    on it, so it is recorded and used again on resume.
    """
    methods: list[str] = Field(default=["fedavg", "tap"], min_length=1, max_length=1000)
    """The methods to compare: ``federated[+personalizer]``, short names, variants. Either half may
    be a ``module:Class`` of your own.
    """
    variants: dict[str, Variant] = Field(default={})
    """Methods with settings of their own, by name."""
    own: dict[str, dict[str, Any]] = Field(default={})
    """Settings of your own classes, by class name."""
    start: PathText | None = None
    """The folder of a run to go on from, with its model and its clients' state; ``train.rounds``
    counts its rounds, too. On a node of a deployment: the node's own earlier folder, or ``new``
    where it has none.
    """
    foundation: FoundationConfig = FoundationConfig()
    backbone: BackboneConfig = BackboneConfig()
    lora: LoraConfig = LoraConfig()
    decoder: DecoderConfig = DecoderConfig()
    federation: FederationConfig = FederationConfig()
    aggregation: AggregationConfig = AggregationConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    post: PostConfig = PostConfig()
    tap: TapConfig = TapConfig()
    perfedavg: PerFedAvgConfig = PerFedAvgConfig()
    disentafl: DisentAFLConfig = DisentAFLConfig()
    feddat: FedDATConfig = FedDATConfig()
    fedprox: FedProxConfig = FedProxConfig()
    fedrep: FedRepConfig = FedRepConfig()
    fedala: FedALAConfig = FedALAConfig()
    ditto: DittoConfig = DittoConfig()
    apfl: ApflConfig = ApflConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """What the frozen base computes in; ``auto`` is bf16 on a GPU and fp32 on a CPU. What trains is
    always fp32.
    """
    speed: SpeedConfig = SpeedConfig()

    @model_validator(mode="after")
    def _validation_needs_data(self) -> Config:
        if self.tap.reads_holdout and not self.federation.holdout:
            raise ValueError(f"{self.tap.reads_holdout} needs held-out data: set "
                             "federation.holdout, e.g. to 0.1")
        if self.post.use_holdout and not self.federation.holdout:
            raise ValueError("post.use_holdout: nothing is held out; set federation.holdout, e.g. "
                             "to 0.1")
        return self

    @model_validator(mode="after")
    def _begins_with_a_checkpoint(self) -> Config:
        if self.start is not None and self.checkpoint.every is None:
            raise ValueError("checkpoint.every: a run that starts from another one (start) needs "
                             "checkpoints; expected a number, got null")
        return self

    @model_validator(mode="after")
    def _private(self) -> Config:
        if self.privacy.secret_cohort and self.privacy.mode != "central":
            raise ValueError("privacy.secret_cohort: only noise at the server counts on it; set "
                             "privacy.mode to central")
        if self.privacy.mode == "central" and self.aggregation.rule != "mean":
            raise ValueError(f"aggregation.rule: {self.aggregation.rule}: noise at the server "
                             "(privacy.mode: central) is stated for a mean; expected mean")
        if self.privacy.mode == "central" and self.federation.max_update_norm is not None:
            raise ValueError("federation.max_update_norm: whom it refuses depends on data, which "
                             "privacy.mode: central does not allow for; privacy.clip bounds norms")
        return self

    @model_validator(mode="after")
    def _names(self) -> Config:
        for name in self.variants:
            if not NAME.fullmatch(name) or len(name) > 80:
                raise ValueError(f"variants: {name!r} is not a name: expected letters, digits, '_' "
                                 "or '-', starting with a letter or digit, at most 80 characters")
        for name in self.methods:
            if not name.isprintable() or len(name) > 200:
                raise ValueError(f"methods: {name[:80]!r} is not the name of a method")
        return self

    def with_data(self, folder: str) -> Config:
        """Return the configuration with another mirror of the hub's data sets."""
        data = self.data.model_copy(update={"folder": folder})
        return self.model_copy(update={"data": data})

    @property
    def post_lr(self) -> float:
        """The learning rate after federation."""
        return self.post.lr or self.train.lr_initial

    @property
    def thread_count(self) -> int:
        """How many CPU threads compute: as set, or the cores there are, eight at most."""
        return self.threads or min(USUAL_THREADS, usable_cores())


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (
        os.cpu_count() or 1)


def preset_names() -> list[str]:
    """Return the names of the shipped presets."""
    return sorted(p.name.removesuffix(".yaml")
                  for p in (resources.files("tapfl") / "presets").iterdir()
                  if p.name.endswith(".yaml"))


def preset_summaries() -> dict[str, str]:
    """Return what each preset is for: the comment under the command that its file opens with."""
    texts = {name: preset_text(name) for name in preset_names()}
    return {name: text.splitlines()[1].lstrip("# ") for name, text in texts.items()}


def preset_text(name: str) -> str:
    """Return a preset's YAML."""
    return (resources.files("tapfl") / "presets" / f"{name}.yaml").read_text()


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a preset by name or a YAML file by path; ``overrides`` are ``dotted.key=value``."""
    name = str(source)
    if name in preset_names():
        text, where = preset_text(name), name
    elif is_file(name):
        text, where = read_text(name), name
    elif name.endswith((".yaml", ".yml")) or "/" in name:
        raise TapflError(f"{name}: no such file")
    else:
        raise TapflError(f"unknown preset '{name}'" + nearest(name, preset_names()))
    values = parse_yaml(text, where)
    for override in overrides:
        set_key(values, override)
    config = check(Config, values, where)
    if config.start not in (None, NEW):  # other processes of a deployment may run elsewhere
        config = config.model_copy(update={"start": str(Path(str(config.start)).resolve())})
    file = config.federation.file
    if file is not None and name not in preset_names() and is_file(Path(name).parent / file):
        # A federation file is looked for beside the configuration that names it.
        found = str((Path(name).parent / file).resolve())
        federation = config.federation.model_copy(update={"file": found})
        config = config.model_copy(update={"federation": federation})
    return config


def set_key(values: dict[str, Any], override: str) -> None:
    """Set what ``dotted.key=value`` says."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise TapflError(f"--set {override}: expected key=value, e.g. train.rounds=10")
    value = yaml_value(text, f"--set {override}")
    *sections, last = key.split(".")
    place = values
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise TapflError(f"--set {override}: '{section}' holds no keys")
        place = inner
    place[last] = value
