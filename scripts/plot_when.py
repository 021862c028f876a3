"""Draw docs/figures/when.svg: python scripts/plot_when.py DIR OUT.svg

DIR is where `tapfl reproduce data criteria --out DIR` has written data.csv and criteria.csv. Each
line is a method's gain over FedAvg + 2P: in accuracy, the mean of the classification data sets; in
squared error, the mean reduction of the two that are reconstructed. Needs matplotlib.
"""

import csv
import statistics
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

BASELINE = "fedavg+post2"
STYLES = {"local": ("local", "tab:gray", "v"),
          "fedavg+post": ("FedAvg + post-training", "tab:gray", "v"),
          "tap": ("TAP", "tab:orange", "s"), "tap-soft": ("tap-soft", "tab:blue", "o"),
          "tap-gap": ("tap-gap", "tab:brown", "P"),
          "tap-merge": ("tap-merge", "tab:red", "X"), "ditto": ("Ditto", "tab:green", "^"),
          "apfl": ("APFL", "tab:purple", "D")}


def means(path):
    """Return the mean by part, method, data set and metric."""
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["part"], row["method"], row["dataset"], row["metric"]): float(row["mean"])
                for row in csv.DictReader(file)
                if row.get("mean") and row["source"] == "tapfl" and row["dataset"] != "average"}


def gain(values, part, method, metric):
    """Return a method's mean gain over the baseline: points of accuracy, or percent of the mse."""
    found = []
    for (where, name, dataset, kind), value in values.items():
        if (where, name, kind) == (part, method, metric):
            other = values[part, BASELINE, dataset, metric]
            found.append(100 * (1 - value / other) if metric == "mse" else value - other)
    return statistics.fmean(found) if found else None


def draw(axis, values, parts, ticks, metric, methods):
    """Draw a line for each method over the parts."""
    for method in methods:
        gains = [gain(values, part, method, metric) for part in parts]
        if None not in gains:
            label, color, marker = STYLES[method]
            axis.plot(range(len(parts)), gains, marker=marker, color=color, label=label)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(parts)), ticks)
    axis.grid(alpha=0.3)


def main(folder, out):
    """Draw the figure."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tapfl", "font.size": 9})
    data, skew = (means(folder / name) for name in ("data.csv", "criteria.csv"))
    sizes = list(dict.fromkeys(key[0] for key in data))
    skews = [part for part in dict.fromkeys(key[0] for key in skew)
             if part.startswith("Nothing held out")]
    figure, axes = plt.subplots(2, 2, figsize=(8, 5), sharex="col", layout="constrained")
    for row, (metric, what) in enumerate((("accuracy", "accuracy, points"),
                                          ("mse", "squared error, % less"))):
        methods = ("tap", "tap-soft") if metric == "mse" else ("local", "tap", "tap-soft")
        draw(axes[row][0], data, sizes, [part.split()[0] for part in sizes], metric, methods)
        draw(axes[row][1], skew, skews, [part.partition(", ")[2] for part in skews], metric,
             ("tap", "tap-soft", "ditto", "apfl"))
        axes[row][0].set_ylabel(f"gain over FedAvg + 2P\n({what})")
        for axis in axes[row]:
            axis.legend(fontsize=8)
    axes[1][0].set_xlabel("training samples of a data set (3 to 9 clients share it)")
    axes[1][1].set_xlabel("label skew between clients")
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
