"""The server model as modality-task pairs are added: python scripts/pairs.py DIR [options]

FedAvg is run on federations of 1, 2, 4 and 8 pairs, each pair with two clients that hold half of
its data. All clients take part in every round, so a client trains as much in a large federation as
in a small one, and what changes for a task is who else moves its shared blocks. Prints a table of
the server model's quality on every task, and the bound's parts beside it; runs that are there are
kept.
"""

import argparse
import csv
import statistics
import sys
from pathlib import Path

import yaml

from tapfl.cli import main as tapfl
from tapfl.config import FederationConfig, load_config
from tapfl.data.participants import load_federation
from tapfl.theory.bound import Block, Setting, bound, constant, max_step_size
from tapfl.theory.federation import ownerships

# Kinds alternate, so that every step brings a pair that shares blocks with earlier ones.
ORDER = ("agnews", "fmnist", "cifar100", "commongen", "caltech256", "mmlu", "tiny-imagenet", "vqa")
COUNTS = (1, 2, 4, 8)
HOLDERS = 2
METRICS = {"image_classification": "accuracy", "text_classification": "accuracy",
           "image_generation": "mse", "text_generation": "token_f1"}


def write_federation(folder, count, layout):
    """Write a federation of the first pairs; return its file."""
    tasks = load_federation(FederationConfig(layout=layout)).tasks
    names = ORDER[:count]
    values = {"tasks": {name: tasks[name].model_dump(mode="json", exclude_none=True)
                        for name in names},
              "clients": [{"name": f"{name}-{number}", "tasks": {name: f"1/{HOLDERS}"}}
                          for name in names for number in range(HOLDERS)]}
    file = folder / f"pairs{count}.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def settings(options, file, count):
    """Return what differs from the preset."""
    found = {"federation.file": file.resolve(), "federation.groups": 1, "methods": "[fedavg]",
             "train.cohort": HOLDERS * count, "train.rounds": options.rounds,
             "train.local_steps": 4, "train.batch_size": 8, "train.warmup_rounds": 2,
             "data.train": options.train, "data.test": options.test,
             "evaluation.metrics": "[token_f1]", "evaluation.samples": 0,
             "data.source": "hub" if options.data else "miniature"}
    if options.data:
        found["data.folder"] = options.data
    return [*(f"{key}={value}" for key, value in found.items()), *options.overrides]


def quality(run, tasks):
    """Return the server model's quality by task, the mean over its clients."""
    with (run / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "fedavg"]
    return {task: statistics.fmean(float(row["value"]) for row in rows if row["task"] == task
                                   and row["metric"] == METRICS[tasks[task].kind])
            for task in dict.fromkeys(row["task"] for row in rows)}


def bounds(config):
    """Return the number of blocks, C_K and the bound in two forms, with all constants 1."""
    owned = ownerships(config).owned()
    setting = Setting(tuple(Block(name, k, float(k > 1)) for name, k in owned.owners.items()),
                      owned.clients, 1.0, 1.0, config.train.local_steps, 1.0)
    steps = constant(max_step_size(1.0, config.train.local_steps), config.train.rounds)
    return (len(owned.owners), setting.inverse_owners, bound(setting, steps).total,
            bound(setting, steps, "weighted").total)


def spread(values):
    """Return a mean and, of several values, the standard deviation."""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"


def main():
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", help="a folder that mirrors the hub's data sets (miniature data)")
    parser.add_argument("--model", default="quickstart", help="a preset: foundation and backbone")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[41, 42, 43])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--train", type=int, default=400, help="training samples of a data set")
    parser.add_argument("--test", type=int, default=60, help="test samples of a data set")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found, parts = {}, {}
    for seed in options.seeds:  # seed by seed: whoever stops early has whole ones
        for count in COUNTS:
            file = write_federation(options.folder, count, "flava" if options.data else "miniature")
            run = options.folder / f"seed{seed}-pairs{count}"
            changes = settings(options, file, count)
            config = load_config(options.model, changes)
            if not (run / "results.csv").is_file():
                words = [word for change in changes for word in ("--set", change)]
                if tapfl(["run", options.model, *words, "--seed", str(seed), "--out", str(run),
                          "--threads", "1", "--quiet", "--no-report"]):
                    return 2
            parts[count] = bounds(config)
            for task, value in quality(run, load_federation(config.federation).tasks).items():
                found.setdefault((task, count), []).append(value)
    print("| |" + "".join(f" {count} |" for count in COUNTS) + "\n|---|" + "---|" * len(COUNTS))
    for task in ORDER:
        cells = [spread(found[task, c]) if (task, c) in found else "" for c in COUNTS]
        print(f"| {task} | " + " | ".join(cells) + " |")
    for place, (name, form) in enumerate((("blocks", "d"), ("C_K", ".3f"), ("theorem", ".4g"),
                                          ("weighted", ".4g"))):
        print(f"| {name} | " + " | ".join(format(parts[c][place], form) for c in COUNTS) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
