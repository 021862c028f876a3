"""The command line: thin, a verb is a function.

Everything heavy is imported inside the verbs, so that help answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tapfl import __version__
from tapfl.bench.command import add_bench
from tapfl.errors import TapflError
from tapfl.experiments.command import add_places, add_reproduce, run_seeds

Verbs = Any  # argparse's collection of subparsers


def entry() -> None:
    """Run the command and leave with its exit status."""
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line and status 2."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        with _terminable():
            options.run(options)
    except TapflError as error:
        print(f"tapfl: {_printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tapfl: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does: what is complete is written down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _printable(line: str) -> str:
    """Return a line that any terminal takes: a name may hold bytes that are no text."""
    return line.encode("utf-8", "backslashreplace").decode()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tapfl",
        description="Personalise multi-modal, multi-task foundation models in federated learning.",
        epilog="Start with: tapfl run quickstart",
    )
    parser.add_argument("--version", action="version", version=f"tapfl {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_run, _add_report, _add_watch, _add_table, _add_verdict, _add_footprint,
                add_reproduce, _add_predict, _add_export, _add_presets, _add_show, _add_validate,
                _add_model, _add_pretrain, _add_setup_metrics, add_bench):
        add(verbs)
    return parser


def _verb(verbs: Verbs, name: str, run: Callable[[argparse.Namespace], None], short: str,
          long: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=short, description=long,
        epilog="examples:\n" + "\n".join(f"  {e}" for e in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    verb.set_defaults(run=run)
    return verb


def _add_config(verb: argparse.ArgumentParser, optional: bool = False) -> None:
    verb.add_argument("preset", metavar="PRESET|FILE.yaml", nargs="?" if optional else None,
                      help="a shipped preset (see 'tapfl presets') or a configuration file")
    verb.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                      help="change any key of the configuration, by its dotted name")


def _add_run(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "run", _run, "run an experiment",
        "Run an experiment: every method of the configuration, on the same clients and data.\n"
        "Writes results.csv, events.jsonl, run.json, scores and models into the folder --out.\n"
        "Stop it at any moment; --resume goes on from the last checkpoint.",
        ["tapfl run quickstart",
         "tapfl run quickstart --seed 42 --set train.rounds=100 --out runs/longer",
         "tapfl run --resume --out runs/longer",
         "tapfl run quickstart --seeds 41,42,43 --out runs/three",
         "tapfl run quickstart --set 'methods=[fedavg, disentafl+tap]'"])
    _add_config(verb, optional=True)
    verb.add_argument("--out", type=Path, metavar="DIR", help="where to write (runs/PRESET)")
    verb.add_argument("--seed", type=int, metavar="N", help="the experiment's seed")
    verb.add_argument("--seeds", metavar="N,N,...",
                      help="run once for each seed, into DIR/seedN, and print one table; --devices "
                           "and --jobs say where")
    add_places(verb)
    verb.add_argument("--data", metavar="DIR",
                      help="a folder that mirrors the hub's data sets, DIR/owner/name "
                           "(TAPFL_DATA by default; without either, the hub itself)")
    verb.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")
    verb.add_argument("--threads", type=int, metavar="N",
                      help="CPU threads to compute with (the cores there are, 8 at most); results "
                           "depend on it, so a run keeps it")
    verb.add_argument("--resume", action="store_true", help="go on with the run in --out")
    verb.add_argument("--modules", type=Path, metavar="DIR",
                      help="where methods of your own (module:Class) are imported from (beside "
                           "FILE.yaml, or the current folder; --resume needs it named)")
    verb.add_argument("--compile", action="store_true",
                      help="compile layers that have no kernels (GPU, long runs: see "
                           "docs/performance.md)")
    verb.add_argument("--quiet", action="store_true", help="print the table at the end, no more")
    verb.add_argument("--tensorboard", action="store_true",
                      help="write TensorBoard scalars to DIR/tensorboard")


def _run(options: argparse.Namespace) -> None:
    from tapfl.engine.record import read_record
    from tapfl.engine.run import run
    from tapfl.methods import names_own_code
    from tapfl.report.progress import progress
    from tapfl.report.tables import show

    if options.preset is None and not (options.resume and options.out):
        raise TapflError("run: expected a preset or a file, or --resume with --out DIR")
    config = _run_config(options)
    if options.seeds is not None:
        if options.preset is None or options.seed is not None or options.tensorboard:
            raise TapflError("--seeds: expected a preset or a file, no --seed and no --tensorboard")
        run_seeds(config, options.out or Path("runs") / f"{Path(options.preset).stem}-seeds",
                  options, options.modules or _beside(options.preset))
        return
    if options.jobs is not None or options.devices != "auto":
        raise TapflError("--devices and --jobs are for several --seeds; one run takes --device")
    out = options.out or _folder(Path("runs") / Path(options.preset).stem, options.resume)
    display = progress(options.quiet, out / "tensorboard" if options.tensorboard else None)
    try:
        rows = run(config, out, resume=options.resume, device=options.device, notify=display,
                   modules=options.modules or _beside(options.preset))
    except KeyboardInterrupt:
        if (out / "run.json").is_file():
            own = " --modules DIR" if names_own_code(config) else ""
            print(f"tapfl: go on with: tapfl run --resume --out {out}{own}", file=sys.stderr)
        raise
    finally:
        display.close()
    show(rows, config.methods)
    record = read_record(out)
    for lost in record.dropped:
        print(f"{lost['where']}: {lost['dropped']} of {lost['rows']} rows were left out; "
              f"{out / 'run.json'} says why")
    if record.random_weights:
        print("made with random weights: the foundation was not pre-trained")
    print(f"results: {out / 'results.csv'}   events: {out / 'events.jsonl'}   "
          f"record: {out / 'run.json'}"
          + (f"   models: {out / 'models'}" if record.config.checkpoint.models else ""))


def _run_config(options: argparse.Namespace) -> Any:
    """Return the configuration that was asked for, or that of the run to continue."""
    from tapfl.config import load_config
    from tapfl.engine.run import stored_config

    if options.preset is None:
        if options.overrides or options.seed is not None or options.threads is not None:
            raise TapflError("run --resume: the run keeps its configuration; omit --set, --seed "
                             "and --threads")
        config = stored_config(options.out)
        if options.compile:
            speed = config.speed.model_copy(update={"compile": True})
            config = config.model_copy(update={"speed": speed})
    else:
        more = [] if options.seed is None else [f"seed={options.seed}"]
        more += [] if options.threads is None else [f"threads={options.threads}"]
        more += ["speed.compile=true"] if options.compile else []
        config = load_config(options.preset, [*options.overrides, *more])
    if options.data:
        if not Path(options.data).is_dir():
            raise TapflError(f"--data {options.data}: no such folder")
        data = config.data.model_copy(update={"folder": options.data})
        config = config.model_copy(update={"data": data})
    return config


def _folder(folder: Path, resume: bool) -> Path:
    """Return a new folder for a run, or the newest run's."""
    from tapfl.engine.folder import fresh_folder

    if not resume:
        return fresh_folder(folder)
    runs = [p for p in folder.parent.glob(f"{folder.name}*") if (p / "run.json").is_file()]
    if not runs:
        raise TapflError(f"--resume: no run in {folder}; name one with --out DIR")
    return max(runs, key=lambda p: (p / "run.json").stat().st_mtime)


