"""``tapfl bound``: what it prints, its JSON, its figure, and bad input."""

import json
import sys

import pytest

from tapfl.cli import main
from tapfl.engine.run import run
from tests.experiment import FEDERATION, tiny_experiment


def tapfl(capsys, *words):
    status = main(["bound", *map(str, words)])
    out = capsys.readouterr()
    return status, out.out, out.err


def found(capsys, *words):
    status, out, err = tapfl(capsys, *words, "--json")
    assert status == 0, err
    return json.loads(out)


def test_a_layout_by_hand(capsys):
    value = found(capsys, "flava", "--local-steps", 2, "--rounds", 1, "--smoothness", 0.5,
                  "--noise", 2, "--heterogeneity", 3, "--gap", 7, "--step-size", 0.01)
    assert (value["R"], value["clients"], len(value["blocks"])) == (38, 30, 39)
    assert value["max_step_size"] == pytest.approx(1 / 48)
    assert value["C_K"] == pytest.approx(sum(1 / k for k in value["K_r"].values()))
    assert value["Z"] == pytest.approx(3 * 39)
    assert value["terms"]["gap"] == pytest.approx(8 * 7 / 0.01)
    assert value["terms"]["noise"] == pytest.approx(16 * 0.5 * 2 * value["C_K"] * 2 * 0.01)
    assert value["terms"]["heterogeneity"] == pytest.approx(48 * 0.5 * 4 * 117 * 0.01)
    assert value["terms"]["drift"] == pytest.approx(16 * 8 * 0.25 * (38 * 2 + 117) * 1e-4)
    assert value["total"] == pytest.approx(sum(value["terms"].values()))
    assert sum(b["share"] for b in value["blocks"]) == pytest.approx(
        1 - value["terms"]["gap"] / value["total"])
    assert set(value["forms"]) == {"theorem", "proof", "weighted"}
    assert len(value["pairs"]) == 8
    assert value["pairs"][-1]["totals"]["theorem"] == pytest.approx(value["total"])
    assert set(value["origins"].values()) == {"given"}


def test_single_blocks_and_schedules(capsys):
    value = found(capsys, "miniature", "--heterogeneity", "0", "--heterogeneity",
                  "encoder/image=4", "--step-size", "diminishing", "--rounds", "3")
    zeta = {b["name"]: b["zeta2"] for b in value["blocks"]}
    assert {name for name, z in zeta.items() if z} == {"encoder/image"}
    assert max(value["blocks"], key=lambda b: b["cost"])["name"] == "encoder/image"
    assert value["step_sizes"]["last"] == pytest.approx(value["max_step_size"] / 3)
    steps = found(capsys, "miniature", "--step-size", "1e-4,1e-5", "--rounds", "2")["step_sizes"]
    assert (steps["first"], steps["last"]) == (1e-4, 1e-5)
    steps = found(capsys, "miniature", "--step-size", "1e-4/(t+1)", "--rounds", "4")["step_sizes"]
    assert steps["last"] == pytest.approx(1e-4 / 4)


def test_a_federation_file_and_what_is_printed(tmp_path, capsys):
    (tmp_path / "f.yaml").write_text(FEDERATION)
    status, out, _ = tapfl(capsys, tmp_path / "f.yaml", "--figure", tmp_path / "f.svg")
    assert status == 0
    assert "4 clients" in out
    assert "assumed to be 1" in out
    assert "AdamW" in out
    assert "draws 2" in out  # mini's cohort
    assert "image+text vqa" in out
    assert out.count("\n") < 70
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bound")
    run(tiny_experiment(path, methods=["tap"], train={"rounds": 1}), path / "run", device="cpu")
    return path / "run"


def test_a_run(folder, capsys):
    value = found(capsys, folder, "--batches", "2", "--device", "cpu", "--gap", "3")
    assert {k for k, origin in value["origins"].items() if origin == "given"} == {"gap"}
    assert set(value["origins"].values()) == {"estimated", "given"}
    assert value["gap"] == 3
    assert value["estimated_from"]["clients"] == 4
    assert value["tau"] == 2
    assert any("lower estimate" in note for note in value["notes"])
    assert value["total"] > 0
    assert value["max_step_size"] == pytest.approx(1 / (48 * value["L"] * 2))


@pytest.mark.parametrize(("words", "message"), [
    (["flavor"], "flavor: neither a layout or preset, nor a file, nor the folder of a run; did"),
    (["gone.yaml"], "gone.yaml: no such file"),
    (["flava", "--smoothness", "0"], "L: expected a number above 0"),
    (["flava", "--noise", "-1"], "sigma^2: expected a number from 0 on"),
    (["flava", "--gap", "nan"], "gap: expected a finite number"),
    (["flava", "--heterogeneity", "-1"], "zeta^2: expected a number from 0 on"),
    (["flava", "--heterogeneity", "much"], "--heterogeneity much: expected a number, or BLOCK="),
    (["flava", "--heterogeneity", "encoder/imag=1"], "no such block; did you mean 'encoder/image'"),
    (["flava", "--local-steps", "0"], "tau: expected a whole number from 1 on"),
    (["flava", "--rounds", "0"], "--rounds 0: expected at least 1"),
    (["flava", "--step-size", "1"], "step size of round 0: 1 is above 0.001042"),
    (["flava", "--step-size", "fast"], "--step-size fast: expected max, diminishing, a number"),
    (["flava", "--step-size", "1e-4,1e-5"], "2 step sizes for 200 rounds"),
    (["flava", "--figure", "bound.txt"], "--figure bound.txt: expected a name that ends in .svg"),
    (["flava", "--set", "nothing"], "--set nothing: expected key=value")])
def test_bad_input(words, message, capsys):
    status, out, err = tapfl(capsys, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_figure_needs_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = tapfl(capsys, "flava", "--figure", tmp_path / "a.svg")
    assert (status, out) == (2, "")
    assert "matplotlib is not installed; pip install 'tapfl[figures]'" in err


def test_bad_runs(folder, tmp_path, capsys):
    for words, message in (([tmp_path], "run.json: not a readable record"),
                           ([folder, "--set", "train.rounds=3"], "a run has its configuration"),
                           ([folder, "--batches", "1"], "--batches 1: expected at least 2"),
                           ([folder, "--device", "tpu"], "--device tpu: expected")):
        status, _, err = tapfl(capsys, *words)
        assert status == 2
        assert message in err
        assert err.count("\n") == 1
