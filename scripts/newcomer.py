"""What a newcomer gets: python scripts/newcomer.py OUT [--data DIR] [--model mini] [--help]

A federation of six clients trains by FedAvg on AG News and Fashion-MNIST: the miniature world's, or
with --data the real ones. Then two newcomers come with AG News, one with few samples and one with
many. Three ways, on the same test samples:

- at once: the stored W, personalised for P steps (`tapfl join`), for several P;
- alone: as many steps from fresh blocks;
- waiting: both take part in N more rounds with everybody (`start`), and then take --then steps.

With --unknown, the first federation has no AG News (CommonGen instead): the task is a new one.
OUT/newcomer.csv has all figures, OUT/newcomer.svg draws their means over seeds (needs matplotlib).
What is there already is not run again.
"""

import argparse
import csv
import statistics
from pathlib import Path

from tapfl.config import load_config
from tapfl.engine.results import read_results
from tapfl.engine.run import run
from tapfl.use.join import join

TASK, OTHER = "agnews", "fmnist"
NEWCOMERS = ("few", "many")
FEDERATION = """\
tasks:
  agnews: {{kind: text_classification, modalities: [text], classes: 4}}
  fmnist: {{kind: image_generation, modalities: [image]}}
{more}clients:
{clients}"""
WAYS = {"tap": ("TAP at once", "tab:orange", "s"),
        "fedavg+post": ("W, post-trained at once", "tab:blue", "o"),
        "alone": ("alone", "tab:gray", "v")}


def options():
    parser = argparse.ArgumentParser(description="What a newcomer gets.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", help="a folder that mirrors the hub's data sets")
    parser.add_argument("--model", default="mini", help="a preset: its foundation and backbone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seeds", default="41", help="a list such as 41,42")
    parser.add_argument("--samples", default="50,500", help="of the two newcomers")
    parser.add_argument("--total", type=int, default=2400, help="AG News' training samples")
    parser.add_argument("--test", type=int, default=400, help="test samples")
    parser.add_argument("--rounds", type=int, default=40, help="of the first federation")
    parser.add_argument("--steps", default="0,5,10,20,40,80", help="values of P")
    parser.add_argument("--waits", default="10,20,40", help="more rounds with everybody")
    parser.add_argument("--then", type=int, default=10, help="P after waiting")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--unknown", action="store_true", help="the task is new to the federation")
    return parser.parse_args()


def numbers(text):
    return [int(part) for part in text.split(",")]


def federation(chosen):
    """Write who holds what; the newcomers' samples are nobody else's."""
    samples = numbers(chosen.samples)
    share = f"{(chosen.total - sum(samples)) // 4}/{chosen.total}"
    old = (["{commongen: 1/4}"] * 4 if chosen.unknown else [f"{{agnews: {share}}}"] * 4)
    old += ["{fmnist: 1/2}"] * 2
    new = [f"{{agnews: {count}/{chosen.total}}}" for count in samples]
    names = [f"old{place}" for place in range(len(old))]
    lines = [f"  - {{name: {name}, tasks: {tasks}}}\n"
             for name, tasks in zip((*names, *NEWCOMERS), (*old, *new), strict=True)]
    more = "  commongen: {kind: text_generation, modalities: [text]}\n" if chosen.unknown else ""
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "federation.yaml"
    path.write_text(FEDERATION.format(more=more, clients="".join(lines)))
    return path, names


def configuration(chosen, path, clients, seed, rounds, steps, start=None):
    """Return the configuration of some clients of the federation."""
    settings = [
        f"seed={seed}", f"threads={chosen.threads}", "methods=[fedavg, fedavg+post]",
        f"federation.file={path.resolve()}", "federation.groups=1",
        f"federation.clients=[{', '.join(clients)}]",
        f"data.source={'hub' if chosen.data else 'miniature'}",
        f"data.train={chosen.total}", f"data.test={chosen.test}", f"train.rounds={rounds}",
        "train.cohort=3", "train.local_steps=5", f"train.batch_size={chosen.batch}",
        "train.lr_initial=1e-3", "train.lr=3e-3", "train.warmup_rounds=5", "lora.dropout=0.0",
        f"post.steps={steps}", "post.lr=3e-3", "evaluation.scores=false", "evaluation.samples=0",
        "evaluation.max_new_tokens=8"]
    if chosen.data:
        settings.append(f"data.folder={chosen.data}")
    if start:
        settings.append(f"start={start}")
    return load_config(chosen.model, settings)


