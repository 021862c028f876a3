from collections import Counter
from fractions import Fraction

import pytest

from tapfl.config import FederationConfig, load_config, preset_names
from tapfl.data.participants import load_federation
from tapfl.errors import TapflError
from tapfl.evaluation.metrics import LOWER_IS_BETTER
from tapfl.evaluation.significance import ALPHA, Sample, welch
from tapfl.report.paper import (
    DATASETS,
    METHODS,
    PLAIN_AVERAGES,
    SETTINGS,
    dataset_name,
    figures,
    method_name,
    metric_name,
    published,
)
from tapfl.tasks import IMAGE_CLASSIFICATION, IMAGE_GENERATION, TEXT_GENERATION

GROUPS, SEEDS = 3, 4


def clients(layout):
    """Return how many clients each data set has in the paper's main experiments."""
    file = load_federation(FederationConfig(layout=layout, groups=GROUPS))
    return {task: count * GROUPS
            for task, count in Counter(t for c in file.clients for t in c.tasks).items()}


def significant(setting, method):
    """Return on what share of the metrics TAP is better than a method by Welch's test."""
    found, counts, wins = published(setting), clients(setting), []
    for (of, dataset, metric), mine in found.items():
        if of != "tap" or dataset not in DATASETS:
            continue
        other = found[method, dataset, metric]
        size = counts[dataset] * SEEDS
        test = welch(Sample(mine.mean, mine.deviation, size),
                     Sample(other.mean, other.deviation, size))
        better = test.difference < 0 if metric in LOWER_IS_BETTER else test.difference > 0
        wins.append(better and test.p < ALPHA)
    return 100 * sum(wins) / len(wins), len(wins)


def test_the_papers_significance_comes_out_of_its_figures():
    """All clients of four seeds, taken as independent: 17 of the 18 shares come out."""
    differ = []
    for figure in (f for f in figures() if f.table == "welch-t-test"):
        setting = figure.model.lower()
        method = next(m for m, name in METHODS.items() if name == figure.method)
        share, metrics = significant(setting, method)
        assert metrics == {"flava": 11, "vilt": 9}[setting]
        if abs(share - figure.mean) > 0.06:
            differ.append((setting, method, round(share, 1), figure.mean))
    # TAP against Local on MMLU's BERTScore: p = 0.03 by the printed figures.
    assert differ == [("vilt", "local", 66.7, 55.6)]
    assert sum(f.table == "welch-t-test" for f in figures()) == 18


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_the_papers_averages(setting):
    """Plain over image data sets; over text data sets by their clients, or plain."""
    found = published(setting)
    layout = SETTINGS[setting][0].lower()
    checked, wrong = 0, []
    for (method, kind, metric), figure in found.items():
        if kind in DATASETS:
            continue
        names = [d for d in clients(layout) if DATASETS[d][1] == kind]
        by_clients = kind == TEXT_GENERATION and setting not in PLAIN_AVERAGES
        weights = [clients(layout)[d] if by_clients else 1 for d in names]
        mean = sum(w * found[method, d, metric].mean for w, d in zip(weights, names, strict=True)
                   ) / sum(weights)
        checked += 1
        # Printed figures are rounded, and so are those that they are averages of.
        if abs(mean - figure.mean) > (1.2e-4 if metric == "mse" else 0.0151):
            wrong.append((method, metric))
    assert checked >= 12
    # One row of one table differs, by 0.09 and 0.15.
    assert wrong == ([("perfedavg", "bertscore"), ("perfedavg", "meteor")]
                     if setting == "flava-standard" else [])


def test_what_a_setting_holds():
    flava = published("flava")
    assert flava["tap", "mmlu", "bertscore"].mean == 46.75
    assert flava["tap", "mmlu", "bertscore"].deviation == 5.58
    assert flava["tap", IMAGE_CLASSIFICATION, "accuracy"].mean == 52.07
    assert flava["tap-nokd", "cifar100", "accuracy"].mean == 56.82
    assert ("fedavg+post2", "agnews", "accuracy") in flava
    vilt = published("vilt")
    assert ("tap", "cifar100", "accuracy") not in vilt
    assert vilt["local", IMAGE_GENERATION, "mse"].deviation is None
    assert published("flava-100")["tap", "fmnist", "mse"].mean == 0.5961
    assert len(figures()) == 945 + 18


def test_tables_of_margins_and_of_validation_losses_have_their_own_names():
    flava, vilt = published("flava-margins"), published("vilt-margins")
    assert flava["tap-margins-1-4", IMAGE_CLASSIFICATION, "accuracy"].mean == 51.85
    assert flava["tap-margins-5-10", IMAGE_GENERATION, "mse"].mean == 0.5014
    assert vilt["tap-margins-2-5", "fmnist", "mse"].mean == 0.6071
    assert {m for m, *_ in vilt if m.startswith("tap-margins")} == {
        "tap-margins-1-4", "tap-margins-2-5", "tap-margins-5-10"}
    # The usual margins stand in the main tables.
    assert flava["tap", "mmlu", "bertscore"] == published("flava")["tap", "mmlu", "bertscore"]
    validation = published("flava-validation")
    for method, name in (("tap", "TAP (train)"), ("tap-validation", "TAP (val)")):
        assert validation[method, "cifar100", "accuracy"].method == name
    assert method_name("tap-margins-5-10") == "TAP, margins 0.05 / 0.1"


def test_settings_and_methods_are_those_of_the_presets():
    assert set(SETTINGS) - set(preset_names()) == {
        "flava-validation", "flava-margins", "vilt-margins"}
    for name in ("flava", "vilt"):
        assert set(load_config(name).methods) <= set(METHODS)
        file = load_federation(FederationConfig(layout=name, groups=1))
        for task, entry in file.tasks.items():
            assert DATASETS[task][1] == entry.kind
        assert all(isinstance(share, Fraction) for c in file.clients for share in c.tasks.values())


def test_names():
    assert method_name("fedavg+post") == "FedAvg + Post-train"
    assert method_name("prox:FedProx+tap") == "prox:FedProx+tap"
    assert (dataset_name("agnews"), dataset_name("x-rays")) == ("AG News", "x-rays")
    assert metric_name("bertscore(all-MiniLM,6)") == "BS"
    assert metric_name("general_accuracy") == "general Acc"
    assert metric_name("token_f1") == "token_f1"


def test_an_unknown_setting():
    with pytest.raises(TapflError, match="no tables of 'flawa'; did you mean 'flava'"):
        published("flawa")
