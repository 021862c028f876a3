"""The constant answer, against a slow oracle."""

import random
from fractions import Fraction

import pytest

from tapfl.engine.build import build
from tapfl.engine.registry import plan
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.evaluation.constant import constant_answer
from tapfl.evaluation.metrics import exact_match, token_f1
from tests.experiment import tiny_experiment


def _f1(one, other):
    """Words that both have, one by one; exact, so that ties are ties."""
    a, b = one.lower().split(), other.lower().split()
    left, common = list(b), 0
    for word in a:
        if word in left:
            left.remove(word)
            common += 1
    return Fraction(2 * common, len(a) + len(b)) if common else Fraction(0)


def _oracle(answers):
    by_count = sorted(set(answers), key=lambda text: (-answers.count(text), text))
    best, best_key = None, None
    for text in by_count[:50]:
        mean = sum((_f1(text, other) for other in answers[:500]), Fraction(0))
        key = (mean, answers.count(text), [-ord(c) for c in text] + [1])  # the first of the words
        if best_key is None or key > best_key:
            best, best_key = text, key
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_oracles(seed):
    draw = random.Random(seed)
    words = ["yes", "no", "red", "two", "dog", "cat"][:2 + seed]
    answers = [" ".join(draw.choices(words, k=draw.randint(1, 3)))
               for _ in range((5, 40, 200, 700)[seed % 4])]
    assert constant_answer(answers) == _oracle(answers)
    if len(answers) <= 500:  # no order, no randomness
        assert constant_answer(sorted(answers)) == constant_answer(answers)


def test_the_best_fit_beats_the_most_common_answer():
    answers = ["green"] * 3 + ["a red dog", "a red cat", "a red cow", "a big red dog"]
    assert constant_answer(answers) == "a red dog"
    assert constant_answer(["b", "a"]) == "a"  # all equal: the first in the alphabet
    assert constant_answer(["b", "a", "b", "c", "c"]) == "b"
    assert constant_answer([""]) == ""


def test_only_common_answers_are_candidates():
    """The 51st most common answer would fit best."""
    answers = [f"x{n:02d}" for n in range(50) for _ in range(2)] + ["x00 x01 x02 x03"]
    assert constant_answer(answers) == "x00"


def test_a_run_scores_every_clients_own_constant(tmp_path):
    config = tiny_experiment(tmp_path, methods=["local", "fedavg"], train={"rounds": 1},
                             federation={"groups": 2})
    rows = [row for row in run(config, tmp_path / "out") if row["method"] == "constant"]
    found = {(r["client"], r["task"], r["metric"]): r["value"] for r in rows}
    federation = build(config, "cpu").federation
    expected = {}
    for client in federation:
        for data, chosen in client.data.holdings:
            if data.task.kind != "text_generation":
                continue
            answer = constant_answer([data.references[i] for i in chosen])
            test, tested = client.tests[data.task.name]
            wanted = [test.references[i] for i in tested]
            for name, metric in (("token_f1", token_f1), ("exact_match", exact_match)):
                scores = metric([answer] * len(wanted), wanted)
                expected[client.id, data.task.name, name] = 100 * sum(scores) / len(scores)
    assert len(expected) == 8
    assert found == pytest.approx(expected)


def test_no_text_no_constant(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg"], train={"rounds": 1})
    (tmp_path / "federation.yaml").write_text(
        "tasks:\n  agnews: {kind: text_classification, modalities: [text], classes: 4}\n"
        "clients:\n  - {name: news, tasks: {agnews: 1}}\n")
    assert {row["method"] for row in run(config, tmp_path / "out")} == {"fedavg"}
    assert {p.name for p in (tmp_path / "out" / "scores").iterdir()} == {"fedavg"}


@pytest.mark.parametrize("name", ["constant", "Constant"])
def test_the_name_is_taken(tmp_path, name):
    config = tiny_experiment(tmp_path, methods=[name], variants={name: {"of": "tap"}})
    with pytest.raises(TapflError, match="is a method already; expected a name of its own"):
        plan(config)
