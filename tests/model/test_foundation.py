import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tapfl.config import Config, FoundationConfig, load_config
from tapfl.errors import TapflError
from tapfl.model.foundation import build_foundation, load_tokenizer
from tapfl.model.network import build_network
from tapfl.model.weights import flava_fields
from tests.conftest import FLAVA, PAIR, TASKS, TINY, VILT, make_batch, tiny_config


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints as the library writes them: FLAVA, ViLT, and the two halves of a pair."""
    root = tmp_path_factory.mktemp("weights")
    torch.manual_seed(5)
    hf.FlavaModel(hf.FlavaConfig(**flava_fields(FLAVA))).save_pretrained(root / "flava")
    hf.ViltModel(hf.ViltConfig(**VILT)).save_pretrained(root / "vilt")
    for modality in ("image", "text"):
        fields = dict(PAIR[modality])
        config = hf.AutoConfig.for_model(fields.pop("model_type"), **fields)
        hf.AutoModel.from_config(config).save_pretrained(root / modality)
    return root


def _config(saved, name):
    weights = ({m: str(saved / m) for m in ("image", "text")} if name == "pair"
               else str(saved / name))
    return Config.model_validate({"foundation": {"name": name, "weights": weights}})


@pytest.mark.parametrize("name", ["flava", "vilt", "pair"])
def test_weights_from_a_folder(saved, name):
    network = build_network(_config(saved, name), TASKS).eval()
    assert not network.foundation.is_random
    for task in TASKS:
        assert network(task, make_batch(TASKS[task])).prediction.isfinite().all()
    random = build_foundation(tiny_config(name).foundation)
    assert random.is_random
    assert not torch.equal(random.layers[0].query.weight, network.foundation.layers[0].query.weight)


def test_folder_weights_are_the_saved_ones(saved):
    base = build_foundation(_config(saved, "flava").foundation)
    tensors = load_file(saved / "flava" / "model.safetensors")
    name = "image_model.encoder.layer.1.attention.attention.query.weight"
    assert torch.equal(base.encoders["image"].layers[1].query.weight, tensors[name])


def test_pretraining_checkpoints_load_too(saved, tmp_path):
    """The published FLAVA is a pre-training model: its tensors carry the prefix ``flava.``"""
    tensors = load_file(saved / "flava" / "model.safetensors")
    save_file({f"flava.{k}": v for k, v in tensors.items()}, tmp_path / "model.safetensors",
              {"format": "pt"})
    (tmp_path / "config.json").write_text((saved / "flava" / "config.json").read_text())
    config = FoundationConfig(name="flava", weights=str(tmp_path))
    a = build_foundation(config)
    b = build_foundation(_config(saved, "flava").foundation)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)


def _damaged(saved, folder, change):
    tensors = load_file(saved / "flava" / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((saved / "flava" / "config.json").read_text())
    return FoundationConfig(name="flava", weights=str(folder))


def test_missing_tensor(saved, tmp_path):
    name = "multimodal_model.encoder.layer.0.output.dense.weight"
    config = _damaged(saved, tmp_path, lambda t: t.pop(name))
    with pytest.raises(TapflError, match=f"tensor '{name}' is missing"):
        build_foundation(config)


def test_missing_tensor_of_an_encoder_nobody_asked_for(saved, tmp_path):
    config = _damaged(saved, tmp_path, lambda t: t.pop("image_model.embeddings.cls_token"))
    build_foundation(config, ["text"])
    with pytest.raises(TapflError, match="cls_token' is missing"):
        build_foundation(config)


def test_misshapen_tensor(saved, tmp_path):
    name = "text_model.encoder.layer.0.intermediate.dense.weight"
    config = _damaged(saved, tmp_path, lambda t: t.update({name: torch.zeros(3, 4)}))
    with pytest.raises(TapflError, match=rf"'{name}' has shape \(3, 4\), expected \(64, 32\)"):
        build_foundation(config)


def test_folder_without_safetensors(saved, tmp_path):
    (tmp_path / "config.json").write_text((saved / "flava" / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(TapflError, match=r"no \.safetensors file in this weights folder"):
        build_foundation(FoundationConfig(name="flava", weights=str(tmp_path)))


def test_truncated_safetensors(saved, tmp_path):
    config = _damaged(saved, tmp_path, lambda t: None)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(TapflError, match="cannot read safetensors weights"):
        build_foundation(config)


def test_no_such_weights():
    with pytest.raises(TapflError, match="no/where: cannot read"):
        build_foundation(FoundationConfig(name="flava", weights="no/where"))


def test_broken_config_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TapflError, match=r"cannot read config\.json"):
        build_foundation(FoundationConfig(name="flava", weights=str(tmp_path)))


@pytest.mark.parametrize(("config", "message"), [
    ({"name": "flavour", "weights": "random"}, "did you mean 'flava'"),
    ({"name": "pair", "weights": "somewhere"}, r"a pair takes \{image: ..., text: ...\}"),
    ({"name": "pair", "architecture": {"text": {"model_type": "nonsense"}}}, "no such conf"),
    ({"name": "pair", "architecture": {"text": {"model_type": "gpt2", "n_layer": 2,
                                                "n_embd": 32, "n_head": 2}}}, "BERT-like"),
    ({"name": "pair", "architecture": {"text": {"model_type": "electra", **TINY}}}, "BERT-like"),
    ({"name": "pair", "architecture": {"text": {"model_type": "roformer", **TINY,
                                                "num_hidden_layers": 4}}}, "is not computed as"),
    ({"name": "pair", "architecture": {"text": {"model_type": "vit", **TINY}}}, "BERT-like"),
    ({"name": "pair", "architecture": {"image": {"model_type": "bert", **TINY}}}, "ViT-like"),
    ({"name": "pair", "architecture": {"image": 3}}, "expected fields, got 3"),
    ({"name": "flava", "architecture": {"bogus": 1}}, "unknown field 'bogus'"),
    ({"name": "flava", "architecture": {"hidden_size": 7}}, "foundation.architecture: "),
    ({"name": "vilt", "architecture": {"hidden_size": "abc"}}, "foundation.architecture: "),
    ({"name": "flava", "architecture": {"hidden_act": "nope"}}, "foundation.architecture: "),
    ({"name": "pair", "architecture": PAIR, "image_size": 30}, "no multiple of the patch size 8"),
])
def test_bad_foundation(config, message):
    with pytest.raises(TapflError, match=message):
        build_foundation(FoundationConfig.model_validate(config))


def test_weights_of_another_model(saved):
    with pytest.raises(TapflError, match="describes a vilt model, expected flava"):
        build_foundation(FoundationConfig(name="flava", weights=str(saved / "vilt")))
    with pytest.raises(TapflError, match="describes a bert model, expected vilt"):
        build_foundation(FoundationConfig(name="vilt", weights=str(saved / "text")), device="meta")


def test_an_architecture_is_for_random_weights(saved):
    with pytest.raises(ValueError, match="an architecture is for random weights"):
        FoundationConfig(name="flava", weights=str(saved / "flava"), architecture=FLAVA)


def test_an_index_that_points_to_other_formats(saved, tmp_path):
    config = _damaged(saved, tmp_path, lambda t: None)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"multimodal_model.cls_token": "evil.bin"}}')
    with pytest.raises(TapflError, match=r"'evil\.bin' is no safetensors file"):
        build_foundation(config)


def test_code_that_comes_with_weights_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}}')
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    weights = {"image": str(tmp_path), "text": str(tmp_path)}
    with pytest.raises(TapflError, match=r"cannot read config\.json"):
        build_foundation(FoundationConfig(name="pair", weights=weights))
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_not_finite(saved, tmp_path):
    name = "text_model.embeddings.LayerNorm.weight"
    config = _damaged(saved, tmp_path, lambda t: t[name].fill_(float("nan")))
    with pytest.raises(TapflError, match=f"'{name}' holds values that are not finite"):
        build_foundation(config)


def test_misshapen_tensor_of_an_encoder_nobody_asked_for(saved, tmp_path):
    name = "image_model.embeddings.cls_token"
    config = _damaged(saved, tmp_path, lambda t: t.update({name: torch.zeros(1, 1, 3)}))
    build_foundation(config, ["text"])


def test_unknown_modality():
    with pytest.raises(TapflError, match="unknown modality 'imgae'; did you mean 'image'"):
        build_foundation(tiny_config().foundation, ["imgae"])


def test_building_leaves_the_gpus_generators_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded"))
    build_network(tiny_config(), TASKS, ["news"])


@pytest.mark.parametrize("name", ["flava", "vilt", "pair"])
def test_more_layers_than_there_are(name):
    with pytest.raises(TapflError, match="layers_per_stage: 9 needs 18 layers"):
        build_foundation(tiny_config(name).foundation, layers_per_stage=9)


def test_random_weights_are_the_same_in_every_process():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a = build_foundation(tiny_config().foundation)
    assert torch.equal(torch.get_rng_state(), state)
    b = build_foundation(tiny_config().foundation, ["text"])
    assert torch.equal(a.encoders["text"].layers[0].query.weight,
                       b.encoders["text"].layers[0].query.weight)


def test_stages_take_consecutive_layers():
    one = build_foundation(tiny_config().foundation, layers_per_stage=1)
    two = build_foundation(tiny_config().foundation, layers_per_stage=2)
    assert (len(one.layers), len(two.layers)) == (2, 4)
    assert torch.equal(one.layers[1].query.weight, two.layers[1].query.weight)


def test_text_limits():
    assert build_foundation(load_config("flava").foundation, device="meta").max_text == 256
    assert build_foundation(load_config("vilt").foundation, device="meta").max_text == 40


def test_shipped_tokenizer():
    tokenizer = load_tokenizer(FoundationConfig(name="mini"))
    text = "What color is the small circle? (A) 42%"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.cls_token_id
    assert ids[-1] == tokenizer.sep_token_id
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.pad_token_id == 0
    written = tokenizer.decode(ids, skip_special_tokens=True)
    assert written.replace(" ", "") == text.lower().replace(" ", "")

