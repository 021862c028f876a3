import csv
import json
import math
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from tapfl.cli import main
from tapfl.engine.files import Label
from tapfl.engine.results import write_results
from tapfl.engine.scores import read_scores, write_scores
from tapfl.errors import TapflError
from tapfl.evaluation.bootstrap import interval
from tapfl.evaluation.significance import holm, paired, student_quantile
from tapfl.report.runs import read_runs
from tapfl.report.verdict import client_outcomes, compare, usual_rivals, verdict
from tests.report.runs import SAMPLES, write_run


@pytest.fixture
def runs(tmp_path):
    # Not seed 1: there the noise alone helps one client (p = 0.03), as it may in 5% of reports.
    return [write_run(tmp_path / str(seed), seed) for seed in (2, 3, 4)]


def test_a_table_of_other_settings_says_so(tmp_path, capsys):
    runs = [write_run(tmp_path / name, seed, train={"rounds": rounds})
            for name, seed, rounds in (("a", 2, 3), ("b", 3, 3), ("c", 4, 9))]
    assert main(["table", *map(str, runs[:2])]) == 0
    assert capsys.readouterr().err == ""
    assert main(["table", *map(str, runs)]) == 0
    assert capsys.readouterr().err == (
        f"tapfl: {runs[2]} and {runs[0]} are not seeds of one configuration (different: train); "
        "means go over both\n")


def values_of(run, method, client, task, metric):
    (run,) = read_runs([run])
    return run.values[method, client, task, metric]


def test_data_sets(runs):
    report = verdict(runs)
    assert (report.method, report.against, report.seeds) == ("tap", ("local", "fedavg"), (2, 3, 4))
    assert report.sampled
    found = {(c.against, c.dataset, c.metric): c for c in report.comparisons}
    assert len(found) == 2 * 6
    agnews = found["local", "agnews", "accuracy"]
    pairs = [values_of(run, "tap", client, "agnews", "accuracy")
             - values_of(run, "local", client, "agnews", "accuracy")
             for run in runs for client in ("shapes", "news")]
    assert agnews.gain.mean == pytest.approx(np.mean(pairs))
    assert agnews.pairs == paired(pairs)
    assert agnews.verdict == "better"
    assert agnews.margin == 1.0
    assert agnews.gain.low < agnews.gain.mean < agnews.gain.high
    vqa = found["fedavg", "vqa", "token_f1"]
    assert vqa.verdict in ("equivalent", "not told apart")
    # One of the two clients with this task gains what the other loses.
    fmnist = found["local", "fmnist", "mse"]
    assert fmnist.verdict == "not told apart"
    assert fmnist.margin == pytest.approx(0.05 * fmnist.baseline)
    assert [c.p for c in report.comparisons] == holm([c.pairs.p for c in report.comparisons])


def test_lower_errors_are_gains(runs):
    report = verdict(runs)
    gains = {(c.client, c.task): c for c in report.clients}
    looks, words = gains["looks", "fmnist"], gains["words", "fmnist"]
    assert looks.mean < looks.baseline
    assert looks.gain.mean == pytest.approx(0.3, abs=0.03)
    assert looks.outcome == "helped"
    assert words.gain.mean == pytest.approx(-0.3, abs=0.03)
    assert words.outcome == "hurt"


def test_clients_are_sorted_and_counted(runs):
    report = verdict(runs[:1])
    assert report.alternative == "local"
    assert len(report.clients) == 7  # vqa speaks by one of its two metrics
    assert [c.outcome for c in report.clients] == (
        ["helped"] * 4 + ["not told apart"] * 2 + ["hurt"])
    assert report.counts == {"helped": 4, "not told apart": 2, "hurt": 1}
    effects = [c.effect for c in report.clients[:4]]
    assert effects == sorted(effects, reverse=True)
    (vqa,) = [c for c in report.clients if c.task == "vqa"]
    assert vqa.metric == "token_f1"
    assert all(c.gain.low < c.gain.mean < c.gain.high for c in report.clients)


def test_a_client_is_judged_by_its_samples(runs):
    """The mean over seeds of every sample's gain: seeds share the test data."""
    scores = [read_scores(run, ["tap", "local"]) for run in runs]
    key = ("shapes", "tiny-imagenet", "accuracy")
    gains = np.mean([s["tap", *key].astype(float) - s["local", *key] for s in scores], axis=0)
    (found,) = [c for c in verdict(runs).clients if c.task == "tiny-imagenet"]
    assert found.gain.mean == pytest.approx(gains.mean())
    assert found.effect == pytest.approx(paired(gains).effect)


