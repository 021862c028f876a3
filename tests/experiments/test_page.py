"""A reproduction's page: the tables' own figures, answers first, and what is missing."""

import csv
import json
import math
import shutil
import statistics
from collections import Counter

import pytest

from tapfl.cli import main
from tapfl.experiments import written as reading
from tapfl.experiments.catalogue import CATALOGUE, MODELS, Experiment, Part
from tapfl.experiments.index import FILE, Index, read_index, write_index
from tapfl.experiments.page import read_reproduction, render, sentence, write_reproduction
from tapfl.experiments.plan import make_plan
from tapfl.experiments.results import seeds_of
from tapfl.experiments.write import write_experiment
from tapfl.report import figures
from tapfl.report.verdict import compare
from tests.experiments.tiny import make_runs, tiny_model
from tests.report.pages import Page

SEEDS = (41, 42)
METHODS = ("fedavg", "fedavg+post", "tap")
HOSTILE = "<script>alert('a')</script>"
EXPERIMENTS = [
    Experiment("2p", "Is it better?", (Part("First", METHODS, at="{clients}"),)),
    Experiment("data", "How much?", (
        Part("Few", METHODS, {"post": {"steps": 1}}, leads=(("tap", "fedavg"),), at="few"),
        Part("Many", METHODS, leads=(("tap", "fedavg"),), at="many")),
        layout="leads", axis="steps"),
    Experiment("skew", "Other clients?", (Part("Alike", METHODS, at="other"),), axis="clients",
               beside="2p"),
    Experiment("margins", "Which margin?", (
        Part("Margins", ("tap", "fedavg"), places={"tap": "usual", "fedavg": "none"}),),
        axis="margins"),
    Experiment("replacements", "When?", (Part("Cumulative", ("tap",)),), layout="replacements"),
    Experiment("footprint", "What cost?", (Part("Costs", METHODS),), layout="footprint")]


def written(folder):
    """Make all experiments in a folder: one run for each seed."""
    model, out = tiny_model(folder, train={"local_steps": 1, "batch_size": 3}), folder / "out"
    make_runs(make_plan(EXPERIMENTS, model, True, SEEDS, out))
    plan = make_plan(EXPERIMENTS, model, True, SEEDS, out)
    for number, experiment in enumerate(EXPERIMENTS):
        write_experiment(plan, number, experiment, model, out)
    write_index(out, plan, EXPERIMENTS, "mini", "small")
    return plan, out, model


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"))


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "copy")
    return tmp_path / "copy"


