"""What ``tapfl bound`` finds: a federation's blocks, the constants, the bound in every form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapfl.config import Config
from tapfl.errors import TapflError, nearest
from tapfl.theory.bound import (
    FORMS,
    Block,
    Bound,
    Setting,
    bound,
    constant,
    diminishing,
    max_step_size,
    step_size_limits,
)
from tapfl.theory.estimate import Estimates
from tapfl.theory.federation import Owned, Ownerships

ASSUMED = 1.0  # for every constant that is neither given nor estimated


@dataclass(frozen=True)
class Constants:
    """L, sigma^2, zeta_r^2 by block and the gap, and where each comes from."""

    smoothness: float
    noise: float
    heterogeneity: Mapping[str, float]
    gap: float
    origins: Mapping[str, str]  # by the names above: assumed, given or estimated


def constants(blocks: Mapping[str, int], given: Mapping[str, float | None],
              by_block: Mapping[str, float], estimates: Estimates | None) -> Constants:
    """Choose each constant: what was given, else what was estimated, else 1.

    ``by_block`` are values of zeta^2 for single blocks. Owners of a block that has one owner agree.
    """
    for name, value in by_block.items():
        if name not in blocks:
            raise TapflError(f"--heterogeneity {name}: no such block" + nearest(name, blocks))
        if blocks[name] == 1 and value:
            raise TapflError(f"--heterogeneity {name}={value:g}: the block has a single owner, "
                             "whose gradient is the mean; expected 0")
    values: dict[str, float] = {}
    origins: dict[str, str] = {}
    for key in ("smoothness", "noise", "gap"):
        told = given[key]
        origins[key] = "given" if told is not None else "estimated" if estimates else "assumed"
        values[key] = told if told is not None else float(
            getattr(estimates, key) if estimates else ASSUMED)
    common = given["heterogeneity"]
    origins["heterogeneity"] = ("given" if common is not None
                                else "estimated" if estimates else "assumed")
    uneven = {}
    for name, owners in blocks.items():
        known = estimates.heterogeneity[name] if estimates and common is None else (
            ASSUMED if common is None else common)
        uneven[name] = by_block.get(name, known if owners > 1 else 0.0)
    return Constants(values["smoothness"], values["noise"], uneven, values["gap"], origins)


@dataclass(frozen=True)
class Analysis:
    """The bound of a federation."""

    name: str
    config: Config
    owned: Owned
    constants: Constants
    setting: Setting
    schedule: str  # in words
    step_sizes: list[float]
    bounds: dict[str, Bound]  # by form
    pairs: list[tuple[str, Owned, dict[str, Bound]]]  # as they are added one by one
    estimates: Estimates | None

    @property
    def max_step_size(self) -> float:
        """The largest step size that the theorem allows."""
        return max_step_size(self.setting.smoothness, self.setting.local_steps)


def analyse(name: str, config: Config, who: Ownerships, found: Constants, local_steps: int,
            rounds: int, schedule: str, estimates: Estimates | None = None) -> Analysis:
    """Return the bound of a federation in every form, and as its pairs are added one by one."""
    limit = max_step_size(found.smoothness, local_steps)
    step_sizes, words = read_schedule(schedule, limit, rounds)

    def bounds(owned: Owned) -> tuple[Setting, dict[str, Bound]]:
        blocks = tuple(Block(block, k, found.heterogeneity[block] if k > 1 else 0.0)
                       for block, k in owned.owners.items())
        setting = Setting(blocks, owned.clients, found.smoothness, found.noise, local_steps,
                          found.gap)
        return setting, {form: bound(setting, step_sizes, form) for form in FORMS}

    owned = who.owned()
    setting, whole = bounds(owned)
    return Analysis(name, config, owned, found, setting, words, step_sizes, whole,
                    [(pair, each, bounds(each)[1]) for pair, each in who.pairs()], estimates)


def read_schedule(text: str, limit: float, rounds: int) -> tuple[list[float], str]:
    """Return the step sizes that ``--step-size`` stands for, and how to say it."""
    if rounds < 1:
        raise TapflError(f"--rounds {rounds}: expected at least 1")
    if text == "max":
        return constant(limit, rounds), f"{limit:.4g} in every round, the largest allowed"
    if text == "diminishing":
        return diminishing(limit, rounds), f"{limit:.4g}/(t+1), from the largest allowed"
    number = r"([0-9.]+(?:[eE][-+]?[0-9]+)?)"
    try:
        if fading := re.fullmatch(rf"{number}/\(t\+1\)", text):
            return diminishing(float(fading[1]), rounds), text
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise TapflError(f"--step-size {text}: expected max, diminishing, a number, "
                         "NUMBER/(t+1), or a list such as 0.1,0.05") from None
    if len(found) == 1:
        return constant(found[0], rounds), f"{found[0]:g} in every round"
    if len(found) != rounds:
        raise TapflError(f"--step-size: {len(found)} step sizes for {rounds} rounds; expected as "
                         "many, or --rounds " + str(len(found)))
    return found, "a list"


def as_json(found: Analysis) -> dict[str, Any]:
    """Return everything as plain values."""
    theorem, setting = found.bounds["theorem"], found.setting
    estimates = found.estimates
    return {
        "federation": found.name, "clients": setting.clients, "R": setting.last,
        "blocks": [{"name": b.name, "K_r": b.owners, "zeta2": b.heterogeneity,
                    "cost": theorem.costs[b.name], "share": theorem.costs[b.name] / theorem.total}
                   for b in setting.blocks],
        "K_r": found.owned.owners, "C_K": setting.inverse_owners, "Z": setting.heterogeneity,
        "L": setting.smoothness, "sigma2": setting.noise, "gap": setting.gap,
        "origins": dict(found.constants.origins),
        "tau": setting.local_steps, "rounds": len(found.step_sizes),
        "step_sizes": {"schedule": found.schedule, "first": found.step_sizes[0],
                       "last": found.step_sizes[-1]},
        "max_step_size": found.max_step_size,
        "step_size_limits": step_size_limits(setting.smoothness, setting.local_steps),
        "terms": theorem.terms, "total": theorem.total,
        "forms": {form: {"terms": each.terms, "total": each.total}
                  for form, each in found.bounds.items()},
        "pairs": [{"pair": pair, "clients": owned.clients, "blocks": len(owned.owners),
                   "C_K": sum(1 / k for k in owned.owners.values()),
                   "totals": {form: each.total for form, each in bounds.items()}}
                  for pair, owned, bounds in found.pairs],
        "estimated_from": None if estimates is None else {
            "clients": estimates.clients, "batches": estimates.batches,
            "mean_sigma2": estimates.mean_noise, "squared_gradient": estimates.gradient},
        "notes": notes(found)}


def notes(found: Analysis) -> list[str]:
    """Return what has to be known to read the figures."""
    config, setting, origins = found.config, found.setting, found.constants.origins
    cohort = min(config.train.cohort, setting.clients)
    said = []
    assumed = [{"smoothness": "L", "noise": "sigma^2", "heterogeneity": "zeta_r^2",
                "gap": "the gap"}[key] for key, origin in origins.items() if origin == "assumed"]
    if assumed:
        said.append(f"{', '.join(assumed)}: assumed to be 1. Compare bounds and shares; the "
                    "numbers themselves mean nothing.")
    if found.estimates:
        said.append(f"Estimated at one stored model from {found.estimates.batches} minibatches of "
                    f"{found.estimates.clients} clients. The theorem needs values that hold "
                    "everywhere: L, from finite differences in a few directions, is a lower "
                    "estimate, and so are sigma^2 and zeta_r^2. The gap is what the run's own "
                    "training achieved.")
    if cohort < setting.clients:
        said.append(f"The theorem has all {setting.clients} clients in every round; this "
                    f"configuration draws {cohort}, which adds variance that no term counts.")
    said.append("The theorem is about plain SGD and means in which every owner counts alike; runs "
                "use AdamW and weigh clients by their number of samples.")
    if setting.last == 0:
        said.append("There is one block: R = 0, and the theorem's last term lacks the noise that "
                    "its proof has. Read the proof's form.")
    return said
