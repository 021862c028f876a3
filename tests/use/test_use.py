"""A finished run in use: predictions, exports, and what is refused."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import tapfl
from tapfl.blocks import BlockState
from tapfl.cli import main
from tapfl.config import Config, FoundationConfig
from tapfl.data.prompts import prompt
from tapfl.engine.registry import default_models, plan
from tapfl.engine.run import run, stored_config
from tapfl.errors import TapflError
from tapfl.model.foundation import load_tokenizer
from tests.conftest import FLAVA
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

    federation = build(stored_config(finished / "run"), "cpu").federation
    with (finished / "run" / "results.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["method"] == method]
    model = load(finished, "shapes", method=method)
    _, test = federation.splits["tiny-imagenet"]
    pictures = [Image.fromarray(i) for i in test.images.permute(0, 2, 3, 1).numpy()]
    found = [a["label"] for a in model.predict_many("tiny-imagenet", pictures)]
    right = [found[i] == test.classes[test.labels[i]] for i in range(len(test))]
    (row,) = (r for r in rows if r["client"] == "shapes" and r["task"] == "tiny-imagenet")
    assert 100 * np.mean(right) == pytest.approx(float(row["value"]))
    words = load(finished, "words", method=method)
    _, test = federation.splits["fmnist"]
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
    for change, message in (({"federated": "evil:X"}, "--modules"),
                            ({"client": "../../x"}, "not a name"),
                            ({"classes": {"agnews": ["a"]}}, "1 names for 4 classes")):
        (out / "tapfl.json").write_text(json.dumps(card | change))
        with pytest.raises(TapflError, match=message):
            tapfl.load(out, device="cpu")


def test_the_record_says_which_model_is_meant():
    def models(*methods, **sections):
        return default_models(plan(Config.model_validate({"methods": methods, **sections})))

    both = {"personal": "tap", "federated": "fedavg"}
    assert models("disentafl", "fedavg", "tap", "fedavg+post") == both
    assert models("fedavg", "feddat+post") == {"personal": "feddat+post", "federated": "feddat"}
    assert models("perfedavg") == {"personal": "perfedavg", "federated": "perfedavg"}
    assert models("local") == {"personal": "local"}
    assert models("fedavg", "perfedavg") == {"federated": "fedavg"}
    wide = {"wide": {"of": "tap", "tap": {"temperature": 2.0}}}
    assert models("fedavg+post", "wide", "tap-nokd", variants=wide)["personal"] == "wide"


@pytest.mark.parametrize(("methods", "model", "message"), [
    (["local"], "federated", "learned alone"),
    (["fedavg", "perfedavg"], "personal", "choose one with --method"),
    (["fedavg"], "best", "expected personal or federated"),
])
def test_models_that_a_run_does_not_have(finished, tmp_path, methods, model, message):
    record = json.loads((finished / "run" / "run.json").read_text())
    config = record["config"] | {"methods": methods}
    models = default_models(plan(Config.model_validate(config)))
    (tmp_path / "run.json").write_text(json.dumps(record | {"config": config, "models": models}))
    with pytest.raises(TapflError, match=message):
        tapfl.load(tmp_path, client="news", model=model)


def test_what_is_no_run(finished, tmp_path):
    with pytest.raises(TapflError, match="neither a run"):
        tapfl.load(tmp_path, client="a")
    record = json.loads((finished / "run" / "run.json").read_text())
    path = tmp_path / "run.json"
    for change, message in (
            (record | {"finished": False}, "not complete"),
            ({"finished": True, "config": {}}, "another version of tapfl"),
            (record | {"format": 3}, "another version of tapfl"),
            (record | {"format": "two"}, "another version of tapfl"),
            (record | {"clients": "many"}, "clients"),
            (record | {"classes": {"agnews": 5}}, "classes.agnews"),
            (record | {"classes": {"agnews": ["a", 3, "b", "c"]}}, "classes.agnews"),
            (record | {"seconds": "long"}, "seconds"),
            (record | {"config": []}, "config"),
            ([record], "expected a JSON object, got list"), (None, "expected a JSON object")):
        path.write_text(json.dumps(change))
        with pytest.raises(TapflError, match=message) as caught:
            tapfl.load(tmp_path, client="news")
        assert "\n" not in str(caught.value)
    for text in ("{", "[" * 100_000, '{"a":' * 100_000, "", "\ud800"):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(TapflError, match="not a readable record") as caught:
            tapfl.load(tmp_path, client="news")
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("change", "message"), [
    (lambda state: state["decoder/agnews"].fill_(float("nan")), "not finite"),
    (lambda state: state._flat.update({"decoder/agnews": state["decoder/agnews"].double()}),
     "torch.float64"),
    (lambda state: state._flat.pop("decoder/agnews"), "'decoder/agnews' is missing"),
])
def test_blocks_that_are_no_models(finished, tmp_path, change, message):
    out = tmp_path / "taken"
    tapfl.export(load(finished, "news"), out)
    state = BlockState.load(out / "model.safetensors")
    change(state)
    state.save(out / "model.safetensors", {})
    with pytest.raises(TapflError, match=message) as caught:
        tapfl.load(out, device="cpu")
    assert "model.safetensors" in str(caught.value)


def test_a_model_with_a_flipped_bit_or_in_anothers_place(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished / "run", folder)
    path = folder / "models" / "tap" / "news.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(TapflError, match=r"news\.safetensors: damaged"):
        tapfl.load(folder, client="news")
    shutil.copy(path.with_name("shapes.safetensors"), path)
    with pytest.raises(TapflError, match=r"it is of shapes, tap, round 2, expected news, tap"):
        tapfl.load(folder, client="news")
    (folder / "models" / "feddat" / "news.safetensors").unlink()
    with pytest.raises(TapflError, match="kept no model of news"):
        tapfl.load(folder, client="news", method="feddat")


def test_a_record_cannot_import_what_is_installed(finished, tmp_path, capsys):
    out = tmp_path / "taken"
    tapfl.export(load(finished, "news"), out)
    card = json.loads((out / "tapfl.json").read_text())
    (out / "tapfl.json").write_text(json.dumps(card | {"federated": "this:Foo"}))
    with pytest.raises(TapflError, match=r"no this\.py in"):
        tapfl.load(out, modules=tmp_path)
    assert "Zen" not in capsys.readouterr().out


def test_arrays_and_lists(finished):
    looks, news = load(finished, "looks"), load(finished, "news")
    pixels = np.full((20, 30, 3), (200, 30, 60), dtype=np.uint8)
    one = looks.predict("fmnist", pixels)["image"]
    assert np.array_equal(one, looks.predict("fmnist", Image.fromarray(pixels))["image"])
    assert np.array_equal(one, looks.predict("fmnist", pixels / 255)["image"])
    many = looks.predict("fmnist", np.stack([pixels, pixels]))
    assert len(many) == 2
    assert [a["label"] for a in news.predict("agnews", text=["a", "b"])] == [
        news.predict("agnews", text=t)["label"] for t in ("a", "b")]
    assert len(looks.predict("vqa", [pixels, pixels[:, :, 0]], ["what?", "why?"])) == 2
    for wrong in (pixels.astype(np.int64), pixels[..., :2], pixels / 255 * 2,
                  np.full((4, 4), np.nan)):
        with pytest.raises(TapflError, match="not a readable picture"):
            looks.predict("fmnist", wrong)


OWN = """
from tapfl.config import Section
from tapfl.federated.method import FedAvg
from tapfl.personal.posttrain import PostTrain

