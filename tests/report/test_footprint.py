"""What a run has cost, counted again."""

import csv
import dataclasses
import io
import json
import shutil

import pytest

from tapfl.cli import main
from tapfl.config import load_config
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.model.summary import GIB, MIB, PAPER, summarize
from tapfl.report.footprint import (
    Footprint,
    Traffic,
    _sent,
    _with_more,
    block_rows,
    footprint,
    render,
    rows,
)
from tests.engine.test_resume import Stop
from tests.experiment import read_events, tiny_experiment


@pytest.fixture(scope="module")
def paid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paid")
    config = tiny_experiment(folder, methods=["tap", "feddat", "fedavg+post"],
                             train={"rounds": 3, "local_steps": 1}, post={"steps": 1})
    with pytest.raises(KeyboardInterrupt):
        run(config, folder / "out", notify=Stop(at_client=2))
    run(config, folder / "out", resume=True)
    return config, folder / "out"


def test_times_of_a_run_that_was_interrupted(paid):
    _, out = paid
    record = json.loads((out / "run.json").read_text())
    assert set(record["times"]) == {"fedavg", "feddat"}
    for name, times in record["times"].items():
        rounds = [e["seconds"] for e in read_events(out, "round") if e["method"] == name]
        assert times["rounds"] == pytest.approx(sum(rounds))
        assert max(times["per_client_final"].values()) > 0
        assert 4 * sum(times["per_client_final"].values()) < times["final"]
    assert set(record["times"]["fedavg"]["per_client_final"]) == {"tap", "fedavg+post"}
    assert set(record["times"]["feddat"]["per_client_final"]) == {"feddat"}


def test_the_mean_client_is_that_of_tapfl_model(paid):
    config, out = paid
    found = footprint(out)
    assert found.mean == summarize(config)["mean"]
    trained = [c["trainable"] for c in summarize(config)["clients"]]
    assert found.added == pytest.approx(sum(trained) / len(trained))
    (out.parent / "federation.yaml").rename(out.parent / "moved.yaml")
    try:
        assert footprint(out) == found  # the record knows the federation
    finally:
        (out.parent / "moved.yaml").rename(out.parent / "federation.yaml")


def test_blocks_of_a_method_count_for_who_holds_them(paid):
    """Each client of FedDAT holds three adapters for every place of its modalities."""
    config, out = paid
    more = json.loads((out / "run.json").read_text())["parameters"]["methods"]["feddat"]
    clients = summarize(config)["clients"]
    assert set(more["held"]) == {"+".join(sorted(client["tasks"])) for client in clients}
    assert 0 < more["held"]["agnews"] < more["held"]["fmnist+vqa"] == more["more"]
    found = footprint(out)
    held = [more["held"]["+".join(sorted(client["tasks"]))] for client in clients]
    assert found.means["feddat"]["total"] == pytest.approx(
        found.mean["total"] + sum(held) / len(held))
    fedavg, _, _, feddat = rows([found])[:4]
    assert fedavg["mean parameters"] == f"{found.mean['total']:,.0f}"
    assert feddat["mean parameters"] == f"{found.means['feddat']['total']:,.0f}"
    assert float(feddat["trainable %"]) > float(fedavg["trainable %"])
    # A run of an earlier version has not recorded who holds them.
    shown = rows([dataclasses.replace(found, means={"feddat": {}})])[3]
    assert (shown["mean parameters"], shown["memory GiB"]) == ("", "")


def test_traffic_is_that_of_the_events(paid):
    _, out = paid
    found = footprint(out)
    for name in ("fedavg", "feddat"):
        events = [e for e in read_events(out, "round") if e["method"] == name]
        traffic = found.traffic[name]
        assert traffic.rounds == 3
        assert traffic.up == sum(e["bytes_up"] for e in events)
        assert traffic.down == sum(e["bytes_down"] for e in events)
        # No update was refused: block by block it is the same sum.
        assert sum(traffic.blocks.values()) == traffic.up
        assert sum(traffic.blocks_down.values()) == traffic.down
    assert any(name.startswith("adapter/shared") for name in found.traffic["feddat"].blocks)
    assert not any("local" in name for name in found.traffic["feddat"].blocks)  # never sent


