"""Compare the full-size FLAVA and ViLT with the transformers library: random weights, fp32.

python scripts/check_full_size.py      (about 5 GB of memory)
"""

import torch
import transformers as hf

from tapfl.config import FoundationConfig
from tapfl.model.encoder import EncoderBlock
from tapfl.model.foundation import build_foundation
from tapfl.model.weights import RANDOM_SEED


def seeded(build):
    torch.manual_seed(RANDOM_SEED)
    return build().eval()


def report(name, ours, theirs):
    print(f"{name:<44} largest difference {(ours - theirs).abs().max():.2e}, "
          f"largest value {theirs.abs().max():.2f}")


def layers(base, library, x, mask):
    """Every backbone layer after the other, on the same input."""
    additive = None if mask is None else torch.zeros(mask[:, None, None].shape).masked_fill(
        ~mask[:, None, None], -1e9)
    for index, (layer, reference) in enumerate(zip(base.layers, library, strict=False)):
        ours = layer(x, mask)
        theirs = reference(x, additive)[0]
        real = slice(None) if mask is None else mask
        report(f"  backbone layer {index}", ours[real], theirs[real])
        x = theirs


@torch.no_grad()
def main():
    ids = torch.randint(5, 30000, (4, 64))
    mask = torch.arange(64) < torch.tensor([64, 40, 10, 3])[:, None]
    print("FLAVA, facebook/flava-full's configuration")
    flava = seeded(lambda: hf.FlavaModel(hf.FlavaConfig()))
    base = build_foundation(FoundationConfig(name="flava", weights="random"), layers_per_stage=3)
    image = torch.randn(4, 3, 224, 224)
    states = flava.image_model(image, output_hidden_states=True).hidden_states[-1]
    block = EncoderBlock(base.encoders["image"], 8)
    report("  image encoder and projection", base.encoders["image"](image, block=block),
           flava.image_to_mm_projection(states))
    states = flava.text_model(ids, attention_mask=mask.long(), output_hidden_states=True)
    block = EncoderBlock(base.encoders["text"], 8)
    report("  text encoder and projection", base.encoders["text"](ids, mask, block)[mask],
           flava.text_to_mm_projection(states.hidden_states[-1])[mask])
    layers(base, flava.multimodal_model.encoder.layer, torch.randn(4, 64, 768), mask)
    del flava, base
    print("ViLT, dandelin/vilt-b32-mlm's configuration")
    vilt = seeded(lambda: hf.ViltModel(hf.ViltConfig()))
    base = build_foundation(FoundationConfig(name="vilt", weights="random"), layers_per_stage=6)
    torch.multinomial = lambda p, n, **_: torch.arange(int(n))  # the library shuffles patches
    image = torch.randn(4, 3, 384, 384)
    tokens, _ = vilt.embeddings(ids[:, :40], mask[:, :40].long(), None, image,
                                torch.ones(4, 384, 384), None, None)
    block = EncoderBlock(base.encoders["image"], 4)
    report("  image embedding", base.encoders["image"](image, block=block), tokens[:, 40:])
    report("  text embedding", base.encoders["text"](ids[:, :40]), tokens[:, :40])
    layers(base, vilt.encoder.layer, tokens, None)


if __name__ == "__main__":
    main()
