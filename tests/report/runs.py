"""Runs as files, made up: what verdicts read of them, and nothing else."""

import numpy as np

from tapfl.data.participants import load_federation
from tapfl.engine.files import Label
from tapfl.engine.record import RunRecord
from tapfl.engine.results import write_results
from tapfl.engine.run import federation_digest
from tapfl.engine.scores import write_scores
from tests.experiment import tiny_experiment

SAMPLES = 80
# Client, task, metric, and what TAP gains over Local; 0 and 0.2 are less than the noise.
CASES = [("shapes", "tiny-imagenet", "accuracy", 30.0), ("shapes", "agnews", "accuracy", 20.0),
         ("news", "agnews", "accuracy", 20.0), ("looks", "fmnist", "mse", 0.3),
         ("words", "fmnist", "mse", -0.3), ("looks", "vqa", "token_f1", 0.0),
         ("looks", "vqa", "exact_match", 0.0), ("words", "commongen", "token_f1", 0.2)]


def write_run(folder, seed=1, scores=True, finished=True, models=None, **sections):
    """Write a run's record, results and scores: what verdicts read, and nothing else."""
    folder.mkdir(parents=True)
    config = tiny_experiment(folder.parent, seed=seed, methods=["local", "fedavg", "tap"],
                             **sections)
    record = RunRecord(
        config=config, seed=seed, threads=1, finished=finished, clients=4,
        models={"personal": "tap", "federated": "fedavg"} if models is None else models,
        federation=load_federation(config.federation), classes={}, data={}, data_sha256={},
        federation_sha256=federation_digest(config), weights="", random_weights=True,
        environment={}, computing={}, parameters={})
    record.save(folder)
    rng = np.random.default_rng(seed)
    rows, kept = [], {}
    for client, task, metric, gain in CASES:
        unit = 0.2 if metric == "mse" else 25.0
        base = unit * (2 + rng.normal(size=SAMPLES))
        for method in ("local", "fedavg", "tap"):
            values = base + 0.2 * unit * rng.normal(size=SAMPLES)
            if method == "tap":
                values += -gain if metric == "mse" else gain
            values = values.astype(np.float32)
            kept.setdefault((method, client), {})[f"{task}|{metric}"] = values
            rows.append({"seed": seed, "method": method, "client": client, "task": task,
                         "dataset": task, "metric": metric, "value": float(values.mean()),
                         "samples": SAMPLES})
    rows.sort(key=lambda row: ["local", "fedavg", "tap"].index(row["method"]))
    write_results(folder / "results.csv", rows)
    for (method, client), tensors in kept.items() if scores else ():
        path = folder / "scores" / method / f"{client}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_scores(path, Label(method, client, 1), tensors)
    return folder
