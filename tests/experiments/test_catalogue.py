"""Every experiment of every model is a valid configuration, and asks for what it says."""

import re
import runpy
from pathlib import Path

import pytest

from tapfl.config import Config
from tapfl.data.participants import load_federation
from tapfl.errors import TapflError
from tapfl.experiments.catalogue import (
    ALL,
    CATALOGUE,
    LEADS,
    MARGINS,
    MODELS,
    RULES,
    STRONG_KD,
    find_experiments,
)
from tapfl.experiments.plan import needed_models
from tapfl.experiments.write import _FIGURES, _LAYOUTS, _setting
from tapfl.methods import method_specs
from tapfl.report.paper import METHODS

NAMES = ["main", "kd", "margins", "2p", "standard", "deep", "clients100", "validation", "footprint",
         "replacements", "significance", "criteria", "skew", "data", "faults"]


def models_of(experiment, model, scale, part=0):
    return needed_models(experiment.parts[part], MODELS[model], scale == "small", 41, None, "")


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_all_experiments_are_valid(model, scale):
    found = find_experiments([ALL], model, scale)
    assert [each.name for each in found] == NAMES == list(CATALOGUE)
    for experiment in found:
        assert experiment.layout in _LAYOUTS
        assert experiment.layout in _FIGURES
        assert len({part.title for part in experiment.parts}) == len(experiment.parts)
        for index, part in enumerate(experiment.parts):
            needed = models_of(experiment, model, scale, index)
            assert [each.spec.name for each in needed] == list(part.methods)
            assert {name for pair in part.leads for name in pair} <= set(part.methods)
            assert all(not each.config.checkpoint.models for each in needed)
            assert len({each.key for each in needed}) == len(needed)


@pytest.mark.parametrize(("names", "model", "scale", "message"), [
    (["mian"], "mini", "small", "unknown experiment 'mian'; did you mean 'main'"),
    (["main"], "flawa", "small", "--model flawa: no such model; did you mean 'flava'"),
    (["main"], "mini", "tiny", "--scale tiny: expected small or paper"),
    (["all", "nil"], "mini", "small", "unknown experiment 'nil'")])
def test_wrong_names(names, model, scale, message):
    with pytest.raises(TapflError, match=message):
        find_experiments(names, model, scale)


def test_each_experiment_once_in_the_order_asked():
    found = find_experiments(["skew", "main", "skew"], "mini", "small")
    assert [each.name for each in found] == ["skew", "main"]


def test_margins_are_those_of_the_papers_tables():
    (experiment,) = find_experiments(["margins"], "flava", "paper")
    for each in models_of(experiment, "flava", "paper")[1:]:
        low, high = (float(x) for x in METHODS[each.spec.name].partition("margins ")[2].split("/"))
        margins = each.spec.config.tap.margins
        assert (margins.image_generation, margins.text_classification) == (low, low)
        assert (margins.image_classification, margins.text_generation) == (high, high)
    assert len(MARGINS) == 3


def test_clients100_has_a_hundred_clients_of_which_five_take_part():
    (experiment,) = find_experiments(["clients100"], "flava", "paper")
    config = models_of(experiment, "flava", "paper")[0].config
    assert len(load_federation(config.federation).clients) * config.federation.groups == 100
    assert config.train.cohort == 5


def test_the_public_faults_change_what_they_name():
    (experiment,) = find_experiments(["faults"], "mini", "paper")
    steps = MODELS["mini"].config(False).post.steps
    found = {part.title: {each.spec.name: each.spec for each in models_of(
        experiment, "mini", "paper", index)} for index, part in enumerate(experiment.parts)}
    assert set(found.pop("No fault")) == {"fedavg", "fedavg+post", "tap"}
    few, plain = steps // 4, "fedavg"
    expected = {  # the federated method; whether TAP sums its KL; steps after federation
        "The averaged backbone is never sent": ("UnsentBackbone", False, steps),
        "P counts micro-batches": (plain, False, few),
        "The KL is summed, not averaged": (plain, True, steps),
        "These three": ("UnsentBackbone", True, few),
        "The text head ignores its input": ("UnheardInput", False, steps),
        "The head ignores its input, and P counts micro-batches": ("UnheardInput", False, few),
        "Texts are scored past their end": ("PastTheEnd", False, steps),
        "All five": ("AllOfFedAvg", True, few)}
    assert set(found) == set(expected)
    for title, (federated, summed, after) in expected.items():
        before, post, tap = found[title].values()
        assert {s.federated.rpartition(":")[2] for s in (before, post, tap)} == {federated}
        assert [s.config.post.steps for s in (post, tap)] == [
            steps if post.name == "fedavg+post" else after, after]
        assert ["Summed" in s.personalizer for s in (before, post, tap)] == [False, False, summed]
    for part in experiment.parts:  # TAP's lead over post-training, under the same fault
        ((mine, other),) = part.leads
        assert mine.endswith("tap")
        assert other.endswith("post")


def test_held_out_rules_have_held_out_data():
    (experiment,) = find_experiments(["criteria"], "mini", "small")
    shares = {each.config.federation.holdout for index in range(len(experiment.parts))
              for each in models_of(experiment, "mini", "small", index)
              if each.spec.config.tap.reads_holdout}
    assert shares == {0.1}
    skews = [models_of(experiment, "mini", "small", i)[0].config.federation.dirichlet
             for i in range(len(experiment.parts))]
    assert skews == [None, None, 1.0, 1.0, 0.3, 0.3]


def test_the_papers_figures_stand_beside_the_same_backbone():
    (experiment,) = find_experiments(["standard"], "vilt", "paper")
    assert [_setting(experiment, part, MODELS["vilt"]) for part in experiment.parts] == [
        "vilt-standard", "vilt"]
    (experiment,) = find_experiments(["deep"], "vilt", "paper")  # the paper has FLAVA's alone
    assert _setting(experiment, experiment.parts[0], MODELS["vilt"]) is None
    (experiment,) = find_experiments(["skew"], "flava", "paper")
    assert _setting(experiment, experiment.parts[0], MODELS["flava"]) is None


def test_the_documents_own_experiment(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    path = tmp_path / "own.py"
    path.write_text("from __future__ import annotations\n"
                    "from tapfl.experiments.catalogue import FAMILY, Experiment, Model, Part\n\n"
                    + code)
    experiment = runpy.run_path(str(path))["_batches"](MODELS["mini"], True)
    sizes = [needed_models(part, MODELS["mini"], True, 41, None, "")[0].config.train.batch_size
             for part in experiment.parts]
    assert sizes == [16, 64]
    named = set(re.findall(r"^\| `(\w+)` \| [A-Z]", text, re.M))
    assert named == set(NAMES)


def test_variants_and_leads_stand_on_fedavg():
    config = MODELS["mini"].config(True).model_dump() | {
        "methods": [*RULES, *STRONG_KD], "variants": {**RULES, **STRONG_KD}}
    assert {s.federated for s in method_specs(Config.model_validate(config))} == {"fedavg"}
    assert ("tap", "fedavg+post") in LEADS
