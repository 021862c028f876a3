"""Test samples that a run keeps with every method's predictions, and the clients' labels."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import tapfl
from tapfl.data.batches import TaskData
from tapfl.engine.build import build
from tapfl.engine.files import Label, write_checked_json
from tapfl.engine.labels import read_labels
from tapfl.engine.run import run
from tapfl.engine.sample_choice import CLIENTS, SampleChoice
from tapfl.engine.samples import (
    picture_path,
    read_inputs,
    read_picture,
    read_predictions,
    sampled_clients,
    samples_digest,
    samples_path,
    write_predictions,
)
from tapfl.engine.scores import read_file
from tapfl.errors import TapflError
from tapfl.evaluation.evaluate import Evaluator
from tapfl.evaluation.predictions import Predictions, Watch
from tapfl.tasks import Task
from tests.engine.test_resume import Stop
from tests.experiment import read_events, tiny_experiment

METHODS = ["local", "fedavg", "tap"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Skewed labels: clients that share a data set have test rows of their own."""
    folder = tmp_path_factory.mktemp("kept")
    config = tiny_experiment(folder, methods=METHODS, train={"rounds": 2},
                             data={"train": 40, "test": 12}, evaluation={"samples": 3},
                             federation={"file": str(folder / "federation.yaml"), "groups": 1,
                                         "dirichlet": 0.5})
    return config, folder / "out", run(config, folder / "out")


def files_of(run, kind="samples"):
    return {p.relative_to(run): p.read_bytes() for p in (run / kind).rglob("*") if p.is_file()}


def without_times(folder):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in read_events(folder)]


def test_nothing_but_the_samples_differs_from_a_run_without(kept, tmp_path):
    config, out, rows = kept
    without = config.model_copy(update={
        "evaluation": config.evaluation.model_copy(update={"samples": 0})})
    assert run(without, tmp_path / "out") == rows
    assert not (tmp_path / "out" / "samples").exists()
    assert without_times(tmp_path / "out") == without_times(out)
    for kind in ("scores", "models"):
        assert files_of(tmp_path / "out", kind) == files_of(out, kind)


def test_every_method_predicts_the_same_samples_of_the_clients_own(kept):
    config, out, _ = kept
    federation = build(config, "cpu").federation
    assert sampled_clients(out) == ["looks", "news", "shapes", "words"]
    for client in federation:
        inputs = read_inputs(out, client.id)
        assert set(inputs.tasks) == set(client.tasks)
        for task, shown in inputs.tasks.items():
            data, own = client.tests[task]
            assert len(shown.rows) == min(3, len(own))
            assert set(shown.rows) <= set(own.tolist())
            if data.labels is not None:
                assert shown.labels == data.labels[shown.rows].tolist()
                assert shown.classes == list(data.classes)
                assert shown.classes
            if data.references is not None:
                assert shown.answers == [data.references[i] for i in shown.rows]
            for number, row in enumerate(shown.rows if data.images is not None else ()):
                with Image.open(picture_path(samples_path(out, client.id), task, number)) as image:
                    assert np.array_equal(np.asarray(image).transpose(2, 0, 1), data.images[row])
            for method in METHODS:
                assert read_predictions(out, client.id, method).tasks[task].rows == shown.rows


def test_predictions_agree_with_scores_and_with_the_model_that_was_kept(kept):
    """Each sample evaluated on its own, by the model that the run kept."""
    config, out, _ = kept
    experiment = build(config, "cpu")
    evaluate = Evaluator(experiment.tokenizer, config.evaluation)
    for client in experiment.federation:
        model = tapfl.load(out, client=client.id, method="tap", device="cpu")
        inputs = read_inputs(out, client.id)
        scores = read_file(out / "scores" / "tap" / f"{client.id}.safetensors")
        for task, found in read_predictions(out, client.id, "tap").tasks.items():
            data, own = client.tests[task]
            places = np.searchsorted(own, found.rows)
            for metric, values in found.scores.items():
                assert values == pytest.approx(scores[task, metric][places].tolist(), rel=1e-4)
            few = data.take(np.array(found.rows))
            alone = [_alone(evaluate, model.network, few, i) for i in range(len(few))]
            if found.labels:
                assert found.labels == [each.labels[0].tolist() for each in alone]
                for probabilities, each in zip(found.probabilities, alone, strict=True):
                    assert probabilities == pytest.approx(each.probabilities[0], abs=1e-3)
                right = [labels[0] == label for labels, label in
                         zip(found.labels, inputs.tasks[task].labels, strict=True)]
                assert found.scores["accuracy"] == [100.0 * each for each in right]
            elif found.texts:
                assert found.texts == [each.texts[0] for each in alone]
            for number, each in enumerate(alone if found.pictures else ()):
                with Image.open(picture_path(samples_path(out, client.id, "tap"), task,
                                             number)) as image:
                    written = np.asarray(image).transpose(2, 0, 1).astype(int)
                assert np.abs(written - each.pictures[0]).max() <= 1  # rounding


def _alone(evaluate, network, few, place):
    watch = Watch(np.array([0]))
    evaluate(network, few.take(np.array([place])), watch)
    return watch.predictions()


def test_a_resumed_run_has_the_same_samples(kept, tmp_path):
    config, expected, _ = kept
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_client=2))
    run(config, tmp_path / "out", resume=True)
    assert files_of(tmp_path / "out") == files_of(expected)
    assert ((tmp_path / "out" / "labels.json").read_bytes()
            == (expected / "labels.json").read_bytes())


