import peft
import pytest
import torch
import transformers as hf

from tapfl.errors import TapflError
from tapfl.model.foundation import RANDOM_SEED
from tapfl.model.network import build_network
from tapfl.model.peft import export_encoder_lora
from tapfl.model.weights import flava_fields
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
