"""Membership inference: can an attacker tell the samples that a model was trained on?

An attack gives every sample a score; members should get higher ones. What follows from the scores:

- the AUC, the probability that a member's score is higher than another sample's (0.5: a coin);
- the share of members that are found where at most 1% of the others are taken for members.
  An attack that is sure of a few samples has a small AUC and a large share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tapfl.errors import TapflError

Floats = NDArray[np.float64]
FALSE = 0.01  # the share of others that may be taken for members
REPLICATES = 1000
GENERATOR = 20  # the seed of every bootstrap: the same scores give the same interval


# Scores

def loss_score(losses: ArrayLike) -> Floats:
    """Return the score of a loss threshold: what a model was trained on, it fits better."""
    return -np.asarray(losses, dtype=np.float64)


def drop_score(before: ArrayLike, after: ArrayLike) -> Floats:
    """Return by how much each sample's loss has fallen from one model to the next.

    The first model tells how hard a sample is, so that an easy one is not taken for a member.
    """
    return np.asarray(before, dtype=np.float64) - np.asarray(after, dtype=np.float64)


def alignment(step: ArrayLike, gradients: ArrayLike) -> Floats:
    """Return the cosine of the angle between an update's step and each sample's way downhill.

    ``gradients`` (samples by parameters) are those of the samples' losses where the step began.
    """
    move, slopes = np.asarray(step, dtype=np.float64), np.asarray(gradients, dtype=np.float64)
    lengths = np.linalg.norm(slopes, axis=1) * np.linalg.norm(move)
    return np.asarray(-(slopes @ move) / np.maximum(lengths, np.finfo(np.float64).tiny))


# What they tell

@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Leak:
    """What an attack finds out."""

    auc: Estimate
    found: Estimate  # the share of members, where 1% of the others are taken for members


def auc(members: ArrayLike, others: ArrayLike) -> float:
    """Return the probability that a member's score is higher; a tie counts half."""
    inside, outside = _scores(members, others)
    ordered = np.sort(outside)
    below = np.searchsorted(ordered, inside, side="left")
    not_above = np.searchsorted(ordered, inside, side="right")
    return float((below + not_above).mean() / 2 / len(outside))


def found_share(members: ArrayLike, others: ArrayLike, false: float = FALSE) -> float:
    """Return the share of members above the lowest threshold that few enough others exceed."""
    inside, outside = _scores(members, others)
    allowed = int(false * len(outside))
    threshold = np.sort(outside)[len(outside) - 1 - allowed]
    return float((inside > threshold).mean())


def leak(members: ArrayLike, others: ArrayLike) -> Leak:
    """Return both figures; the intervals come from samples that are drawn anew."""
    return Leak(_bootstrapped(auc, members, others), _bootstrapped(found_share, members, others))


def _bootstrapped(figure: Callable[[ArrayLike, ArrayLike], float], members: ArrayLike,
                  others: ArrayLike) -> Estimate:
    inside, outside = _scores(members, others)
    rng = np.random.default_rng(GENERATOR)
    drawn = [figure(rng.choice(inside, len(inside)), rng.choice(outside, len(outside)))
             for _ in range(REPLICATES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(figure(inside, outside), float(low), float(high))


def _scores(members: ArrayLike, others: ArrayLike) -> tuple[Floats, Floats]:
    found = []
    for what, values in (("members", members), ("others", others)):
        scores = np.asarray(values, dtype=np.float64)
        if scores.ndim != 1 or not len(scores):
            raise TapflError(f"membership: {what}: expected a list of scores, got an array of "
                             f"shape {scores.shape}")
        if np.isnan(scores).any():
            raise TapflError(f"membership: {what}: a score is not a number")
        found.append(scores)
    return found[0], found[1]