def test_without_scores_seeds_and_clients_remain(tmp_path):
    runs = [write_run(tmp_path / str(seed), seed, scores=False) for seed in (1, 2, 3)]
    report = verdict(runs)
    assert not report.sampled
    assert {c.verdict for c in report.comparisons if c.dataset == "agnews"} == {"better"}
    assert all(c.gain.low < c.gain.high for c in report.clients)
    one = verdict(runs[:1])
    assert all(math.isnan(c.gain.low) and c.outcome == "not told apart" for c in one.clients)


def test_methods_to_compare(runs, tmp_path):
    report = verdict(runs[:1], method="fedavg", against=["tap"])
    assert report.against == ("local", "tap")
    assert verdict(runs[:1], against=["fedavg", "fedavg"]).against == ("local", "fedavg")


def test_margins(runs):
    report = verdict(runs, points=100.0, mse=50.0)
    assert {c.verdict for c in report.comparisons} == {"equivalent"}
    report = verdict(runs, points=0.0, mse=0.0)
    assert "equivalent" not in {c.verdict for c in report.comparisons}


class ByHand:
    """A run from {(method, client, task, metric): a score per sample}."""

    def __init__(self, scores, draws=False):
        self.kept, self.draws = {key: np.array(v, dtype=float) for key, v in scores.items()}, draws
        self.values = {key: float(np.mean(values)) for key, values in scores.items()}
        names = ("method", "client", "task", "metric")
        self.rows = [{**dict(zip(names, key, strict=True)), "dataset": key[2]} for key in scores]

    def scores(self, methods):
        return {key: values for key, values in self.kept.items() if key[0] in methods}

    def draws_tests(self, task):
        return self.draws

    def shares_tests(self, task):
        return not self.draws


def pairs_by_hand(gains, task="agnews", metric="accuracy"):
    """Return scores of two methods, of which the first gains so much on every sample."""
    rng = np.random.default_rng(0)
    found = {}
    for client, gain in gains.items():
        base = rng.normal(50, 10, size=len(gain))
        found["tap", client, task, metric] = base + gain
        found["local", client, task, metric] = base
    return found


def test_who_lacks_a_result_in_any_run_is_not_compared():
    one, two = (pairs_by_hand({"a": [gain, 3.0], "b": [9.0, 9.0]}) for gain in (1.0, 5.0))
    one["tap", "a", "own", "accuracy"] = [1.0]  # nobody else has this task
    del two["local", "b", "agnews", "accuracy"]
    (found,) = compare([ByHand(one), ByHand(two)], "tap", ["local"])
    assert (found.dataset, found.pairs.pairs, found.margin) == ("agnews", 2, 1.0)
    assert found.gain.mean == pytest.approx((2.0 + 4.0) / 2)


def test_the_interval_knows_which_samples_are_the_same():
    rng = np.random.default_rng(1)
    easy = 5 * rng.normal(size=20)
    gains = {client: 2 + easy + rng.normal(size=20) for client in "abc"}
    means, samples = np.array([[each.mean() for each in gains.values()]]), [list(gains.values())]
    for draws in (False, True):
        (found,) = compare([ByHand(pairs_by_hand(gains), draws)], "tap", ["local"])
        expected, other = (interval(means, samples, shared) for shared in (not draws, draws))
        assert (found.gain.low, found.gain.high) == pytest.approx((expected.low, expected.high))
        assert found.gain.low != pytest.approx(other.low, abs=0.1)


def test_scores_that_do_not_pair_count_by_their_means():
    """Of one of two clients is known which samples the methods share: that is not enough."""
    scores = pairs_by_hand({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 9.0]})
    scores["local", "b", "agnews", "accuracy"] = [40.0, 60.0]
    (found,) = compare([run := ByHand(scores)], "tap", ["local"])
    means = [[run.values["tap", c, "agnews", "accuracy"] - run.values[
        "local", c, "agnews", "accuracy"] for c in "ab"]]
    assert found.gain == interval(np.array(means))


def test_outcomes_of_clients_by_hand():
    gains = {"a": [5.0, 6.0, 8.0, 9.0], "b": [1.0, -2.0, 3.0, 4.0], "c": [-7.0, -8.0, -6.0, -9.0]}
    scores = {("tap", "a", "agnews", "general_accuracy"): [1.0], **pairs_by_hand(gains)}
    found = client_outcomes([ByHand(scores)], "tap", "local")
    assert [(each.client, each.outcome) for each in found] == [
        ("a", "helped"), ("b", "not told apart"), ("c", "hurt")]
    tests = [paired(each) for each in gains.values()]
    assert [each.p for each in found] == pytest.approx(holm([test.p for test in tests]))
    for each, test in zip(found, tests, strict=True):
        half = student_quantile(0.05, 3) * test.deviation / 2
        assert (each.metric, each.gain.mean) == ("accuracy", pytest.approx(test.mean))
        assert (each.gain.low, each.gain.high) == pytest.approx((test.mean - half,
                                                                 test.mean + half))


