"""Methods by name: ``federated[+personalizer]``, ours or a user's own class."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError, nearest
from tapfl.federated.disentafl import DisentAFL
from tapfl.federated.feddat import FedDAT
from tapfl.federated.local import Local
from tapfl.federated.method import FedAvg, FederatedMethod
from tapfl.federated.perfedavg import PerFedAvg
from tapfl.personal.personalizer import Personalizer
from tapfl.personal.posttrain import PostTrain, PostTrainTwice
from tapfl.personal.tap import Tap, TapWithoutDistillation

FEDERATED: dict[str, type[FederatedMethod]] = {
    m.name: m for m in (Local, FedAvg, PerFedAvg, DisentAFL, FedDAT)}
PERSONALIZERS: dict[str, type[Personalizer]] = {
    "post": PostTrain, "post2": PostTrainTwice, "tap": Tap, "tap-nokd": TapWithoutDistillation}
SHORT = {name: f"fedavg+{name}" for name in ("tap", "tap-nokd")}


@dataclass(frozen=True)
class Plan:
    """One federated run and everything that is to come out of it.

    ``personalizers`` are (method name, class); ``plain`` is the name under which the federated
    model itself is evaluated, if it is.
    """

    federated: str
    method: type[FederatedMethod]
    plain: str | None
    personalizers: tuple[tuple[str, type[Personalizer]], ...]


def plan(names: Sequence[str], folder: Path | None = None) -> list[Plan]:
    """Group methods by their federated half: each group is one run.

    ``folder`` is where a user's own ``module:Class`` is looked for first.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        federated, _, personalizer = SHORT.get(name, name).partition("+")
        group = groups.setdefault(federated, {})
        if personalizer in group:
            raise TapflError(f"methods: '{name}' is there twice")
        group[personalizer] = name
    plans = []
    for federated, group in groups.items():
        method = _find(federated, FEDERATED, FederatedMethod, "federated method", folder)
        personalizers = [
            (name, _find(half, PERSONALIZERS, Personalizer, "personalizer", folder))
            for half, name in group.items() if half]
        plans.append(Plan(federated, method, group.get(""), tuple(personalizers)))
    return plans


def _find(name: str, known: dict[str, Any], base: type, what: str, folder: Path | None) -> Any:
    if name in known:
        return known[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise TapflError(f"methods: unknown {what} '{name}'" + nearest(name, [*known, *SHORT]))
    found = getattr(_import(module_name, name, folder), class_name, None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise TapflError(f"methods: '{name}': expected a class {class_name} in {module_name} that "
                         f"is derived from {base.__module__}.{base.__name__}")
    return found


def _import(module: str, name: str, folder: Path | None) -> Any:
    """Import a user's module: a file beside the configuration, or one that is installed."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise TapflError(f"methods: '{name}': '{module}' is not the name of a module")
    path = (folder or Path.cwd()) / (module.replace(".", "/") + ".py")
    try:
        if not path.is_file():
            return importlib.import_module(module)
        if getattr(sys.modules.get(module), "__file__", None) == str(path):
            return sys.modules[module]
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
        return loaded
    except TapflError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise TapflError(f"methods: '{name}': cannot import {module} (looked for {path}): "
                         f"{type(error).__name__}: {reason}") from None
