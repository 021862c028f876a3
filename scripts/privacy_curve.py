"""What noise costs: epsilon against each task's score. python scripts/privacy_curve.py --help

Runs one configuration at several levels of noise, writes a table (Markdown) and, with --figure, a
plot. Every run has its folder below --out: what is complete is not run again.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from tapfl.config import load_config
from tapfl.engine.record import read_record
from tapfl.engine.run import run

PLAIN = "no privacy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--mode", default="central", choices=("central", "local"))
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--noise", default="0,0.01,0.03,0.1,0.3,1,3,10", help="multipliers")
    parser.add_argument("--seeds", default="41", help="seeds, with commas between them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    levels = [PLAIN, *options.noise.split(",")]
    found = {level: _scores(options, level) for level in levels}
    print(_table(found))
    if options.figure:
        _draw(found, options.figure)


def _scores(options, level):
    """Return (epsilon, {(method, metric): mean over data sets and seeds})."""
    values, epsilon = defaultdict(list), None
    for seed in options.seeds.split(","):
        private = [] if level == PLAIN else [
            f"privacy.mode={options.mode}", f"privacy.clip={options.clip}",
            f"privacy.noise={level}"]
        config = load_config(options.preset, [*options.overrides, *private, f"seed={seed}"])
        out = options.out / f"{level.replace(' ', '-')}-{seed}"
        rows = run(config, out, resume=(out / "run.json").is_file())
        for promise in read_record(out).privacy.values():
            epsilon = promise.epsilon
        for row in rows:
            if not row["metric"].startswith("general_") and row["method"] in config.methods:
                values[row["method"], row["dataset"], row["metric"]].append(row["value"])
    return epsilon, {key: sum(each) / len(each) for key, each in values.items()}


def _table(found):
    keys = [key for key in found[PLAIN][1] if key[2] != "exact_match"]
    datasets = list(dict.fromkeys(key[1:] for key in keys))
    lines = ["| noise | epsilon | method | " + " | ".join(f"{d} {m}" for d, m in datasets) + " |",
             "|---|---|---|" + "---:|" * len(datasets)]
    for level, (epsilon, scores) in found.items():
        shown = "" if level == PLAIN else "infinite" if epsilon is None else f"{epsilon:.3g}"
        for method in dict.fromkeys(key[0] for key in keys):
            cells = (f"{scores[method, d, m]:.3f}" for d, m in datasets)
            lines.append(f"| {level} | {shown} | {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _draw(found, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    keys = [key for key in found[PLAIN][1] if key[2] == "accuracy"]
    levels = [(e, s) for e, s in found.values() if e is not None]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for number, key in enumerate(keys):
        line, = axes.plot([e for e, _ in levels], [s[key] for _, s in levels], "o-",
                          label=f"{key[1]}, {key[0]}", color=f"C{number}")
        axes.axhline(found[PLAIN][1][key], color=line.get_color(), linestyle=":")
    axes.set(xscale="log", xlabel="epsilon (smaller promises more)", ylabel="accuracy")
    axes.set_xticks([e for e, _ in levels], [f"{e:.3g}" for e, _ in levels])
    axes.set_xticks([], minor=True)
    axes.legend(fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    main()
