"""What is written of an experiment: the runs' own figures, in three formats that can be read."""

import csv
import dataclasses
import re
import statistics
from pathlib import Path

import pytest

from tapfl.engine.results import read_results
from tapfl.errors import TapflError
from tapfl.evaluation.bootstrap import Interval
from tapfl.evaluation.significance import paired, welch
from tapfl.experiments.catalogue import FAMILY, Experiment, Part
from tapfl.experiments.plan import make_plan
from tapfl.experiments.results import SeedOfPart, seeds_of
from tapfl.experiments.write import (
    _provenance,
    _setting,
    _test_table,
    _welch_shares,
    first_metrics,
    verdict_table,
    write_experiment,
)
from tapfl.methods import method_specs
from tapfl.report.footprint import render as render_rows
from tapfl.report.standings import EVERY_METHOD, standings_of
from tapfl.report.verdict import Comparison, compare
from tests.experiments.tiny import make_runs, tiny_model

SEEDS = (41, 42)
LEADS = (("fedavg+post", "fedavg"), ("tap", "fedavg+post"))
# The second part's names mean something else than the first's.
PARTS = (Part("All of them", FAMILY, leads=LEADS),
         Part("Short, 50% & more_or_less", FAMILY, {"post": {"steps": 1}}, leads=LEADS))
LAYOUTS = ("table", "verdicts", "leads", "significance", "footprint", "replacements")
EXPERIMENTS = [Experiment(name, "Which?", PARTS, paper="", layout=name) for name in LAYOUTS]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """All layouts of two parts and two seeds, which are two runs."""
    folder = tmp_path_factory.mktemp("write")
    train = {"rounds": 3, "local_steps": 1, "batch_size": 3}
    model, out = tiny_model(folder, train=train), folder / "out"
    make_runs(make_plan(EXPERIMENTS, model, True, SEEDS, out))
    plan = make_plan(EXPERIMENTS, model, True, SEEDS, out)
    assert not plan.missing
    assert len(plan.finished) == len(SEEDS)
    for number, experiment in enumerate(EXPERIMENTS):
        paths = write_experiment(plan, number, experiment, model, out)
        assert paths == [out / f"{experiment.name}.{e}" for e in ("md", "tex", "csv")]
    return plan, out, model


