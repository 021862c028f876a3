"""The constant answer: one text for every question of a task. A floor that a model must beat.

A client takes it from its own training answers, so that nothing but reading the question is missing
from it. It is no method of a configuration; results have it beside the methods.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tapfl.data.federation import Client
from tapfl.evaluation.evaluate import Evaluator, Scores
from tapfl.evaluation.metrics import token_f1
from tapfl.tasks import TEXT_GENERATION

CONSTANT = "constant"  # its name in the results, in the place of a method's
CANDIDATES = 50  # the most common answers, one of which is chosen
COMPARED = 500  # training answers that each of them is compared with


def constant_answer(answers: Sequence[str]) -> str:
    """Return the common answer that fits the answers best, by its mean token F1.

    Ties go to the more common answer, then to the first in alphabetical order.
    """
    counts = Counter(answers)
    common = sorted(counts, key=lambda text: (-counts[text], text))[:CANDIDATES]
    compared = Counter(answers[:COMPARED])

    def fit(text: str) -> float:
        scores = token_f1([text] * len(compared), list(compared))
        return math.fsum(n * f1 for n, f1 in zip(compared.values(), scores, strict=True))

    # The first of equals stays: the candidates are in the order that decides ties.
    return max(common, key=fit)


def constant_scores(evaluator: Evaluator, client: Client) -> dict[str, Scores]:
    """Return the scores of a client's constant answers on its own test samples, by task."""
    found = {}
    for data, rows in client.data.holdings:
        test, chosen = client.tests[data.task.name]
        if data.task.kind != TEXT_GENERATION or not len(rows) or not len(chosen):
            continue
        if data.references is None or test.references is None:  # synthetic data have no words
            continue
        answer = constant_answer([data.references[i] for i in rows])
        found[data.task.name] = evaluator.score_texts([answer] * len(chosen),
                                                      [test.references[i] for i in chosen])
    return found
