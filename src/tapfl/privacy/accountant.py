"""What noise promises: epsilon at a delta, computed by the dp-accounting library.

The unit is a client: all that it ever sends, not one of its samples. A client adds to B blocks,
each with a norm of at most C and noise of standard deviation z C. Together that is one Gaussian
mechanism, whose noise is z / sqrt(B) times what a client can change. Neighbouring federations
differ in one client:

- noise at the server, cohorts that follow from the seed: with the client's updates, or without
  them. It changes a block by C at most.
- noise at the clients, or secret cohorts: with the client's data, or with any others in their
  place. It changes a block by 2 C at most.

Releases of both kinds are added up as the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapfl.errors import TapflError

LARGEST = 1e6  # an epsilon beyond this promises nothing


@dataclass(frozen=True)
class Releases:
    """What one client takes part in: how often, with how many blocks, and with which noise.

    ``replaced`` says whether a neighbour replaces the client's data or leaves them out. ``drawn``
    is (cohort, clients) where a secret generator draws the cohort of every one of these rounds.
    """

    noise: float
    blocks: int
    rounds: int
    replaced: bool
    drawn: tuple[int, int] | None = None

    @property
    def multiplier(self) -> float:
        """The noise of a round in units of its sensitivity."""
        return self.noise / math.sqrt(self.blocks) / (2 if self.replaced else 1)


def epsilon(releases: Sequence[Releases], delta: float) -> float:
    """Return what all of these releases together promise; infinite where there is no noise."""
    counted = [r for r in releases if r.rounds and r.blocks]
    if any(not r.noise for r in counted):
        return math.inf
    library = accounting()
    relation = library.NeighboringRelation
    replaced = any(r.replaced for r in counted)
    accountant = library.rdp.RdpAccountant(neighboring_relation=(
        relation.REPLACE_ONE if replaced else relation.ADD_OR_REMOVE_ONE))
    for each in counted:
        # One kind of neighbours for all: whoever replaces data does so in every release.
        event = library.GaussianDpEvent(replace(each, replaced=replaced).multiplier)
        if each.drawn:
            cohort, clients = each.drawn
            event = library.SampledWithoutReplacementDpEvent(clients, cohort, event)
        accountant.compose(event, each.rounds)
    return float(accountant.get_epsilon(delta))


def needed_noise(releases: Sequence[Releases], delta: float, target: float) -> float:
    """Return the smallest noise, to three digits, whose epsilon is at most the target."""
    def found(noise: float) -> float:
        return epsilon([replace(each, noise=noise) for each in releases], delta)

    low, high = 0.0, 1.0
    while found(high) > target:
        low, high = high, high * 2
        if high > LARGEST:
            raise TapflError(f"no noise reaches an epsilon of {target:g} at a delta of {delta:g}")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) <= target else (middle, high)
    return high


def accounting() -> Any:
    """Return the library; without it, nothing could be promised."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise TapflError("privacy: epsilon is computed by the dp-accounting library; "
                         "pip install 'tapfl[privacy]'") from None
    return dp_accounting