class Mine(FedAvg):
    class Settings(Section):
        mu: float = 0.5

class Third(PostTrain):
    times = 3
"""


def test_models_of_ones_own_methods_are_exported(tmp_path):
    (tmp_path / "minemod.py").write_text(OWN)
    methods = ["minemod:Mine", "fedavg+minemod:Third"]
    run(tiny_experiment(tmp_path, methods=methods, own={"Mine": {"mu": 0.7}}, train={"rounds": 1}),
        tmp_path / "run", modules=tmp_path)
    # Only the federated half is code that a model needs.
    third = tapfl.load(tmp_path / "run", client="news", method="fedavg+minemod:Third")
    tapfl.export(third, tmp_path / "third")
    assert tapfl.load(tmp_path / "third").predict("agnews", text="x")
    with pytest.raises(TapflError, match="--modules DIR"):
        tapfl.load(tmp_path / "run", client="news", method="minemod:Mine")
    mine = tapfl.load(tmp_path / "run", client="news", method="minemod:Mine", modules=tmp_path)
    tapfl.export(mine, tmp_path / "mine")
    assert "`minemod:Mine` is code" in (tmp_path / "mine" / "README.md").read_text()
    with pytest.raises(TapflError, match="--modules DIR"):
        tapfl.load(tmp_path / "mine")
    again = tapfl.load(tmp_path / "mine", modules=tmp_path)
    assert again._method.settings.mu == 0.7
    assert again.predict("agnews", text="x") == mine.predict("agnews", text="x")


def test_an_export_carries_weights_that_lie_in_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in FLAVA.items() if k in ("hidden_size", "num_hidden_layers",
                                                     "num_attention_heads", "intermediate_size")}
    torch.manual_seed(0)
    image = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    image.save_pretrained(tmp_path / "weights" / "image")
    text = transformers.BertModel(transformers.BertConfig(**sizes | {"num_hidden_layers": 4},
                                                          vocab_size=600))
    text.save_pretrained(tmp_path / "weights" / "text")
    load_tokenizer(FoundationConfig()).save_pretrained(tmp_path / "weights" / "text")
    weights = {m: str(tmp_path / "weights" / m) for m in ("image", "text")}
    config = tiny_experiment(tmp_path, train={"rounds": 1})
    foundation = FoundationConfig(name="pair", weights=weights)
    run(config.model_copy(update={"foundation": foundation}), tmp_path / "run")
    model = tapfl.load(tmp_path / "run", client="shapes")
    expected = model.predict("agnews", text="shares rise")
    tapfl.export(model, tmp_path / "taken")
    tapfl.export(model, tmp_path / "named", weights="{image: me/vit, text: me/bert}")
    (tmp_path / "weights").rename(tmp_path / "moved")
    shutil.move(tmp_path / "taken", tmp_path / "elsewhere")
    assert tapfl.load(tmp_path / "elsewhere").predict("agnews", text="shares rise") == expected
    card = json.loads((tmp_path / "named" / "tapfl.json").read_text())
    assert card["config"]["foundation"]["weights"] == {"image": "me/vit", "text": "me/bert"}
    moved = str({m: str(tmp_path / "moved" / m) for m in ("image", "text")}).replace("'", '"')
    found = tapfl.load(tmp_path / "named", weights=moved)
    assert found.predict("agnews", text="shares rise") == expected


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
