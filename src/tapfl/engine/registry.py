"""Methods by name, ours or a user's own class: what a run is planned from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.config import Config
from tapfl.errors import TapflError, nearest
from tapfl.evaluation.constant import CONSTANT
from tapfl.federated.disentafl import DisentAFL
from tapfl.federated.fedala import FedALA
from tapfl.federated.feddat import FedDAT
from tapfl.federated.fedper import FedPer
from tapfl.federated.fedprox import FedProx
from tapfl.federated.fedrep import FedRep
from tapfl.federated.local import Local
from tapfl.federated.method import FedAvg, FederatedMethod
from tapfl.federated.perfedavg import PerFedAvg
from tapfl.federated.settings import Configurable
from tapfl.methods import (
    NAMED,
    SHORT,
    MethodSpec,
    RunSpec,
    check_named,
    class_name,
    federated_runs,
    is_ours,
    method_specs,
)
from tapfl.personal.apfl import Apfl
from tapfl.personal.ditto import Ditto
from tapfl.personal.personalizer import Personalizer
from tapfl.personal.posttrain import PostTrain, PostTrainTwice
from tapfl.personal.tap import Tap

FEDERATED: dict[str, type[FederatedMethod]] = {
    m.name: m for m in (Local, FedAvg, PerFedAvg, DisentAFL, FedDAT, FedProx, FedPer, FedRep,
                        FedALA)}
PERSONALIZERS: dict[str, type[Personalizer]] = {
    "post": PostTrain, "post2": PostTrainTwice, "tap": Tap, "ditto": Ditto, "apfl": Apfl}


@dataclass(frozen=True)
class Plan:
    """One federated run and everything that is to come out of it, as classes.

    ``plain`` says whether the federated model itself is evaluated, under the run's name;
    ``constant`` whether the answer that never changes is, which one federated run does for all.
    """

    name: str
    config: Config
    method: type[FederatedMethod]
    plain: bool
    personalizers: tuple[tuple[MethodSpec, type[Personalizer]], ...]
    constant: bool = False


def plan(config: Config, folder: Path | None = None, installed: bool = True) -> list[Plan]:
    """Return the federated runs that a configuration's methods need.

    ``folder`` is where a user's own ``module:Class`` is looked for first, and with ``installed``
    among what is installed: only for names that the user gave, not for those of a record.
    """
    for name in config.variants:
        if name in {*FEDERATED, *PERSONALIZERS, *NAMED} or name.lower() == CONSTANT:
            raise TapflError(f"variants: '{name}' is a method already; expected a name of its own")
    specs = method_specs(config)
    check_named(config, specs)
    plans = [find_plan(run, folder, installed) for run in federated_runs(specs)]
    _check_own(config, plans)
    if config.speed.micro_batch is not None:
        _check_splitting(plans)
    return [dataclasses.replace(plans[0], constant=True), *plans[1:]]


def find_plan(run: RunSpec, folder: Path | None = None, installed: bool = True) -> Plan:
    """Return one federated run with its classes."""
    find = functools.partial(_find, folder=folder, installed=installed)
    key = next(map(_key, filter(None, (run.plain, *run.personal))), "methods")
    method = find(run.federated, FEDERATED, FederatedMethod, "federated method", key)
    method.read_settings(run.config)
    personalizers = []
    for spec in run.personal:
        found = find(spec.personalizer, PERSONALIZERS, Personalizer, "personalizer", _key(spec))
        found.read_settings(spec.config)
        personalizers.append((spec, found))
    return Plan(run.name, run.config, method, run.plain is not None, tuple(personalizers))


def default_models(plans: Iterable[Plan]) -> dict[str, str]:
    """Return which model ``predict`` takes by default: the record of a run says so.

    ``personal`` is the first method whose personalizer asks to be preferred, else the last one
    that has a personalizer; ``federated`` is the W that it has watched. A kind of model that is
    not there, or of which there are several on equal terms, is left out.
    """
    plans = list(plans)
    personal = [(p, spec.name, cls.preferred) for p in plans for spec, cls in p.personalizers]
    chosen = next((c for c in personal if c[2]), personal[-1] if personal else None)
    shared = [p for p in ([chosen[0]] if chosen else plans) if not issubclass(p.method, Local)]
    found = {}
    if chosen:
        found["personal"] = chosen[1]
    elif len(plans) == 1 or not shared:
        found["personal"] = plans[0].name
    if shared:
        found["federated"] = shared[0].name
    return found


def second_models(plans: Iterable[Plan]) -> list[str]:
    """Return the methods for which a client keeps a second copy of what trains."""
    return [spec.name for p in plans for spec, cls in p.personalizers if cls.keeps_model()]


def own_code(plans: Iterable[Plan]) -> dict[str, str]:
    """Return a checksum of every module that classes of the user's own come from.

    What such a module imports in its turn is not looked at.
    """
    modules = {c.__module__ for p in plans
               for cls in (p.method, *(cls for _, cls in p.personalizers))
               for c in cls.__mro__ if issubclass(c, Configurable) and not is_ours(c.__module__)}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
            for name, file in files.items() if file}


def _check_own(config: Config, plans: Iterable[Plan]) -> None:
    """Refuse settings of classes that are not there, and two classes of one name."""
    classes: dict[str, type[Configurable]] = {}
    for cls in (c for p in plans for c in (p.method, *(cls for _, cls in p.personalizers))):
        other = classes.setdefault(cls.__name__, cls)
        if other is not cls and "Settings" in {*cls.__dict__, *other.__dict__}:
            raise TapflError(f"methods: two classes are called {cls.__name__}; their settings, "
                             f"own.{cls.__name__}, would be the same")
    for name in config.own:
        if name not in classes:
            raise TapflError(f"own.{name}: no method of this run is a class of that name"
                             + nearest(name, classes))


def _check_splitting(plans: Iterable[Plan]) -> None:
    """Refuse methods whose minibatches cannot go in pieces, and those that do not say."""
    named = [pair for p in plans for pair in (
        (p.name, p.method), *((spec.name, cls) for spec, cls in p.personalizers))]
    for name, cls in named:
        if not cls.splits_batches:
            raise TapflError(f"speed.micro_batch: {name} looks across samples, so its minibatches "
                             "cannot be split; leave it out of methods, or micro_batch unset")
        own = [c for c in cls.__mro__ if issubclass(c, Configurable)
               and not c.__module__.startswith("tapfl.")]
        if own and not any("splits_batches" in c.__dict__ for c in own):
            raise TapflError(
                f"speed.micro_batch: {cls.__module__}:{cls.__name__} does not say whether its "
                "losses are sums over samples and tasks; if so, set splits_batches = True in it")


def _key(spec: MethodSpec) -> str:
    """Return the key of a configuration that names a method's halves."""
    return f"variants.{spec.name}.of" if spec.name in spec.config.variants else "methods"


