"""The right side of the paper's bound on FedAvg's server model, term by term.

The left side is the mean over rounds, weighted by the step size, of E||grad f(W_t)||^2. Three forms
of the right side differ in what stands in the sums (docs/theory.md derives them):

    theorem   as the theorem states it: its last term has R sigma^2
    proof     as its proof ends: (R + 1) / 3 instead of R
    weighted  our own, smaller: blocks weigh by their share of owners. It also holds where a loss
              couples blocks that different numbers of clients own, and proves the theorem there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tapfl.errors import TapflError, nearest

FORMS = ("theorem", "proof", "weighted")
TERMS = {
    "gap": "how far f falls from the first model to the last",
    "noise": "minibatches are samples; each block's noise averages out over its K_r owners",
    "heterogeneity": "owners of a block disagree about where it should go (Z)",
    "drift": "clients move away from the server's model in their local steps",
}


@dataclass(frozen=True)
class Block:
    """A block of the server model: K_r, and zeta_r^2, how much its owners' gradients differ."""

    name: str
    owners: int
    heterogeneity: float

    def __post_init__(self) -> None:
        if isinstance(self.owners, bool) or not isinstance(self.owners, int) or self.owners < 1:
            raise TapflError(f"block '{self.name}': {self.owners!r} owners, expected 1 or more")
        _check(f"block '{self.name}': zeta^2", self.heterogeneity, zero=True)


@dataclass(frozen=True)
class Setting:
    """What the bound depends on beside the step sizes; the paper's letters are in brackets."""

    blocks: tuple[Block, ...]
    clients: int  # [K]
    smoothness: float  # [L]
    noise: float  # [sigma^2]
    local_steps: int  # [tau]
    gap: float  # [f(W_0) - E f(W_T)]

    def __post_init__(self) -> None:
        if not self.blocks:
            raise TapflError("blocks: expected at least one")
        most = max(self.blocks, key=lambda block: block.owners)
        if self.clients < most.owners:
            raise TapflError(f"block '{most.name}' has {most.owners} owners, more than the "
                             f"{self.clients} clients")
        step_size_limits(self.smoothness, self.local_steps)  # checks both
        _check("sigma^2", self.noise, zero=True)
        if not math.isfinite(self.gap):
            raise TapflError(f"gap: expected a finite number, got {self.gap}")

    @property
    def last(self) -> int:
        """R: the index of the last block. The sums start at 0, so there are R + 1 blocks."""
        return len(self.blocks) - 1

    @property
    def inverse_owners(self) -> float:
        """C_K, the sum of 1 / K_r."""
        return sum(1 / block.owners for block in self.blocks)

    @property
    def heterogeneity(self) -> float:
        """Z, the sum of zeta_r^2."""
        return sum(block.heterogeneity for block in self.blocks)

    def share(self, block: Block) -> float:
        """Return p_r, the share of the clients that own a block."""
        return block.owners / self.clients

    @property
    def weighted_noise(self) -> float:
        """The factor of sigma^2 in the weighted form's noise term.

        It is at most (R + 1) / K, because a block's noise is at most the client's, and at most one
        over the fewest owners, because the noise of a client's blocks adds up to the client's.
        """
        return min(len(self.blocks) / self.clients, 1 / min(b.owners for b in self.blocks))


@dataclass(frozen=True)
class Bound:
    """The right side: its terms, and what each block adds to them."""

    form: str
    terms: dict[str, float]
    costs: dict[str, float]  # by block; the gap belongs to none

    @property
    def total(self) -> float:
        """The right side."""
        return sum(self.terms.values())


def max_step_size(smoothness: float, local_steps: int) -> float:
    """Return the largest step size that the theorem allows."""
    return min(step_size_limits(smoothness, local_steps).values())


def step_size_limits(smoothness: float, local_steps: int) -> dict[str, float]:
    """Return the theorem's three limits; the first is always the smallest."""
    _check("L", smoothness)
    if isinstance(local_steps, bool) or not isinstance(local_steps, int) or local_steps < 1:
        raise TapflError(f"tau: expected a whole number from 1 on, got {local_steps!r}")
    reach = smoothness * local_steps
    return {"1/(48 L tau)": 1 / (48 * reach), "1/(sqrt(8) L tau)": 1 / (math.sqrt(8) * reach),
            "(1/(96 L^3 tau^3))^(1/3)": (1 / 96) ** (1 / 3) / reach}