def _beside(preset: str | None) -> Path | None:
    """Return the folder of a configuration file: a user's own methods may stand in it."""
    return Path(preset).parent if preset and Path(preset).is_file() else None


def _add_report(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "report", _report, "write a report to look at, as one HTML file",
        "Write a report as one HTML file that needs no network: the verdict and the main table,\n"
        "who was helped and who was hurt, how models learned, replacements, a map of the\n"
        "federation, costs and configuration. Several runs are several seeds of one configuration.",
        ["tapfl report runs/quickstart --open",
         "tapfl report runs/three/seed41 runs/three/seed42 --out three.html"])
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    verb.add_argument("--out", type=Path, metavar="FILE",
                      help="where to write (report.html in the first run's folder)")
    verb.add_argument("--open", action="store_true", help="show it in the browser")
    verb.add_argument("--no-samples", action="store_true",
                      help="leave the samples out, for a report that is passed on")


def _report(options: argparse.Namespace) -> None:
    from tapfl.report.html import write_report

    path = write_report(options.runs, options.out, samples=not options.no_samples)
    print(f"report: {path}")
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _add_watch(verbs: Verbs) -> None:
    verb = _verb(
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


def _add_table(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "table", _table, "put the results of runs into one table",
        "Put the results of one or several runs into one table: mean and standard deviation over\n"
        "clients and seeds, best bold, second best underlined.",
        ["tapfl table runs/quickstart", "tapfl table runs/seed41 runs/seed42 --format markdown",
         "tapfl table runs/flava --format latex --paper flava --averages"])
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN",
                      help="the folder of a run, or a results.csv")
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
    from tapfl.engine.results import read_results
    from tapfl.report.tables import render

    rows: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    for path in options.runs:
        file = path / "results.csv" if path.is_dir() else path
        if not file.is_file():
            raise TapflError(f"{path}: no results here; expected a complete run or its results.csv")
        rows += read_results(file)
        with contextlib.suppress(TapflError):  # a table of results alone only lacks the kinds
            tasks = read_record(path).federation.tasks
            kinds |= {name: entry.kind for name, entry in tasks.items()}
    if not rows:
        raise TapflError(f"{options.runs[0]}: no results")
    if options.columns < 1:
        raise TapflError(f"--columns {options.columns}: expected at least 1")
    if options.markdown and options.format not in (None, "markdown"):
        raise TapflError(f"--markdown and --format {options.format}: expected one of them")
    print(render(rows, None, "markdown" if options.markdown else options.format or "terminal",
                 options.paper, options.averages, kinds, options.columns))


