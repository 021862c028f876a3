"""Draw docs/figures/faults.svg: python scripts/plot_faults.py OUT.svg

METEOR of post-training and of TAP on written texts: published, and ours on large subsets with and
without faults (docs/evidence/results, seed 41). Means over clients. Needs matplotlib.
"""

import csv
import statistics
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "evidence" / "results"
PAPER = ROOT / "src" / "tapfl" / "report" / "paper.csv"
TASKS = {"mmlu": "MMLU", "vqa": "VQA", "commongen": "CommonGen"}
OURS = {"no fault": ("large-41.csv", "fedavg+post", "tap"),
        "three faults, none in the text head": ("large-unsent-41.csv", "all-post", "all-tap"),
        "the text head ignores its input": ("large-heads-41.csv", "unheard-post", "unheard-tap"),
        "the same, fewer steps after federation": ("large-heads-41.csv", "few-unheard-post",
                                                   "few-unheard-tap"),
        "all five faults": ("large-five-41.csv", "five-post", "five-tap")}
PUBLISHED = ("FLAVA", "ViLT")
LOST = "g2-9"  # the client whose results without faults are missing


def read(path):
    """Return the rows of a CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ours(name, method, task):
    """Return our mean METEOR."""
    return statistics.fmean(float(row["value"]) for row in read(RESULTS / name)
                            if (row["method"], row["task"], row["metric"])
                            == (method, task, "meteor") and row["client"] != LOST)


def published(model, method, dataset):
    """Return the METEOR of the paper's main table."""
    found, = [float(row["mean"]) for row in read(PAPER)
              if (row["table"], row["model"], row["method"], row["dataset"], row["metric"])
              == ("main-txt", model, method, dataset, "METEOR")]
    return found


def main(out):
    """Draw the figure: a panel for each task, a line from post-training to TAP in each row."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tapfl", "font.size": 9})
    rows = [*OURS, *(f"published, {model}" for model in PUBLISHED)]
    figure, axes = plt.subplots(1, len(TASKS), figsize=(9, 2.9), sharey=True, sharex=True,
                                layout="constrained")
    for axis, (task, title) in zip(axes, TASKS.items(), strict=True):
        pairs = [(ours(name, post, task), ours(name, tap, task))
                 for name, post, tap in OURS.values()]
        pairs += [(published(model, "FedAvg + Post-train", title), published(model, "TAP", title))
                  for model in PUBLISHED]
        for place, (post, tap) in enumerate(pairs):
            axis.plot([post, tap], [place, place], color="tab:gray", linewidth=1.5, zorder=1)
        axis.scatter([post for post, _ in pairs], range(len(pairs)), marker="v", color="tab:gray",
                     label="FedAvg + Post-train", zorder=2)
        axis.scatter([tap for _, tap in pairs], range(len(pairs)), marker="s", color="tab:orange",
                     label="TAP", zorder=3, s=22)
        axis.axhline(len(OURS) - 0.5, color="black", linewidth=0.6)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    axes[0].set_xlim(left=0)
    axes[1].set_xlabel("METEOR")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=2,
                  loc="outside lower left")
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
