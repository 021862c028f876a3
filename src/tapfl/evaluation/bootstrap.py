"""An interval for a difference between two methods, and what it says.

A difference is seen on a few seeds, a few clients and many test samples. All three are drawn from
larger populations, and draws go together: clients of one seed share that seed's training, a client
is the same one in every seed, and clients may share one test set. The bootstrap draws seeds,
clients and samples anew and shows how the mean difference varies.

With three seeds and nine clients, percentiles alone are wrong by far: too narrow, because so few
draws hide much of the variance, and too wide, because the noise of samples is counted again at
every level. On simulated data without any difference they call 3 to 29% of the cases better or
worse, depending on what varies (scripts/calibrate_verdicts.py). The percentiles are therefore
stretched to the width that an analysis of variance gives, with the quantile of Student's t that so
few draws need. The rate is then 3 to 10% (5% is meant), but 15% with only two seeds that differ
much. One seed says nothing of other seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tapfl.evaluation.metrics import metric_kind
from tapfl.evaluation.significance import ALPHA, ENOUGH, ROUNDING, f_test, student_quantile

Floats = NDArray[np.float64]
Samples = Sequence[Sequence[NDArray[np.floating]]]  # [seed][client] -> a difference per sample
Verdict = Literal["better", "worse", "equivalent", "not told apart"]

REPLICATES = 2000
GENERATOR = 20  # the seed of every bootstrap: the same data give the same interval
NORMAL = statistics.NormalDist().inv_cdf(1 - ALPHA / 2)
POOL = 0.25  # seeds or clients that do not differ at this level count as one population

# Differences that nobody would act on, fixed before looking: a point of accuracy or of a text
# score, and a twentieth of the baseline's squared error. Both have a command-line option.
MARGIN_POINTS = 1.0
MARGIN_MSE = 0.05


@dataclass(frozen=True)
class Interval:
    """A mean difference with its 95% interval."""

    mean: float
    low: float
    high: float


def margin(metric: str, baseline: float, points: float = MARGIN_POINTS,
           mse: float = MARGIN_MSE) -> float:
    """Return the difference below which two methods are as good as equal."""
    return mse * abs(baseline) if metric_kind(metric) == "mse" else points


def judge(interval: Interval, within: float) -> Verdict:
    """Say what an interval of a gain (above 0 is better) means, given the margin.

    An interval inside the margin is ``equivalent`` even if it excludes 0: a difference that is
    there, but too small to matter, is no reason to prefer a method.
    """
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return "not told apart"
    if -within < interval.low and interval.high < within:
        return "equivalent"
    if interval.low > 0:
        return "better"
    return "worse" if interval.high < 0 else "not told apart"


def interval(means: Floats, samples: Samples | None = None, shared: bool = False) -> Interval:
    """Return the mean over seeds and clients of paired differences, with its interval.

    ``means`` has a row per seed and a column per client; ``samples`` the differences that these are
    means of, where they are known. ``shared`` says that every client was tested on the same
    samples, in the same order: these are then drawn once for all clients (a crossed design), since
    an easy sample is easy for everyone. Only the caller knows: equal counts prove nothing.
    """
    centre = float(means.mean())
    if not math.isfinite(centre):
        return Interval(centre, math.nan, math.nan)
    crossed = _stack(samples) if samples is not None and shared else None
    variance, freedom = _variance(means, samples, crossed)
    if math.isnan(variance):
        return Interval(centre, math.nan, math.nan)
    drawn = _replicates(means, samples, crossed)
    spread = float(drawn.std())
    if min(spread, math.sqrt(variance)) <= ROUNDING * float(np.abs(means).max()):
        # Many equal differences are certain; a few may be equal by chance.
        end = centre if _different(means, samples, crossed) >= ENOUGH else math.nan
        return Interval(centre, end, end)
    low, high = np.percentile(drawn - drawn.mean(), [50 * ALPHA, 100 - 50 * ALPHA])
    stretch = (math.sqrt(variance) / spread
               * student_quantile(ALPHA, freedom) / NORMAL)
    return Interval(centre, centre + float(low) * stretch, centre + float(high) * stretch)


def _different(means: Floats, samples: Samples | None, crossed: Floats | None) -> int:
    """Return how many differences there are, those on the same samples counted once."""
    if samples is None:
        return means.size
    if crossed is not None:
        return int(crossed.shape[2])
    return sum(max(map(len, seeds)) for seeds in zip(*samples, strict=True))


def _stack(samples: Samples) -> Floats | None:
    """Return samples as one array, seeds by clients by samples, if all have equally many."""
    if len({len(values) for row in samples for values in row}) != 1:
        return None
    return np.array(samples, dtype=np.float64)


def _replicates(means: Floats, samples: Samples | None, crossed: Floats | None) -> Floats:
    """Return the mean difference in every draw of seeds, clients and samples."""
    rng = np.random.default_rng(GENERATOR)
    seeds, clients = (_weights(rng, count) for count in means.shape)
    if crossed is not None:
        weights = _weights(rng, crossed.shape[2])
        redrawn = (weights @ crossed.reshape(means.size, -1).T).reshape(-1, *means.shape)
    elif samples is not None:
        redrawn = _redrawn(rng, samples).reshape(-1, *means.shape)
    else:
        redrawn = np.broadcast_to(means, (REPLICATES, *means.shape))
    return np.asarray(np.einsum("bs,bc,bsc->b", seeds, clients, redrawn, optimize=True))


def _weights(rng: np.random.Generator, count: int) -> Floats:
    """Return, for every replicate, how often each of ``count`` was drawn, as a share."""
    drawn = rng.integers(count, size=(REPLICATES, count))
    drawn += count * np.arange(REPLICATES)[:, None]
    times = np.bincount(drawn.ravel(), minlength=REPLICATES * count)
    return times.reshape(REPLICATES, count) / count


def _redrawn(rng: np.random.Generator, samples: Samples) -> Floats:
    """Return every client's mean of samples drawn anew: replicates by clients of all seeds.

    Clients with equally many samples share the numbers drawn, and each has its samples shuffled:
    that is as good as numbers of its own, and a matrix product.
    """
    flat = [values for row in samples for values in row]
    redrawn = np.empty((REPLICATES, len(flat)))
    for count in sorted({len(values) for values in flat}):
        places = [i for i, values in enumerate(flat) if len(values) == count]
        shuffled = rng.permuted(np.array([flat[i] for i in places], dtype=np.float64), axis=1)
        redrawn[:, places] = _weights(rng, count) @ shuffled.T
    return redrawn


def _variance(means: Floats, samples: Samples | None,
              crossed: Floats | None) -> tuple[float, float]:
    """Return the variance of the mean difference, and its degrees of freedom."""
    if means.size == 1:  # nothing but samples can say how far the mean may be off
        if samples is None or len(samples[0][0]) < 2:
            return math.nan, math.nan
        values = np.asarray(samples[0][0], dtype=np.float64)
        return float(values.var(ddof=1)) / len(values), len(values) - 1
    variance, freedom = _variance_of_means(means)
    if crossed is None:
        return variance, freedom
    common = _variance_of_common_samples(crossed)
    both = variance + common
    parts = variance ** 2 / freedom + common ** 2 / max(crossed.shape[2] - 1, 1)
    return both, both ** 2 / parts if parts else freedom


def _variance_of_means(means: Floats) -> tuple[float, float]:
    """Return the variance of the grand mean, seeds and clients being random, and its freedom.

    A two-way analysis of variance. Seeds that differ no more than chance (at the level ``POOL``)
    are pooled with the rest, and clients likewise: with three seeds there are otherwise too few
    degrees of freedom to see anything.
    """
    seeds, clients = means.shape
    if 1 in means.shape:
        return float(means.var(ddof=1)) / means.size, means.size - 1
    centred = means - means.mean()
    by_seed = clients * float((centred.mean(axis=1) ** 2).sum())
    by_client = seeds * float((centred.mean(axis=0) ** 2).sum())
    rest = max(float((centred ** 2).sum()) - by_seed - by_client, 0.0)
    free_seed, free_client = seeds - 1, clients - 1
    free_rest = free_seed * free_client
    noise = rest / free_rest
    seed, client = by_seed / free_seed, by_client / free_client  # mean squares
    seeds_differ = seed > 0 and (not noise or f_test(seed / noise, free_seed, free_rest) < POOL)
    clients_differ = client > 0 and (
        not noise or f_test(client / noise, free_client, free_rest) < POOL)
    if seeds_differ and clients_differ:
        total = max(seed + client - noise, seed, client)
        free = total ** 2 / (seed ** 2 / free_seed + client ** 2 / free_client
                             + noise ** 2 / free_rest)
        return total / means.size, max(free, min(free_seed, free_client))
    if seeds_differ:
        return seed / means.size, free_seed
    if clients_differ:
        return client / means.size, free_client
    return (by_seed + by_client + rest) / (means.size - 1) / means.size, means.size - 1


def _variance_of_common_samples(crossed: Floats) -> float:
    """Return what samples that are common to all clients add to the variance of the mean."""
    flat = crossed.reshape(-1, crossed.shape[2])
    models, count = flat.shape
    if count < 2:
        return 0.0
    common = flat.mean(axis=0)
    noise = flat - flat.mean(axis=1, keepdims=True) - common + common.mean()
    chance = float((noise ** 2).sum()) / ((models - 1) * (count - 1)) / models
    return max(float(common.var(ddof=1)) - chance, 0.0) / count
