"""`tapfl reproduce` and `tapfl run --seeds`: print the plan, run what is missing, write tables."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapfl.errors import TapflError, one_line
from tapfl.verbs import Verbs, add_verb

if TYPE_CHECKING:
    from tapfl.config import Config
    from tapfl.experiments.plan import Run

SEEDS = "41,42,43,44"
AGAIN, RESUMED = "the same command", "the same command with --resume"  # what goes on


def add_reproduce(verbs: Verbs) -> None:
    """Add the verb; nothing heavy is imported before it runs."""
    verb = add_verb(
        verbs, "reproduce", _reproduce, "make the paper's tables, and ours",
        "Make the tables of experiments: the paper's (main, kd, margins, 2p, standard, deep,\n"
        "clients100, validation, footprint, replacements, significance) and ours (criteria,\n"
        "skew, data, faults), or all. Writes DIR/EXPERIMENT.md, .tex and .csv and keeps the\n"
        "runs below DIR/runs. The plan is printed first. Experiments share runs; what is\n"
        "there is not run again; a plan that was interrupted goes on where it stopped.",
        ["tapfl reproduce all --model mini --scale small --seeds 41,42",
         "tapfl reproduce main criteria --model offline-pair --data DIR --dry-run",
         "tapfl reproduce main --model flava --devices cuda:0,cuda:1"])
    verb.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help="names, or all")
    verb.add_argument("--model", default="mini", metavar="flava|vilt|mini|offline-pair",
                      help="the foundation, with its preset (mini)")
    verb.add_argument("--scale", default="paper", metavar="small|paper",
                      help="the paper's schedule and all clients (paper), or a short try (small)")
    verb.add_argument("--seeds", default=SEEDS, metavar="N,N,...", help=f"seeds ({SEEDS})")
    verb.add_argument("--data", metavar="DIR",
                      help="a folder that mirrors the hub's data sets (TAPFL_DATA by default)")
    verb.add_argument("--out", type=Path, metavar="DIR",
                      help="where tables and runs go (reproduction/MODEL-SCALE)")
    verb.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    verb.add_argument("--any-version", action="store_true",
                      help="take runs that another version of the code has made as well")
    verb.add_argument("--paper", action="store_true", help="put the published figures beside ours")
    verb.add_argument("--no-checkpoints", action="store_true",
                      help="new runs keep clients' state in memory (checkpoint.every: null), for "
                           "disks that cannot keep up; one that is interrupted starts again")
    add_places(verb)
    verb.add_argument("--threads", type=int, metavar="N",
                      help="threads of each new run (the CPU's cores, divided among the runs); one "
                           "that was begun keeps its own")


def add_places(verb: argparse.ArgumentParser) -> None:
    """Add where runs go."""
    verb.add_argument("--devices", metavar="cuda:0,cuda:1", default="auto",
                      help="spread runs over these devices (auto: a GPU if there is one)")
    verb.add_argument("--jobs", type=int, metavar="N",
                      help="runs at a time on each device (one on a GPU; on a CPU one for each "
                           "core, with one thread)")


def read_seeds(text: str) -> list[int]:
    """Read ``41,42,43``."""
    from tapfl.config import SEED

    words = [word.strip() for word in text.split(",")]
    seeds = [int(word) for word in words if word.isdecimal() and len(word) < 20]
    if len(set(seeds)) < len(words) or max(seeds) > SEED:
        raise TapflError(f"--seeds {text}: expected different numbers with commas, e.g. 41,42,43")
    return seeds


def _check_folder(out: Path) -> None:
    """Refuse an --out that is no folder, or is below something that is none."""
    for path in (out, *out.parents):
        if path.is_dir():
            return
        if path.exists():
            raise TapflError(f"--out {out}: {path} is not a folder")


def _mirror(options: argparse.Namespace, config: Config) -> Path | None:
    """Return the folder that the model's data are read from, if one is named."""
    import os

    from tapfl.use.mirror import check_folder, refuse_unread, unread

    if options.data is not None:
        check_folder(options.data)
        refuse_unread(config, options.data, f"--model {options.model}")
        return Path(options.data)
    named = os.environ.get("TAPFL_DATA")
    if not named or unread(config) is not None:  # it may be there for other models
        return None
    check_folder(named, "TAPFL_DATA")
    return Path(named)


