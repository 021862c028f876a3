"""Metrics of predictions. All are means over samples; larger is better, except for ``mse``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

LOWER_IS_BETTER = frozenset({"mse"})
PERCENT = frozenset({"accuracy", "exact_match", "token_f1"})
SECONDARY = frozenset({"exact_match"})  # in results.csv, not in the table on the screen


def exact_match(written: Sequence[str], references: Sequence[str]) -> float:
    """Return the percentage of answers that are right to the word."""
    pairs = zip(written, references, strict=True)
    return 100 * sum(_words(a) == _words(b) for a, b in pairs) / max(1, len(written))


def token_f1(written: Sequence[str], references: Sequence[str]) -> float:
    """Return the mean F1 of the words written against the words expected, in percent."""
    pairs = zip(written, references, strict=True)
    return 100 * sum(_f1(_words(a), _words(b)) for a, b in pairs) / max(1, len(written))


def _f1(written: list[str], expected: list[str]) -> float:
    common = sum((Counter(written) & Counter(expected)).values())
    return 2 * common / (len(written) + len(expected)) if common else float(written == expected)


def _words(text: str) -> list[str]:
    """Split as WordPiece does: punctuation stands alone, case does not matter."""
    spaced = "".join(c if c.isalnum() else f" {c} " for c in text.lower())
    return spaced.split()
