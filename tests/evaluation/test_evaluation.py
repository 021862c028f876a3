import numpy as np
import pytest
import torch

from tapfl.evaluation.evaluate import evaluate
from tapfl.evaluation.metrics import exact_match, token_f1
from tests.experiment import tiny_experiment, trajectory


def test_text_metrics_by_hand():
    written = ["answer: red", "", "the dog", "a b c"]
    expected = ["Answer : red", "x", "the cat", "c b a"]
    assert exact_match(written, expected) == 25
    assert token_f1(written, expected) == pytest.approx(100 * (1 + 0 + 0.5 + 1) / 4)
    assert token_f1([""], [""]) == exact_match([""], [""]) == 100
    assert token_f1([], []) == 0


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    run = trajectory(tiny_experiment(tmp_path), tmp_path)
    network = run.method.network
    for task, (_, test) in run.context.federation.splits.items():
        config = run.context.config.evaluation
        whole = evaluate(network, test, run.tokenizer, config)
        small = evaluate(network, test, run.tokenizer, config.model_copy(update={"batch_size": 4}))
        assert whole == pytest.approx(small, rel=1e-5), task
        if test.task.is_classification:
            batch = test.batch(np.arange(len(test)))
            right = (network.eval()(task, batch).prediction.argmax(-1) == batch.label).float()
            assert whole == {"accuracy": pytest.approx(100 * right.mean().item())}
        elif test.task.kind == "image_generation":
            batch = test.batch(np.arange(len(test)))
            with torch.no_grad():
                image = network.eval()(task, batch).prediction
            assert whole["mse"] == pytest.approx(
                ((image - network.normalize(batch.image)) ** 2).mean().item(), rel=1e-5)
        else:
            assert set(whole) == {"token_f1", "exact_match"}
