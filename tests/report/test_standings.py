"""Every method against the best one of each data set."""

import csv
import json

import pytest

from tapfl.cli import main
from tapfl.engine.results import read_results, write_results
from tapfl.errors import TapflError
from tapfl.evaluation.significance import holm
from tapfl.report.gather import gather
from tapfl.report.html import render
from tapfl.report.standings import STANDINGS, standings
from tapfl.report.verdict import verdict
from tests.report.pages import Page
from tests.report.runs import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / str(seed), seed) for seed in (2, 3, 4)]


def test_leaders(runs):
    found = standings(runs)
    leaders = {leader.dataset: leader for leader in found.leaders}
    # One metric speaks for a data set: text generation has two here.
    assert [(each.dataset, each.metric) for each in found.leaders] == [
        ("tiny-imagenet", "accuracy"), ("fmnist", "mse"), ("agnews", "accuracy"),
        ("vqa", "token_f1"), ("commongen", "token_f1")]
    # TAP gains 30 and 20 points there, far more than the noise.
    for name in ("tiny-imagenet", "agnews"):
        assert leaders[name].method == "tap"
        assert [each.method for each in leaders[name].of("worse")] == ["local", "fedavg"]
    means = {method: [row["value"] for run in runs for row in read_results(run / "results.csv")
                      if (row["method"], row["task"]) == (method, "fmnist")]
             for method in found.methods}
    lowest = min(means, key=lambda method: sum(means[method]))
    assert leaders["fmnist"].method == lowest  # of an error, the lowest is the best
    assert leaders["fmnist"].mean == pytest.approx(sum(means[lowest]) / 6)


def test_a_comparison_is_that_of_the_verdict(runs):
    found = standings(runs)
    leader = found.leaders[0]
    (mine,) = [each for each in leader.others if each.method == "local"]
    (theirs,) = [each for each in verdict(runs, "local", [leader.method]).comparisons
                 if (each.against, each.dataset) == (leader.method, leader.dataset)]
    assert mine.gain == theirs.gain
    assert (mine.verdict, mine.pairs) == (theirs.verdict, theirs.pairs)
    every = [each for one in found.leaders for each in one.others]
    assert [each.p for each in every] == holm([each.pairs.p for each in every])


def test_every_method_has_one_place_on_every_data_set(runs):
    found = standings(runs)
    for method in found.methods:
        assert sum(found.count(method, each) for each in STANDINGS) == len(found.leaders)
    assert found.ranked[0] == max(found.methods, key=lambda method: (
        found.count(method, "best") + found.count(method, "equivalent")))
    assert set(found.ranked) == set(found.methods)
    wide = standings(runs, points=100.0, mse=50.0)  # everything is within such margins
    assert all(wide.count(method, "worse") == 0 for method in wide.methods)


def test_a_result_that_is_not_finite_is_never_the_best(tmp_path):
    run = write_run(tmp_path / "run", 2, scores=False)
    rows = read_results(run / "results.csv")
    for row in rows:
        if (row["method"], row["task"]) == ("tap", "tiny-imagenet"):
            row["value"] = float("nan")
    write_results(run / "results.csv", rows)
    assert standings([run]).leaders[0].method != "tap"
    for row in rows:
        if row["task"] == "tiny-imagenet":
            row["value"] = float("nan")
    write_results(run / "results.csv", rows)
    assert [leader.dataset for leader in standings([run]).leaders] == [
        "fmnist", "agnews", "vqa", "commongen"]  # nobody leads where nothing is finite


def test_the_table_of_a_report(runs, tmp_path):
    page = Page(render(gather(runs)))
    page.check()
    first = standings(runs).ranked[0]
    assert (f"{first} is best, or equivalent to the best, on {standings(runs).good(first)} of "
            "5 data sets") in page.text
    assert "All methods: ★ the best mean" in page.text
    run = write_run(tmp_path / "run", 2, scores=False)
    write_results(run / "results.csv", [row for row in read_results(run / "results.csv")
                                        if row["method"] != "local"])
    assert gather([run]).standings is None  # of two methods the verdict says it all


def test_one_method_cannot_be_compared(tmp_path):
    run = write_run(tmp_path / "run", 2)
    write_results(run / "results.csv", [row for row in read_results(run / "results.csv")
                                        if row["method"] == "tap"])
    with pytest.raises(TapflError, match="the run has one method, tap; expected several"):
        standings([run])


def test_the_command(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [str(run) for run in runs]
    assert main(["verdict", *names, "--all"]) == 0
    out = capsys.readouterr().out
    assert "every method against the best of each data set, 3 seeds" in out
    assert "worse: local*, fedavg*" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["verdict", *names, "--all", "--json", "--csv", str(tmp_path / "all.csv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["counts"]["tap"].values()) == len(found["leaders"]) == 5
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["verdict"] for row in rows].count("best") == 5
    assert len(rows) == 5 * 3
    assert main(["verdict", names[0], "--all"]) == 0
    assert not (runs[0] / "verdict.csv").exists()  # that is for the verdict on one method
    assert main(["verdict", *names, "--all", "--method", "tap"]) == 2
    assert "--all: compares every method; omit --method" in capsys.readouterr().err