def read_csv(out, name):
    with (out / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def results_of(plan, part):
    """Return a part's results from its runs' files: (method, data set, metric) -> values.

    The run's own names: its configuration says which of its models has how many steps.
    """
    steps = (2, 1)[part]
    found = {}
    for folder in sorted({folder for folder, _ in plan.there.values()}):
        (record,) = (r for r in plan.finished if str(r.seed) in folder.name)
        rows = read_results(folder / "results.csv")
        for spec in method_specs(record.config):
            name = re.sub(r"^fedavg-post", "fedavg+post", re.sub(r"-2$", "", spec.name))
            if spec.config.post.steps == steps or not spec.personalizer:
                for row in rows:
                    if row["method"] == spec.name:
                        key = (name, row["dataset"], row["metric"])
                        found.setdefault(key, []).append(row["value"])
    return found


def test_a_table_has_exactly_the_runs_figures(written):
    plan, out, _ = written
    rows = read_csv(out, "table")
    for number, part in enumerate(PARTS):
        expected = results_of(plan, number)
        found = {(r["method"], r["dataset"], r["metric"]): r for r in rows
                 if r["part"] == part.title and r["dataset"] != "average"
                 and r["method"] != "constant"}
        assert set(found) == set(expected)
        assert {method for method, *_ in found} == set(FAMILY)
        for key, values in expected.items():
            assert float(found[key]["mean"]) == statistics.fmean(values)
            assert float(found[key]["deviation"]) == pytest.approx(statistics.pstdev(values))
            assert int(found[key]["count"]) == len(values)
    assert results_of(plan, 0) != results_of(plan, 1)
    assert any(row["method"] == "constant" for row in rows)


def test_the_same_figures_are_in_the_text(written):
    plan, out, _ = written
    values = results_of(plan, 1)["tap", "fmnist", "mse"]
    mean, spread = statistics.fmean(values), statistics.pstdev(values)
    part = (out / "table.md").read_text().partition(f"## {PARTS[1].title}")[2]
    (line,) = (each for each in part.splitlines() if each.startswith("| TAP |") and "0." in each
               and f"{mean:.3f} ±{spread:.3f}" in each)
    assert line
    assert f"{mean:.4f}" in (out / "table.tex").read_text()


def test_leads_are_above_zero_where_the_first_is_better(written):
    """Also for mse, where less is better; the verdict is that of ``compare``."""
    plan, out, _ = written
    rows = read_csv(out, "leads")
    for number, part in enumerate(PARTS):
        values, seeds = results_of(plan, number), seeds_of(plan, 2, number)
        for method, against in LEADS:
            (row,) = (r for r in rows if r.get("setting") == part.title
                      and (r["method"], r["against"]) == (method, against))
            for dataset, metric, factor, digits in (("fmnist", "mse", -1, 3),
                                                    ("agnews", "accuracy", 1, 1),
                                                    ("vqa", "token_f1", 1, 1)):
                gain = factor * (statistics.fmean(values[method, dataset, metric])
                                 - statistics.fmean(values[against, dataset, metric]))
                (found,) = (c for c in compare(seeds, method, [against])
                            if (c.dataset, c.metric) == (dataset, metric))
                lead, _, verdict = row[dataset].partition(" (")
                assert float(lead) == pytest.approx(gain, abs=0.51 * 10 ** -digits)
                assert verdict == f"{found.verdict})"
    better = next(r for r in rows if r["method"] == "fedavg+post")
    assert float(better["fmnist"].split()[0]) != 0


def test_verdicts_stand_against_post_training_with_as_many_steps(written):
    _, out, _ = written
    rows = [r for r in read_csv(out, "verdicts") if r.get("against")]
    assert {(r["method"], r["against"]) for r in rows} == {
        (m, "fedavg+post2") for m in ("fedavg+post", "tap", "tap-soft", "tap-gap")}
    assert len(rows) == 2 * 4
    for row in rows:
        assert re.fullmatch(r"(better|worse|equivalent|not told apart) [+-]\d+\.\d "
                            r"\[[+-]\d+\.\d; [+-]\d+\.\d\]|not told apart [+-]\d+\.\d "
                            r"\[too few scores for an interval\]", row["agnews"]), row["agnews"]


def test_replacements_add_up(written):
    plan, out, _ = written
    rows = read_csv(out, "replacements")
    for method in FAMILY:
        mine = [r for r in rows if r["part"].endswith(f": {method}")]
        assert {r["task"] for r in mine} == {"tiny-imagenet", "fmnist", "agnews", "vqa",
                                             "commongen"}
        if method.startswith("fedavg"):
            assert all(float(r["round 3"]) == 0 for r in mine)
            continue
        made = [(event["task"], event["round"]) for seed in seeds_of(plan, 5, 0)
                for event in seed.events(method, "replacement")]
        assert made
        for row in mine[:5]:
            assert [key for key in row if key.startswith("round ")] == [
                "round 1", "round 2", "round 3"]
            for mark in (1, 2, 3):
                before = sum(task == row["task"] and round_ < mark for task, round_ in made)
                assert float(row[f"round {mark}"]) == before / len(SEEDS)


def test_every_method_is_compared_with_the_best(written):
    plan, out, _ = written
    for name in ("table", "verdicts"):
        for number, part in enumerate(PARTS):
            rows = [row for row in read_csv(out, name)
                    if row["part"] == f"{part.title}: {EVERY_METHOD}"]
            found = standings_of(seeds_of(plan, LAYOUTS.index(name), number))
            assert [row["method"] for row in rows] == found.ranked
            assert sorted(found.ranked) == sorted(FAMILY)
            for leader in found.leaders:
                assert [row[leader.dataset] for row in rows].count("best") == 1
                assert all(row[leader.dataset] == leader.standing(row["method"]) for row in rows)
            assert sum(int(row["best"]) for row in rows) == len(found.leaders)
    assert "every method" not in (out / "leads.md").read_text()


def test_the_footprint_is_of_every_run(written):
    plan, out, _ = written
    rows = read_csv(out, "footprint")
    runs = {r["run"] for r in rows}
    assert runs == {folder.name for folder, _ in plan.there.values()}
    sizes = [r for r in rows if r.get("mean parameters")]
    assert all(r["mean parameters"].isdigit() for r in sizes)
    first = [r["setting"] for r in sizes if r["part"] == rows[0]["part"]]
    # Two parts, two runs each: W, and X of every method under the names that the run has for them.
    names = ["fedavg+post", "fedavg+post2", "tap", "tap-soft", "tap-gap"]
    again = [f"{name}-2".replace("+", "-") for name in names]
    assert first == ["fedavg", *names] * 2 + ["fedavg", *again] * 2
    assert {r["run"] for r in rows if r.get("block")} == {
        seeds_of(plan, 4, 0)[0].sources["tap"][0].name}  # of one run: its traffic is each one's


def test_the_head_says_where_the_figures_come_from(written, monkeypatch):
    plan, out, _ = written
    text = (out / "table.md").read_text()
    assert "Seeds 41, 42; 4 clients, 3 rounds, P = 2. Made by tapfl " in text
    assert "The foundation has random weights." in text
    seeds = seeds_of(plan, 0, 0)
    more = [dataclasses.replace(seed, record=seed.record.model_copy(
        update={"clients": clients, "random_weights": False}))
        for seed, clients in zip(seeds, (4, 7), strict=True)]
    assert "; 4 or 7 clients, " in _provenance(more)
    assert "random" not in _provenance(more)
    fast = {"tapfl": "1", "code": "abcdefgh", "torch": "2", "gpu": "a GPU"}
    monkeypatch.setattr("tapfl.experiments.write.read_record",
                        lambda _: seeds[0].record.model_copy(update={"environment": fast}))
    assert _provenance(more).endswith("Made by tapfl 1 (code abcdef) with torch 2 on a GPU.")


def test_the_answer_comes_first(written):
    _, out, _ = written
    titles = re.findall(r"^## (.*)$", (out / "leads.md").read_text(), re.M)
    assert titles == ["Leads: gain of the first method over the second",
                      *(part.title for part in PARTS)]


def test_every_layout_can_be_read(written):
    _, out, _ = written
    for name in LAYOUTS:
        rows = read_csv(out, name)
        assert rows
        assert all(None not in row and None not in row.values() for row in rows)
        text = (out / f"{name}.md").read_text()
        assert text.startswith(f"# {name}: Which?\n\nSeeds 41, 42; 4 clients, 3 rounds, P = ")
        tables = re.findall(r"(?:^\|.*\n?)+", text, re.M)
        assert tables
        for table in tables:
            lines = table.strip().splitlines()
            assert len({re.sub(r"\\\|", "", line).count("|") for line in lines}) == 1
            assert len(lines) > 2


def test_latex_is_balanced_and_escaped(written):
    _, out, _ = written
    for name in LAYOUTS:
        text = (out / f"{name}.tex").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("%")]
        open_, rows = [], []
        for line in lines:
            if begin := re.match(r"\\begin\{(\w+)\}(?:\{(\w+)\})?", line):
                open_.append(begin[1])
                columns = len(begin[2])
            elif end := re.match(r"\\end\{(\w+)\}", line):
                assert open_.pop() == end[1]
            elif line.endswith(r"\\"):
                wide = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
                assert len(re.findall(r"(?<!\\)&", line)) + wide == columns - 1, line
                rows.append(line)
        assert not open_
        assert rows
        plain = re.sub(r"\\[%_&#]", "", "\n".join(rows))
        assert not re.search(r"[%_#]", re.sub(r"\$[^$]*\$", "", plain)), name
    leads = (out / "leads.tex").read_text()
    assert r"Short, 50\% \& more\_or\_less &" in leads


