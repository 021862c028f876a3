"""Curves: what W and X are worth on the way; they change nothing."""

import numpy as np
import pytest

from tapfl.config import load_config
from tapfl.engine.curves import curve, sample_rows
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.evaluation.evaluate import Evaluator
from tests.engine.test_resume import Stop, same_files, same_run
from tests.experiment import FederatedRun, read_events, tiny_experiment

METHODS = ["feddat", "feddat+tap", "perfedavg", "perfedavg+tap", "perfedavg+post"]
SMALL = {"train": {"rounds": 4, "local_steps": 1}, "post": {"steps": 1}}


@pytest.fixture(scope="module")
def curved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curved")
    config = tiny_experiment(folder, methods=METHODS, evaluation={"every": 2, "sample": 4}, **SMALL)
    run(config, folder / "out")
    return config, folder


def test_curves_change_nothing_but_the_events(tmp_path, curved):
    config, folder = curved
    without = config.model_copy(update={
        "evaluation": config.evaluation.model_copy(update={"every": None})})
    run(without, tmp_path / "out")
    one, other = folder / "out", tmp_path / "out"
    assert (one / "results.csv").read_bytes() == (other / "results.csv").read_bytes()
    same_files(one, other, "models")
    same_files(one, other, "scores")

    def rest(out):
        return [{k: v for k, v in e.items() if k != "seconds"} for e in read_events(out)
                if e["event"] != "curve"]

    assert rest(one) == rest(other)
    assert not read_events(other, "curve")


def test_who_is_evaluated_when(curved):
    _, folder = curved
    events = read_events(folder / "out", "curve")
    tasks = {"shapes": ["tiny-imagenet", "agnews"], "news": ["agnews"],
             "looks": ["vqa", "fmnist"], "words": ["commongen", "fmnist"]}
    expected = []
    for run_, methods in (("feddat", ["feddat", "feddat+tap"]),
                          ("perfedavg", ["perfedavg", "perfedavg+tap"])):  # post has no X yet
        for event in read_events(folder / "out", "round"):
            if event["method"] == run_ and event["round"] in (1, 3):
                expected += [(method, event["round"], client, task) for client in event["cohort"]
                             for task in tasks[client] for method in methods]
    assert [(e["method"], e["round"], e["client"], e["task"]) for e in events] == expected
    metrics = {"vqa": {"token_f1", "exact_match"}, "commongen": {"token_f1", "exact_match"},
               "fmnist": {"mse"}}
    for event in events:
        assert set(event["values"]) == metrics.get(event["task"], {"accuracy"})
        assert event["samples"] == 4


@pytest.mark.long
def test_a_resumed_run_has_the_same_curves(tmp_path, curved):
    config, folder = curved
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_round=2))
    run(config, tmp_path / "out", resume=True)
    same_run(tmp_path / "out", folder / "out")


def test_the_values_are_those_of_w_as_sent_and_of_x_as_kept(tmp_path):
    config = tiny_experiment(tmp_path, evaluation={"every": 1, "sample": 5}, train={"cohort": 4})
    some = FederatedRun(config, tmp_path / "run")
    some.round(0)
    sent = some.server.blocks.to("cpu")
    some.round(1)
    events = [e for e in read_events(tmp_path / "run", "curve") if e["round"] == 1]
    assert {e["method"] for e in events} == {"fedavg", "tap"}
    evaluate = Evaluator(some.worker.evaluator.tokenizer, config.evaluation)
    for event in events:
        client = some.federation.find(event["client"])
        data, rows = client.tests[event["task"]]
        order = sample_rows(rows, 5, config.seed, event["task"])
        state = (sent if event["method"] == "fedavg"
                 else some.store.load("tap", client.id, as_of=1)[0])
        state.subset(some.method.owned(client)).load_into(some.method.network.blocks)
        scores = evaluate(some.method.network, data)
        assert event["values"] == pytest.approx(
            {m: float(values[order].mean()) for m, values in scores.items()}, rel=1e-5)


def test_the_sample_is_fixed_and_nested():
    rows = np.arange(100, 150)
    drawn = sample_rows(rows, 10, 41, "vqa")
    assert len(set(drawn.tolist())) == 10
    assert set(drawn.tolist()) <= set(rows.tolist())
    assert sample_rows(rows, 20, 41, "vqa")[:10].tolist() == drawn.tolist()
    assert sorted(sample_rows(rows, 1000, 41, "vqa")) == rows.tolist()
    assert sample_rows(rows, 10, 42, "vqa").tolist() != drawn.tolist()
    assert sample_rows(rows, 10, 41, "agnews").tolist() != drawn.tolist()


def test_what_is_not_finite_is_left_out(tmp_path):
    data = next(iter(FederatedRun(tiny_experiment(tmp_path), tmp_path / "run")
                     .federation[0].tests.values()))[0]
    event = curve("tap", 3, "x", data, {"mse": np.array([1.0, np.nan]), "good": np.array([1.0])})
    assert event.values == {"good": 1.0}


OWN = """
from tapfl.personal.personalizer import Personalizer

class Mine(Personalizer):
    def current(self, client, round_):
        return {answer}
    def after_federation(self, client, final):
        return final
"""


@pytest.mark.parametrize(("name", "answer", "message"), [
    ("curvy", "7", "expected blocks"), ("curved", "1 / 0", "ZeroDivisionError"),
    ("curving", "self.method.initial.subset(['encoder/text'])", "is missing")])
def test_an_x_of_ones_own_that_is_wrong(tmp_path, name, answer, message):
    (tmp_path / f"{name}.py").write_text(OWN.replace("{answer}", answer))
    config = tiny_experiment(tmp_path, methods=[f"fedavg+{name}:Mine"], evaluation={"every": 1})
    with pytest.raises(TapflError, match=rf"Mine\.current: .*{message}"):
        run(config, tmp_path / "out", modules=tmp_path)


@pytest.mark.parametrize("setting", ["every=0", "sample=0", "every=often"])
def test_settings(setting):
    with pytest.raises(TapflError, match=setting.partition("=")[0]):
        load_config("quickstart", [f"evaluation.{setting}"])


def test_one_w_is_scored_once_for_all_who_share_the_test_data(tmp_path, monkeypatch):
    asked = []
    score = Evaluator.__call__
    monkeypatch.setattr(Evaluator, "__call__", lambda self, network, data, watch=None: (
        asked.append(data.task.name), score(self, network, data, watch))[1])
    config = tiny_experiment(tmp_path, methods=["fedavg"], evaluation={"every": 1, "sample": 4},
                             **{**SMALL, "train": {"rounds": 1, "local_steps": 1, "cohort": 4}})
    run(config, tmp_path / "out")
    events = read_events(tmp_path / "out", "curve")
    tasks = [e["task"] for e in events]
    assert len(tasks) > len(set(tasks))  # some clients have the same tasks
    assert sorted(asked) == sorted(2 * list(set(tasks)))  # on the way, and in the end
    for task in set(tasks):
        assert len({str(e["values"]) for e in events if e["task"] == task}) == 1
