"""Ten clients with the same two tasks of the miniature world, all of them in every round: what
attacks.py and membership.py measure, and the CSV file that keeps it."""

import csv
import time

from tapfl.config import Config, load_config
from tapfl.methods import merge

IMAGES, TEXTS, CLIENTS = "tiny-imagenet", "agnews", 10
FEDERATION = f"""
tasks:
  {IMAGES}: {{kind: image_classification, modalities: [image], classes: 8}}
  {TEXTS}: {{kind: text_classification, modalities: [text], classes: 4}}
clients:
  - {{name: member, tasks: {{{IMAGES}: 1, {TEXTS}: 1}}}}
"""


def configured(folder, rounds, changes):
    """Return a run of the ten clients; ``folder`` takes the federation's file."""
    (folder / "federation.yaml").write_text(FEDERATION)
    fixed = {
        "threads": 1, "backbone": {"kind": "standard"},
        "federation": {"file": str(folder / "federation.yaml"), "groups": CLIENTS},
        "train": {"rounds": rounds, "cohort": CLIENTS, "local_steps": 2, "batch_size": 16,
                  "lr_initial": 2e-3, "lr": 5e-3, "warmup_rounds": 3},
        "evaluation": {"samples": 0, "scores": False}, "checkpoint": {"every": 1000}}
    return Config.model_validate(merge(merge(load_config("quickstart").model_dump(), fixed),
                                       changes))


def run_missing(out, fields, runs, measured):
    """Make the runs that OUT does not have; ``measured(*run)`` yields the lines of one.

    A run is the values of the first fields.
    """
    with out.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        done = [list(row.values()) for row in csv.DictReader(file)]
        writer = csv.DictWriter(file, fields)
        if not done:
            writer.writeheader()
        for run in runs:
            if any(row[:len(run)] == [str(value) for value in run] for row in done):
                continue
            began, cpu = time.time(), time.process_time()
            writer.writerows(list(measured(*run)))
            file.flush()
            print(f"{', '.join(f'{k} {v}' for k, v in zip(fields, run, strict=False))}: "
                  f"{time.time() - began:.0f} s, {time.process_time() - cpu:.0f} s of a core",
                  flush=True)


def lines(out, **wanted):
    """Return the lines of OUT with these values."""
    with out.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file)
                if all(row[key] == str(value) for key, value in wanted.items())]
