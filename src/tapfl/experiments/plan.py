"""From experiments to runs: what is needed, what is there already, what is still to run.

A *model* of a plan is a method under a setting and a seed. Models that stand on the same federated
run come out of one run. A run is found again by a hash of all that its results depend on, which is
part of its folder's name; run.json says which models it has.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from tapfl.config import Config, FederationConfig
from tapfl.data.participants import load_federation
from tapfl.engine.folder import MADE
from tapfl.engine.record import RunRecord, code_digest, read_record
from tapfl.errors import TapflError
from tapfl.experiments.catalogue import Experiment, Model, Part
from tapfl.experiments.whole import check_whole
from tapfl.methods import PERSONAL_SECTIONS, MethodSpec, folder_name, is_ours, method_specs
from tapfl.model.weights import SHIPPED
from tapfl.reading import check

# What a federated run's results do not depend on: where and how fast it is computed, and who
# watches. What files hold counts (see ``_contents``), not where they lie.
ASIDE: Any = {**dict.fromkeys(("methods", "variants", "own", "checkpoint", "speed", "threads",
                               *PERSONAL_SECTIONS), True),
              "data": {"folder"}, "federation": {"file"}}
VERSION = 6  # so many digits of the code's checksum are in a folder's name
FOLDER = re.compile(rf".*-([0-9a-f]{{10}})-([0-9a-f]{{{VERSION}}})(-\d+)?")


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
    finished: list[RunRecord] = field(default_factory=list)  # all runs that are done, needed or not
    faults: list[tuple[str, str]] = field(default_factory=list)  # base, why a run of it is not used

    @property
    def models(self) -> int:
        """How many models are asked for, each counted whenever it is."""
        return sum(len(models) for models in self.needed.values())

    @property
    def federated_runs(self) -> int:
        """How many federated runs they stand on."""
        return len({model.base for models in self.needed.values() for model in models})

    @property
    def complete_runs(self) -> int:
        """How many of these have all their models already."""
        return self.federated_runs - len(self._lacking)

    @property
    def _lacking(self) -> set[str]:
        return {model.base for models in self.needed.values() for model in models
                if model.key not in self.there}

    @property
    def unused(self) -> list[str]:
        """What is wrong with runs that cannot be used, where others have to be made."""
        return [fault for base, fault in self.faults if base in self._lacking]

    def has(self, experiment: int) -> bool:
        """Return whether all models of an experiment are there."""
        return all(model.key in self.there for (e, _, _), models in self.needed.items()
                   if e == experiment for model in models)


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
    _add_missing(plan, out, unfinished, data)
    return plan


def needed_models(part: Part, model: Model, small: bool, seed: int, data: Path | None,
                  files: str) -> list[Needed]:
    """Return the models of a part for one seed."""
    config = model.config(small, part.changes)
    config = config.model_copy(update={
        "seed": seed, "methods": list(part.methods),
        "checkpoint": config.checkpoint.model_copy(update={"models": False})})
    values = _reading(config, data).model_dump() | {"variants": dict(part.variants)}
    config = check(Config, values, part.title)
    return [Needed(spec, config, *keys(spec, files)) for spec in method_specs(config)]


def keys(spec: MethodSpec, files: str = "") -> tuple[str, str]:
    """Return the hashes of a method's federated run and of its model.

    Settings at their defaults do not count: a version with more settings still finds old runs.
    """
    config = spec.config
    settings = config.model_dump(mode="json", exclude=ASIDE, exclude_defaults=True)
    own = config.own.get(spec.federated.partition(":")[2], {})
    base = _hash([settings, spec.federated, own, files, _contents(config),
                  _source(spec.federated)])
    return base, _key(spec, base)


def _key(spec: MethodSpec, base: str) -> str:
    """Return the hash of a model that stands on a federated run."""
    if not spec.personalizer:
        return _hash([base])
    personal = spec.config.model_dump(mode="json", include={*PERSONAL_SECTIONS, "own"},
                                      exclude_defaults=True)
    return _hash([base, spec.personalizer, personal, _source(spec.personalizer)])


def _contents(config: Config) -> list[str]:
    """Return checksums of what comes as a file: who holds what, and the shipped weights."""
    return [_federation(config.federation),
            *map(_asset, ("mini.safetensors", "tokenizer.json")
                 if config.foundation.weights == SHIPPED else ())]


@functools.cache
def _federation(config: FederationConfig) -> str:
    return _hash(load_federation(config).model_dump(mode="json"))


@functools.cache
def _asset(name: str) -> str:
    return hashlib.sha256((resources.files("tapfl") / "assets" / name).read_bytes()).hexdigest()


@functools.cache
def _source(half: str) -> str:
    """Return a checksum of a method's code, where the code version does not count it: faults."""
    module = half.partition(":")[0]
    if ":" not in half or not is_ours(module):
        return ""
    package, _, name = module.rpartition(".")
    return hashlib.sha256((resources.files(package) / f"{name}.py").read_bytes()).hexdigest()


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
    found = [(folder, match) for folder in sorted((out / "runs").glob("*"))
             if (match := FOLDER.fullmatch(folder.name)) and _holds_run(folder)]
    for folder, match in sorted(found, key=lambda pair: not _is_current(pair[1][2])):
        asked_for = match[1] in wanted and (_is_current(match[2]) or any_version)
        try:
            record = read_record(folder)
            specs = method_specs(record.config)
            if record.finished:
                plan.finished.append(record)
            # The code may have changed after the folder got its name.
            current = _is_current(match[2]) and _is_current(str(record.environment.get("code")))
            if not asked_for or not (current or any_version):
                continue
            if record.finished:
                check_whole(folder, record)
                for spec in specs:
                    plan.there.setdefault(_key(spec, match[1]), (folder, spec.name))
            elif current:
                unfinished.setdefault(match[1], []).append((folder, record))
        except TapflError as error:  # of another version, or damaged: it counts for nothing
            if asked_for:
                plan.faults.append((match[1], str(error)))
    return unfinished


