"""Draw docs/figures/faults.svg: python scripts/plot_faults.py OUT.svg

METEOR of post-training and of TAP on written texts: published, and ours on large subsets with and
without faults (docs/evidence/results, seed 41). Means over clients. Needs matplotlib.
"""

import statistics
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from plot_when import STYLES

from tapfl.engine.results import read_results
from tapfl.report.paper import dataset_name, method_name, published

RESULTS = Path(__file__).parent.parent / "docs" / "evidence" / "results"
TASKS = ("mmlu", "vqa", "commongen")
METHODS = {"fedavg+post": 36, "tap": 22}  # size: the second lies on the first where both are equal
OURS = {"no fault": ("large-41.csv", "fedavg+post", "tap"),
        "three faults, none in the text head": ("large-unsent-41.csv", "all-post", "all-tap"),
        "the text head ignores its input": ("large-heads-41.csv", "unheard-post", "unheard-tap"),
        "the same, fewer steps after federation": ("large-heads-41.csv", "few-unheard-post",
                                                   "few-unheard-tap"),
        "all five faults": ("large-five-41.csv", "five-post", "five-tap")}
PUBLISHED = {"published, FLAVA": "flava", "published, ViLT": "vilt"}
LOST = "g2-9"  # the client whose results without faults are missing


def ours(name, methods):
    """Return the methods' mean METEOR by task, from one of our results."""
    rows = [row for row in read_results(RESULTS / name)
            if row["metric"] == "meteor" and row["client"] != LOST]
    return {task: [statistics.fmean(row["value"] for row in rows
                                    if (row["method"], row["task"]) == (method, task))
                   for method in methods] for task in TASKS}


def theirs(setting):
    """Return the published METEOR by task."""
    figures = published(setting)
    return {task: [figures[method, task, "meteor"].mean for method in METHODS] for task in TASKS}


def draw(axis, pairs):
    """Draw a line from post-training to TAP in each row."""
    for place, pair in enumerate(pairs):
        axis.plot(pair, [place, place], color="tab:gray", linewidth=1.5, zorder=1)
    for number, (method, size) in enumerate(METHODS.items()):
        _, color, marker = STYLES[method]
        axis.scatter([pair[number] for pair in pairs], range(len(pairs)), marker=marker,
                     color=color, label=method_name(method), zorder=2 + number, s=size)
    axis.axhline(len(OURS) - 0.5, color="black", linewidth=0.6)
    axis.grid(alpha=0.3)


def main(out):
    """Draw the figure: a panel for each task, a row for each source of figures."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tapfl", "font.size": 9})
    rows = {title: ours(name, methods) for title, (name, *methods) in OURS.items()}
    rows |= {title: theirs(setting) for title, setting in PUBLISHED.items()}
    figure, axes = plt.subplots(1, len(TASKS), figsize=(9, 2.9), sharey=True, sharex=True,
                                layout="constrained")
    for axis, task in zip(axes, TASKS, strict=True):
        draw(axis, [row[task] for row in rows.values()])
        axis.set_title(dataset_name(task), fontsize=9)
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    axes[0].set_xlim(left=0)
    axes[1].set_xlabel("METEOR")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=2,
                  loc="outside lower left")
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