def rows_of(folder, name):
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page_of(folder, **options):
    page = Page(render(read_reproduction(folder), **options))
    page.check()
    return page


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_a_reproduction_from_the_command_line(copy, capsys):
    assert main(["report", str(copy)]) == 0
    assert f"report: {copy / 'report.html'}" in capsys.readouterr().out
    text = (copy / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    page.check()
    assert "http" not in text.replace("http-equiv", "")
    for experiment in EXPERIMENTS:
        assert f"{experiment.name}: {experiment.question}" in page.text
    for heading in ("Answers", "Learning", "Map of the federation", "Runs"):
        assert heading in page.text
    assert "not finished" not in page.text


def test_every_figure_of_the_tables_is_on_the_page(finished):
    _, out, _ = finished
    text = render(read_reproduction(out))
    for name in ("2p", "data", "skew"):
        found = [row for row in rows_of(out, name) if row.get("mean")]
        assert found
        for row in found:
            digits = 3 if row["metric"] == "mse" else 1
            assert f'data-v="{row["mean"]}"' in text
            assert f"{float(row['mean']):.{digits}f}" in text
    for row in rows_of(out, "replacements"):
        assert f"<td class=\"n\" data-v=\"{float(row['round 2'])}\">{row['round 2']}</td>" in text


def test_verdicts_are_those_of_the_runs(finished):
    plan, out, _ = finished
    found = read_reproduction(out)
    expected = compare(seeds_of(plan, 0, 0), "tap", ["fedavg", "fedavg+post"])
    (part,) = found.judged["2p"]
    rows = {row["against"]: row for row in part.rows}
    kinds = {"fmnist": "mse", "agnews": "accuracy", "tiny-imagenet": "accuracy"}
    for against in ("fedavg", "fedavg+post"):
        for dataset, metric in kinds.items():
            (c,) = (c for c in expected
                    if (c.against, c.dataset, c.metric) == (against, dataset, metric))
            digits = 3 if metric == "mse" else 1
            assert rows[against][dataset].startswith(f"{c.verdict} {c.gain.mean:+.{digits}f} [")
    counts = reading.verdict_counts([part])
    assert all(sum(each.values()) == 5 for each in counts.values())  # one for each data set
    assert "tap</strong> against fedavg+post: " in sentence(found, "2p")


def test_the_cost_of_tap_is_that_of_its_second_copy(finished):
    """Post-training has a row of its own, but keeps nothing more than FedAvg."""
    _, out, _ = finished
    table = rows_of(out, "footprint")
    rows = {row["setting"]: row for row in table
            if row["run"] == table[0]["run"] and row["mean parameters"]}
    assert list(rows) == list(METHODS)
    tap, fedavg = (float(rows[name]["mean parameters"]) for name in ("tap", "fedavg"))
    said = str(sentence(read_reproduction(out), "footprint"))
    assert f"{fedavg:,.0f} parameters without TAP and {tap:,.0f} with it" in said
    assert f"the second stage takes {rows['tap']['stage 2 s/client']} s a client" in said


def test_leads_are_counted_over_all_settings(finished):
    _, out, _ = finished
    parts = reading.read_written(out / "data.csv")
    counts = reading.verdict_counts(parts)
    assert set(counts) == {("tap", "fedavg")}
    words = Counter()
    for row in rows_of(out, "data"):
        words.update(value.partition("(")[2].rstrip(")") for key, value in row.items()
                     if "(" in value and key != "part")
    assert counts["tap", "fedavg"] == words


def test_lines_over_an_axis_are_the_means(finished):
    _, out, _ = finished
    found = read_reproduction(out)
    (chart,) = reading.axis_charts(found.index, "data", found.written)
    assert chart.places == ("few", "many")
    rows = {(r["part"], r["method"], r["dataset"], r["metric"]): r["mean"]
            for r in rows_of(out, "data") if r["mean"]}
    for panel in chart.datasets:
        for curve in panel.curves:
            for value, part in zip(curve.values, ("Few", "Many"), strict=True):
                key = (part, curve.name, panel.column.dataset, panel.column.metric)
                assert value == float(rows[key])
    assert {curve.name for panel in chart.families for curve in panel.curves} == set(METHODS)
    # Parts of another experiment stand on the same axis; how many clients there are is read.
    (beside,) = reading.axis_charts(found.index, "skew", found.written)
    assert beside.places == ("4", "other")
    (margins,) = reading.axis_charts(found.index, "margins", found.written)
    assert margins.places == ("usual", "none")
    (agnews,) = (panel for panel in margins.datasets if panel.column.dataset == "agnews")
    assert agnews.curves[0].values == tuple(
        statistics.fmean(float(r["mean"]) for r in rows_of(out, "margins")
                         if (r["method"], r["dataset"]) == (method, "agnews"))
        for method in ("tap", "fedavg"))


def test_every_experiment_with_an_axis_has_places():
    """A place that the catalogue forgets would leave a chart out."""
    for name, make in CATALOGUE.items():
        for small in (True, False):
            experiment = make(MODELS["mini"], small)
            if experiment.axis:
                assert all(part.at or part.places for part in experiment.parts), name
    assert {name for name, make in CATALOGUE.items() if make(MODELS["mini"], True).axis} == {
        "margins", "standard", "clients100", "criteria", "skew", "data"}


def test_an_unfinished_reproduction_says_what_is_missing(finished, tmp_path):
    """One of two runs is gone, and with it the table of an experiment."""
    _, out, model = finished
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (gone,) = (copy / "runs").glob("*-s42-*[0-9a-f]")
    shutil.rmtree(gone)
    (copy / "2p.csv").unlink()
    plan = make_plan(EXPERIMENTS, model, True, SEEDS, copy)
    write_index(copy, plan, EXPERIMENTS, "mini", "small")
    page = page_of(copy)
    assert "This reproduction is not finished: 5 of 6 experiments are written." in page.text
    assert "3 of 6 models are missing" in page.text
    assert "First: seed 42: fedavg, fedavg+post, tap" in page.text
    assert "Not written yet" in page.text
    assert "3 of 6" in page.text
    assert "written before: they are of earlier runs" in page.text


def test_nothing_is_there_yet(finished, tmp_path):
    _, _, model = finished
    out = tmp_path / "new"
    write_index(out, make_plan(EXPERIMENTS, model, True, SEEDS, out), EXPERIMENTS, "mini", "small")
    page = page_of(out)
    assert "0 of 6 experiments are written" in page.text
    assert "None yet." in page.text


def test_a_run_that_is_gone_is_named(copy):
    gone = next((copy / "runs").glob("*-s42-*[0-9a-f]"))
    shutil.rmtree(gone)
    page = page_of(copy)
    assert "a run cannot be read" in page.text
    assert "cannot be read" in page.text.partition("Runs below")[2]
    assert not read_reproduction(copy).judged["2p"]


def test_tables_without_an_index(copy):
    (copy / FILE).unlink()
    found = read_reproduction(copy)
    page = page_of(copy)
    assert f"there is no {FILE} here" in page.text
    assert set(found.index.experiments) == {e.name for e in EXPERIMENTS}
    assert found.main is None
    assert "Most often best" in page.text


def test_other_commands_keep_what_is_there(finished, copy):
    _, _, model = finished
    one = [Experiment("kd", "More?", (Part("P", METHODS),))]
    write_index(copy, make_plan(one, model, True, (41,), copy), one, "mini", "small")
    assert list(read_index(copy).experiments) == [*(e.name for e in EXPERIMENTS), "kd"]
    (copy / FILE).write_text("{")  # damaged: only what is asked for now is known
    write_index(copy, make_plan(one, model, True, (41,), copy), one, "mini", "small")
    assert list(read_index(copy).experiments) == ["kd"]


def test_hostile_names_are_only_text(copy):
    def change(values):
        first = values["experiments"]["2p"]
        first["question"] = first["parts"][0]["title"] = HOSTILE
        first["axis"] = first["model"] = HOSTILE
        first["parts"][0]["at"] = HOSTILE

    edit(copy / FILE, change)
    text = (copy / "2p.csv").read_text()
    (copy / "2p.csv").write_text(text.replace("First", HOSTILE).replace("fedavg+post", HOSTILE))
    data = (copy / "data.csv").read_text()
    (copy / "data.csv").write_text(data.replace("tap,fedavg", f"tap,{HOSTILE}"))
    page = page_of(copy)
    assert HOSTILE in page.text
    assert page.count("script") == 1


def test_values_that_are_not_finite(copy):
    rows = rows_of(copy, "data")
    for row in rows:
        if row["method"] == "tap" and row.get("mean"):
            row["mean"], row["rank"] = "nan", ""
        if row["method"] == "fedavg" and row.get("mean"):
            row["mean"], row["deviation"], row["rank"] = "inf", "nan", ""
    with (copy / "data.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    page = page_of(copy)
    assert "not a number" in page.text
    assert "infinite" in page.text
    assert not {"nan", "inf"} & set(page.attributes("x", "y", "cx", "cy", "x1", "x2", "y1", "y2"))


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda f: (f / FILE).write_text("{"), "not a readable record"),
    (lambda f: edit(f / FILE, lambda v: v.update(format=9)), "format 9, expected 1"),
    (lambda f: edit(f / FILE, lambda v: v["experiments"].update({"../x": {}})), "../x"),
    (lambda f: edit(f / FILE, lambda v: v["experiments"]["2p"]["parts"][0]["runs"]["41"].update(
        tap=["../../etc", "tap"])), "without a path"),
    (lambda f: (f / "2p.csv").write_text("a,b\n1,2\n"), "not the tables of an experiment"),
    (lambda f: (f / "2p.csv").write_text("part,mean\nx\n"), "longer or shorter"),
    (lambda f: (f / "2p.csv").write_text((f / "2p.csv").read_text().replace(
        "accuracy,", "accuracy,x")), "could not convert"),
    (lambda f: (f / "2p.csv").write_bytes(b"\xff"), "not the tables of an experiment")])