def results(out, make):
    """Return what a run has found; it runs if it has not."""
    if not (out / "results.csv").is_file():
        make()
    return [row for row in read_results(out / "results.csv")
            if row["client"] in NEWCOMERS and row["metric"] == "accuracy"]


def seed_rows(chosen, path, old, seed):
    """Run everything for one seed; yield tidy rows."""
    place = chosen.out / f"seed{seed}"
    base = configuration(chosen, path, old, seed, chosen.rounds, 0)
    results(place / "base", lambda: run(base, place / "base", device=chosen.device))
    for steps in numbers(chosen.steps):
        out = place / f"join{steps}"
        found = results(out, lambda out=out, steps=steps: join(
            place / "base", path, out, alone=True, device=chosen.device, overrides=[
                "methods=[fedavg, fedavg+post, tap]", f"post.steps={steps}",
                f"federation.clients=[{', '.join(NEWCOMERS)}]"]))
        yield from ({"way": row["method"], "rounds": 0, "steps": steps, **row} for row in found)
    before = place / "base"
    for more in numbers(chosen.waits):
        out = place / f"wait{more}"
        config = configuration(chosen, path, [*old, *NEWCOMERS], seed, chosen.rounds + more,
                               chosen.then, before)
        found = results(out, lambda out=out, config=config: run(config, out,
                                                                device=chosen.device))
        yield from ({"way": f"waiting: {row['method']}", "rounds": more, "steps": chosen.then,
                     **row} for row in found)
        before = out


def mean(rows, **wanted):
    """Return the mean over seeds of what fits."""
    found = [row["value"] for row in rows if all(row[k] == v for k, v in wanted.items())]
    return statistics.fmean(found) if found else None


def draw(rows, chosen, out):
    """Draw accuracy over steps, and over rounds, for each newcomer."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tapfl", "font.size": 9})
    steps, waits = numbers(chosen.steps), numbers(chosen.waits)
    figure, axes = plt.subplots(1, 4, figsize=(10, 3), sharey=True, layout="constrained",
                                width_ratios=[2, 1, 2, 1])
    for place, (client, count) in enumerate(zip(NEWCOMERS, numbers(chosen.samples), strict=True)):
        left, right = axes[2 * place], axes[2 * place + 1]
        for way, (label, color, marker) in WAYS.items():
            left.plot(steps, [mean(rows, way=way, client=client, steps=each) for each in steps],
                      color=color, marker=marker, label=label)
        label, color, marker = WAYS["fedavg+post"]
        right.plot([0, *waits],
                   [mean(rows, way="fedavg+post", client=client, steps=chosen.then),
                    *(mean(rows, way="waiting: fedavg+post", client=client, rounds=each)
                      for each in waits)], color=color, marker=marker, label=label)
        left.set_title(f"{count} samples")
        left.set_xlabel("steps P of its own")
        right.set_xlabel(f"more rounds,\nthen P = {chosen.then}")
        for axis in (left, right):
            axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy on AG News (%)")
    axes[0].legend(fontsize=7)
    figure.savefig(out, metadata={"Date": None})


def main():
    chosen = options()
    path, old = federation(chosen)
    rows = [row for seed in numbers(chosen.seeds) for row in seed_rows(chosen, path, old, seed)]
    with (chosen.out / "newcomer.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    seen = dict.fromkeys((row["client"], row["way"], row["rounds"], row["steps"]) for row in rows)
    for client, way, rounds, steps in seen:
        value = mean(rows, client=client, way=way, rounds=rounds, steps=steps)
        print(f"{client:<6} {way:<22} rounds {rounds:>3}  P {steps:>3}  {value:5.1f}")
    draw(rows, chosen, chosen.out / "newcomer.svg")


if __name__ == "__main__":
    main()
