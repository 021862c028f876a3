"""What the shipped presets promise in their comments."""

import json
import re
import shlex
from operator import attrgetter

import pytest
import torch
import transformers as hf

from tapfl.cli import main
from tapfl.config import load_config, preset_text
from tapfl.data.participants import load_federation
from tapfl.model.foundation import build_foundation
from tests.conftest import PAIR


def _differences(one, other, place=""):
    """The dotted keys in which two nested mappings differ."""
    found = set()
    for key in one.keys() | other.keys():
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= _differences(a, b, f"{place}{key}.")
        elif a != b:
            found.add(f"{place}{key}")
    return found


@pytest.mark.parametrize(("name", "expected"), [
    ("flava-100", {"federation.groups", "train.cohort"}),
    ("flava-deep", {"backbone.layers_per_stage"}),
])
def test_variants_of_flava_differ_where_they_say(name, expected):
    flava, variant = (load_config(n).model_dump() for n in ("flava", name))
    assert _differences(flava, variant) == expected


# The table hyperparams-setup: FLAVA's value and ViLT's.
HYPERPARAMETERS = {
    "train.cohort": (2, 2), "train.batch_size": (128, 128), "lora.encoder_rank": (8, 4),
    "lora.attention_rank": (16, 8), "lora.expert_rank": (4, 4), "lora.dropout": (0.3, 0.3),
    "feddat.bottleneck": (32, 32), "tap.temperature": (1, 1), "disentafl.weight": (0.5, 0.5),
    "tap.distill_weights.image_generation": (2e-3, 2e-3),
    "tap.distill_weights.text_generation": (1, 1),
    "tap.distill_weights.image_classification": (2e-3, 2e-3),
    "tap.distill_weights.text_classification": (2e-3, 2e-3), "feddat.kl_weight": (2e-3, 2e-3),
    "train.lr_initial": (1e-4, 1e-5), "train.lr": (3e-4, 5e-5),
    "perfedavg.inner_lr_initial": (1e-4, 1e-5), "perfedavg.inner_lr": (3e-4, 5e-5),
    "train.weight_decay": (0.01, 0.01), "train.warmup_rounds": (20, 20),
    "train.local_steps": (20, 20), "post.steps": (50, 50), "train.rounds": (200, 200),
}


@pytest.mark.parametrize(("number", "name"), [
    (0, "flava"), (0, "flava-deep"), (0, "flava-standard"), (1, "vilt"), (1, "vilt-standard")])
def test_the_papers_hyperparameters(number, name):
    config = load_config(name)
    for key, values in HYPERPARAMETERS.items():
        assert attrgetter(key)(config) == values[number], key


@pytest.mark.parametrize("name", ["flava", "vilt"])
def test_the_papers_margins(name):
    margins = load_config(name).tap.margins
    assert (margins.image_generation, margins.text_classification) == (0.005, 0.005)
    assert (margins.image_classification, margins.text_generation) == (0.01, 0.01)


def test_the_papers_100_clients():
    config = load_config("flava-100")
    assert config.train.cohort == 5
    assert config.federation.groups == 10
    assert len(load_federation(config.federation).clients) * config.federation.groups == 100


def test_the_deeper_backbone_has_one_more_layer_a_stage(capsys):
    assert load_config("flava-deep").backbone.layers_per_stage == 2
    totals = {}
    for name in ("flava", "flava-deep"):
        assert main(["model", name, "--json"]) == 0
        totals[name] = json.loads(capsys.readouterr().out)["frozen"]
    layer = hf.FlavaConfig().multimodal_config
    width, inner = layer.hidden_size, layer.intermediate_size
    size = 4 * (width + 1) * width + (width + 1) * inner + (inner + 1) * width + 4 * width
    assert totals["flava-deep"] - totals["flava"] == 2 * size
    assert layer.num_hidden_layers == 6


@pytest.fixture
def folders(tmp_path):
    """Two tiny encoders, as the library saves them."""
    for modality in ("image", "text"):
        fields = dict(PAIR[modality])
        config = hf.AutoConfig.for_model(fields.pop("model_type"), **fields)
        hf.AutoModel.from_config(config).save_pretrained(tmp_path / modality)
    return tmp_path


def test_a_pair_takes_real_weights_as_its_comment_says(folders, capsys):
    (command,) = re.findall(r"--set '.*'", preset_text("pair"))
    image, text = folders / "image", folders / "text"
    for folder in (image, text):
        command = command.replace("FOLDER_OR_HUB_ID", str(folder), 1)
    arguments = shlex.split(command)
    assert main(["model", "pair", "--json", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["weights"] == f"{image} + {text}"
    assert not summary["random"]
    base = build_foundation(load_config("pair", arguments[1:]).foundation)
    query = hf.AutoModel.from_pretrained(text).encoder.layer[-1].attention.self.query.weight
    assert torch.equal(base.layers[-1].query.weight, query)


def test_a_random_pair_has_the_sizes_of_its_comment(capsys):
    assert main(["model", "pair", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["frozen"], summary["trainable"]) == (44_174_592, 16_428_963)
    assert summary["random"]


def test_an_architecture_replaces_the_default_of_a_pair():
    base = build_foundation(load_config(
        "pair", [f"foundation.architecture={json.dumps(PAIR)}"]).foundation)
    assert base.encoders["image"].width == 16
    assert base.vocabulary == 120