def _add_verdict(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "verdict", _verdict, "say whether a method is better, and whom federation helped",
        "Say for each data set whether a method is better than others, worse, equivalent, or not\n"
        "to be told apart, and which clients were helped or hurt by federation. Several runs are\n"
        "several seeds of one configuration.",
        ["tapfl verdict runs/quickstart",
         "tapfl verdict runs/41 runs/42 runs/43 --against fedavg+post",
         "tapfl verdict runs/41 runs/42 --method tap --csv verdict.csv"])
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    verb.add_argument("--method", metavar="NAME",
                      help="the method in question (the run's personal model)")
    verb.add_argument("--against", metavar="NAME", action="append", default=[],
                      help="compare with this method too, beside local training and the federated "
                           "model; may be given again")
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
    from tapfl.report.verdict import verdict
    from tapfl.report.verdict_text import text, write_tidy

    points = MARGIN_POINTS if options.margin is None else options.margin
    mse = MARGIN_MSE if options.margin_mse is None else options.margin_mse
    for option, value in (("--margin", points), ("--margin-mse", mse)):
        if not 0 <= value < float("inf"):
            raise TapflError(f"{option} {value:g}: expected a number, 0 or more")
    report = verdict(options.runs, options.method, options.against, points, mse)
    # What a run's verdict is belongs to its results.
    file = options.csv or (options.runs[0] / "verdict.csv" if len(options.runs) == 1 else None)
    if file:
        with contextlib.suppress(TapflError) if options.csv is None else contextlib.nullcontext():
            write_tidy(file, report)
    print(json.dumps(report.as_json(), indent=1) if options.json else text(report))


def _add_footprint(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "footprint", _footprint, "say what runs have cost, beside the paper's table",
        "Say what complete runs have cost: parameters and memory of the mean client without and\n"
        "with TAP, seconds of stage 2, traffic and time of a round, peak memory of the process.",
        ["tapfl footprint runs/flava runs/vilt", "tapfl footprint runs/flava --format latex",
         "tapfl footprint runs/flava --blocks --format csv"])
    verb.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    verb.add_argument("--blocks", action="store_true", help="the traffic of every block instead")
    verb.add_argument("--format", default="markdown", metavar="markdown|latex|csv",
                      help="how to print (markdown)")


