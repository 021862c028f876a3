"""What averaging withstands: python scripts/attacks.py OUT.csv [--seeds 41,42] [--rounds N]
       [--rules 'mean;median']

Ten clients with the same two tasks of the miniature world, all of them in every round; one or three
of them are malicious. Every line of OUT.csv is one run; those that are there are not made again.
Prints two Markdown tables: the accuracy on the honest clients' test data, and how often a picture
with the backdoor's trigger gets the backdoor's class.
"""

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path

import ten_clients
from ten_clients import CLIENTS, IMAGES, TEXTS, lines, run_missing

from tapfl.experiments.attacks import backdoor_test
from tapfl.experiments.observed import Observed
from tapfl.methods import merge

W, X = "federated", "personal"
TARGET, SIDE = 0, 8
ATTACKS = {  # the class and its settings; a step of 5 is beyond the bound of 3x, 2.5 is not
    "none": ("SignFlip", {"malicious": 0}),
    "sign flip x5": ("SignFlip", {"scale": 5.0}),
    "label flip": ("LabelFlip", {}),
    "backdoor x2.5": ("Backdoor", {"scale": 2.5, "target": TARGET, "side": SIDE, "task": IMAGES}),
    "scaling x10": ("Scaling", {"scale": 10.0}),
    "sign flip x2.5": ("SignFlip", {"scale": 2.5}),
}
SEEN = ("none", "backdoor x2.5")  # attacks for which triggered pictures are counted
RULES = {"mean": {}, "mean, bound 3x": {"federation": {"max_update_norm": "3x"}},
         "median": {"aggregation": {"rule": "median"}},
         "trimmed": {"aggregation": {"rule": "trimmed"}}}
FIELDS = ["seed", "rounds", "attack", "malicious", "rule", "model", IMAGES, TEXTS, "triggered",
          "refused"]


def models(rule, malicious=3):
    """Return what is asked for: X takes as long as W, so only where W is least protected."""
    return [W, X] if rule == "mean" and malicious != 1 else [W]


def configured(folder, attack, malicious, rule, seed, rounds):
    """Return one run: W under attack, and each client's X."""
    cls, settings = ATTACKS[attack]
    name = f"tapfl.experiments.attacks:{cls}"
    return ten_clients.configured(folder, rounds, merge({
        "seed": seed, "methods": models(rule, malicious),
        "variants": {model: {"of": name + ("" if model == W else "+tap-soft")}
                     for model in models(rule, malicious)},
        "own": {cls: {"malicious": malicious, **settings}},
        "data": {"train": 1000, "test": 100}, "post": {"steps": 4}}, RULES[rule]))


def measured(seed, rounds, attack, malicious, rule):
    """Run once; yield a line for W and one for X, means over the honest clients."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        observed = Observed(configured(folder, attack, malicious, rule, seed, rounds),
                            folder / "run")
        events = (folder / "run" / "events.jsonl").read_text()
        honest = [client for client in observed.clients if client.index >= malicious]
        ids = {client.id for client in honest}
        for model in models(rule, malicious):
            scores = {task: statistics.fmean(
                row["value"] for row in observed.rows if row["method"] == model
                and row["client"] in ids and row["dataset"] == task
                and row["metric"] == "accuracy") for task in (IMAGES, TEXTS)}
            # W is the same for all of them.
            asked = honest[:1] if model == W else honest
            triggered = [success(observed, model, c) for c in asked] if attack in SEEN else ""
            yield {"seed": seed, "rounds": rounds, "attack": attack, "malicious": malicious,
                   "rule": rule, "model": model, **scores,
                   "triggered": triggered and statistics.fmean(triggered),
                   "refused": events.count('"event": "refused"')}


def success(observed, model, client):
    """Return how many percent of a client's triggered test pictures get the target."""
    observed.model(model, client).load_into(observed.method.network.blocks)
    found = observed.evaluator(observed.method.network,
                               backdoor_test(*client.tests[IMAGES], TARGET, SIDE))
    return float(found["accuracy"].mean())


def cases():
    """Return attacks with their numbers of malicious clients; what tells most comes first."""
    return [("none", 0), *((attack, n) for n in (3, 1) for attack in ATTACKS if attack != "none")]


def tables(out, rounds):
    """Print what OUT says."""
    rows = lines(out, rounds=rounds)
    seeds = sorted({row["seed"] for row in rows})
    print(f"\n{rounds} rounds; seeds {', '.join(seeds)}\n")

    def cell(attack, malicious, rule, model, key):
        found = [float(row[key]) for row in rows if (
            row["attack"], row["malicious"], row["rule"], row["model"]) == (
            attack, str(malicious), rule, model)]
        return " / ".join(f"{value:.0f}" for value in found) or "-"

    columns = [(rule, model) for rule in RULES for model in models(rule)]
    titles = [f"{rule}: {'W' if model == W else 'X'}" for rule, model in columns]
    ordered = sorted(cases(), key=lambda case: (list(ATTACKS).index(case[0]), case[1]))
    for key, wanted in ((TEXTS, ordered), (IMAGES, ordered),
                        ("triggered", [case for case in ordered if case[0] in SEEN])):
        print(f"{key}, %\n\n| attack | malicious | {' | '.join(titles)} |")
        print("|---|---|" + "---|" * len(titles))
        for attack, malicious in wanted:
            cells = [cell(attack, malicious, rule, model, key) for rule, model in columns]
            print(f"| {attack} | {malicious} of {CLIENTS} | {' | '.join(cells)} |")
        print()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="41")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rules", default=";".join(RULES))
    options = parser.parse_args()
    for rule in options.rules.split(";"):
        if rule not in RULES:
            parser.error(f"--rules {rule}: expected some of {'; '.join(RULES)}")
    runs = [(int(seed), options.rounds, attack, malicious, rule)
            for seed, (attack, malicious), rule in itertools.product(
                options.seeds.split(","), cases(), options.rules.split(";"))]
    run_missing(options.out, FIELDS, runs, measured)
    tables(options.out, options.rounds)


if __name__ == "__main__":
    main()
