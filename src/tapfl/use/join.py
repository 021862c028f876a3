"""Newcomers: clients that arrive after a run, take its model over and make it their own at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.config import CheckpointConfig, Config, set_key
from tapfl.data.participants import client_ids, load_federation
from tapfl.engine.messages import Row
from tapfl.engine.origin import Origin
from tapfl.engine.registry import find_plan
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.events import Subscriber, nobody
from tapfl.federated.fedper import FedPer
from tapfl.federated.method import FederatedMethod
from tapfl.methods import LOCAL, RunSpec, federated_runs, method_specs, names_own_code
from tapfl.reading import check
from tapfl.use.mirror import with_mirror

ALONE = "alone"  # the variant that stands for training without a federation


@dataclass(frozen=True)
class Joined:
    """What newcomers got: their results, and which methods were omitted, with the reasons."""

    config: Config
    rows: list[Row]
    omitted: dict[str, str]


def join(folder: Path | str, federation: Path | str, out: Path | str, *,
         overrides: Iterable[str] = (), data: Path | str | None = None, alone: bool = False,
         device: str = "auto", modules: Path | None = None,
         notify: Subscriber = nobody) -> Joined:
    """Let the clients of a federation file join a stored run; write a run's folder ``out``.

    Each gets the run's W, with fresh blocks where that has none, and makes its personal models from
    it as the run's methods do in the end. ``data`` is a folder that mirrors the hub's data sets.
    ``alone`` adds training from fresh blocks alone, for as many steps. The stored run is only read.
    """
    origin = Origin(Path(folder))
    config, omitted = newcomers(origin, Path(federation), overrides, alone, modules)
    _check_names(origin, config)
    config = with_mirror(config, data)
    return Joined(config, run(config, out, device=device, notify=notify, modules=modules), omitted)


def newcomers(origin: Origin, federation: Path, overrides: Iterable[str] = (),
              alone: bool = False, modules: Path | None = None) -> tuple[Config, dict[str, str]]:
    """Return the configuration of newcomers to a run, and which of its methods are omitted."""
    before = origin.record.config
    values = before.model_dump()
    values["federation"] |= {"file": str(federation.resolve()), "groups": 1, "clients": None}
    values["start"] = str(origin.path.resolve())
    values["checkpoint"]["every"] = before.checkpoint.every or CheckpointConfig().every
    for override in overrides:
        set_key(values, override)
    if values["train"]["rounds"] != before.train.rounds:
        raise TapflError("--set train.rounds: newcomers make their models at once, without rounds; "
                         "to go on together, see start in docs/newcomers.md")
    asked = check(Config, values, f"{origin.path} with --set")
    if names_own_code(asked) and modules is None:
        raise TapflError(f"{origin.path}: the run has methods of your own; name the folder that "
                         "they are imported from with --modules DIR")
    usable, omitted = _usable(origin, federated_runs(method_specs(asked)), modules)
    methods = [name for name in asked.methods if name not in omitted]
    if not methods:
        raise TapflError(f"{origin.path}: nothing for a newcomer: "
                         + "; ".join(f"{name}: {why}" for name, why in omitted.items()))
    variants = {name: each for name, each in values["variants"].items() if name in methods}
    _as_stored(origin, usable, values, variants)
    # W as it came stands beside what is made of it.
    plain = [each.federated for each in usable
             if each.plain is None and each.name == each.federated and not _headless(each, modules)]
    if alone:
        variants[ALONE] = {"of": f"{LOCAL}+post", "train": {"rounds": 0}}
    values |= {"methods": [*([ALONE] if alone else []), *plain, *methods], "variants": variants}
    return check(Config, values, str(origin.path)), omitted


def _usable(origin: Origin, runs: Sequence[RunSpec],
            modules: Path | None) -> tuple[list[RunSpec], dict[str, str]]:
    """Return the federated runs that have something for newcomers; omit methods that have not."""
    rounds = {each.name: _rounds(origin, each.name) for each in runs}
    complete = {name for name, done in rounds.items()
                if name in origin.runs and done == origin.runs[name].config.train.rounds}
    found, omitted = [], dict[str, str]()
    for each in runs:
        if each.federated == LOCAL:
            why = "its clients share nothing"
        elif not rounds[each.name]:
            why = "the run has no stored model of it"
        elif complete and each.name not in complete:
            why = f"it was stopped after round {rounds[each.name]}; others are complete"
        else:
            found.append(each)
            if each.plain and _headless(each, modules):
                omitted[each.plain.name] = "nobody has trained a new client's decoders"
            continue
        methods = [*([each.plain] if each.plain else []), *each.personal]
        omitted |= {spec.name: why for spec in methods}
    return found, omitted


def _rounds(origin: Origin, run: str) -> int:
    """Return how many rounds are behind the stored W of a federated run; 0 where there is none."""
    try:
        return origin.stored(run).round + 1
    except TapflError:
        return 0


def _headless(run: RunSpec, modules: Path | None) -> bool:
    """Return whether W itself says nothing to a new client: its decoders are its own, and fresh."""
    method = find_plan(run, modules, installed=False).method
    return issubclass(method, FedPer) and method.adapt is FederatedMethod.adapt


def _as_stored(origin: Origin, usable: Sequence[RunSpec], values: dict[str, Any],
               variants: Mapping[str, Any]) -> None:
    """Let a run that was stopped end where it is: nothing is trained but newcomers' own models."""
    for each in usable:
        done = origin.stored(each.name).round + 1
        if done != each.config.train.rounds:
            values["train"]["rounds"] = done
            for variant in variants.values():
                variant.get("train", {}).pop("rounds", None)


def _check_names(origin: Origin, config: Config) -> None:
    for client in client_ids(load_federation(config.federation), config.federation):
        if client in origin.clients:
            raise TapflError(f"{config.federation.file}: client '{client}' is already one of "
                             f"{origin.path}; expected another name")
