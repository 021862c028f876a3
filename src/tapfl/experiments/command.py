"""`tapfl reproduce` and `tapfl run --seeds`: print the plan, run what is missing, write tables."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError

Verbs = Any  # argparse's collection of subparsers
SEEDS = "41,42,43,44"


def add_reproduce(verbs: Verbs) -> None:
    """Add the verb; nothing heavy is imported before it runs."""
    verb = verbs.add_parser(
        "reproduce", help="make the paper's tables, and ours",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Make the tables of experiments: the paper's (main, kd, margins, 2p, standard, deep,\n"
            "clients100, validation, footprint, replacements, significance) and ours (criteria,\n"
            "skew, data, faults), or all. Writes DIR/EXPERIMENT.md, .tex and .csv and keeps the\n"
            "runs below DIR/runs. The plan is printed first. Experiments share runs; what is\n"
            "there is not run again; a plan that was interrupted goes on where it stopped."),
        epilog="examples:\n"
               "  tapfl reproduce all --model mini --scale small --seeds 41,42\n"
               "  tapfl reproduce main criteria --model offline-pair --data DIR --dry-run\n"
               "  tapfl reproduce main --model flava --devices cuda:0,cuda:1")
    verb.set_defaults(run=_reproduce)
    verb.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help="names, or all")
    verb.add_argument("--model", default="mini", metavar="flava|vilt|mini|offline-pair",
                      help="the foundation, with its preset (mini)")
    verb.add_argument("--scale", default="paper", metavar="small|paper",
                      help="the paper's schedule and all clients (paper), or a short try (small)")
    verb.add_argument("--seeds", default=SEEDS, metavar="N,N,...", help=f"seeds ({SEEDS})")
    verb.add_argument("--data", type=Path, metavar="DIR",
                      help="a folder that mirrors the hub's data sets (TAPFL_DATA by default)")
    verb.add_argument("--out", type=Path, metavar="DIR",
                      help="where tables and runs go (reproduction/MODEL-SCALE)")
    verb.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    verb.add_argument("--any-version", action="store_true",
                      help="take runs that another version of the code has made as well")
    verb.add_argument("--paper", action="store_true", help="put the published figures beside ours")
    add_places(verb)


def add_places(verb: argparse.ArgumentParser) -> None:
    """Add where runs go."""
    verb.add_argument("--devices", metavar="cuda:0,cuda:1", default="auto",
                      help="spread runs over these devices (auto: a GPU if there is one)")
    verb.add_argument("--jobs", type=int, metavar="N",
                      help="runs at a time on each device (one on a GPU; on a CPU one for each "
                           "core, with one thread)")


def read_seeds(text: str) -> list[int]:
    """Read ``41,42,43``."""
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words) or len(set(words)) < len(words):
        raise TapflError(f"--seeds {text}: expected different numbers with commas, e.g. 41,42,43")
    return [int(word) for word in words]


def _reproduce(options: argparse.Namespace) -> None:
    import os

    from tapfl.experiments.catalogue import MODELS, find_experiments
    from tapfl.experiments.plan import make_plan
    from tapfl.experiments.write import write_experiment

    chosen = find_experiments(options.experiments, options.model, options.scale)
    seeds, small = read_seeds(options.seeds), options.scale == "small"
    out = options.out or Path("reproduction") / f"{options.model}-{options.scale}"
    data = options.data or (Path(os.environ["TAPFL_DATA"]) if os.environ.get("TAPFL_DATA")
                            else None)
    if data is not None and not data.is_dir():
        raise TapflError(f"--data {data}: no such folder")

    def planned() -> Any:
        return make_plan(chosen, MODELS[options.model], small, seeds, out, data,
                         options.any_version)

    plan = planned()
    where = _places(options)
    print(_described(plan, chosen, len(seeds), len(where)))
    if options.dry_run:
        return
    if plan.missing:
        from tapfl.experiments.execute import Job

        _execute([Job(run.folder, run.config, run.resumes) for run in plan.missing], where)
        plan = planned()
    for number, experiment in enumerate(chosen):
        print(f"{experiment.name}: " + "   ".join(str(path) for path in write_experiment(
            plan, number, experiment, MODELS[options.model], out, options.paper)))


def _places(options: argparse.Namespace) -> Any:
    from tapfl.engine.run import pick_device
    from tapfl.experiments.execute import places

    devices = [pick_device("auto")] if options.devices == "auto" else options.devices.split(",")
    return places(devices, options.jobs)


def _described(plan: Any, chosen: Sequence[Any], seeds: int, at_once: int) -> str:
    """Return the plan in words."""
    lines = [f"{e.name:<14} {len(e.parts)} part(s): {e.question}" for e in chosen]
    resumed = sum(run.resumes for run in plan.missing)
    done = plan.federated_runs - len({run.folder for run in plan.missing})
    lines += ["", f"models to compare: {plan.models} ({seeds} seed(s)); one run for each would be "
              f"{plan.models} runs",
              f"federated runs needed: {plan.federated_runs}; there: {max(0, done)}; to run: "
              f"{len(plan.missing)}" + (f" ({resumed} to go on with)" if resumed else "")]
    for run in plan.missing:
        lines.append(f"  {run.folder.name}: {', '.join(run.config.methods)}"
                     + (" (goes on)" if run.resumes else ""))
    lines.append(_expected(plan, at_once))
    return "\n".join(lines)


def _expected(plan: Any, at_once: int) -> str:
    """Return how long it may take, judged by the runs that are there."""
    from tapfl.engine.record import read_record

    def work(config: Any) -> float:
        """Steps of training, roughly: each personal model costs about what W does."""
        train, personal = config.train, sum("+" in m or m.startswith("tap")
                                            for m in config.methods)
        return float(train.rounds * train.cohort * train.local_steps * (1 + personal))

    if not plan.missing:
        return "expected time: none, all runs are there"
    known = [read_record(folder) for folder in {folder for folder, _ in plan.there.values()}]
    if not known:
        return "expected time: not known before the first run is done"
    rate = sum(r.seconds for r in known) / sum(work(r.config) for r in known)
    seconds = rate * sum(work(run.config) for run in plan.missing) / at_once
    return f"expected time: about {seconds / 60:.0f} min, judged by {len(known)} run(s)"


def _execute(jobs: Sequence[Any], where: Any) -> None:
    from tapfl.experiments.execute import execute

    started = time.monotonic()
    display = _Display(len(jobs))
    try:
        outcomes = execute(jobs, where, display)
    finally:
        display.close()
    failed = [outcome for outcome in outcomes if outcome.fault]
    print(f"{len(outcomes) - len(failed)} run(s) in {(time.monotonic() - started) / 60:.1f} min")
    for outcome in failed:
        print(f"{outcome.job.folder.name}: {outcome.fault} ({outcome.job.log})", file=sys.stderr)
    if failed:
        raise TapflError(f"{len(failed)} of {len(outcomes)} runs failed; the others are kept, the "
                         "same command tries again")


class _Display:
    """A bar for each run on a terminal, a line for each run that has ended elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.told, self._bars = total, 0, None
        self._looked = 0.0
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(stderr=True))
            self._bars.start()
            self._all = self._bars.add_task("runs", total=total)
            self._tasks: dict[Path, Any] = {}

    def __call__(self, status: Any) -> None:
        for outcome in status.done[self.told:]:
            self.told += 1
            how = outcome.fault or f"{outcome.seconds:.0f} s"
            line = f"{self.told}/{self.total} {outcome.job.folder.name}: {how}"
            if self._bars is None:
                print(line, file=sys.stderr, flush=True)
            else:
                self._bars.console.print(line, markup=False)
                self._bars.advance(self._all)
                task = self._tasks.pop(outcome.job.folder, None)
                if task is not None:
                    self._bars.remove_task(task)
        if self._bars is None or time.monotonic() - self._looked < 2:
            return
        self._looked = time.monotonic()
        for job in status.running:
            if job.folder not in self._tasks:
                self._tasks[job.folder] = self._bars.add_task(
                    job.folder.name, total=job.config.train.rounds)
            self._bars.update(self._tasks[job.folder], completed=job.rounds())

    def close(self) -> None:
        """Nothing more will come."""
        if self._bars is not None:
            self._bars.stop()


def run_seeds(config: Any, out: Path, options: argparse.Namespace, modules: Path | None) -> None:
    """Run a configuration once for each seed, below ``out``; print one table of all of them."""
    from tapfl.engine.record import read_record
    from tapfl.engine.results import read_results
    from tapfl.experiments.execute import Job
    from tapfl.report.tables import show

    jobs, folders = [], []
    for seed in read_seeds(options.seeds):
        folder = out / f"seed{seed}"
        folders.append(folder)
        begun = (folder / "run.json").is_file()
        if begun and not options.resume:
            raise TapflError(f"{folder} already holds a run: continue it with --resume, or choose "
                             "another --out")
        if not (begun and read_record(folder).finished):
            jobs.append(Job(folder, config.model_copy(update={"seed": seed}), begun, modules))
    if jobs:
        _execute(jobs, _places(options))
    rows = [row for folder in folders for row in read_results(folder / "results.csv")]
    show(rows, config.methods)
    print(f"runs: {'   '.join(str(folder) for folder in folders)}")