def test_a_task_speaks_by_its_best_metric_in_whatever_order():
    scores = {key: values for metric in ("exact_match", "token_f1")
              for key, values in pairs_by_hand({"a": [1.0, 2.0]}, "vqa", metric).items()}
    (found,) = client_outcomes([ByHand(scores)], "tap", "local")
    assert found.metric == "token_f1"


def test_samples_of_several_seeds_are_averaged_only_if_they_are_the_same():
    one, two, short = [1.0, 4.0, 2.0], [3.0, 0.0, 7.0], [3.0, 0.0]
    for draws, other, expected in ((False, two, [2.0, 2.0, 4.5]), (True, two, [*one, *two]),
                                   (False, short, [*one, *short])):
        runs = [ByHand(pairs_by_hand({"a": gains}), draws) for gains in (one, other)]
        (found,) = client_outcomes(runs, "tap", "local")
        assert found.gain.mean == pytest.approx(np.mean(expected))
        assert found.effect == pytest.approx(paired(expected).effect)


def test_clients_without_an_effect_come_last_among_their_like():
    scores = pairs_by_hand({"a": [1.0], "b": [1.0, -2.0], "c": [2.0, -1.0]})
    found = client_outcomes([ByHand(scores)], "tap", "local")
    assert [each.client for each in found] == ["c", "b", "a"]
    assert math.isnan(found[-1].effect)


def test_a_method_is_no_rival_of_its_own(runs):
    (run,) = read_runs(runs[:1])
    assert [usual_rivals(run, name) for name in ("tap", "local", "fedavg")] == [
        ["local", "fedavg"], ["fedavg"], ["local"]]


def test_samples_are_at_hand_if_every_run_has_kept_them(tmp_path):
    both = [write_run(tmp_path / str(seed), seed, scores=seed == 1) for seed in (1, 2)]
    assert not verdict(both).sampled


def test_which_clients_share_test_data(runs, tmp_path):
    (run,) = read_runs(runs[:1])
    assert run.shares_tests("agnews")
    assert not run.draws_tests("agnews")
    (skewed,) = read_runs([write_run(tmp_path / "skewed", federation={"dirichlet": 0.5})])
    assert skewed.draws_tests("agnews")
    assert not skewed.shares_tests("agnews")
    assert skewed.shares_tests("vqa")  # no labels, no skew
    own = run.record.federation.model_copy(deep=True)
    values = own.model_dump(mode="json")
    values["clients"] = [{"name": "shapes", "tasks": {"agnews": {"path": "mine.csv"}}}]
    brought = type(own).model_validate(values)
    run = type(run)(run.path, run.record.model_copy(update={"federation": brought}), run.rows)
    assert not run.shares_tests("agnews")
    record = skewed.record.model_copy(update={"federation": brought})
    assert not type(run)(skewed.path, record, skewed.rows).draws_tests("agnews")  # not dealt out


