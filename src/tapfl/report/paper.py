"""The paper's published figures, and its names for methods, data sets and metrics.

The figures in paper.csv are those printed in the tables of "TAP: Two-Stage Adaptive Personalization
of Multi-Task and Multi-Modal Foundation Models in Federated Learning" by Seohyun Lee, Wenzhi Fang,
Dong-Jun Han, Seyyedali Hosseinalipour and Christopher G. Brinton: one row per table, model, method,
data set and metric, with the deviation where one is printed. ``table`` is the label of the table in
the paper. The rows ``welch-t-test`` say on what share of the metrics (in percent) TAP is
significantly better than a method.

The paper does not say what its deviations are taken over. Its Welch tests come out (17 of 18
shares) if they are over all clients of four seeds. The shares are the same whether a deviation
divides by n or by n - 1, so they do not show which.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib import resources

from tapfl.errors import TapflError, nearest
from tapfl.evaluation.metrics import GENERAL, metric_kind
from tapfl.tasks import (
    IMAGE_CLASSIFICATION,
    IMAGE_GENERATION,
    TEXT_CLASSIFICATION,
    TEXT_GENERATION,
)

METHODS = {
    "local": "Local", "fedavg": "FedAvg", "fedavg+post": "FedAvg + Post-train",
    "perfedavg": "Per-FedAvg", "perfedavg+post": "Per-FedAvg + Post-train",
    "disentafl": "DisentAFL", "disentafl+post": "DisentAFL + Post-train",
    "feddat": "FedDAT", "feddat+post": "FedDAT + Post-train",
    "fedavg+post2": "FedAvg + 2 x P", "disentafl+post2": "DisentAFL + 2 x P",
    "tap": "TAP", "tap-nokd": "TAP, no KD", "tap-validation": "TAP (val)",
    **{f"tap-margins-{low}-{high}": f"TAP, margins {low / 100} / {high / 100}"
       for low, high in ((1, 4), (2, 5), (5, 10))},
}
# What the tables call methods in their own context. The lower margin is that of image generation
# and text classification.
_ALIASES = {"No KD": "tap-nokd", "KD": "tap", "TAP (train)": "tap",
            "0.01 / 0.04": "tap-margins-1-4", "0.02 / 0.05": "tap-margins-2-5",
            "0.05 / 0.1": "tap-margins-5-10", **{name: method for method, name in METHODS.items()}}
DATASETS = {
    "tiny-imagenet": ("Tiny-ImageNet", IMAGE_CLASSIFICATION),
    "cifar100": ("CIFAR-100", IMAGE_CLASSIFICATION),
    "fmnist": ("FMNIST", IMAGE_GENERATION),
    "caltech256": ("Caltech-256", IMAGE_GENERATION),
    "agnews": ("AG News", TEXT_CLASSIFICATION),
    "mmlu": ("MMLU", TEXT_GENERATION),
    "vqa": ("VQA", TEXT_GENERATION),
    "commongen": ("CommonGen", TEXT_GENERATION),
}
METRICS = {"accuracy": "Acc", "mse": "MSE", "bertscore": "BS", "meteor": "METEOR"}
# The two families' averages are both called "Avg. Gen."; the metric tells them apart.
_AVERAGES = {("Avg. Class.", "Acc"): IMAGE_CLASSIFICATION, ("Avg. Gen.", "MSE"): IMAGE_GENERATION,
             ("Avg. Gen.", "BS"): TEXT_GENERATION, ("Avg. Gen.", "METEOR"): TEXT_GENERATION}
# A preset's tables. Where two of them print the same method, the first counts.
SETTINGS = {
    "flava": ("FLAVA", ("main-img-combined", "main-txt", "kd-combined-img", "kd-txt",
                        "2p-flava-image", "2p-text")),
    "vilt": ("ViLT", ("main-img-combined", "main-txt", "kd-combined-img", "kd-txt",
                      "2p-vilt-image", "2p-text")),
    "flava-margins": ("FLAVA", ("margin-flava-image", "margin-text", "main-img-combined",
                                "main-txt")),
    "vilt-margins": ("ViLT", ("margin-vilt-image", "margin-text", "main-img-combined", "main-txt")),
    "flava-100": ("FLAVA", ("appendix-flava-img-100clients", "appendix-txt-100clients")),
    "flava-deep": ("FLAVA", ("appx-flava-img-deep", "appx-txt-deep")),
    "flava-validation": ("FLAVA", ("appendix-val-img", "appendix-val-txt")),
    "flava-standard": ("FLAVA", ("unified-flava-image", "unified-txt")),
    "vilt-standard": ("ViLT", ("unified-vilt-img", "unified-txt")),
}
# Here the paper's averages over text data sets are plain; elsewhere they weigh by clients.
PLAIN_AVERAGES = frozenset({"flava-100", "flava-validation"})


@dataclass(frozen=True)
class Figure:
    """A published figure, in the paper's own words."""

    table: str
    model: str
    method: str
    dataset: str
    metric: str
    mean: float
    deviation: float | None


@functools.cache
def figures() -> tuple[Figure, ...]:
    """Return all published figures."""
    text = (resources.files("tapfl") / "report" / "paper.csv").read_text(encoding="utf-8")
    return tuple(Figure(row["table"], row["model"], row["method"], row["dataset"], row["metric"],
                        float(row["mean"]), float(row["std"]) if row["std"] else None)
                 for row in csv.DictReader(text.splitlines()))


def published(setting: str) -> dict[tuple[str, str, str], Figure]:
    """Return a setting's figures by method, data set and kind of metric, all in tapfl's names.

    An average has the kind of its tasks in place of a data set.
    """
    if setting not in SETTINGS:
        raise TapflError(f"--paper: the paper has no tables of '{setting}'"
                         + nearest(setting, SETTINGS))
    model, tables = SETTINGS[setting]
    datasets = {name: dataset for dataset, (name, _) in DATASETS.items()}
    metrics = {name: metric for metric, name in METRICS.items()}
    found: dict[tuple[str, str, str], Figure] = {}
    for figure in sorted((f for f in figures() if f.model == model and f.table in tables),
                         key=lambda f: tables.index(f.table)):
        method = _ALIASES.get(figure.method)
        dataset = datasets.get(figure.dataset) or _AVERAGES[figure.dataset, figure.metric]
        if method is not None:
            found.setdefault((method, dataset, metrics[figure.metric]), figure)
    return found


def welch_shares(setting: str) -> dict[str, float]:
    """Return on what share of the metrics, in percent, TAP is better than each method."""
    model, _ = SETTINGS[setting]
    return {_ALIASES[figure.method]: figure.mean for figure in figures()
            if (figure.table, figure.model) == ("welch-t-test", model)}


def method_name(method: str) -> str:
    """Return the paper's name of a method; one that it does not have keeps its own."""
    return METHODS.get(method, method)


def dataset_name(dataset: str) -> str:
    """Return the paper's name of a data set; one that it does not have keeps its own."""
    return DATASETS[dataset][0] if dataset in DATASETS else dataset


def metric_name(metric: str) -> str:
    """Return the paper's name of a metric, without the model that it depends on."""
    kind = metric_kind(metric)
    return ("general " if metric.startswith(GENERAL) else "") + METRICS.get(kind, kind)
