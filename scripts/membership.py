"""What an attacker learns of training samples: python scripts/membership.py OUT.csv [--seed 41]

Ten clients with the same two tasks of the miniature world, all of them in every round, with few and
with more samples each; without noise, with noise at the server, and with noise at the clients. An
attacker scores each client's training samples and as many others from the test data, which nobody
trained on; every sample is scored once, by the models of one client. Lines that OUT.csv has are not
made again. Prints Markdown tables.
"""

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

import numpy as np
import ten_clients
from ten_clients import CLIENTS, IMAGES, TEXTS, lines, run_missing

from tapfl.engine.record import read_record
from tapfl.experiments.leaks import decoder_gradients, losses_of
from tapfl.experiments.observed import Observed
from tapfl.privacy.membership import alignment, drop_score, leak, loss_score

ROUNDS = 10
FEW, MORE = 20, 100  # training samples of a task that a client has
SCORED = 20  # of each client and task: members, and others
CLIP = 0.5
NOISE = {"none": {}, **{f"{mode} {noise:g}": {"mode": mode, "noise": noise, "clip": CLIP}
                        for mode in ("central", "local") for noise in (0.1, 1.0)}}
RUNS = [*((FEW, noise) for noise in NOISE), (MORE, "none")]
ATTACKS = {  # and the method whose model they read
           "W: loss": "fedavg", "X of tap: loss": "tap", "X of tap: drop from W": "tap",
           "X of tap-soft: loss": "tap-soft", "X of tap-soft: drop from W": "tap-soft",
           "update: drop": "", "update: alignment": ""}
PERSONAL = ("tap", "tap-soft")
FIELDS = ["seed", "samples", "noise", "task", "attack", "auc", "auc_low", "auc_high", "found",
          "found_low", "found_high", "accuracy", "epsilon"]


def configured(folder, samples, noise, seed):
    return ten_clients.configured(folder, ROUNDS, {
        "seed": seed, "methods": ["fedavg", *PERSONAL], "privacy": NOISE[noise],
        "data": {"train": samples * CLIENTS, "test": SCORED * CLIENTS},
        "post": {"steps": 8, "lr": 5e-3}})


def scores_of(observed, client, data, rows):
    """Return every attack's scores of some samples, by what it reads of one client."""
    network, block = observed.method.network, f"decoder/{data.task.name}"
    received, update = observed.messages[client.id, ROUNDS - 1]
    w, before, after = (losses_of(network, model, data, rows) for model in (
        observed.model("fedavg", client), received, update.blocks))
    found = {"W: loss": loss_score(w)}
    for method in PERSONAL:
        x = losses_of(network, observed.model(method, client), data, rows)
        found[f"X of {method}: loss"] = loss_score(x)
        found[f"X of {method}: drop from W"] = drop_score(w, x)
    step = (update.blocks[block] - received[block]).numpy()
    return found | {
        "update: drop": drop_score(before, after),
        "update: alignment": alignment(step, decoder_gradients(network, received, data, rows))}


def attacked(observed, task):
    """Return the scores of members and of others, of all clients."""
    found = {}
    for client in observed.clients:
        train, own = next(h for h in client.data.holdings if h[0].task.name == task)
        test, _ = client.tests[task]
        others = np.arange(client.index * SCORED, (client.index + 1) * SCORED)
        for which, (data, rows) in enumerate(((train, own[:SCORED]), (test, others))):
            for attack, scores in scores_of(observed, client, data, rows).items():
                found.setdefault(attack, ([], []))[which].append(scores)
    return {attack: [np.concatenate(scores) for scores in pair] for attack, pair in found.items()}


def measured(seed, samples, noise):
    """Run once; yield a line for every task and attack."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        observed = Observed(configured(folder, samples, noise, seed), folder / "run",
                            keep=lambda member, round_: round_ == ROUNDS - 1)
        promised = read_record(folder / "run").privacy
        epsilon = promised["fedavg"].epsilon if promised else None
        for task in (TEXTS, IMAGES):
            for attack, pair in attacked(observed, task).items():
                got = leak(*pair)
                right = [row["value"] for row in observed.rows
                         if (row["method"], row["dataset"], row["metric"]) == (
                             ATTACKS[attack], task, "accuracy")]
                yield {"seed": seed, "samples": samples, "noise": noise, "task": task,
                       "attack": attack, "auc": got.auc.value, "auc_low": got.auc.low,
                       "auc_high": got.auc.high, "found": got.found.value,
                       "found_low": got.found.low, "found_high": got.found.high,
                       "accuracy": statistics.fmean(right) if right else "",
                       "epsilon": "" if epsilon is None else epsilon}


def tables(out, seed):
    """Print what OUT says, task by task."""
    rows = lines(out, seed=seed)

    def cell(row):
        half = (float(row["auc_high"]) - float(row["auc_low"])) / 2
        return f"{float(row['auc']):.2f} ± {half:.2f}, {100 * float(row['found']):.0f}%"

    for task, samples in itertools.product((TEXTS, IMAGES), (FEW, MORE)):
        found = {(row["noise"], row["attack"]): row for row in rows
                 if (row["task"], row["samples"]) == (task, str(samples))}
        names = [noise for noise in NOISE if (noise, "W: loss") in found]
        if not names:
            continue
        print(f"\n{task}, {samples} samples a client\n\n| | {' | '.join(names)} |")
        print("|---|" + "---|" * len(names))
        epsilons = [found[name, "W: loss"]["epsilon"] for name in names]
        print(f"| epsilon | {' | '.join(f'{float(e):.0f}' if e else '∞' for e in epsilons)} |")
        for attack, model in {"W: loss": "W", "X of tap: loss": "X of tap",
                              "X of tap-soft: loss": "X of tap-soft"}.items():
            right = [f"{float(found[name, attack]['accuracy']):.0f}" for name in names]
            print(f"| accuracy of {model}, % | {' | '.join(right)} |")
        for attack in ATTACKS:
            print(f"| {attack} | {' | '.join(cell(found[name, attack]) for name in names)} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=41)
    options = parser.parse_args()
    run_missing(options.out, FIELDS, [(options.seed, *run) for run in RUNS], measured)
    tables(options.out, options.seed)


if __name__ == "__main__":
    main()
