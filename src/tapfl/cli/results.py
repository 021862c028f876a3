"""Commands that show what runs have found: reports, tables, verdicts, costs."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapfl.errors import TapflError
from tapfl.verbs import Verbs, add_verb

if TYPE_CHECKING:
    from tapfl.engine.record import RunRecord


def add_report(verbs: Verbs) -> None:
    """Add ``tapfl report``."""
    verb = add_verb(
        verbs, "report", _report, "write a report to look at, as one HTML file",
        "Write a report as one HTML file that needs no network: the verdict and the main table,\n"
        "who was helped and who was hurt, how models learned, replacements, a map of the\n"
        "federation, costs and configuration. Several runs are seeds of one configuration; the\n"
        "folder of 'tapfl run --seeds' stands for all its seeds. The folder of 'tapfl reproduce'\n"
        "gives a page of all its experiments: answers, tables and charts.",
        ["tapfl report runs/quickstart --open",
         "tapfl report runs/three/seed41 runs/three/seed42 --out three.html",
         "tapfl report runs/three --method fedavg+post --against tap",
         "tapfl report reproduction/mini-small",
         "tapfl report runs/three --figures paper/figures"])
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                      help="the folder of a run, of several seeds, or of a reproduction")
    verb.add_argument("--out", type=Path, metavar="FILE",
                      help="where to write (report.html in the first folder)")
    _add_compared(verb)
    verb.add_argument("--open", action="store_true", help="show it in the browser")
    verb.add_argument("--no-samples", action="store_true",
                      help="leave the samples out, for a report that is passed on")
    verb.add_argument("--figures", type=Path, metavar="DIR",
                      help="write figures for a paper as well, as PDF and SVG, with LaTeX tables "
                           "beside them (needs matplotlib: pip install tapfl[figures])")


def _add_compared(verb: argparse.ArgumentParser) -> None:
    """Add what a verdict compares."""
    verb.add_argument("--method", metavar="NAME",
                      help="the method in question (the run's personal model)")
    verb.add_argument("--against", metavar="NAME", action="append", default=[],
                      help="compare with this method too, beside local training and the federated "
                           "model; may be given again")


def _report(options: argparse.Namespace) -> None:
    from tapfl.experiments.index import is_reproduction
    from tapfl.report.html import FILE, write_page

    folder, figures = options.runs[0], options.figures
    page, draw = ((_reproduction_page if is_reproduction(folder) else _runs_page)(options))
    drawn = draw(figures) if figures else []
    path = write_page(page, options.out or folder / FILE)
    print(f"report: {path}")
    if figures:
        print(f"figures: {len(drawn)} files in {figures}")
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _with_seeds(runs: Sequence[Path]) -> list[Path]:
    """Return runs; the folder of ``tapfl run --seeds`` stands for all its seeds."""
    from tapfl.report.gather import seed_folders

    return [run for folder in runs for run in seed_folders(folder) or [folder]]


Drawing = Callable[[Path], Sequence[Path]]


def _runs_page(options: argparse.Namespace) -> tuple[str, Drawing]:
    """Return the page of a run or of several seeds, and what draws its figures."""
    from tapfl.report.gather import gather
    from tapfl.report.html import render

    gathered = gather(_with_seeds(options.runs), options.method, options.against)

    def draw(folder: Path) -> Sequence[Path]:
        from tapfl.report.figures import write_figures

        return write_figures(gathered, folder)

    return render(gathered, not options.no_samples), draw


def _reproduction_page(options: argparse.Namespace) -> tuple[str, Drawing]:
    """Return the page of a reproduction, and what draws its figures."""
    from tapfl.experiments.page import read_reproduction, render

    if len(options.runs) > 1:
        raise TapflError(f"{options.runs[0]}: a reproduction; expected no other folder beside it")
    if options.method or options.against:
        raise TapflError(f"{options.runs[0]}: a reproduction compares what its experiments say; "
                         "--method and --against are for runs")
    found = read_reproduction(options.runs[0])

    def draw(folder: Path) -> Sequence[Path]:
        from tapfl.experiments.figures import write_figures

        return write_figures(found, folder)

    return render(found, not options.no_samples), draw


def add_watch(verbs: Verbs) -> None:
    """Add ``tapfl watch``."""
    verb = add_verb(
        verbs, "watch", _watch, "show a run's report in the browser while the run goes on",
        "Serve the report of a run to this machine's own browser. It follows the run until it is\n"
        "finished. Only this machine can reach it; Ctrl-C ends it, and leaves the run alone.",
        ["tapfl watch runs/quickstart", "tapfl watch runs/quickstart --port 8800"])
    verb.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of a run")
    verb.add_argument("--port", type=int, default=0, metavar="N", help="which port (a free one)")


def _watch(options: argparse.Namespace) -> None:
    from tapfl.report.watch import serve

    with serve(options.run_folder, options.port) as server:
        print(f"watching {options.run_folder}: {server.url}   Ctrl-C ends it", flush=True)
        server.serve_forever()


def add_table(verbs: Verbs) -> None:
    """Add ``tapfl table``."""
    verb = add_verb(
        verbs, "table", _table, "put the results of runs into one table",
        "Put the results of one or several runs into one table: mean and standard deviation over\n"
        "clients and seeds, best bold, second best underlined.",
        ["tapfl table runs/quickstart", "tapfl table runs/seed41 runs/seed42 --format markdown",
         "tapfl table runs/flava --format latex --paper flava --averages"])
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                      help="the folder of a run or of several seeds, or a results.csv")
    verb.add_argument("--format", metavar="terminal|markdown|latex|csv",
                      help="how to print (terminal); LaTeX needs the package booktabs")
    verb.add_argument("--markdown", action="store_true", help="the same as --format markdown")
    verb.add_argument("--paper", metavar="SETTING",
                      help="put the paper's figures under each method: flava, vilt, or another of "
                           "the presets that stand for its tables")
    verb.add_argument("--averages", action="store_true",
                      help="add the average over the data sets of a kind, weighed as in the paper")
    verb.add_argument("--columns", type=int, default=4, metavar="N",
                      help="data sets side by side (4)")


def _table(options: argparse.Namespace) -> None:
    from tapfl.engine.record import read_record
    from tapfl.engine.results import no_results, read_results
    from tapfl.report.tables import render

    rows: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    records: dict[Path, RunRecord] = {}
    for path in _with_seeds(options.runs):
        file = path / "results.csv" if path.is_dir() else path
        if not file.is_file():
            raise TapflError(f"{path}: " + ("no results here" if path.exists() else
                                            "there is no such file or folder")
                             + "; expected a complete run or its results.csv")
        rows += read_results(file)
        with contextlib.suppress(TapflError):  # a table of results alone only lacks the kinds
            records[path] = read_record(path)
            kinds |= {name: entry.kind for name, entry in records[path].federation.tasks.items()}
    _note_differences(records)
    if not rows:
        raise no_results(options.runs[0])
    if options.columns < 1:
        raise TapflError(f"--columns {options.columns}: expected at least 1")
    if options.markdown and options.format not in (None, "markdown"):
        raise TapflError(f"--markdown and --format {options.format}: expected one of them")
    print(render(rows, None, "markdown" if options.markdown else options.format or "terminal",
                 options.paper, options.averages, kinds, options.columns))


def _note_differences(records: Mapping[Path, RunRecord]) -> None:
    """Warn of runs that the same means go over, though they are not seeds of one configuration."""
    from tapfl.report.runs import differences

    first, *others = records or [Path()]
    for path in others:
        # Other methods are no reason: they have rows of their own.
        keys = differences(records[first], records[path]).keys() - {"methods", "variants"}
        if keys:
            print(f"tapfl: {path} and {first} are not seeds of one configuration (different: "
                  f"{', '.join(sorted(keys))}); means go over both", file=sys.stderr)


def add_verdict(verbs: Verbs) -> None:
    """Add ``tapfl verdict``."""
    verb = add_verb(
        verbs, "verdict", _verdict, "say whether a method is better, and whom federation helped",
        "Say for each data set whether a method is better than others, worse, equivalent, or not\n"
        "to be told apart, and which clients were helped or hurt by federation, compared with\n"
        "training alone (where the run has no 'local': with the federated model). Several runs\n"
        "are several seeds of one configuration; the folder of 'tapfl run --seeds' stands for\n"
        "all its seeds.",
        ["tapfl verdict runs/quickstart",
         "tapfl verdict runs/41 runs/42 runs/43 --against fedavg+post",
         "tapfl verdict runs/41 runs/42 --method tap --csv verdict.csv",
         "tapfl verdict runs/41 runs/42 runs/43 --all"])
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                      help="the folder of a run, or of several seeds")
    _add_compared(verb)
    verb.add_argument("--all", action="store_true",
                      help="compare every method with the best one of each data set instead")
    verb.add_argument("--margin", type=float, metavar="POINTS",
                      help="methods within so many points of accuracy or of a text score are "
                           "equivalent (1)")
    verb.add_argument("--margin-mse", type=float, metavar="SHARE",
                      help="the same for mse, as a share of the other method's (0.05)")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.add_argument("--csv", type=Path, metavar="FILE",
                      help="write tidy rows to a file (RUN/verdict.csv for a single run)")


def _verdict(options: argparse.Namespace) -> None:
    from tapfl.evaluation.bootstrap import MARGIN_MSE, MARGIN_POINTS
    from tapfl.report.standings import standings
    from tapfl.report.verdict import verdict
    from tapfl.report.verdict_text import all_text, text, tidy, tidy_all, write_tidy

    points = MARGIN_POINTS if options.margin is None else options.margin
    mse = MARGIN_MSE if options.margin_mse is None else options.margin_mse
    for option, value in (("--margin", points), ("--margin-mse", mse)):
        if not 0 <= value < float("inf"):
            raise TapflError(f"{option} {value:g}: expected a number, 0 or more")
    runs = _with_seeds(options.runs)
    if options.all:
        if options.method or options.against:
            raise TapflError("--all: compares every method; omit --method and --against")
        found = standings(runs, points, mse)
        if options.csv:
            write_tidy(options.csv, tidy_all(found))
        print(json.dumps(found.as_json(), indent=1) if options.json else all_text(found))
        return
    report = verdict(runs, options.method, options.against, points, mse)
    # What a run's verdict is belongs to its results.
    file = options.csv or (runs[0] / "verdict.csv" if len(runs) == 1 else None)
    if file:
        with contextlib.suppress(TapflError) if options.csv is None else contextlib.nullcontext():
            write_tidy(file, tidy(report))
    print(json.dumps(report.as_json(), indent=1) if options.json else text(report))


def add_footprint(verbs: Verbs) -> None:
    """Add ``tapfl footprint``."""
    verb = add_verb(
        verbs, "footprint", _footprint, "say what runs have cost, beside the paper's table",
        "Say what complete runs have cost: parameters and memory of the mean client without and\n"
        "with TAP, seconds of stage 2, traffic and time of a round, peak memory of the process.",
        ["tapfl footprint runs/flava runs/vilt", "tapfl footprint runs/flava --format latex",
         "tapfl footprint runs/flava --blocks --format csv"])
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                      help="the folder of a run, or of several seeds")
    verb.add_argument("--blocks", action="store_true", help="the traffic of every block instead")
    verb.add_argument("--format", default="markdown", metavar="markdown|latex|csv",
                      help="how to print (markdown)")


def _footprint(options: argparse.Namespace) -> None:
    from tapfl.report.footprint import block_rows, footprint, render, rows

    found = [footprint(path) for path in _with_seeds(options.runs)]
    table = ([row for each in found for row in block_rows(each)] if options.blocks
             else rows(found))
    print(render(table, options.format))
