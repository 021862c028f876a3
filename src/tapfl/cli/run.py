"""`tapfl run`: make an experiment, or go on with one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError
from tapfl.experiments.command import add_places, run_seeds, write_and_say
from tapfl.verbs import Verbs, add_config, add_verb, beside


def add_run(verbs: Verbs) -> None:
    """Add ``tapfl run``."""
    verb = add_verb(
        verbs, "run", _run, "run an experiment",
        "Run an experiment: every method of the configuration, on the same clients and data.\n"
        "Writes results.csv, events.jsonl, run.json, scores, samples and models into --out.\n"
        "Stop it at any moment; --resume goes on from the last checkpoint.",
        ["tapfl run quickstart",
         "tapfl run quickstart --seed 42 --set train.rounds=100 --out runs/longer",
         "tapfl run --resume --out runs/longer",
         "tapfl run quickstart --seeds 41,42,43 --out runs/three",
         "tapfl run quickstart --engine flower --workers 2 --threads 1",
         "tapfl run quickstart --set 'methods=[fedavg, disentafl+tap]'"])
    add_config(verb, optional=True)
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
    verb.add_argument("--engine", choices=("inprocess", "flower"), default="inprocess",
                      help="where clients' turns are taken: in this process, or in worker "
                           "processes on this machine or on a Ray cluster (docs/simulation.md); "
                           "the results are the same")
    verb.add_argument("--workers", type=int, metavar="N",
                      help="how many worker processes --engine flower has (one for each GPU, or "
                           "one)")
    verb.add_argument("--ray-address", metavar="ADDRESS",
                      help="the Ray cluster that --engine flower runs on, as HOST:PORT or auto "
                           "(without it, Ray is started on this machine for this run alone)")
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
    verb.add_argument("--no-report", action="store_true",
                      help="do not write DIR/report.html in the end")


def _run(options: argparse.Namespace) -> None:
    from tapfl.engine.record import read_record
    from tapfl.engine.run import run
    from tapfl.methods import names_own_code
    from tapfl.report.progress import progress
    from tapfl.report.tables import show

    if options.preset is None and not (options.resume and options.out):
        raise TapflError("run: expected a preset or a file, or --resume with --out DIR")
    _check_engine(options)
    config = _run_config(options)
    if options.seeds is not None:
        if options.preset is None or options.seed is not None or options.tensorboard:
            raise TapflError("--seeds: expected a preset or a file, no --seed and no --tensorboard")
        run_seeds(config, options.out or Path("runs") / f"{Path(options.preset).stem}-seeds",
                  options, options.modules or beside(options.preset))
        return
    if options.jobs is not None or options.devices != "auto":
        raise TapflError("--devices and --jobs are for several --seeds; one run takes --device")
    modules = options.modules or beside(options.preset)
    out = options.out or _folder(Path("runs") / Path(options.preset).stem, options.resume)
    display = progress(options.quiet, out / "tensorboard" if options.tensorboard else None)
    try:
        with _engine(options, modules) as site:
            rows = run(config, out, resume=options.resume, device=options.device, notify=display,
                       modules=modules, site=site)
    except KeyboardInterrupt:
        if (out / "run.json").is_file():
            own = " --modules DIR" if names_own_code(config) else ""
            anew = "" if config.checkpoint.every else " (from the first round: no checkpoints)"
            print(f"tapfl: go on with: tapfl run --resume --out {out}{own}{anew}", file=sys.stderr)
        raise
    finally:
        display.close()
    show(rows, config.methods)
    record = read_record(out)
    for lost in record.dropped:
        print(f"{lost['where']}: {lost['dropped']} of {lost['rows']} rows were left out; "
              f"{out / 'run.json'} says why")
    for client, since in record.left.items():
        print(f"{client} has left: " + ", ".join(
            f"not in {name} from round {round_ + 1} on" for name, round_ in since.items()))
    if record.random_weights:
        print("made with random weights: the foundation was not pre-trained")
    print(f"results: {out / 'results.csv'}   events: {out / 'events.jsonl'}   "
          f"record: {out / 'run.json'}"
          + (f"   models: {out / 'models'}" if record.config.checkpoint.models else ""))
    if not options.no_report:
        write_and_say([out], out / "report.html")


def _check_engine(options: argparse.Namespace) -> None:
    """Refuse options of the other engine."""
    if options.engine == "flower":
        if options.workers is not None and options.workers < 1:
            raise TapflError(f"--workers {options.workers}: expected 1 or more")
        if options.seeds is not None:
            raise TapflError("--seeds: runs side by side, each in one process; omit --engine "
                             "flower, or run one --seed after the other")
        return
    for name in ("workers", "ray_address"):
        if getattr(options, name) is not None:
            raise TapflError(f"--{name.replace('_', '-')}: is for --engine flower")


def _engine(options: argparse.Namespace,
            modules: Path | None) -> contextlib.AbstractContextManager[Any]:
    """Return where the clients of the run are."""
    if options.engine == "flower":
        from tapfl.engine.flower.simulation import simulation

        return simulation(options.workers, options.ray_address, modules)
    from tapfl.engine.site import Here

    return contextlib.nullcontext(Here)


def _run_config(options: argparse.Namespace) -> Any:
    """Return the configuration that was asked for, or that of the run to continue."""
    from tapfl.config import load_config
    from tapfl.engine.run import stored_config
    from tapfl.use.mirror import with_mirror

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
    return with_mirror(config, options.data)


def _folder(folder: Path, resume: bool) -> Path:
    """Return a new folder for a run, or the newest run's."""
    from tapfl.engine.folder import fresh_folder

    if not resume:
        return fresh_folder(folder)
    runs = [p for p in folder.parent.glob(f"{folder.name}*") if (p / "run.json").is_file()]
    if not runs:
        raise TapflError(f"--resume: no run in {folder}; name one with --out DIR")
    return max(runs, key=lambda p: (p / "run.json").stat().st_mtime)
