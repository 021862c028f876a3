"""The examples run as printed, with fewer steps."""

import re
from pathlib import Path

import pytest
import yaml

import tapfl
from tapfl.cli import main

ROOT = Path(__file__).parent.parent
CLINICS = ROOT / "examples" / "clinics"


def test_clinics(tmp_path, capsys):
    pytest.importorskip("datasets")
    out = tmp_path / "clinics"
    few = ["train.rounds=2", "train.local_steps=1", "post.steps=1", "methods=[fedavg, tap]",
           "data.test=12"]
    assert main(["run", str(CLINICS / "clinics.yaml"), "--quiet", "--threads", "1",
                 "--out", str(out), *(word for setting in few for word in ("--set", setting))]) == 0
    model = tapfl.load(out, client="radiology", device="cpu")
    answer = model.predict("xray", CLINICS / "radiology" / "nodule" / "03.png")
    assert set(answer["probabilities"]) == {"clear", "nodule", "fracture"}
    capsys.readouterr()
    assert main(["predict", str(out), "--client", "ward", "--task", "ask", "--file",
                 str(CLINICS / "ward" / "questions.jsonl"), "--out",
                 str(tmp_path / "answers.jsonl")]) == 0
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 180


def test_the_document_shows_the_examples_file():
    text = (ROOT / "docs" / "own-data.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    assert yaml.safe_load(shown) == yaml.safe_load((CLINICS / "federation.yaml").read_text())