def _reproduce(options: argparse.Namespace) -> None:
    from tapfl.experiments.catalogue import MODELS, find_experiments
    from tapfl.experiments.execute import Job, check_devices
    from tapfl.experiments.index import write_index
    from tapfl.experiments.plan import make_plan
    from tapfl.experiments.write import write_experiment

    chosen = find_experiments(options.experiments, options.model, options.scale)
    seeds, small = read_seeds(options.seeds), options.scale == "small"
    out = options.out or Path("reproduction") / f"{options.model}-{options.scale}"
    data = _mirror(options, MODELS[options.model].config(small))
    _check_folder(out)

    def planned() -> Any:
        return make_plan(chosen, MODELS[options.model], small, seeds, out, data,
                         options.any_version)

    plan = planned()
    where = _places(options)
    print(f"{options.model}, scale {options.scale}; tables go to {out}, runs to {out / 'runs'}\n")
    print(_described(plan, chosen, len(seeds), len(where)), flush=True)
    if options.dry_run:
        return
    if plan.missing:  # tables of runs that are there need no device
        check_devices(where)
    write_index(out, plan, chosen, options.model, options.scale)
    failed = []
    if plan.missing:
        failed = _execute([Job(run.folder, _checkpointed(run, not options.no_checkpoints),
                               run.resumes) for run in plan.missing], where)
        plan = planned()
        write_index(out, plan, chosen, options.model, options.scale)
    unwritten = 0
    for number, experiment in enumerate(chosen):
        if not plan.has(number):
            print(f"{experiment.name}: not written, some of its runs are missing")
            continue
        try:
            paths = write_experiment(plan, number, experiment, MODELS[options.model], out,
                                     options.paper)
        except TapflError as error:  # the others are still written
            print(f"{experiment.name}: not written: {error}", file=sys.stderr)
            unwritten += 1
        else:
            print(f"{experiment.name}: " + "   ".join(map(str, paths)))
    for fault in plan.unused:
        print(f"cannot be used: {fault}", file=sys.stderr)
    _end(failed, plan.missing)
    if unwritten:
        raise TapflError(f"{unwritten} experiment(s) could not be written; the others are")


def _checkpointed(run: Run, wanted: bool) -> Config:
    """Return a run's configuration, with checkpoints or without; one that was begun keeps its."""
    if wanted or run.resumes:
        return run.config
    none = run.config.checkpoint.model_copy(update={"every": None})
    return run.config.model_copy(update={"checkpoint": none})


def _end(failed: Sequence[Any], missing: Sequence[Any] = (), again: str = AGAIN) -> None:
    """Say what is not there after all runs have ended."""
    for outcome in failed:
        print(f"{outcome.job.folder.name}: {outcome.fault} ({outcome.job.log})", file=sys.stderr)
    if failed:
        raise TapflError(f"{len(failed)} run(s) failed; what is finished is kept, {again} tries "
                         "again")
    if missing:
        raise TapflError(f"{len(missing)} run(s) are still missing: tapfl's code changed while "
                         f"they ran, or they cannot be used; {again} makes them anew")


def _places(options: argparse.Namespace) -> Any:
    from tapfl.engine.run import pick_device
    from tapfl.experiments.execute import places

    one = getattr(options, "device", "auto")  # `run` takes one device, too
    devices = [pick_device(one)] if options.devices == "auto" else options.devices.split(",")
    return places(devices, options.jobs, options.threads)