def _holds_run(folder: Path) -> bool:
    """Return whether a run has written here, if only a part; a start that failed leaves a lock."""
    return any((folder / name).exists() for name in MADE)


def _is_current(code: str) -> bool:
    return code[:VERSION] == code_digest()[:VERSION]


# What is missing

def _add_missing(plan: Plan, out: Path, unfinished: dict[str, list[tuple[Path, RunRecord]]],
                 data: Path | None) -> None:
    """Plan one run for all missing models of a federated run; go on with unfinished ones."""
    groups: dict[str, dict[str, Needed]] = {}
    for models in plan.needed.values():
        for model in models:
            if model.key not in plan.there:
                groups.setdefault(model.base, {}).setdefault(model.key, model)
    for base, wanted in groups.items():
        for folder, record in unfinished.get(base, ()):
            found = [key for spec in method_specs(record.config)
                     if (key := _key(spec, base)) in wanted]
            if found:
                plan.missing.append(Run(folder, _reading(record.config, data), found,
                                        resumes=True))
                for key in found:
                    del wanted[key]
        if wanted:
            models = list(wanted.values())
            plan.missing.append(Run(_folder(out, models[0]), combined(models), list(wanted)))


def _reading(config: Config, data: Path | None) -> Config:
    """Return a configuration that reads its data from a folder: the mirror may have moved."""
    return config.model_copy(update={"data": config.data.model_copy(
        update={"folder": str(data) if data else None})})


def _folder(out: Path, model: Needed) -> Path:
    """Return a folder for a new run: one that cannot be used stays as it is."""
    name = folder_name(model.spec.federated.rpartition(":")[2]).lower()
    folder = out / "runs" / f"{name}-s{model.config.seed}-{model.base}-{code_digest()[:VERSION]}"
    free, number = folder, 1
    while _holds_run(free):
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