def test_rows_and_formats(paid, capsys):
    _, out = paid
    found = footprint(out)
    table = rows([found])
    assert [row["setting"] for row in table] == ["fedavg", "tap", "fedavg+post", "feddat"]
    assert [row["stage 2 s/client"] for row in table] == [
        "", f"{found.seconds['tap']:.2f}", f"{found.seconds['fedavg+post']:.2f}", ""]
    # Post-training keeps no second copy.
    assert table[2]["mean parameters"] == table[0]["mean parameters"]
    assert main(["footprint", str(out), str(out), "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert float(lines[1]["mean parameters"]) == round(found.mean["tap_total"])
    assert lines[0] == lines[4]
    assert {line["run"] for line in lines} == {"out"}  # the paper has no model of this shape
    full = dataclasses.replace(found, paper=PAPER["flava"])
    lines = list(csv.DictReader(io.StringIO(render(rows([full, full]), "csv"))))
    # Two runs, then the paper's rows, once.
    assert [line["run"] for line in lines] == ["out"] * 8 + ["paper"] * 2
    assert [line["stage 2 s/client"] for line in lines[-2:]] == ["", "153.54"]
    assert float(lines[-1]["mean parameters"]) == round(PAPER["flava"]["tap_total"])
    assert main(["footprint", str(out), "--blocks"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + len(block_rows(found))
    latex = render(table, "latex").splitlines()
    assert latex[0] == r"\begin{tabular}{lllrrrrrrrrr}"
    assert r"trainable \%" in latex[2]
    assert all(line.count("&") == 11 and line.endswith(r"\\") for line in latex[4:-2])


def test_every_figure_of_a_row_by_hand():
    mean = {"total": 1_000_000, "trainable_percent": 12.5, "gib": 0.5, "tap_total": 1_125_000,
            "tap_trainable_percent": 25.0, "tap_gib": 0.75}
    traffic = Traffic(4, 10.0, 8 * MIB, 16 * MIB, {"b": 6 * MIB, "a": 2 * MIB}, [],
                      {"a": 5 * MIB, "b": 11 * MIB})
    each = Footprint("out", "flava", mean, {}, {"a": 1 * MIB, "b": 3 * MIB},
                     {"peak_rss": 2 * GIB, "peak_cuda": 3 * GIB}, {"fedavg": traffic},
                     {"tap": 1.5}, {"fedavg": ["tap"]}, frozenset({"tap"}), None)
    assert each.added == 125_000
    sent = {"up MiB/round": "2.0", "down MiB/round": "4.0", "round s": "2.50",
            "host GiB": "2.00", "GPU GiB": "3.00"}
    assert rows([each]) == [
        {"run": "out", "model": "flava", "setting": "fedavg", "mean parameters": "1,000,000",
         "trainable %": "12.50", "memory GiB": "0.5000", "stage 2 s/client": "", **sent},
        {"run": "out", "model": "flava", "setting": "tap", "mean parameters": "1,125,000",
         "trainable %": "25.00", "memory GiB": "0.7500", "stage 2 s/client": "1.50", **sent}]
    assert [list(row.values()) for row in block_rows(each)] == [
        ["out", "fedavg", "a", "1.000", "0.500", "1.250"],
        ["out", "fedavg", "b", "3.000", "1.500", "2.750"]]


def test_what_rounds_have_sent_by_hand():
    """A client receives its blocks in every turn, also in those whose update did not count."""
    found = _sent([
        {"cohort": ["x", "y"], "contributors": {"a": ["x"], "b": ["x", "y"]}, "seconds": 1.0,
         "bytes_up": 12, "bytes_down": 12},
        {"cohort": ["x", "y"], "contributors": {"b": ["y"]}, "seconds": 2.0, "bytes_up": 12,
         "bytes_down": 12}], {"a": 10, "b": 1})
    assert (found.rounds, found.seconds, found.up, found.down) == (2, 3.0, 24, 24)
    assert found.blocks == {"a": 10, "b": 3}
    assert found.by_round == [{"a": 10, "b": 2}, {"b": 1}]
    assert found.blocks_down == {"a": 20, "b": 4}


def test_blocks_of_a_methods_own_count_as_trainable_and_twice_with_tap():
    clients = [{"tasks": ["agnews"], "total": 100, "trainable": 10, "with_tap": 110},
               {"tasks": ["vqa"], "total": 200, "trainable": 30, "with_tap": 230}]
    found = _with_more(clients, {"agnews": 20, "vqa": 40})
    assert (found["total"], found["tap_total"]) == (180, 230)
    assert found["trainable_percent"] == pytest.approx((100 * 30 / 120 + 100 * 70 / 240) / 2)


def test_markdown_is_a_table():
    table = [{"a": "1", "b": "x|y"}]
    assert render(table, "markdown").splitlines() == ["| a | b |", "|---|---|", r"| 1 | x\|y |"]
    assert render([{"a": "1,000", "b": "100"}], "csv") == "a,b\n1000,100"


OWN = """
from tapfl.personal.personalizer import Personalizer
from tapfl.personal.tap import Tap

class Mine(Tap):
    pass

class Late(Personalizer):
    def after_federation(self, client, final):
        return final
"""


def test_a_personalizer_of_ones_own_in_a_run_without_rounds(tmp_path):
    """It keeps a second copy if it watches the rounds; what no round has sent is not shown."""
    (tmp_path / "costly.py").write_text(OWN)
    names = ["fedavg+costly:Mine", "fedavg+costly:Late"]
    run(tiny_experiment(tmp_path, methods=names, train={"rounds": 0}, post={"steps": 1}),
        tmp_path / "out", modules=tmp_path)
    found = footprint(tmp_path / "out")
    table = rows([found])
    assert [row["setting"] for row in table] == ["fedavg", *names]
    once, twice = (f"{found.mean[key]:,.0f}" for key in ("total", "tap_total"))
    assert [row["mean parameters"] for row in table] == [once, twice, once]
    assert all(float(row["stage 2 s/client"]) >= 0 for row in table[1:])
    assert {row[key] for row in table for key in ("up MiB/round", "round s")} == {""}
    assert block_rows(found) == []


def test_the_papers_rows_are_the_papers():
    paper = summarize(load_config("vilt"))["paper"]
    assert paper["tap_seconds"] == 79.39
    assert paper["tap_total"] - paper["total"] == 38_124_175


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda event: [event], r"not the events of a run \(expected a JSON object, got list\)"),
    (lambda event: {}, r"not an event of a run \(KeyError: 'event'\)"),
    (lambda event: event | {"contributors": None}, r"not an event of a run \(AttributeError: "),
    (lambda event: event | {"contributors": {"?": ["news"]}}, r"not an event .*KeyError: '\?'"),
    (lambda event: event | {"bytes_up": "many"}, r"not an event of a run \(ValueError: ")])
def test_a_damaged_event_is_one_line_that_names_it(tmp_path, paid, spoil, message):
    _, out = paid
    shutil.copytree(out, tmp_path / "copy")
    path = tmp_path / "copy" / "events.jsonl"
    lines = path.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if '"event": "round"' in line)
    lines[place] = json.dumps(spoil(json.loads(lines[place])))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TapflError, match=rf"events\.jsonl, line {place + 1}: {message}") as error:
        footprint(tmp_path / "copy")
    assert "\n" not in str(error.value)
    lines[place] = "[" * 100_000
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TapflError, match=rf"line {place + 1}: not the events of a run"):
        footprint(tmp_path / "copy")


def test_bad_input(tmp_path, paid):
    _, out = paid
    with pytest.raises(TapflError, match="--format word: expected"):
        render([], "word")
    with pytest.raises(TapflError, match="not a readable record"):
        footprint(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / "events.jsonl").unlink()
    with pytest.raises(TapflError, match="not the events of a run"):
        footprint(copy)
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(record | {"finished": False}))
    with pytest.raises(TapflError, match="not complete"):
        footprint(copy)