def _described(plan: Any, chosen: Sequence[Any], seeds: int, at_once: int) -> str:
    """Return the plan in words."""
    lines = [f"{e.name:<14} {len(e.parts)} part(s): {e.question}" for e in chosen]
    resumed = sum(run.resumes for run in plan.missing)
    lines += ["", f"models to compare: {plan.models} ({seeds} seed(s)); one run for each would be "
              f"{plan.models} runs",
              f"federated runs needed: {plan.federated_runs}; there: {plan.complete_runs}; to run: "
              f"{len(plan.missing)}" + (f" ({resumed} to go on with)" if resumed else "")]
    for run in plan.missing:
        lines.append(f"  {run.folder.name}: {', '.join(run.config.methods)}"
                     + (" (goes on)" if run.resumes else ""))
    lines += [f"  cannot be used, counts as not there: {fault}" for fault in plan.unused]
    lines.append(_expected(plan, at_once))
    return "\n".join(lines)


def _expected(plan: Any, at_once: int) -> str:
    """Return how long it may take, judged by the runs that are there."""
    from tapfl.experiments.execute import expected_seconds

    if not plan.missing:
        return "expected time: none, all runs are there"
    known = [record for record in plan.finished if record.times]
    if not known:
        return "expected time: not known before the first run is done"
    each = expected_seconds(known, [run.config for run in plan.missing])
    minutes = max(sum(each) / at_once, max(each)) / 60
    return (f"expected time: about {minutes:.0f} min" if minutes >= 1 else
            "expected time: less than a minute") + f", judged by {len(known)} run(s)"


def _execute(jobs: Sequence[Any], where: Any, again: str = AGAIN) -> list[Any]:
    """Run jobs; return those that failed."""
    from tapfl.experiments.execute import execute

    started = time.monotonic()
    display = _Display(len(jobs))
    try:
        outcomes = execute(jobs, where, display)
    except KeyboardInterrupt:
        print(f"tapfl: {again} goes on where this one stops", file=sys.stderr)
        raise
    finally:
        display.close()
    failed = [outcome for outcome in outcomes if outcome.fault]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} run(s) finished in "
          f"{(time.monotonic() - started) / 60:.1f} min")
    return failed


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
            how = (f"failed, see {outcome.job.log}" if outcome.fault else
                   f"{outcome.seconds:.0f} s")
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
                    job.folder.name, total=job.total)
            self._bars.update(self._tasks[job.folder], completed=job.rounds())

    def close(self) -> None:
        """Nothing more will come."""
        if self._bars is not None:
            self._bars.stop()


def run_seeds(config: Any, out: Path, options: argparse.Namespace, modules: Path | None) -> None:
    """Run a configuration once for each seed, below ``out``; print one table of all of them."""
    from tapfl.engine.record import check_unchanged, read_record
    from tapfl.engine.results import read_results
    from tapfl.experiments.execute import Job, check_devices
    from tapfl.report.tables import show

    _check_folder(out)
    jobs, folders = [], []
    for seed in read_seeds(options.seeds):
        folder, own = out / f"seed{seed}", config.model_copy(update={"seed": seed})
        folders.append(folder)
        begun = (folder / "run.json").is_file()
        if begun and not options.resume:
            raise TapflError(f"{folder} already holds a run: continue it with --resume, or choose "
                             "another --out")
        record = read_record(folder) if begun else None
        if record is not None:
            check_unchanged(folder, record.config, own, "choose another --out", ["threads"])
        if record is None or not record.finished:
            if record is not None:  # what may change, may change; threads go on as they were
                own = own.model_copy(update={"threads": record.config.threads})
            jobs.append(Job(folder, own, begun, modules))
    if jobs:
        where = _places(options)
        check_devices(where)
        _end(_execute(jobs, where, RESUMED), again=RESUMED)
    rows = [row for folder in folders for row in read_results(folder / "results.csv")]
    show(rows, config.methods)
    print(f"runs: {'   '.join(str(folder) for folder in folders)}")
    if not options.no_report:
        write_and_say(folders, out / "report.html")


def write_and_say(folders: Sequence[Path], path: Path) -> None:
    """Write the report of finished runs; whatever goes wrong, the runs are complete."""
    from tapfl.report.html import write_report

    try:
        write_report(folders, path)
    except Exception as error:
        print(f"tapfl: no report was written ({type(error).__name__}: {one_line(str(error))})",
              file=sys.stderr)
    else:
        print(f"report: {path}")
