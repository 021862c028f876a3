"""A model for experiments that takes seconds, and runs that are made in this process."""

import yaml

from tapfl.engine.run import run
from tapfl.experiments.catalogue import Experiment, Model, Part
from tapfl.experiments.execute import Outcome, Status
from tests.experiment import tiny_experiment

FIRST = Experiment("first", "?", (Part("usual", ("fedavg", "fedavg+post", "tap")),))
# The same names with other settings of what comes after federation, and one model that is equal.
SECOND = Experiment("second", "?", (
    Part("shorter", ("fedavg", "tap", "mine"), {"post": {"steps": 1}},
         {"mine": {"of": "tap", "tap": {"criterion": "always"}}}),))

KINDS = ("image_classification", "image_generation", "text_classification", "text_generation")


def tiny_preset(folder, **sections):
    """Write the tiny experiment as a configuration file; return its path."""
    train = {"rounds": 2} | sections.pop("train", {})
    config = tiny_experiment(folder, train=train, **sections)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    return path


def tiny_model(folder, **sections):
    """Return a model of the catalogue whose two scales are the tiny experiment."""
    return Model(str(tiny_preset(folder, **sections)), "flava", {}, {}, (8, 12, 16, 24),
                 {"federation": {"groups": 2}})


def make_runs(plan):
    """Make what a plan misses, one after the other, without processes."""
    for each in plan.missing:
        run(each.config, each.folder, resume=each.resumes, device="cpu")


def contents(folder):
    """Return all files below a folder: when they were written, and what they hold."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(folder.rglob("*")) if path.is_file()}


class InProcess:
    """Stands for ``execute``: makes jobs here, and lets those fail that ``fails`` names."""

    def __init__(self, fails=()):
        self.fails, self.made = fails, []

    def __call__(self, jobs, where, watch=lambda status: None):
        status = Status()
        for job in jobs:
            fault = next((f"exit status 2; last line: {name}" for name in self.fails
                          if name in job.folder.name), None)
            if fault is None:
                job.folder.parent.mkdir(parents=True, exist_ok=True)
                run(job.config, job.folder, resume=job.resumes, device="cpu", modules=job.modules)
            self.made.append(job.folder.name)
            status.done.append(Outcome(job, 1.0, fault))
            watch(status)
        return status.done
