"""Tests of a difference between two methods: Welch's, as the paper does it, and paired ones.

The paper takes every client of every seed as an independent sample (Welch's t-test). Two methods
are, however, compared on the same clients and seeds: pairs tell more, and many comparisons at once
need a correction (Holm's). ``tapfl.evaluation.bootstrap`` also respects that clients of one seed,
and scores on one test set, go together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

ALPHA = 0.05  # the usual level, also the paper's
ENOUGH = 30  # differences that are all the same: fewer may be so by chance
ROUNDING = 1e-12  # a spread of so small a part of the values is none


@dataclass(frozen=True)
class Sample:
    """A sample by its mean, its standard deviation (that of a sample, n - 1) and its size."""

    mean: float
    deviation: float
    size: int

    @classmethod
    def of(cls, values: ArrayLike) -> Sample:
        """Return the figures of some values."""
        array = np.asarray(values, dtype=float)
        mean = float(array.mean())
        if len(array) < 2 or not math.isfinite(mean):
            return cls(mean, math.nan, len(array))
        deviation = float(array.std(ddof=1))
        seen = deviation > ROUNDING * float(np.abs(array).max())
        return cls(mean, deviation if seen else 0.0, len(array))


@dataclass(frozen=True)
class Welch:
    """Welch's t-test: the difference a - b, and how probable it is by chance."""

    difference: float
    t: float
    freedom: float
    p: float


def welch(a: ArrayLike | Sample, b: ArrayLike | Sample) -> Welch:
    """Return Welch's t-test, two-sided, of two samples: their values, or their figures."""
    a, b = (x if isinstance(x, Sample) else Sample.of(x) for x in (a, b))
    shares = [x.deviation ** 2 / x.size for x in (a, b)]
    variance, difference = sum(shares), a.mean - b.mean
    if not variance > 0:  # no spread at all, or too few values to see one
        p = math.nan if math.isnan(variance) else float(difference == 0)
        return Welch(difference, math.copysign(math.inf, difference) if p == 0 else 0.0,
                     math.nan, p)
    freedom = variance ** 2 / sum(s ** 2 / (x.size - 1) for s, x in zip(shares, (a, b),
                                                                        strict=True))
    t = difference / math.sqrt(variance)
    return Welch(difference, t, freedom, student(t, freedom))


@dataclass(frozen=True)
class Paired:
    """Paired differences: their mean, its size in units of their deviation, and a t-test.

    ``better`` is the share of pairs with a difference above 0; equal pairs count half.
    """

    mean: float
    deviation: float
    pairs: int
    better: float
    p: float

    @property
    def effect(self) -> float:
        """The mean difference in units of the deviation of the differences (Cohen's d_z)."""
        return self.mean / self.deviation if self.deviation > 0 else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean difference."""
        return self.deviation / math.sqrt(self.pairs)


def paired(differences: ArrayLike) -> Paired:
    """Return the paired t-test, two-sided, of some differences.

    One pair alone has no p, nor have a few pairs that all differ by the same.
    """
    array = np.asarray(differences, dtype=float).ravel()
    figures = Sample.of(array)
    better = float((array > 0).mean() + (array == 0).mean() / 2)
    if math.isnan(figures.deviation):  # one pair alone, or one that is not finite
        p = math.nan
    elif figures.deviation == 0:  # all pairs differ by the same
        p = 1.0 if figures.mean == 0 else 0.0 if figures.size >= ENOUGH else math.nan
    else:
        p = student(figures.mean / figures.deviation * math.sqrt(figures.size), figures.size - 1)
    return Paired(figures.mean, figures.deviation, figures.size, better, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm, 1979); NaN stays, and does not count."""
    p = np.asarray(p_values, dtype=float)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    corrected = p.copy()
    factors = np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * factors))
    return [float(value) for value in corrected]


def student(t: float, freedom: float) -> float:
    """Return the probability that Student's t is at least so far from 0."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def student_quantile(p: float, freedom: float) -> float:
    """Return the t that is exceeded, on either side, with probability ``p``."""
    low, high = 0.0, 1.0
    while student(high, freedom) > p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) > p else (low, middle)
    return high


def f_test(ratio: float, above: float, below: float) -> float:
    """Return the probability that a ratio of two equal variances is at least so large."""
    return incomplete_beta(below / 2, above / 2, below / (below + above * ratio))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b)."""
    if not 0 < x < 1:
        return math.nan if math.isnan(x) else float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below this point
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
                     + a * math.log(x) + b * math.log1p(-x)) / a
    return front * _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of I_x(a, b), by Lentz's method."""
    smallest = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), smallest)
    value = d
    for m in range(1, 10_000):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                     -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d, c = 1 + term * d, 1 + term / c
            d = 1 / (d if abs(d) > smallest else smallest)
            c = c if abs(c) > smallest else smallest
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