def _find(name: str, known: dict[str, Any], base: type, what: str, key: str, *,
          folder: Path | None, installed: bool) -> Any:
    if name in known:
        return known[name]
    module = name.partition(":")[0]
    if ":" not in name:
        raise TapflError(f"{key}: unknown {what} '{name}'"
                         + nearest(name, {*known, *SHORT}))
    wanted = class_name(name)
    found = getattr(_import(module, f"{key}: '{name}'", folder, installed), wanted, None)
    if not isinstance(found, type) or not issubclass(found, base):
        other = ("; a personalizer stands behind a federated method: fedavg+" + name
                 if isinstance(found, type) and issubclass(found, Personalizer) else "")
        raise TapflError(f"{key}: '{name}': expected a class {wanted} in {module} that "
                         f"is derived from {base.__module__}.{base.__name__}{other}")
    return found


def _import(module: str, where: str, folder: Path | None, installed: bool) -> Any:
    """Import a user's module: a file beside the configuration, or one that is installed."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise TapflError(f"{where}: '{module}' is not the name of a module")
    path = (folder or Path.cwd()).resolve() / (module.replace(".", "/") + ".py")
    try:
        if is_ours(module):
            return importlib.import_module(module)
        if not path.is_file() and not installed:
            raise TapflError(f"{where}: no {path.name} in {path.parent}")
        if not path.is_file():
            return importlib.import_module(module)
        if getattr(sys.modules.get(module), "__file__", None) == str(path):
            return sys.modules[module]
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            sys.modules.pop(module, None)  # or the next try would get half a module
            raise
        return loaded
    except TapflError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise TapflError(f"{where}: cannot import {module} (looked for {path}): "
                         f"{type(error).__name__}: {reason}") from None