def test_titles_with_commas_stay_whole(written):
    _, out, _ = written
    assert {r["setting"] for r in read_csv(out, "leads") if r["setting"]} == {
        part.title for part in PARTS}
    assert render_rows([{"a": "1,234,567", "b": "10,000 samples, or more"}], "csv") == (
        'a,b\n1234567,"10,000 samples, or more"')


def test_published_figures_only_if_asked_for(written, tmp_path):
    plan, out, model = written
    assert "(paper)" not in (out / "table.md").read_text()
    table = write_experiment(plan, 0, EXPERIMENTS[0], model, tmp_path, paper=True)[0].read_text()
    assert "| TAP (paper) |" in table
    assert "| tap-soft (paper) |" not in table


def seed_by_hand(values):
    """Return a part's seed from {method: {(data set, metric): [a client's value, ...]}}."""
    rows = [{"method": method, "client": f"c{i}", "task": dataset, "dataset": dataset,
             "metric": metric, "value": value}
            for method, columns in values.items() for (dataset, metric), found in columns.items()
            for i, value in enumerate(found)]
    return SeedOfPart(Path(), None, rows, {})


def test_welch_shares_by_hand():
    """Of three metrics TAP is clearly better on the mse alone, and worse on the accuracy."""
    tap = {("fmnist", "mse"): [0.1, 0.11, 0.12], ("agnews", "accuracy"): [50.0, 51.0, 52.0],
           ("vqa", "bertscore(m,6)"): [60.0, 70.0, 80.0], ("vqa", "exact_match"): [90.0, 91.0, 92],
           ("vqa", "general_accuracy"): [90.0, 91.0, 92]}
    other = {("fmnist", "mse"): [0.5, 0.51, 0.52], ("agnews", "accuracy"): [60.0, 61.0, 62.0],
             ("vqa", "bertscore(m,6)"): [59.0, 69.0, 79.0], ("vqa", "exact_match"): [1.0, 2.0, 3],
             ("vqa", "general_accuracy"): [1.0, 2.0, 3]}
    seeds = [seed_by_hand({"tap": tap, "other": other, "same": tap})]
    part = Part("hand", ("other", "tap", "same"))
    assert _welch_shares(part, seeds) == [
        {"method": "other", "TAP better %": "33.3", "metrics": "3"},
        {"method": "same", "TAP better %": "0.0", "metrics": "3"}]
    assert welch(tap["fmnist", "mse"], other["fmnist", "mse"]).p < 0.05
    # Clients of all seeds count together: twice as many make the small difference no clearer here,
    # but values of another seed turn it over.
    reverse = seed_by_hand({"tap": other, "other": tap, "same": tap})
    assert _welch_shares(part, [*seeds, reverse])[0]["TAP better %"] == "0.0"


