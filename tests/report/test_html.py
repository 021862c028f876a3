"""A report: one file, complete, safe, and true to the runs."""

import base64
import hashlib
import html
import json
import math
import re
import shutil

import pytest

from tapfl.cli import build_parser, main
from tapfl.config import load_config
from tapfl.engine.results import read_results, write_results
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.report.gather import gather
from tapfl.report.html import render, write_report
from tapfl.report.html_record import command
from tapfl.report.verdict import verdict
from tests.engine.test_resume import Stop
from tests.experiment import read_events, tiny_experiment
from tests.report.pages import Page
from tests.report.runs import write_run

HOSTILE = "<script>alert('a')</script>\"><img src=x onerror=alert(1)>\u202e&amp;"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_experiment(folder, methods=["local", "fedavg", "tap"],
                             train={"rounds": 3, "local_steps": 1}, post={"steps": 1},
                             evaluation={"every": 1, "sample": 2})
    run(config, folder / "out")
    return folder / "out"


def page_of(*folders, **options):
    page = Page(render(gather(folders), **options))
    page.check()
    return page


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


def edit_record(folder, change):
    path = folder / "run.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def write_events(folder, *events):
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))


def round_event(**more):
    return {"event": "round", "method": "fedavg", "round": 0, "cohort": ["news"], "lr": 0.1,
            "losses": {"agnews": 1.5}, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0,
            "contributors": {"decoder/agnews": ["news"]}} | more


def test_a_run_from_the_command_line(finished, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(finished), "--out", str(out)]) == 0
    assert f"report: {out}" in capsys.readouterr().out
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    page.check()
    assert len(text) < 3_000_000
    assert not re.search(r"https?://", text)
    for heading in ("Verdict", "Results", "Who was helped, who was hurt", "Learning",
                    "Replacements", "Map of the federation", "Footprint, time and memory",
                    "Warnings", "Versions and data", "Make it again"):
        assert heading in page.text
    # Only the script and the style that are in the file may run.
    (policy,) = (a["content"] for n, a in page.elements if a.get("http-equiv"))
    script = text[text.index("<script>") + 8:text.index("</script>")]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_tables_can_be_read_and_sorted_by_keyboard(finished):
    page = page_of(finished)
    assert page.count("caption") == page.count("table") == page.count("thead")
    cells = [(name, a) for name, a in page.elements if name == "th"]
    assert {a["scope"] for _, a in cells} == {"col", "row"}
    assert {a.get("aria-sort") for _, a in cells} <= {None, "none"}
    frames = [a for _, a in page.elements if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in frames)


def test_figures_are_those_of_the_run(finished):
    gathered, page = gather([finished]), page_of(finished)
    found = verdict([finished])
    assert gathered.verdict.as_json() == found.as_json()
    assert f"{found.counts['helped']} gained over local" in page.text
    values = [r["value"] for r in gathered.runs[0].rows
              if (r["method"], r["task"], r["metric"]) == ("tap", "agnews", "accuracy")]
    assert f"{sum(values) / len(values):.1f}" in page.text
    events = read_events(finished, "replacement")
    assert sum(gathered.timeline.replaced.values()) == len(events)
    rounds = read_events(finished, "round")
    assert sum(gathered.timeline.averaged.values()) == sum(
        len(clients) for e in rounds for clients in e["contributors"].values())
    for kind in ("curve", "personal"):
        kept = gathered.timeline.curves if kind == "curve" else gathered.timeline.personal
        assert {e["task"] if kind == "curve" else task for e in read_events(finished, kind)
                for task in e.get("losses", [""])} == {key[1] for key in kept}
    # Everybody's gain over the federated model stands beside the gain over local training.
    assert {(c.client, c.task) for c in gathered.beside} == {
        (c.client, c.task) for c in found.clients}


def test_curves_are_drawn_where_there_are_any(finished, tmp_path):
    assert "fixed sample" in page_of(finished).text
    folder = copied(finished, tmp_path / "run")
    write_events(folder, *(e for e in read_events(finished) if e["event"] != "curve"))
    page = page_of(folder)
    assert "Training losses" in page.text
    assert "X of tap" in page.text


