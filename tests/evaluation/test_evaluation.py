import numpy as np
import pytest
import torch

from tapfl.evaluation.evaluate import Evaluator
from tapfl.evaluation.metrics import GENERAL
from tapfl.evaluation.predictions import Watch
from tests.experiment import FederatedRun, tiny_experiment


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    network = run.method.network
    config = run.context.config.evaluation.model_copy(update={"batch_size": 4})
    small = Evaluator(run.worker.evaluator.tokenizer, config)
    for task, (_, test) in run.federation.splits.items():
        whole, pieces = run.worker.evaluator(network, test), small(network, test)
        assert set(whole) == set(pieces)
        for metric, values in whole.items():
            assert values.shape == (len(test),)
            assert values == pytest.approx(pieces[metric], rel=1e-5), task
        batch = test.batch(np.arange(len(test)))
        with torch.no_grad():
            outputs = network.eval()(task, batch)
        if test.task.is_classification:
            right = 100.0 * (outputs.prediction.argmax(-1) == batch.label).double()
            assert whole["accuracy"].tolist() == right.tolist()
        elif test.task.kind == "image_generation":
            loss = network.loss(task, outputs, batch).item()
            assert whole["mse"].mean() == pytest.approx(loss, rel=1e-5)
        else:
            assert set(whole) == {"token_f1", "exact_match"}


def test_a_batch_that_does_not_fit_into_memory_is_evaluated_in_halves(tmp_path, monkeypatch):
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    network, evaluator = run.method.network, run.worker.evaluator
    encode, sizes = network.encode, []
    for _, test in run.federation.splits.values():
        rows = np.array([0, len(test) - 1])
        expected, seen = Watch(rows), Watch(rows)
        whole = evaluator(network, test, expected)
        sizes.clear()

        def small(task, batch, *more, **settings):
            sizes.append(len(batch))
            if len(batch) > 3:
                raise torch.cuda.OutOfMemoryError
            return encode(task, batch, *more, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(network, "encode", small)
            pieces = evaluator(network, test, seen)
        assert sizes[0] == len(test) > 3
        assert sum(size for size in sizes if size <= 3) == len(test)  # every sample once
        for metric, values in whole.items():
            assert values == pytest.approx(pieces[metric], rel=1e-5), metric
        wanted, found = expected.predictions(), seen.predictions()
        assert found.rows.tolist() == wanted.rows.tolist()
        for name in ("labels", "pictures", "texts"):
            assert np.array_equal(getattr(found, name), getattr(wanted, name)), name


def test_memory_that_runs_out_at_a_batchs_end_counts_no_prediction_twice(tmp_path, monkeypatch):
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    network, evaluator = run.method.network, run.worker.evaluator
    _, test = run.federation.splits["agnews"]
    rows = np.arange(len(test))
    expected, seen = Watch(rows), Watch(rows)
    evaluator(network, test, expected)
    gather, left = torch.Tensor.gather, [1]

    def once(*given):  # the last step of looking at a batch
        if left:
            left.pop()
            raise torch.cuda.OutOfMemoryError
        return gather(*given)

    monkeypatch.setattr(torch.Tensor, "gather", once)
    evaluator(network, test, seen)
    assert not left
    wanted, found = expected.predictions(), seen.predictions()
    assert np.array_equal(found.labels, wanted.labels)
    assert found.probabilities == pytest.approx(wanted.probabilities, rel=1e-5)


def test_memory_that_does_not_suffice_for_one_sample_is_an_error(tmp_path, monkeypatch):
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    tried = []

    def never(task, batch, *more, **settings):
        tried.append(len(batch))
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(run.method.network, "encode", never)
    _, test = run.federation.splits["agnews"]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        run.worker.evaluator(run.method.network, test)
    assert tried[-1] == 1
    assert tried == sorted(tried, reverse=True)


def test_general_ability_is_that_on_the_others_test_data(tmp_path):
    config = tiny_experiment(tmp_path, train={"rounds": 1}, data={"test": 30},
                             federation={"dirichlet": 0.5})
    run = FederatedRun(config, tmp_path / "run")
    rows = run.run()
    agnews = [r for r in rows if r["task"] == "agnews"]
    assert {r["metric"] for r in agnews} == {"accuracy", GENERAL + "accuracy"}
    for client in ("shapes", "news"):
        own, general = (r for r in agnews if r["client"] == client)
        assert own["samples"] + general["samples"] == 30
        tests = run.federation.find(client).tests["agnews"][1]
        assert own["samples"] == len(tests)
    # Tasks without labels are not skewed: their clients share one test set.
    assert {r["metric"] for r in rows if r["task"] == "fmnist"} == {"mse"}


def test_personal_values_of_one_client_are_not_the_common_ones_of_the_next(tmp_path):
    """FedAvg is evaluated once for all clients; what TAP gave in between must not get in."""
    config = tiny_experiment(tmp_path, methods=["fedavg", "tap"], train={"rounds": 2})
    rows = FederatedRun(config, tmp_path / "run").run()
    values = {r["value"] for r in rows
              if r["method"] == "fedavg" and r["dataset"] == "fmnist" and r["metric"] == "mse"}
    assert len(values) == 1
