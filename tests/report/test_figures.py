"""Figures for papers: what a run has, the same bytes every time, fonts inside, any name."""

import math
import re
import sys

import pytest

from tapfl.cli import main
from tapfl.engine.results import read_results, write_results
from tapfl.engine.run import run
from tapfl.report import figures
from tapfl.report.gather import gather
from tapfl.report.plotting import COLOURS, METHODS, Lines, line_panels, look, looks_of, save, style
from tests.engine.test_resume import Stop
from tests.experiment import tiny_experiment
from tests.report.runs import write_run
from tests.report.test_html import edit_record, round_event, write_events

NAMES = ("learning", "replacements", "helped", "helped-mse", "map", "footprint")
HOSTILE = "$\\frac{<script>&%_#^ é 中 \u202e"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_experiment(folder, methods=["local", "fedavg", "tap"],
                             train={"rounds": 2, "local_steps": 1}, post={"steps": 1})
    run(config, folder / "out")
    return folder / "out"


@pytest.mark.long
def test_figures_from_the_command_line(finished, tmp_path, capsys):
    out = tmp_path / "figures"
    assert main(["report", str(finished), "--out", str(tmp_path / "r.html"), "--figures",
                 str(out)]) == 0
    expected = {f"{name}{width}.{kind}" for name in NAMES for width in ("", "-wide")
                for kind in ("pdf", "svg")} | {"results.tex", "footprint.tex"}
    assert {path.name for path in out.iterdir()} == expected
    assert f"figures: {len(expected)} files in {out}" in capsys.readouterr().out
    for name in NAMES:
        for ending, inches in (("", 3.3), ("-wide", 6.9)):
            pdf = (out / f"{name}{ending}.pdf").read_bytes()
            width = float(re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", pdf)[1])
            assert width == pytest.approx(72 * inches)
            assert b"/FontFile2" in pdf  # TrueType, the whole glyphs: Type 3 fonts are refused
            assert b"/Type3" not in pdf
            assert b"CreationDate" not in pdf
            svg = (out / f"{name}{ending}.svg").read_text()
            assert "<dc:date>" not in svg
            assert "<text" not in svg  # letters are shapes: they need no font
    table = (out / "results.tex").read_text()
    assert r"\toprule" in table
    assert r"\mathbf" in table


@pytest.mark.long
def test_the_same_files_every_time(finished, tmp_path, monkeypatch):
    """Whatever the reader's own settings of matplotlib are."""
    import matplotlib as mpl

    for slow in ("_map", "_replacements", "_footprint"):  # drawn and saved as the others
        monkeypatch.setattr(figures, slow, lambda *_: [])
    gathered = gather([finished])
    figures.write_figures(gathered, tmp_path / "a")
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 9, "svg.hashsalt": None}):
        figures.write_figures(gathered, tmp_path / "b")
        assert mpl.rcParams["font.size"] == 20
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == [
        path.name for path in sorted((tmp_path / "b").iterdir())]
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_lines_are_the_runs_own(finished, tmp_path):
    drawn = []

    def draw(figure, width):
        lines = {"fedavg": [(1.0, 2.0), (2.0, math.nan), (3.0, 4.0)], "local": [(1.0, math.nan)]}
        line_panels(figure, width, [Lines("t", "y", lines)], "round", looks_of(list(lines)))
        drawn.extend(figure.axes[0].lines)

    with style():
        save(tmp_path, "x", draw, 1.5, 1.5)
    first = drawn[0]
    assert list(first.get_xdata()) == [1.0, 3.0]
    assert list(first.get_ydata()) == [2.0, 4.0]
    assert first.get_color() == COLOURS[METHODS.index("fedavg")]
    assert len(drawn[1].get_xdata()) == 0


def test_a_method_looks_the_same_everywhere():
    assert looks_of(["tap", "own"])["tap"] == looks_of(["local", "tap", "a", "b"])["tap"]
    shown = looks_of([*METHODS, "own", "mine:Class"])
    assert len(set(shown.values())) == len(shown)
    assert len({look(place) for place in range(len(COLOURS) * 4)}) == len(COLOURS) * 4


def test_hostile_names_and_values_that_are_not_finite(tmp_path):
    folder = write_run(tmp_path / "run", scores=False)
    rows = read_results(folder / "results.csv")
    for row in rows:
        if row["client"] == "news":
            row["client"] = HOSTILE
        if (row["method"], row["task"]) == ("tap", "fmnist"):
            row["value"] = math.nan
    write_results(folder / "results.csv", rows)
    write_events(folder, round_event(losses={HOSTILE: None, "agnews": 1.0}))
    paths = figures.write_figures(gather([folder]), tmp_path / "figures")
    names = {path.stem for path in paths}
    assert {"learning", "helped", "map"} <= names
    assert "helped-mse" not in names  # nothing of it is finite


def test_one_client_and_no_events(tmp_path):
    folder = write_run(tmp_path / "run", scores=False)
    rows = read_results(folder / "results.csv")
    write_results(folder / "results.csv", [row for row in rows if row["client"] == "news"])
    names = {path.name for path in figures.write_figures(gather([folder]), tmp_path / "figures")}
    assert {"helped.pdf", "results.tex"} <= names
    assert not {"map.pdf", "learning.pdf", "replacements.pdf"} & names  # nothing to draw


def test_a_thousand_clients(tmp_path, monkeypatch):
    """Those who gained and lost most are drawn; clients of a kind share a column of the map."""
    folder = write_run(tmp_path / "run", scores=False, federation={"groups": 250})
    rows = read_results(folder / "results.csv")
    write_results(folder / "results.csv", [row | {"client": f"g{group}-{row['client']}"}
                                           for group in range(250) for row in rows])
    edit_record(folder, lambda record: record.update(clients=1000))
    write_events(folder, round_event(contributors={"decoder/agnews": ["g7-news", "g9-news"]}))
    sizes = {}
    monkeypatch.setattr(figures, "save", lambda folder, name, draw, height, wide: sizes.update(
        {name: height}) or [])
    figures.write_figures(gather([folder]), tmp_path / "figures")
    assert {"helped", "map"} <= set(sizes)
    assert max(sizes.values()) < 9  # inches: it fits on a page


def test_a_run_under_way_has_no_figures(tmp_path, capsys):
    config = tiny_experiment(tmp_path, methods=["fedavg"], train={"rounds": 2, "local_steps": 1})
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_round=1))
    assert main(["report", str(tmp_path / "out"), "--figures", str(tmp_path / "figures")]) == 2
    assert "figures need its results" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()


def test_without_matplotlib_there_is_one_line(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(finished), "--out", str(tmp_path / "r.html"), "--figures",
                 str(tmp_path / "figures")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "pip install 'tapfl[figures]'" in captured.err