def test_a_part_may_stand_beside_other_figures_of_the_paper(written):
    _, _, model = written
    many = Experiment("many", "?", (), paper="-100")
    assert _setting(many, Part("usual", ("tap",)), model) == "flava-100"
    assert _setting(many, Part("few", ("tap",), paper=""), model) == "flava"
    assert _setting(Experiment("none", "?", ()), Part("none", ("tap",)), model) is None


def compared(dataset, metric, against="fedavg", p=0.04):
    return Comparison("tap", against, dataset, metric, 1.0, 2.0, Interval(1.2345, -0.5, 2.25), 0.1,
                      "better", paired([1.0, 2.0, 0.0, -1.0]), p)


def test_a_table_of_verdicts_by_hand():
    found = [compared("fmnist", "mse"), compared("agnews", "accuracy"),
             compared("agnews", "accuracy", "local")]
    assert verdict_table(found) == [
        {"method": "tap", "against": "fedavg", "fmnist": "better +1.234 [-0.500; +2.250]",
         "agnews": "better +1.2 [-0.5; +2.2]"},
        {"method": "tap", "against": "local", "fmnist": "", "agnews": "better +1.2 [-0.5; +2.2]"}]
    assert _test_table(found[:1]) == [
        {"method": "tap", "against": "fedavg", "fmnist": "p 0.040, d +0.39"}]  # p is corrected