def test_bad_input_is_one_line(copy, capsys, spoil, message):
    spoil(copy)
    assert main(["report", str(copy)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (copy / "report.html").exists()


def test_a_reproduction_stands_alone(copy, capsys):
    assert main(["report", str(copy), str(copy)]) == 2
    assert "expected no other folder beside it" in capsys.readouterr().err


@pytest.mark.long
def test_figures_of_a_reproduction(copy, capsys, monkeypatch):
    drawn = []  # those of runs have tests of their own
    monkeypatch.setattr(figures, "write_figures", lambda *where: drawn.append(where) or [])
    assert main(["report", str(copy), "--figures", str(copy / "figures")]) == 0
    assert "files in" in capsys.readouterr().out
    names = {path.name for path in (copy / "figures").iterdir()}
    for figure in ("data", "skew", "margins", "replacements"):
        assert {f"{figure}{width}.{kind}" for width in ("", "-wide")
                for kind in ("pdf", "svg")} <= names
    assert {f"{e.name}.tex" for e in EXPERIMENTS} <= names
    assert (copy / "figures" / "data.tex").read_text() == (copy / "data.tex").read_text()
    ((gathered, folder),) = drawn
    assert len(gathered.runs) == len(SEEDS)
    assert folder == copy / "figures" / "main-runs"


def test_the_page_is_written_where_asked(finished, tmp_path):
    _, out, _ = finished
    assert write_reproduction(out, tmp_path / "x.html", samples=False) == tmp_path / "x.html"
    assert "section-samples" not in Page((tmp_path / "x.html").read_text()).attributes("id")


def test_best_methods_by_hand():
    def row(method, dataset, mean, rank, source="tapfl"):
        return {"method": method, "source": source, "kind": "image_classification",
                "dataset": dataset, "metric": "accuracy", "mean": str(mean), "deviation": "",
                "count": "1", "rank": str(rank)}

    part = reading._part("p", [row("a", "x", 2, 1), row("b", "x", 1, 2), row("a", "y", 1, 2),
                               row("b", "y", 2, 1), row("b", "z", 2, 1), row("a", "z", 2, 1),
                               row("a", "average", 2, 1), row("a", "x", 9, 1, "paper")])
    assert reading.best_counts([part]) == (Counter(a=2, b=2), 3)
    assert math.isclose(part.sheet.lines[0].cells[part.sheet.columns[0]].mean, 2)


def test_an_index_without_experiments_is_an_empty_page(tmp_path):
    (tmp_path / FILE).write_text(Index().model_dump_json())
    assert "0 experiments" in page_of(tmp_path).text
