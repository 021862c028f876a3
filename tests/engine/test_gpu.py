"""Whole runs on a GPU, where there is one: the fast ways give the same as the plain ones."""

import json

import pytest
import torch

from tapfl.engine.run import run
from tapfl.federated.stepper import Stepper
from tests.conftest import FLAVA, PAIR
from tests.experiment import read_events, tiny_experiment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def experiment(folder, **sections):
    folder.mkdir(parents=True, exist_ok=True)
    # Heads of 16, which the kernels know; more steps, so that steps are recorded and played.
    architecture = {**FLAVA, "vocab_size": 600, "num_attention_heads": 2}
    return tiny_experiment(folder, **{
        "foundation": {"architecture": architecture}, "lora": {"dropout": 0.2},
        "train": {"local_steps": 6, "rounds": 4}, "post": {"steps": 6},
        "methods": ["fedavg", "tap", "disentafl", "feddat", "perfedavg"], **sections})


def losses(folder, event="round"):
    return [loss for e in read_events(folder, event) for _, loss in sorted(e["losses"].items())]


def test_the_same_seed_gives_the_same_results(tmp_path):
    config = experiment(tmp_path)
    rows = [run(config, tmp_path / name, device="cuda") for name in ("a", "b")]
    assert rows[0] == rows[1]
    computing = json.loads((tmp_path / "a" / "run.json").read_text())["computing"]
    assert computing["dtype"] == "bfloat16"
    assert computing["graphs"]
    assert computing["layers"]["plain"] == 0


def test_recorded_steps_and_plain_ones_agree(tmp_path):
    run(experiment(tmp_path), tmp_path / "played", device="cuda")
    run(experiment(tmp_path, speed={"graphs": False}), tmp_path / "plain", device="cuda")
    assert losses(tmp_path / "played") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


def test_recorded_steps_of_the_other_baselines_agree(tmp_path):
    methods = ["fedprox", "fedrep", "fedala", "fedavg+ditto", "fedavg+apfl", "hessian-free"]
    variants = {"hessian-free": {"of": "perfedavg", "perfedavg": {"variant": "hf"}}}
    for name, graphs in (("played", True), ("plain", False)):
        run(experiment(tmp_path, methods=methods, variants=variants, speed={"graphs": graphs}),
            tmp_path / name, device="cuda")
    for event in ("round", "personal"):
        played, plain = (losses(tmp_path / name, event) for name in ("played", "plain"))
        assert played
        assert played == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("pieces", [None, 2])
def test_gradients_of_per_fedavg_are_captured(tmp_path, monkeypatch, pieces):
    """Also those of its last step, the adaptation: reconstructions are made by the result."""
    captured, capture = [], Stepper._capture

    def counted(stepper, body, parts):
        captured.append(parts)
        return capture(stepper, body, parts)

    monkeypatch.setattr(Stepper, "_capture", counted)
    variants = {"hessian-free": {"of": "perfedavg", "perfedavg": {"variant": "hf"}}}
    errors, kinds = {}, {}
    for name, graphs in (("played", True), ("plain", False)):
        captured.clear()
        rows = run(experiment(tmp_path, methods=["perfedavg", "hessian-free"], variants=variants,
                              precision="fp32", speed={"graphs": graphs, "micro_batch": pieces}),
                   tmp_path / name, device="cuda")
        errors[name] = [row["value"] for row in rows if row["metric"] == "mse"]
        kinds[name] = len(captured)
    assert kinds["played"] > 0
    assert kinds["plain"] == 0
    assert errors["played"] == pytest.approx(errors["plain"], rel=1e-3)


def test_half_precision_follows_full_precision(tmp_path):
    run(experiment(tmp_path, lora={"dropout": 0.0}), tmp_path / "fast", device="cuda")
    others = {"plain": {"speed": {"kernels": False}}, "full": {"precision": "fp32"}}
    for name, sections in others.items():
        run(experiment(tmp_path, lora={"dropout": 0.0}, **sections), tmp_path / name,
            device="cuda")
    full = losses(tmp_path / "full")
    assert losses(tmp_path / "fast") == pytest.approx(full, rel=0.05)
    # A tiny model far from converged: one of its 40 losses was 5.6% away on an H200.
    assert losses(tmp_path / "plain") == pytest.approx(full, rel=0.06)


def test_images_that_do_not_fit_are_fetched(tmp_path):
    resident = run(experiment(tmp_path), tmp_path / "resident", device="cuda")
    fetched = run(experiment(tmp_path, speed={"resident_gb": 0.0}), tmp_path / "fetched",
                  device="cuda")
    assert resident == fetched


@pytest.mark.parametrize("resident_gb", [None, 0.0])
def test_curves_change_nothing(tmp_path, resident_gb):
    speed = {"resident_gb": resident_gb}
    without = run(experiment(tmp_path, speed=speed), tmp_path / "without", device="cuda")
    config = experiment(tmp_path, speed=speed, evaluation={"every": 2, "sample": 4})
    assert run(config, tmp_path / "with", device="cuda") == without
    assert read_events(tmp_path / "with", "curve")


def test_layers_whose_norm_comes_after_go_through_the_kernels(tmp_path):
    two = {"num_attention_heads": 2, "hidden_size": 32}
    pair = {"name": "pair", "architecture": {
        "image": {**PAIR["image"], **two}, "text": {**PAIR["text"], **two, "vocab_size": 600}}}
    for name, speed in (("fast", {}), ("plain", {"kernels": False})):
        run(experiment(tmp_path, foundation=pair, lora={"dropout": 0.0}, speed=speed),
            tmp_path / name, device="cuda")
    layers = {name: json.loads((tmp_path / name / "run.json").read_text())["computing"]["layers"]
              for name in ("fast", "plain")}
    assert layers["fast"]["plain"] == layers["plain"]["kernels"] == 0
    assert losses(tmp_path / "fast") == pytest.approx(losses(tmp_path / "plain"), rel=0.06)


def test_recorded_steps_in_pieces_and_plain_ones_agree(tmp_path):
    methods = ["tap", "feddat", "perfedavg"]
    for name, graphs in (("played", True), ("plain", False)):
        run(experiment(tmp_path, methods=methods, speed={"graphs": graphs, "micro_batch": 2}),
            tmp_path / name, device="cuda")
    assert losses(tmp_path / "played") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)