def test_each_rival_is_compared_by_the_best_metric_that_it_has():
    rival = [compared("vqa", metric) for metric in ("exact_match", "token_f1")]
    poor = compared("vqa", "exact_match", "local")
    other = compared("vqa", "general_token_f1", "local")
    assert first_metrics([*rival, other, poor]) == [rival[1], poor]


def test_welch_shares_go_by_other_metrics_where_there_are_no_better_ones():
    tap, other = ({("vqa", "exact_match"): [v, v + 1, v + 2]} for v in (90.0, 10.0))
    part = Part("hand", ("tap", "other"))
    assert _welch_shares(part, [seed_by_hand({"tap": tap, "other": other})]) == [
        {"method": "other", "TAP better %": "100.0", "metrics": "1"}]


def test_welch_shares_say_nothing_of_what_they_do_not_know():
    one = {("fmnist", "mse"): [0.1], ("agnews", "accuracy"): [50.0, 51.0, 52.0]}
    worse = {("fmnist", "mse"): [0.5], ("agnews", "accuracy"): [10.0, 11.0, 12.0]}
    seeds = [seed_by_hand({"tap": one, "fedavg": worse, "other": worse})]
    part = Part("hand", ("fedavg", "tap", "other"))
    assert _welch_shares(part, seeds, "flava") == [  # one value has no p; the paper has no "other"
        {"method": "fedavg", "TAP better %": "100.0", "metrics": "1", "paper %": "90.9"},
        {"method": "other", "TAP better %": "100.0", "metrics": "1", "paper %": ""}]
    part = Part("hand", ("tap", "fedavg"))
    alone = {("fmnist", "mse"): [0.1]}
    assert _welch_shares(part, [seed_by_hand({"tap": alone, "fedavg": alone})]) == [
        {"method": "fedavg", "TAP better %": "", "metrics": "0"}]
    with pytest.raises(TapflError, match=r"fedavg: its run has no accuracy of agnews, which tap's"):
        _welch_shares(part, [seed_by_hand({"tap": one, "fedavg": alone})])


def test_tests_of_pairs_stand_beside_verdicts(written):
    _, out, _ = written
    rows = [row for row in read_csv(out, "significance") if "tests of pairs" in row["part"]]
    assert {row["method"] for row in rows} == {"tap", "tap-soft", "tap-gap"}
    cells = [row[dataset] for row in rows for dataset in ("tiny-imagenet", "agnews", "fmnist")]
    assert all(re.fullmatch(r"p [01]\.\d{3}(, d [+-]\d+\.\d\d)?|too few pairs", c) for c in cells)
    assert any(cell.startswith("p ") for cell in cells)


def test_damaged_events_are_one_line(tmp_path):
    path = tmp_path / "events.jsonl"
    seed = SeedOfPart(tmp_path, None, [], {"tap": (tmp_path, "tap")})
    event = '{"event": "replacement", "method": "tap", "round": 0}\n'
    for text, found in ((event + event[:20], "line 2: not the events of a run"),
                        (event + "[1]\n", "line 2: not the events of a run")):
        path.write_text(text)
        with pytest.raises(TapflError, match=found):
            list(seed.events("tap", "replacement"))
    path.write_text(event * 2)
    assert len(list(seed.events("tap", "replacement"))) == 2