def test_the_command_and_the_configuration_make_it_again(finished, tmp_path):
    gathered = gather([finished])
    text = render(gathered)
    (shown,) = re.findall(r'<pre id="configuration".*?><code>(.*?)</code>', text, re.S)
    (tmp_path / "config.yaml").write_text(html.unescape(shown))
    again = load_config(str(tmp_path / "config.yaml"), [])
    assert again == gathered.record.config
    options = build_parser().parse_args(command(gathered).split()[1:])
    assert (options.preset, options.seed) == ("config.yaml", 7)
    assert command(gathered) in Page(text).text


def test_samples_have_their_place(finished):
    assert "section-samples" in page_of(finished).attributes("id")
    assert "section-samples" not in page_of(finished, samples=False).attributes("id")


def test_several_seeds(tmp_path):
    folders = [write_run(tmp_path / str(seed), seed) for seed in (2, 3, 4)]
    for folder, count in zip(folders, (1, 2, 3), strict=True):
        write_events(folder, *(
            {"event": "replacement", "method": "tap", "round": n, "client": "news",
             "task": "agnews", "federated_loss": 1.0, "personal_loss": 2.0, "margin": 0.1,
             "initial": False, "blocks": ["decoder/agnews"]} for n in range(count)))
    page = page_of(*folders)
    assert "seeds 2, 3, 4" in page.text
    assert "--seeds 2,3,4" in page.text
    assert "one seed" not in page.text
    row = [line for line in re.findall(r"<tr>.*?</tr>", render(gather(folders)))
           if line.startswith('<tr><th scope="row" data-v="news">')]
    assert any('data-v="2.0">2.0</td>' in line for line in row)  # (1 + 2 + 3) / 3 replacements
    assert write_report(folders) == folders[0] / "report.html"


def test_hostile_names_are_only_text(tmp_path):
    folder = write_run(tmp_path / "run")
    rows = read_results(folder / "results.csv")
    for row in rows:
        row["client"] = HOSTILE if row["client"] == "news" else row["client"]
        row["method"] = HOSTILE if row["method"] == "fedavg" else row["method"]
    write_results(folder / "results.csv", rows)
    shutil.rmtree(folder / "scores")

    def change(record):
        record["models"]["federated"] = HOSTILE
        record["environment"] = {HOSTILE: HOSTILE}
        record["data"] = {HOSTILE: HOSTILE}
        record["config"]["data"]["folder"] = HOSTILE
        record["dropped"] = [{"where": HOSTILE, "dropped": 1, "rows": 2,
                              "reasons": [{"reason": HOSTILE, "count": 1, "rows": [1]}]}]

    edit_record(folder, change)
    write_events(
        folder, round_event(losses={HOSTILE: 1.0}, contributors={"decoder/agnews": [HOSTILE]}),
        round_event(round=1, losses={HOSTILE: 0.5}),
        {"event": "refused", "method": "fedavg", "round": 0, "client": HOSTILE,
         "reason": HOSTILE},
        {"event": "personal", "method": HOSTILE, "round": 0, "client": "a",
         "losses": {HOSTILE: 1.0}},
        {"event": "curve", "method": HOSTILE, "round": 0, "client": "a", "task": HOSTILE,
         "values": {HOSTILE: 1.0}, "samples": 1},
        {"event": "replacement", "method": HOSTILE, "round": 0, "client": HOSTILE,
         "task": HOSTILE, "federated_loss": 1.0, "personal_loss": None, "margin": 0.1,
         "initial": True, "blocks": [HOSTILE]})
    page = page_of(folder)
    assert "<script>alert('a')</script>\"><img src=x onerror=alert(1)>\\u202e&amp;" in page.text
    assert "\u202e" not in page.text
    assert page.count("script") == 1


