"""From experiments to runs: what is needed, what is there already, what is still to run.

A *model* of a plan is a method under a setting and a seed. Models that stand on the same federated
run come out of one run. A run is found again by a hash of all that its results depend on, which is
part of its folder's name; run.json says which models it has.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapfl.config import Config
from tapfl.engine.record import FILE, RunRecord, code_digest, read_record
from tapfl.errors import TapflError
from tapfl.experiments.catalogue import Experiment, Model, Part
from tapfl.methods import PERSONAL_SECTIONS, MethodSpec, folder_name, method_specs

# What a federated run's results do not depend on: where and how fast it is computed, and who
# watches.
ASIDE: Any = {**dict.fromkeys(("methods", "variants", "own", "checkpoint", "speed", "threads",
                               *PERSONAL_SECTIONS), True), "data": {"folder"}}
FOLDER = re.compile(r".*-([0-9a-f]{10})-([0-9a-f]{6})(-\d+)?")


@dataclass(frozen=True)
class Needed:
    """A model that a part of an experiment asks for, under the part's configuration."""

    spec: MethodSpec
    config: Config
    base: str  # the federated run: everything that W depends on
    key: str  # the model: the federated run, the personalizer and its settings


@dataclass
class Run:
    """A federated run that is to be made (or continued), with the models that come out of it."""

    folder: Path
    config: Config
    keys: list[str]
    resumes: bool = False


@dataclass
class Plan:
    """All models of some experiments, the runs that have them, and those that are missing."""

    needed: dict[tuple[int, int, int], list[Needed]]  # (experiment, part, seed) -> models
    there: dict[str, tuple[Path, str]]  # key -> a finished run, and the model's name in it
    missing: list[Run] = field(default_factory=list)

    @property
    def models(self) -> int:
        """How many models are asked for, each counted whenever it is."""
        return sum(len(models) for models in self.needed.values())

    @property
    def federated_runs(self) -> int:
        """How many federated runs they stand on."""
        return len({model.base for models in self.needed.values() for model in models})


def make_plan(experiments: Sequence[Experiment], model: Model, small: bool, seeds: Sequence[int],
              out: Path, data: Path | None = None, any_version: bool = False) -> Plan:
    """Return what the experiments need, and which runs below ``out`` have it."""
    files = data_listing(data) if model.config(small).data.source == "hub" else ""
    needed = {
        (e, p, seed): needed_models(part, model, small, seed, data, files)
        for e, experiment in enumerate(experiments) for p, part in enumerate(experiment.parts)
        for seed in seeds}
    plan = Plan(needed, {})
    unfinished = _look(out, plan, any_version)
    _add_missing(plan, out, unfinished)
    return plan


def needed_models(part: Part, model: Model, small: bool, seed: int, data: Path | None,
                  files: str) -> list[Needed]:
    """Return the models of a part for one seed."""
    config = model.config(small, part.changes)
    config = config.model_copy(update={
        "seed": seed, "methods": list(part.methods),
        "checkpoint": config.checkpoint.model_copy(update={"models": False}),
        "data": config.data.model_copy(update={"folder": str(data) if data else None})})
    config = Config.model_validate(config.model_dump() | {"variants": dict(part.variants)})
    return [Needed(spec, config, *keys(spec, files)) for spec in method_specs(config)]


def keys(spec: MethodSpec, files: str = "") -> tuple[str, str]:
    """Return the hashes of a method's federated run and of its model."""
    settings = spec.config.model_dump(mode="json", exclude=ASIDE)
    base = _hash([settings, spec.federated, spec.config.own.get(
        spec.federated.partition(":")[2], {}), files])
    if not spec.personalizer:
        return base, _hash([base])
    personal = spec.config.model_dump(mode="json", include={*PERSONAL_SECTIONS, "own"})
    return base, _hash([base, spec.personalizer, personal])


def _hash(values: object) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def data_listing(folder: Path | None) -> str:
    """Return names and sizes of the files of a data mirror: other files are other data."""
    if folder is None:
        return "hub"
    found = [f"{path.relative_to(folder).as_posix()} {path.stat().st_size}"
             for path in sorted(folder.rglob("*.parquet"))]
    if not found:
        raise TapflError(f"--data {folder}: no .parquet files here; expected a folder that mirrors "
                         "the hub's data sets")
    return "\n".join(found)


