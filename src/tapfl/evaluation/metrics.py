"""Metrics of predictions: one value per sample. Larger is better, except for ``mse``.

Those of text compare what was written with what was expected, in percent. Their names say what
they depend on: ``bertscore(model,layer)``, and ``meteor-nosyn`` where no WordNet was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapfl.config import EvaluationConfig

LOWER_IS_BETTER = frozenset({"mse"})
PERCENT = frozenset({"accuracy", "exact_match", "token_f1", "bertscore", "meteor", "meteor-nosyn"})
# The order in which a data set's metrics are shown; the first that there is speaks for it.
METRIC_ORDER = ("accuracy", "mse", "bertscore", "meteor", "meteor-nosyn", "token_f1", "exact_match")
GENERAL = "general_"  # before a metric: on the test data of the task's other clients

Score = Callable[[Sequence[str], Sequence[str]], Sequence[float]]


def metric_kind(metric: str) -> str:
    """Return the kind of a metric: its name without what it depends on."""
    return metric.removeprefix(GENERAL).partition("(")[0]


def metric_place(metric: str) -> int:
    """Return where a metric stands among a data set's; kinds that we do not know come last."""
    kind = metric_kind(metric)
    return METRIC_ORDER.index(kind) if kind in METRIC_ORDER else len(METRIC_ORDER)


def digits(metric: str) -> int:
    """Return how many digits a metric's values are shown with."""
    return 1 if metric_kind(metric) in PERCENT else 3


def short(metric: str) -> str:
    """Return a metric's name without what it depends on."""
    return metric.partition("(")[0]


@dataclass
class TextMetric:
    """A metric of text. An empty string scores 0, and what was scored once is remembered."""

    name: str
    score: Score
    facts: dict[str, Any] = field(default_factory=dict)
    _known: dict[tuple[str, str], float] = field(default_factory=dict, repr=False)

    def __call__(self, written: Sequence[str], references: Sequence[str]) -> list[float]:
        """Return the score of every pair, in percent."""
        pairs = list(zip(written, references, strict=True))
        new = [pair for pair in dict.fromkeys(pairs)
               if pair not in self._known and all(text.strip() for text in pair)]
        if new:
            scores = self.score([w for w, _ in new], [r for _, r in new])
            self._known |= dict(zip(new, map(float, scores), strict=True))
        return [100 * self._known.get(pair, 0.0) for pair in pairs]


def text_metrics(config: EvaluationConfig, device: str) -> list[TextMetric]:
    """Return the metrics that the configuration asks for."""
    return [_MAKERS[name](config, device) for name in config.metrics]


def _bertscore(config: EvaluationConfig, device: str) -> TextMetric:
    from tapfl.evaluation.bertscore import BertScore

    score = BertScore(config.bertscore_model, config.bertscore_layer, device)
    return TextMetric(f"bertscore({score.model},{score.layer})", score, score.facts)


def _meteor(config: EvaluationConfig, device: str) -> TextMetric:
    from tapfl.evaluation.meteor import Meteor

    score = Meteor()
    return TextMetric("meteor" if score.synonyms else "meteor-nosyn", score, score.facts)


def exact_match(written: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return 1 for answers that are right to the word, else 0."""
    return [float(_words(a) == _words(b)) for a, b in zip(written, references, strict=True)]


def token_f1(written: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return the F1 of the words written against the words expected."""
    return [_f1(_words(a), _words(b)) for a, b in zip(written, references, strict=True)]


def _f1(written: list[str], expected: list[str]) -> float:
    common = sum((Counter(written) & Counter(expected)).values())
    return 2 * common / (len(written) + len(expected)) if common else 0.0


def _words(text: str) -> list[str]:
    """Split as WordPiece does: punctuation marks are words, case does not matter."""
    spaced = "".join(c if c.isalnum() else f" {c} " for c in text.lower())
    return spaced.split()


_MAKERS: dict[str, Callable[[EvaluationConfig, str], TextMetric]] = {
    "token_f1": lambda config, device: TextMetric("token_f1", token_f1),
    "exact_match": lambda config, device: TextMetric("exact_match", exact_match),
    "bertscore": _bertscore, "meteor": _meteor}