def constant(step_size: float, rounds: int) -> list[float]:
    """Return a constant schedule."""
    return [step_size] * rounds


def diminishing(alpha: float, rounds: int) -> list[float]:
    """Return alpha / (t + 1), the schedule under which the paper's bound goes to 0."""
    return [alpha / (t + 1) for t in range(rounds)]


def bound(setting: Setting, step_sizes: Sequence[float], form: str = "theorem") -> Bound:
    """Return the right side of the bound; a step size that it does not allow is refused."""
    if form not in FORMS:
        raise TapflError(f"unknown form '{form}'" + nearest(form, FORMS))
    check_steps(setting, step_sizes)
    return (_weighted if form == "weighted" else _published)(setting, step_sizes, form)


def check_steps(setting: Setting, step_sizes: Sequence[float]) -> None:
    """Refuse a schedule that the theorem says nothing about."""
    if not step_sizes:
        raise TapflError("step sizes: expected at least one")
    limit = max_step_size(setting.smoothness, setting.local_steps)
    for t, eta in enumerate(step_sizes):
        _check(f"step size of round {t}", eta)
        if eta > limit * (1 + 1e-12):
            raise TapflError(f"step size of round {t}: {eta:.4g} is above {limit:.4g}, the largest "
                             f"that the theorem allows for L = {setting.smoothness:g} and tau = "
                             f"{setting.local_steps}")


def _published(setting: Setting, step_sizes: Sequence[float], form: str) -> Bound:
    smoothness, tau, noise = setting.smoothness, setting.local_steps, setting.noise
    total, squares, cubes = power_sums(step_sizes)
    # The last term has R sigma^2 or (R + 1) / 3 sigma^2: every block has an equal part of it.
    count = len(setting.blocks)
    part = setting.last / count if form == "theorem" else 1 / 3

    def costs(block: Block) -> dict[str, float]:
        return {
            "noise": 16 * smoothness * tau * noise / block.owners * squares / total,
            "heterogeneity": 48 * smoothness * tau**2 * block.heterogeneity * squares / total,
            "drift": 16 * tau**3 * smoothness**2 * (part * noise + block.heterogeneity)
            * cubes / total}

    return _put_together(setting, form, 8 * setting.gap / total, costs)


def _weighted(setting: Setting, step_sizes: Sequence[float], form: str) -> Bound:
    smoothness, tau, noise = setting.smoothness, setting.local_steps, setting.noise
    total, squares, cubes = power_sums(step_sizes)
    count = len(setting.blocks)

    def costs(block: Block) -> dict[str, float]:
        uneven = setting.share(block) * block.heterogeneity
        return {
            "noise": 4 * smoothness * noise * setting.weighted_noise / count * squares / total,
            "heterogeneity": 0.0,  # in the mean of a block's owners it cancels, but for drift
            "drift": 8 * tau**2 * smoothness**2 * (noise / 3 / count + uneven) * cubes / total}

    return _put_together(setting, form, 4 * setting.gap / (tau * total), costs)


def _put_together(setting: Setting, form: str, gap: float,
                  costs: Callable[[Block], dict[str, float]]) -> Bound:
    found = {block.name: costs(block) for block in setting.blocks}
    terms = {"gap": gap} | {term: sum(cost[term] for cost in found.values())
                            for term in TERMS if term != "gap"}
    return Bound(form, terms, {name: sum(cost.values()) for name, cost in found.items()})


def power_sums(step_sizes: Sequence[float]) -> tuple[float, float, float]:
    """Return the sums of the step sizes, of their squares and of their cubes."""
    first, second, third = (math.fsum(eta**power for eta in step_sizes) for power in (1, 2, 3))
    return first, second, third


def time_average(values: Sequence[float], step_sizes: Sequence[float]) -> float:
    """Return the left side's mean over rounds: weighted by the step size."""
    return math.fsum(v * eta for v, eta in zip(values, step_sizes, strict=True)) / sum(step_sizes)


def _check(what: str, value: Any, zero: bool = False) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value)
            and (value > 0 or (zero and value == 0))):
        raise TapflError(f"{what}: expected a number {'from 0 on' if zero else 'above 0'}, got "
                         f"{value}")