def test_samples_that_are_gone_or_damaged_are_made_again(kept, tmp_path):
    config, expected, _ = kept
    out = tmp_path / "out"
    shutil.copytree(expected, out)
    samples_path(out, "news").unlink()
    samples_path(out, "looks", "tap").write_text("{}")
    picture_path(samples_path(out, "words", "fedavg"), "fmnist", 0).write_bytes(b"x")
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(record | {"finished": False}))
    run(config, out, resume=True)
    assert files_of(out) == files_of(expected)


def test_the_first_clients_of_a_task_keep_samples(tmp_path):
    config = tiny_experiment(tmp_path, federation={"groups": 6, "file": str(
        tmp_path / "federation.yaml")})
    federation = build(config, "cpu").federation
    choice = SampleChoice.among(federation, 2, 1)
    holders = {task: [c.id for c in federation if task in choice.of_client(c.id)]
               for task in federation.tasks}
    for task, found in holders.items():
        assert found == [c.id for c in federation if task in c.tasks][:CLIENTS]
    data = federation.splits["agnews"][1]
    wanted = {row for c in holders["agnews"] for row in choice.of_client(c)["agnews"].tolist()}
    assert set(choice.of_data(data).tolist()) == wanted
    again = SampleChoice.among(federation, 2, 1)
    assert again.of_data(data).tolist() == choice.of_data(data).tolist()
    assert not len(SampleChoice.among(federation, 0, 1).of_data(data))


def test_labels_that_tie_or_are_not_numbers():
    watch = Watch(np.array([0, 2]))
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [9.0, 0, 0, 0], [0.0, float("nan"), 5.0, 1.0]])
    watch.see(np.arange(3), logits, None, is_label=True)
    found = watch.predictions()
    assert found.labels[:, 0].tolist() == logits[[0, 2]].argmax(dim=-1).tolist() == [1, 1]
    assert found.labels[0].tolist() == [1, 2, 0]
    assert found.probabilities[0, 0] == pytest.approx(np.exp(3) / (1 + np.e + 2 * np.exp(3)))
    assert np.isnan(found.probabilities[1]).all()


def test_what_is_not_finite_is_written_as_nothing(tmp_path):
    path = samples_path(tmp_path, "a", "tap")
    found = Predictions(np.array([4]), np.array([[1, 0]]),
                        np.array([[np.nan, 0.25]], dtype=np.float32))
    write_predictions(path, Label("tap", "a", 3), {"pets": (found, {"mse": np.array([np.inf])})})
    json.loads(path.read_text(), parse_constant=pytest.fail)
    read = read_predictions(tmp_path, "a", "tap").tasks["pets"]
    assert read.probabilities == [[None, 0.25]]
    assert read.scores == {"mse": [None]}


def test_damaged_files(kept, tmp_path):
    run_ = tmp_path / "run"
    shutil.copytree(kept[1], run_)
    path = samples_path(run_, "looks")
    (digest, *_) = read_inputs(run_, "looks").tasks["vqa"].pictures
    assert samples_digest(path) is not None
    assert read_picture(path, "vqa", 0, digest).startswith(b"\x89PNG")
    with pytest.raises(TapflError, match="damaged"):
        read_picture(path, "vqa", 1, digest)
    with pytest.raises(TapflError, match="not a readable picture"):
        read_picture(path, "vqa", 77, digest)
    with pytest.raises(TapflError, match="is not a name"):
        read_picture(path, "../vqa", 0, digest)
    with pytest.raises(TapflError, match="is not a name"):
        samples_path(run_, "../looks")
    path.write_text(path.read_text().replace("vqa", "vqb"))
    with pytest.raises(TapflError, match="checksum does not match"):
        read_inputs(run_, "looks")
    write_checked_json(path, {"format": 1, "client": "looks", "tasks": {
        "vqa": {"rows": [1, 2], "kind": "text_generation", "texts": ["one"]}}})
    with pytest.raises(TapflError, match="texts has 1 entries, expected 2"):
        read_inputs(run_, "looks")
    assert read_predictions(run_, "looks", "nobody") is None


def test_labels_are_those_that_clients_train_on(kept):
    config, out, _ = kept
    labels = read_labels(out)
    for client in build(config, "cpu").federation:
        for data, rows in client.data.holdings:
            found = labels[client.id][data.task.name]
            assert found.samples == len(rows)
            expected = ([] if data.labels is None else
                        [int((data.labels[rows] == c).sum()) for c in range(data.task.classes)])
            assert found.counts == expected
    assert any(each.counts for each in labels["shapes"].values())


def test_labels_of_older_and_of_damaged_runs(tmp_path):
    assert read_labels(tmp_path) == {}
    (tmp_path / "labels.json").write_text("{}")
    with pytest.raises(TapflError, match=r"labels\.json: damaged"):
        read_labels(tmp_path)
    write_checked_json(tmp_path / "labels.json", {
        "format": 1, "clients": {"a": {"pets": {"samples": -1}}}})
    with pytest.raises(TapflError, match="samples"):
        read_labels(tmp_path)


def test_data_without_any_sample(tmp_path):
    assert not len(SampleChoice().of_data(TaskData(Task("a", "image_generation", ("image",)))))
    assert sampled_clients(tmp_path) == []
