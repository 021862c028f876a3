"""With LoRA at zero, encoders and layers equal the transformers library's (trap 4)."""

import pytest
import torch
import transformers as hf

from tapfl.config import Config
from tapfl.model.encoder import EncoderBlock
from tapfl.model.foundation import build_foundation
from tapfl.model.weights import RANDOM_SEED, flava_fields
from tests.conftest import FLAVA, PAIR, TINY, VILT, tiny_config

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def _seeded(build):
    torch.manual_seed(RANDOM_SEED)
    return build().eval()


def _texts():
    ids = torch.randint(5, 120, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([9, 5, 2])[:, None]
    return ids, mask


def _close_on_real_tokens(ours, theirs, mask):
    torch.testing.assert_close(ours[mask], theirs[mask], **TOLERANCE)


@pytest.fixture(scope="module")
def flava():
    return _seeded(lambda: hf.FlavaModel(hf.FlavaConfig(**flava_fields(FLAVA))))


@pytest.mark.parametrize("lora", [False, True])
def test_flava_encoders(flava, lora):
    base = build_foundation(tiny_config().foundation, layers_per_stage=2)
    image = torch.randn(3, 3, 32, 32)
    block = EncoderBlock(base.encoders["image"], 2) if lora else None
    states = flava.image_model(image, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(base.encoders["image"](image, block=block),
                               flava.image_to_mm_projection(states), **TOLERANCE)
    ids, mask = _texts()
    block = EncoderBlock(base.encoders["text"], 2) if lora else None
    states = flava.text_model(ids, attention_mask=mask.long(), output_hidden_states=True)
    _close_on_real_tokens(base.encoders["text"](ids, mask, block),
                          flava.text_to_mm_projection(states.hidden_states[-1]), mask)


def test_flava_backbone_layers(flava):
    base = build_foundation(tiny_config().foundation, layers_per_stage=2)
    x = torch.randn(3, 9, 32)
    mask = _texts()[1]
    additive = torch.zeros(3, 1, 1, 9).masked_fill(~mask[:, None, None], -1e9)
    ours = theirs = x
    for layer, reference in zip(base.layers, flava.multimodal_model.encoder.layer, strict=True):
        ours = layer(ours, mask)
        theirs = reference(theirs, additive)[0]
        _close_on_real_tokens(ours, theirs, mask)


def test_flava_end_to_end(flava):
    """Image and text through FLAVA's own forward pass equal ours without LoRA."""
    base = build_foundation(tiny_config().foundation, layers_per_stage=2)
    ids, _ = _texts()
    image = torch.randn(3, 3, 32, 32)
    flava.multimodal_model.use_cls_token = False
    theirs = flava(input_ids=ids, pixel_values=image).multimodal_embeddings
    flava.multimodal_model.use_cls_token = True
    x = torch.cat([base.encoders["image"](image), base.encoders["text"](ids)], dim=1)
    for layer in base.layers:
        x = layer(x)
    torch.testing.assert_close(base.norm(x), theirs, **TOLERANCE)


def test_vilt(monkeypatch):
    model = _seeded(lambda: hf.ViltModel(hf.ViltConfig(**VILT)))
    base = build_foundation(tiny_config("vilt").foundation, layers_per_stage=2)
    # The library shuffles the patches; keep them in order to compare.
    monkeypatch.setattr(torch, "multinomial", lambda p, n, **_: torch.arange(int(n)))
    ids, mask = _texts()
    image = torch.randn(3, 3, 64, 64)
    tokens, _ = model.embeddings(ids, mask.long(), None, image, torch.ones(3, 64, 64), None, None)
    block = EncoderBlock(base.encoders["image"], 2)
    ours = torch.cat([base.encoders["text"](ids, mask),
                      base.encoders["image"](image, block=block)], dim=1)
    torch.testing.assert_close(ours, tokens, **TOLERANCE)
    whole = torch.cat([mask, torch.ones(3, 17, dtype=torch.bool)], dim=1)
    theirs = model(input_ids=ids, attention_mask=mask.long(), pixel_values=image)
    x = ours
    for layer in base.layers:
        x = layer(x, whole)
    _close_on_real_tokens(base.norm(x), theirs.last_hidden_state, whole)


def _pair(part, architecture, image_size=None):
    return Config.model_validate({"foundation": {
        "name": "pair", "weights": "random", "image_size": image_size,
        "architecture": PAIR | {part: architecture}}}).foundation


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
def test_pair_text_encoders(kind):
    sizes = ({"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64} if kind == "distilbert"
             else {**TINY, "num_hidden_layers": 4})
    fields = {"vocab_size": 120, **sizes, **({"embedding_size": 32} if kind == "electra" else {})}
    model = _seeded(lambda: hf.AutoModel.from_config(hf.AutoConfig.for_model(kind, **fields)))
    config = _pair("text", {"model_type": kind, **fields})
    base = build_foundation(config, ["text"])
    ids, mask = _texts()
    theirs = model(ids, attention_mask=mask.long()).last_hidden_state
    _close_on_real_tokens(base.encoders["text"](ids, mask), theirs, mask)


@pytest.mark.parametrize("kind", ["vit", "deit", "dinov2"])
@pytest.mark.parametrize("size", [32, 48])
def test_pair_image_encoders(kind, size):
    fields = {**TINY, "hidden_size": 16, "image_size": 32, "patch_size": 8}
    if kind == "dinov2":
        fields.pop("intermediate_size")
    model = _seeded(lambda: hf.AutoModel.from_config(hf.AutoConfig.for_model(kind, **fields)))
    base = build_foundation(_pair("image", {"model_type": kind, **fields}, size), ["image"])
    image = torch.randn(2, 3, size, size)
    extra = {} if kind == "dinov2" else {"interpolate_pos_encoding": True}
    theirs = model(image, **extra).last_hidden_state
    torch.testing.assert_close(base.encoders["image"](image), theirs, **TOLERANCE)
    assert "text" not in base.encoders


def test_pair_backbone_is_the_text_encoders_last_layers():
    base = build_foundation(tiny_config("pair").foundation)
    assert base.layers[-1].query.weight is base.encoders["text"].layers[-1].query.weight
    assert base.layers[0].query.weight is base.encoders["text"].layers[-2].query.weight


def test_gpt2_head_equals_the_library():
    from tapfl.model.decoders import TextHead

    torch.manual_seed(0)
    head = TextHead(32, 50, 20, condition_heads=4).eval()
    model = hf.GPT2Model(hf.GPT2Config(
        vocab_size=50, n_positions=20, n_embd=32, n_layer=1, n_head=4, n_inner=64,
        add_cross_attention=True)).eval()
    layer = model.h[0]
    pairs = [(head.norm1, layer.ln_1), (head.norm2, layer.ln_cross_attn), (head.norm3, layer.ln_2),
             (head.norm, model.ln_f)]
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.load_state_dict(ours.state_dict())
        for ours, theirs in [
            (head.qkv, layer.attn.c_attn), (head.out, layer.attn.c_proj),
            (head.query, layer.crossattention.q_attn),
            (head.key_value, layer.crossattention.c_attn),
            (head.condition_out, layer.crossattention.c_proj),
            (head.up, layer.mlp.c_fc), (head.down, layer.mlp.c_proj),
        ]:
            theirs.weight.copy_(ours.weight.T)
            theirs.bias.copy_(ours.bias)
        model.wte.weight.copy_(head.tokens.weight)
        model.wpe.weight.copy_(head.positions.weight)
    ids, condition = torch.randint(0, 50, (2, 8)), torch.randn(2, 5, 32)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    theirs = model(ids, encoder_hidden_states=condition, encoder_attention_mask=mask.long())
    logits = theirs.last_hidden_state @ head.tokens.weight.T
    torch.testing.assert_close(head(ids, head.start(condition, mask)), logits, **TOLERANCE)