def test_one_client_one_task_and_no_text(tmp_path):
    """Nothing is drawn from more than there is."""
    federation = ("tasks:\n  shapes: {kind: image_classification, modalities: [image], "
                  "classes: 3}\nclients:\n  - {name: only, tasks: {shapes: 1}}\n")
    config = tiny_experiment(tmp_path, methods=["fedavg"], data={"source": "synthetic"},
                             train={"rounds": 1, "cohort": 1, "local_steps": 1})
    (tmp_path / "federation.yaml").write_text(federation)
    run(config, tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "there is no verdict" in page.text
    assert "No blocks were replaced" in page.text
    assert "1 client, 1 task" in page.text


def test_values_that_are_not_finite(tmp_path):
    folder = write_run(tmp_path / "run", scores=False)
    rows = read_results(folder / "results.csv")
    for row in rows:
        if (row["method"], row["task"]) == ("tap", "agnews"):
            row["value"] = math.nan
        if (row["method"], row["task"]) == ("tap", "fmnist"):
            row["value"] = math.inf
    write_results(folder / "results.csv", rows)
    write_events(folder, round_event(losses={"agnews": None}), {
        "event": "diverged", "method": "tap", "round": 0, "client": "news", "tasks": ["agnews"],
        "reason": "not finite"})
    page = page_of(folder)
    assert "not a number" in page.text
    assert "infinite" in page.text
    assert "4 results not finite" in page.text
    assert "1 diverged training (listed below)" in page.text
    assert not {"nan", "inf"} & set(page.attributes("x", "y", "cx", "cy", "x1", "x2", "y1", "y2"))


def test_a_run_without_events_and_sizes(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    assert "no events were found" in page.text
    assert "Nothing was federated" in page.text


def test_many_clients_stay_small_and_readable(tmp_path):
    folder = write_run(tmp_path / "run", scores=False, federation={"groups": 250})
    rows = read_results(folder / "results.csv")
    many = [row | {"client": f"g{group}-{row['client']}"} for group in range(250) for row in rows]
    write_results(folder / "results.csv", many)
    edit_record(folder, lambda record: record.update(clients=1000))
    write_events(folder, round_event(contributors={"decoder/agnews": ["g7-news", "g9-news"]}))
    text = render(gather([folder]))
    page = Page(text)
    page.check()
    assert len(text) < 3_000_000
    assert "Clients of a kind" in page.text
    assert "averaged 2 times" in page.text
    assert "are left out" in page.text
    assert page.text.count("g249-words") >= 1


def test_a_run_under_way_shows_how_far_it_is(tmp_path):
    config = tiny_experiment(tmp_path, methods=["tap"], train={"rounds": 3, "local_steps": 1},
                             post={"steps": 1})
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_round=2))
    events = tmp_path / "out" / "events.jsonl"
    done = len(read_events(tmp_path / "out", "round"))
    with events.open("a") as file:
        file.write('{"event": "rou')  # half a line: it is being written
    page = page_of(tmp_path / "out")
    assert f"{done} of 3" in page.text
    assert "not finished" in page.text
    assert "X of tap" in page.text
    assert "section-results" not in page.attributes("id")


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda folder: (folder / "run.json").unlink(), "no run here"),
    (lambda folder: (folder / "events.jsonl").write_text("{}\n"), "line 1: not an event"),
    (lambda folder: (folder / "events.jsonl").write_text("nonsense\n"), "line 1: not the events"),
    (lambda folder: (folder / "events.jsonl").write_text('{"event": "rou'), "line 1"),
    (lambda folder: write_events(folder, round_event(losses=[1])), "line 1: not an event"),
    (lambda folder: (folder / "results.csv").write_text("a,b\n"), "expected the columns"),
])
def test_bad_input_is_one_line(tmp_path, capsys, spoil, message):
    folder = write_run(tmp_path / "run")
    spoil(folder)
    assert main(["report", str(folder)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_it_opens_in_the_browser(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder), "--open", "--no-samples"]) == 0
    assert opened == [(folder / "report.html").resolve().as_uri()]
    assert "section-samples" not in (folder / "report.html").read_text()


def test_runs_that_do_not_belong_together(tmp_path):
    one, two = write_run(tmp_path / "1", 1), write_run(tmp_path / "2", 2, train={"rounds": 9})
    with pytest.raises(TapflError, match="another configuration"):
        gather([one, two])
    with pytest.raises(TapflError, match="has seed 1"):
        gather([one, one])


def test_any_method_can_be_the_one_in_question(tmp_path, capsys):
    folder = write_run(tmp_path / "run", 2)
    assert main(["report", str(folder), "--method", "fedavg", "--against", "tap"]) == 0
    text = Page((folder / "report.html").read_text(encoding="utf-8")).text
    assert "fedavg against local:" in " ".join(text.split())
    assert "fedavg against tap:" in " ".join(text.split())
    assert "tap against" not in text
    for option in ("--method", "--against"):
        capsys.readouterr()
        assert main(["report", str(folder), option, "tapp"]) == 2
        assert f"{option}: the run has no 'tapp'; did you mean 'tap'?" in capsys.readouterr().err


def test_a_place_that_cannot_be_written(tmp_path):
    folder = write_run(tmp_path / "run")
    (tmp_path / "taken").mkdir()
    with pytest.raises(TapflError, match="taken"):
        write_report([folder], tmp_path / "taken")
