"""A finished run in use: predictions, exports, and what is refused."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

import tapfl
from tapfl.cli import main
from tapfl.data.prompts import prompt
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.use.card import _chosen
from tests.experiment import tiny_experiment

METHODS = ["fedavg", "fedavg+post", "tap", "feddat", "feddat+post", "local"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("used")
    run(tiny_experiment(folder, methods=METHODS, train={"rounds": 2}), folder / "run")
    Image.new("RGB", (40, 30), (200, 30, 60)).save(folder / "a.png")
    return folder


def load(finished, client, **options):
    return tapfl.load(finished / "run", client=client, device="cpu", **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_model_scores_what_the_run_recorded(finished, method):
    """The test data again, through the loaded model: the same accuracy and error."""
    from tapfl.engine.build import build
    from tapfl.engine.run import stored_config

    context, _ = build(stored_config(finished / "run"), "cpu")
    with (finished / "run" / "results.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["method"] == method]
    model = load(finished, "shapes", method=method)
    _, test = context.federation.splits["tiny-imagenet"]
    pictures = [Image.fromarray(i) for i in test.images.permute(0, 2, 3, 1).numpy()]
    found = [a["label"] for a in model.predict_many("tiny-imagenet", pictures)]
    right = [found[i] == test.classes[test.labels[i]] for i in range(len(test))]
    (row,) = (r for r in rows if r["client"] == "shapes" and r["task"] == "tiny-imagenet")
    assert 100 * np.mean(right) == pytest.approx(float(row["value"]))
    words = load(finished, "words", method=method)
    _, test = context.federation.splits["fmnist"]
    pictures = [Image.fromarray(i) for i in test.images.permute(0, 2, 3, 1).numpy()]
    made = np.stack([a["image"] for a in words.predict_many("fmnist", pictures)])
    made = words.network.normalize(torch.from_numpy(made).permute(0, 3, 1, 2).contiguous())
    error = (made - words.network.normalize(test.images)).square().mean().item()
    (row,) = (r for r in rows if r["client"] == "words" and r["task"] == "fmnist")
    assert error == pytest.approx(float(row["value"]), rel=0.02)  # pixels are rounded and clamped


def test_kinds_of_answers(finished):
    shapes, looks = load(finished, "shapes"), load(finished, "looks")
    assert shapes.card.method == "tap"
    answer = shapes.predict("agnews", text="shares rise")
    assert set(answer["probabilities"]) == {"world", "sports", "business", "science"}
    assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert answer["label"] == next(iter(answer["probabilities"]))
    assert isinstance(looks.predict("vqa", finished / "a.png", "what?")["text"], str)
    image = looks.predict("fmnist", finished / "a.png")["image"]
    assert (image.shape, image.dtype) == ((64, 64, 3), np.uint8)


def test_personal_and_federated_are_different_models(finished):
    personal, federated = (load(finished, "news", model=m).predict("agnews", text="shares rise")
                           for m in ("personal", "federated"))
    assert personal != federated
    assert load(finished, "news", model="federated").card.method == "fedavg"


def test_export_stands_on_its_own(finished, tmp_path, capsys):
    out = tmp_path / "taken"
    assert main(["export", str(finished / "run"), "--client", "shapes", "--out", str(out)]) == 0
    model = tapfl.load(out, device="cpu")
    original = load(finished, "shapes")
    assert model.predict("agnews", text="shares rise") == original.predict("agnews",
                                                                           text="shares rise")
    card = (out / "README.md").read_text()
    assert "| agnews | accuracy |" in card
    assert "random weights" in card
    peft = pytest.importorskip("peft")
    config = peft.PeftConfig.from_pretrained(str(out / "lora" / "text"))
    assert config.r == 2
    assert main(["export", str(finished / "run"), "--client", "shapes", "--out", str(out)]) == 2
    assert "something already" in capsys.readouterr().err
    (out / "model.safetensors").write_bytes(b"broken")
    assert main(["predict", str(out), "--task", "agnews", "--text", "x"]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_files_of_many_inputs(finished, tmp_path, capsys):
    base = ["predict", str(finished / "run"), "--device", "cpu"]
    (tmp_path / "in.csv").write_text("\ufeffid,text\n1,shares rise\n2,the team wins\n")
    out = tmp_path / "out.csv"
    assert main([*base, "--client", "news", "--task", "agnews", "--file",
                 str(tmp_path / "in.csv"), "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [r["id"] for r in rows] == ["1", "2"]
    one = load(finished, "news").predict("agnews", text="the team wins")
    assert rows[1]["prediction"] == one["label"]
    capsys.readouterr()
    Image.new("L", (5, 5), 9).save(tmp_path / "b.png")
    (tmp_path / "in.jsonl").write_text(json.dumps({"image": "b.png", "question": "what?"}) + "\n")
    assert main([*base, "--client", "looks", "--task", "vqa", "--file",
                 str(tmp_path / "in.jsonl")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"image", "question", "prediction"}
    assert main([*base, "--client", "looks", "--task", "fmnist", "--file",
                 str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "made")]) == 0
    assert (tmp_path / "made" / "00000.png").is_file()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--client", "nws", "--task", "agnews", "--text", "x"], "unknown client 'nws'; did you mean"),
    (["--task", "agnews", "--text", "x"], "--client: expected one of shapes, news"),
    (["--client", "news", "--task", "vqa", "--text", "x"], "client 'news' has no task 'vqa'"),
    (["--client", "news", "--task", "agnews", "--image", "a.png"], "takes text"),
    (["--client", "looks", "--task", "vqa", "--text", "x"], "takes image and text: got no image"),
    (["--client", "looks", "--task", "vqa", "--image", "no.png", "--text", "x"],
     "no.png: no such file"),
    (["--client", "looks", "--task", "vqa", "--image", "bad.png", "--text", "x"],
     "bad.png: not a readable picture"),
    (["--client", "news", "--task", "agnews", "--text", " "], "needs a text"),
    (["--client", "news", "--task", "agnews"], "nothing to predict"),
    (["--client", "news", "--task", "agnews", "--file", "no.csv"], "no.csv: cannot be read"),
    (["--client", "news", "--task", "agnews", "--file", "a.png"], "expected a .csv or .jsonl"),
    (["--client", "news", "--task", "agnews", "--file", "none.csv"], "no rows"),
    (["--client", "looks", "--task", "vqa", "--file", "texts.csv"], "needs a column 'image'"),
    (["--client", "news", "--task", "agnews", "--file", "ragged.csv"],
     "ragged.csv: row 1: 2 values, expected 1"),
    (["--client", "news", "--task", "agnews", "--file", "bad.jsonl"], "bad.jsonl: row 0: not JSON"),
    (["--client", "news", "--task", "agnews", "--file", "bytes.csv"], "bytes.csv: cannot be read"),
    (["--client", "news", "--task", "agnews", "--text", "x", "--method", "tp"],
     "the run has no 'tp'"),
    (["--client", "news", "--task", "agnews", "--text", "x", "--model", "best"],
     "expected personal or federated"),
    (["--client", "news", "--task", "agnews", "--text", "x", "--file", "none.csv"],
     "expected --file, or"),
])
def test_bad_requests(finished, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(finished)
    (finished / "bad.png").write_text("no picture")
    (finished / "none.csv").write_text("text\n")
    (finished / "texts.csv").write_text("text\nwhat?\n")
    (finished / "ragged.csv").write_text("text\na\nb,c\n")
    (finished / "bad.jsonl").write_text("{\n")
    (finished / "bytes.csv").write_bytes(b"text\n\xff\xfe\n")
    assert main(["predict", "run", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_export_is_one_model_and_names_no_code(finished, tmp_path):
    out = tmp_path / "taken"
    tapfl.export(load(finished, "news"), out)
    for option in ({"client": "shapes"}, {"method": "fedavg"}, {"model": "federated"}):
        with pytest.raises(TapflError, match="holds one model"):
            tapfl.load(out, device="cpu", **option)
    assert tapfl.load(out, client="news", device="cpu").card.method == "tap"
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')")
    card = json.loads((out / "tapfl.json").read_text())
    for change, message in (({"method": "evil:X"}, "--modules"),
                            ({"client": "../../x"}, "not a name"),
                            ({"classes": {"agnews": ["a"]}}, "1 names for 4 classes")):
        (out / "tapfl.json").write_text(json.dumps(card | change))
        with pytest.raises(TapflError, match=message):
            tapfl.load(out, device="cpu")


def test_which_methods_model_is_meant():
    assert _chosen(["disentafl", "fedavg", "tap", "fedavg+post"], "federated") == "fedavg"
    assert _chosen(["disentafl", "fedavg", "tap", "fedavg+post"], "personal") == "tap"
    assert _chosen(["fedavg", "feddat+post"], "federated") == "feddat"
    assert _chosen(["perfedavg"], "personal") == _chosen(["perfedavg"], "federated") == "perfedavg"
    assert _chosen(["local"], "personal") == "local"
    with pytest.raises(TapflError, match="learned alone"):
        _chosen(["local"], "federated")
    with pytest.raises(TapflError, match="choose one with --method"):
        _chosen(["fedavg", "perfedavg"], "personal")


def test_what_is_no_run(tmp_path):
    with pytest.raises(TapflError, match="neither a run"):
        tapfl.load(tmp_path, client="a")
    (tmp_path / "run.json").write_text(json.dumps({"finished": False}))
    with pytest.raises(TapflError, match="not complete"):
        tapfl.load(tmp_path, client="a")
    (tmp_path / "run.json").write_text(json.dumps({"finished": True, "config": {}}))
    with pytest.raises(TapflError, match="older version"):
        tapfl.load(tmp_path, client="a")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(TapflError, match="not a readable record"):
        tapfl.load(tmp_path, client="a")


def test_prompts():
    assert prompt("vqa", {"text": "how many?"}) == (
        "Answer the question based on the image.\nQuestion: how many?")
    assert prompt("vqa", {"question": "how many?"}) == prompt("vqa", {"text": "how many?"})
    assert prompt("commongen", {"text": "dog, run"}).endswith("Concepts: dog, run")
    assert prompt("agnews", {"title": "A", "description": "b"}) == "A b"
    assert prompt("mmlu", {"text": "whole prompt"}) == "whole prompt"
    row = {"subject": "law", "question": "why?", "choices": ["aa", "bb"], "answer": 1}
    assert prompt("mmlu", row).endswith("Options:\nA. aa\nB. bb")
    assert prompt("mmlu", {k: v for k, v in row.items() if k != "answer"}) == prompt("mmlu", row)
    assert prompt("commongen", {"concepts": ["ski", "snow"]}).endswith("Concepts: ski, snow")
    with pytest.raises(TapflError, match="needs a text"):
        prompt("vqa", {})