def test_the_command(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [str(run) for run in runs]
    before = sorted(tmp_path.rglob("*"))
    assert main(["verdict", *names]) == 0
    out = capsys.readouterr().out
    assert "…" not in out  # no name and no figure is cut
    assert re.search(r"tiny-imagenet +accuracy +[+-]\d+\.\d \[[+-]", out)
    assert "tap against local, 3 seeds" in out
    assert "helped 4, hurt 1, not told apart 2 of 7 (4 clients, counted by task)" in out
    assert "no scores" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["verdict", names[0], "--json", "--csv", str(tmp_path / "v.csv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["helped"] == 4
    with (tmp_path / "v.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == ["dataset"] * 12 + ["client"] * 7
    first = found["comparisons"][0]
    assert float(rows[0]["low"]) == first["gain"]["low"]
    assert rows[0]["verdict"] == first["verdict"]
    assert main(["verdict", names[0]]) == 0  # one run: its verdict is kept with its results
    assert (runs[0] / "verdict.csv").read_text() == (tmp_path / "v.csv").read_text()


def test_the_command_without_scores(tmp_path, capsys):
    run = write_run(tmp_path / "1", scores=False)
    assert main(["verdict", str(run)]) == 0
    out = capsys.readouterr().out
    assert "no scores of single samples were kept" in out
    assert "one seed" in out
    assert main(["verdict", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clients"][0]["gain"]["low"] is None


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere"], "no run here (run.json is missing)"),
    (["1", "--method", "tab"], "--method: the run has no 'tab'; did you mean 'tap'?"),
    (["1", "--against", "ditto"], "--against: the run has no 'ditto'; known: fedavg, local, tap"),
    (["1", "1"], "has seed 1, as"),
    (["1", "--margin", "-1"], "--margin -1: expected a number, 0 or more"),
    (["1", "--margin-mse", "nan"], "--margin-mse nan: expected a number, 0 or more"),
    (["1", "--csv", "no/where.csv"], "cannot be written"),
])
def test_bad_commands(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "1")
    assert main(["verdict", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_runs_that_do_not_go_together(tmp_path):
    first = write_run(tmp_path / "1", 1)
    with pytest.raises(TapflError, match=r"another configuration than .*: 'train' differs"):
        verdict([first, write_run(tmp_path / "2", 2, train={"rounds": 5})])
    other = write_run(tmp_path / "3", 3, threads=2, checkpoint={"every": 3},
                      evaluation={"batch_size": 3})
    assert verdict([first, other]).seeds == (1, 3)
    with pytest.raises(TapflError, match="is not finished; continue it with"):
        verdict([first, write_run(tmp_path / "4", 4, finished=False)])
    text = (other / "run.json").read_text()
    (other / "run.json").write_text(text.replace('"federation_sha256": "',
                                                 '"federation_sha256": "0'))
    with pytest.raises(TapflError, match="'federation_sha256' differs"):
        verdict([first, other])


def test_nothing_to_compare(tmp_path):
    run = write_run(tmp_path / "1", models={})
    with pytest.raises(TapflError, match="no personal model; name one with --method"):
        verdict([run])
    rows = [row for row in read_runs([run])[0].rows if row["method"] == "tap"]
    write_results(run / "results.csv", rows)
    with pytest.raises(TapflError, match="nothing to compare 'tap' with"):
        verdict([run], method="tap")
    write_results(run / "results.csv", [])
    with pytest.raises(TapflError, match="no results"):
        verdict([run], method="tap")


def test_results_that_are_not_finite(tmp_path):
    run = write_run(tmp_path / "1", scores=False)
    rows = read_runs([run])[0].rows
    for row in rows:
        if row["method"] == "tap":
            row["value"] = math.nan
    write_results(run / "results.csv", rows)
    report = verdict([run])
    assert {c.verdict for c in report.comparisons} == {"not told apart"}
    json.dumps(report.as_json(), allow_nan=False)


def test_bad_scores(tmp_path):
    run = write_run(tmp_path / "1")
    assert read_scores(tmp_path / "none", ["tap"]) is None
    path = run / "scores" / "tap" / "shapes.safetensors"
    label = Label("tap", "shapes", 1)
    write_scores(path, label, {"tiny-imagenet|accuracy": np.full(SAMPLES, 3.0)})
    with pytest.raises(TapflError, match=r"client shapes, tiny-imagenet \(accuracy\) are not"):
        verdict([run])
    save_file({"tiny-imagenet|accuracy": np.full(SAMPLES, 3.0, dtype=np.float32)}, path)
    with pytest.raises(TapflError, match="damaged, or not the scores of a run"):
        verdict([run])
    path.write_bytes(b"no scores")
    with pytest.raises(TapflError, match="damaged"):
        verdict([run])
    path.unlink()
    with pytest.raises(TapflError, match=r"tap/shapes.safetensors is missing; remove .*scores to"):
        verdict([run])


def test_a_few_equal_gains_help_nobody(tmp_path):
    run = write_run(tmp_path / "run", scores=False)
    rows = [row | {"value": 100.0 if row["method"] == "tap" else 0.0, "samples": 3}
            for row in read_runs([run])[0].rows if row["metric"] == "accuracy"]
    write_results(run / "results.csv", rows)
    for method, value in (("local", 0.0), ("tap", 100.0)):
        for client, tasks in (("shapes", ("tiny-imagenet", "agnews")), ("news", ("agnews",))):
            path = run / "scores" / method / f"{client}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_scores(path, Label(method, client, 1),
                         {f"{task}|accuracy": np.full(3, value) for task in tasks})
    found = verdict([run], against=["local"]).clients
    assert len(found) == 3
    for each in found:
        assert each.outcome == "not told apart"
        assert math.isnan(each.p)
        assert math.isnan(each.gain.low)