def _footprint(options: argparse.Namespace) -> None:
    from tapfl.report.footprint import block_rows, footprint, render, rows

    found = [footprint(path) for path in options.runs]
    table = ([row for each in found for row in block_rows(each)] if options.blocks
             else rows(found))
    print(render(table, options.format))


def _add_client(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("run_folder", type=Path, metavar="RUN",
                      help="the folder of a complete run, or of an exported model")
    verb.add_argument("--client", metavar="ID", help="whose model, e.g. g0-1")
    verb.add_argument("--model", metavar="personal|federated",
                      help="the client's own model, which is the default (run.json says which "
                           "method's), or the federated one")
    verb.add_argument("--method", metavar="NAME", help="one of the run's methods, by its name")
    verb.add_argument("--modules", type=Path, metavar="DIR",
                      help="where a federated method of your own (module:Class) is imported from")


def _add_predict(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "predict", _predict, "let a client's model answer",
        "Let a client's model answer: a label with probabilities, a text, or a picture that is\n"
        "written to --out. One input by --image and --text, or a file of many.\n"
        "A CSV or JSON lines file has the columns 'image' and 'text', or those that the task's\n"
        "template names; the answers are put beside them.",
        ["tapfl predict runs/quickstart --client g0-1 --task agnews --text 'shares rise'",
         "tapfl predict runs/quickstart --client g0-4 --task vqa --image a.png --text 'how many?'",
         "tapfl predict runs/quickstart --client g0-1 --task agnews --file in.csv --out out.csv"])
    _add_client(verb)
    verb.add_argument("--task", required=True, metavar="TASK", help="one of the client's tasks")
    verb.add_argument("--image", type=Path, metavar="FILE", help="a picture")
    verb.add_argument("--text", metavar="TEXT", help="a text, a question, or concepts")
    verb.add_argument("--file", type=Path, metavar="FILE", help="a .csv or .jsonl of many inputs")
    verb.add_argument("--out", type=Path, metavar="FILE", help="where to write")
    verb.add_argument("--json", action="store_true", help="print one answer as JSON")
    verb.add_argument("--weights", metavar="PLACE",
                      help="where the frozen base is found now, if not where it was")
    verb.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")


def _predict(options: argparse.Namespace) -> None:
    from tapfl.use.command import run_predict

    run_predict(options)


def _add_export(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "export", _export, "write a client's model as files to take away",
        "Write a client's model into a new folder: its blocks as safetensors, a model card with\n"
        "the client's own results, the encoders' LoRA in the format of the peft library.\n"
        "tapfl.load(DIR) and 'tapfl predict DIR' read it back.",
        ["tapfl export runs/quickstart --client g0-7 --out g0-7",
         "tapfl predict g0-7 --task agnews --text 'shares rise'"])
    _add_client(verb)
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    verb.add_argument("--weights", metavar="PLACE",
                      help="where the frozen base will be found, e.g. a hub id; by default weights "
                           "from a hub or a package are named and those in a folder are copied")


def _export(options: argparse.Namespace) -> None:
    from tapfl.use.command import run_export

    run_export(options)


def _add_setup_metrics(verbs: Verbs) -> None:
    _verb(verbs, "setup-metrics", _setup_metrics, "fetch what the metrics of text need",
          "Fetch WordNet for METEOR, and say which model BERTScore will use here.",
          ["tapfl setup-metrics"])


def _setup_metrics(options: argparse.Namespace) -> None:
    from tapfl.evaluation.bertscore import usual_model
    from tapfl.evaluation.meteor import fetch_wordnet

    print(f"meteor: WordNet in {fetch_wordnet()}")
    print(f"bertscore: {usual_model()}")


def _add_presets(verbs: Verbs) -> None:
    _verb(verbs, "presets", _presets, "list the shipped presets", "List the shipped presets.",
          ["tapfl presets"])


def _presets(options: argparse.Namespace) -> None:
    from tapfl.config import preset_summaries

    for name, summary in preset_summaries().items():
        print(f"{name:<16} {summary}")


def _add_show(verbs: Verbs) -> None:
    verb = _verb(verbs, "show", _show, "print a whole configuration",
                 "Print a configuration as YAML with every key, also those left at their default.",
                 ["tapfl show miniature > mine.yaml", "tapfl show quickstart --set train.rounds=5"])
    _add_config(verb)


def _show(options: argparse.Namespace) -> None:
    import yaml

    from tapfl.config import load_config

    config = load_config(options.preset, options.overrides)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")


def _add_validate(verbs: Verbs) -> None:
    verb = _verb(verbs, "validate", _validate, "check a configuration without running it",
                 "Check a configuration as a run would: its keys and values, its federation and\n"
                 "methods, the files and columns of its data, weights and packages. Data are\n"
                 "prepared on the way: the run will find them so.",
                 ["tapfl validate mine.yaml", "tapfl validate flava --config-only"])
    _add_config(verb)
    verb.add_argument("--data", metavar="DIR", help="a folder that mirrors the hub's data sets")
    verb.add_argument("--modules", type=Path, metavar="DIR",
                      help="where methods of your own (module:Class) are imported from")
    verb.add_argument("--config-only", action="store_true",
                      help="read neither data nor weights")


def _validate(options: argparse.Namespace) -> None:
    from tapfl.config import load_config
    from tapfl.engine.validate import validate
    from tapfl.report.progress import progress

    overrides = [*options.overrides, *([f"data.folder={options.data}"] if options.data else [])]
    config = load_config(options.preset, overrides)
    display = progress()
    try:
        found = validate(config, options.modules or _beside(options.preset),
                         config_only=options.config_only, notify=display)
    finally:
        display.close()
    print(f"{options.preset}: valid. {found}")


def _add_model(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "model", _model, "count a model's parameters and bytes, block by block",
        "Count the parameters of a preset's server model and of every kind of client, without and\n"
        "with TAP's second copy. Loads no weights.",
        ["tapfl model flava", "tapfl model vilt --json",
         "tapfl model flava --set backbone.layers_per_stage=2"])
    _add_config(verb)
    verb.add_argument("--json", action="store_true", help="print JSON")


def _model(options: argparse.Namespace) -> None:
    from tapfl.config import load_config
    from tapfl.model.summary import render, summarize

    summary = summarize(load_config(options.preset, options.overrides))
    print(json.dumps(summary, indent=2) if options.json else render(summary, options.preset))


def _add_pretrain(verbs: Verbs) -> None:
    verb = _verb(
        verbs, "pretrain", _pretrain, "pre-train the mini foundation",
        "Pre-train the mini foundation on the miniature world's unlabelled stream: masked text,\n"
        "masked images, image-text matching. The package ships what this command writes.",
        ["tapfl pretrain mini --out mini.safetensors --device cuda",
         "tapfl run quickstart --set foundation.weights=mini.safetensors"])
    verb.add_argument("foundation", choices=["mini"], help="the foundation to pre-train")
    verb.add_argument("--out", type=Path, default=Path("mini.safetensors"), metavar="FILE",
                      help="where to write (mini.safetensors)")
    verb.add_argument("--steps", type=int, default=3500, metavar="N", help="training steps (3500)")
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="the seed (0)")
    verb.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")


def _pretrain(options: argparse.Namespace) -> None:
    from tapfl.engine.run import pick_device
    from tapfl.pretrain import pretrain_mini

    if options.steps < 10:
        raise TapflError(f"--steps {options.steps}: expected at least 10")

    def show(step: int, losses: dict[str, float]) -> None:
        print(f"step {step + 1}/{options.steps}: "
              + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()), flush=True)

    pretrain_mini(options.out, steps=options.steps, seed=options.seed,
                  device=pick_device(options.device), progress=show)
    print(f"written: {options.out}")
