"""Draw gains over a method with their 95% intervals: python scripts/plot_gains.py OUT.svg CSV...

Each CSV is what `tapfl verdict RUN... --method NAME --against fedavg+post2 --csv FILE` has written.
Squared errors are shown in percent of the baseline's, all else in points. Needs matplotlib.
"""

import csv
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from plot_when import BASELINE, STYLES

METRICS = ("accuracy", "mse", "bertscore", "meteor")


def gains(path):
    """Return the method's name, and its gain with interval by data set and metric."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file)
                if row["what"] == "dataset" and row["against"] == BASELINE]
    found = {}
    for row in rows:
        metric = row["metric"].partition("(")[0]
        if metric in METRICS:
            unit = 100 / float(row["baseline"]) if metric == "mse" else 1.0
            found[row["dataset"], metric] = [unit * float(row[key]) for key in ("gain", "low",
                                                                                "high")]
    return rows[0]["method"], found


def main(out, paths):
    """Draw the figure."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tapfl", "font.size": 9})
    methods = dict(gains(path) for path in paths)
    keys = sorted({key for found in methods.values() for key in found},
                  key=lambda key: (METRICS.index(key[1]), key[0]))
    figure, axis = plt.subplots(figsize=(7.5, 0.5 * len(keys) + 0.8), layout="constrained")
    for number, (method, found) in enumerate(methods.items()):
        label, color, marker = STYLES[method]
        offset = (number - (len(methods) - 1) / 2) * 0.2
        at = [place + offset for place, key in enumerate(keys) if key in found]
        values = [found[key] for key in keys if key in found]
        axis.errorbar([value for value, _, _ in values], at, fmt=marker, color=color, label=label,
                      xerr=[[value - low for value, low, _ in values],
                            [high - value for value, _, high in values]], markersize=4, capsize=2)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(keys)), [f"{data} {'mse, %' if metric == 'mse' else metric}"
                                       for data, metric in keys])
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    axis.set_xlabel("gain over FedAvg + 2P (points; % less squared error)")
    axis.legend(fontsize=8)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