# What is there

def _look(out: Path, plan: Plan, any_version: bool) -> dict[str, list[tuple[Path, RunRecord]]]:
    """Find the models of finished runs; return the unfinished runs by their base."""
    unfinished: dict[str, list[tuple[Path, RunRecord]]] = {}
    wanted = {model.base for models in plan.needed.values() for model in models}
    for folder in sorted((out / "runs").glob("*")):
        match = FOLDER.fullmatch(folder.name)
        if not match or match[1] not in wanted or not (folder / FILE).is_file():
            continue
        if match[2] != code_digest()[:6] and not any_version:
            continue
        record = read_record(folder)
        if not record.finished:
            if match[2] == code_digest()[:6]:
                unfinished.setdefault(match[1], []).append((folder, record))
        elif (folder / "results.csv").is_file() and (folder / "events.jsonl").is_file():
            for key, name in _models_of(record.config, match[1]).items():
                plan.there.setdefault(key, (folder, name))
    return unfinished


def _models_of(config: Config, base: str) -> dict[str, str]:
    """Return the models of a run by key; its base is what its folder says."""
    found = {}
    for spec in method_specs(config):
        personal = spec.config.model_dump(mode="json", include={*PERSONAL_SECTIONS, "own"})
        found[_hash([base, spec.personalizer, personal] if spec.personalizer else [base])] = (
            spec.name)
    return found


# What is missing

def _add_missing(plan: Plan, out: Path,
                 unfinished: dict[str, list[tuple[Path, RunRecord]]]) -> None:
    """Plan one run for all missing models of a federated run; go on with unfinished ones."""
    groups: dict[str, dict[str, Needed]] = {}
    for models in plan.needed.values():
        for model in models:
            if model.key not in plan.there:
                groups.setdefault(model.base, {}).setdefault(model.key, model)
    for base, wanted in groups.items():
        for folder, record in unfinished.get(base, ()):
            found = [key for key in _models_of(record.config, base) if key in wanted]
            if found:
                plan.missing.append(Run(folder, record.config, found, resumes=True))
                for key in found:
                    del wanted[key]
        if wanted:
            models = list(wanted.values())
            taken = {folder for folder, _ in unfinished.get(base, ())}
            plan.missing.append(Run(_folder(out, models[0], taken), combined(models),
                                    list(wanted)))


def _folder(out: Path, model: Needed, taken: Iterable[Path]) -> Path:
    name = folder_name(model.spec.federated.rpartition(":")[2]).lower()
    folder = out / "runs" / f"{name}-s{model.config.seed}-{model.base}-{code_digest()[:6]}"
    free, number = folder, 1
    while free.exists() or free in taken:
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def combined(models: Sequence[Needed]) -> Config:
    """Return one configuration for several models of a federated run.

    A model keeps its name if that means the same under the common settings; otherwise it becomes
    a variant that says all of its settings.
    """
    base = models[0].config
    methods: list[str] = []
    variants: dict[str, object] = {}
    for model in models:
        name, variant = model.spec.name, model.config.variants.get(model.spec.name)
        own = {} if variant is None else {name: variant.model_dump()}
        plain = Config.model_validate(base.model_dump() | {"methods": [name], "variants": own})
        (spec,) = method_specs(plain)
        same = spec.config.model_dump() | {"methods": 0, "variants": 0} == (
            model.spec.config.model_dump() | {"methods": 0, "variants": 0})
        if name in methods or not same:
            name = _other_name(name, methods)
            sections = model.spec.config.model_dump(include={*PERSONAL_SECTIONS, "own"})
            whole = "+".join(filter(None, (model.spec.federated, model.spec.personalizer)))
            own = {name: {"of": whole, **sections}}
        methods.append(name)
        variants |= own
    return Config.model_validate(base.model_dump() | {"methods": methods, "variants": variants})


def _other_name(name: str, taken: Sequence[str]) -> str:
    clean, number = folder_name(name).replace("+", "-"), 2
    while f"{clean}-{number}" in taken:
        number += 1
    return f"{clean}-{number}"
