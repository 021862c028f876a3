"""Write an encoder's LoRA in the format of the peft library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tapfl.errors import TapflError
from tapfl.model.encoder import Encoder, EncoderBlock
from tapfl.model.lora import ALPHA_PER_RANK, ConvLoRA, LoRA
from tapfl.model.network import Network

VILT_PATCHES = "embeddings.patch_embeddings.projection"


def export_encoder_lora(network: Network, modality: str, folder: Path | str) -> Path:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` for one encoder.

    ``PeftModel.from_pretrained(model, folder)`` loads them onto the library's own encoder (for
    FLAVA a FlavaImageModel or FlavaTextModel). A trained projection, which only pairs have, is no
    LoRA: it goes to ``projection.safetensors`` beside them.
    """
    name = f"encoder/{modality}"
    if name not in network.blocks:
        raise TapflError(f"no LoRA to export: this network has no block '{name}'")
    block, encoder = network.blocks[name], network.foundation.encoders[modality]
    assert isinstance(block, EncoderBlock)
    assert isinstance(encoder, Encoder)
    loras = _loras(block, encoder)
    rank = next(iter(loras.values())).a.shape[0]
    tensors: dict[str, Tensor] = {}
    for target, lora in loras.items():
        tensors[f"base_model.model.{target}.lora_A.weight"] = lora.a.detach().cpu().contiguous()
        tensors[f"base_model.model.{target}.lora_B.weight"] = lora.b.detach().cpu().contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"), {"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": None, "inference_mode": True, "bias": "none",
        "r": rank, "lora_alpha": ALPHA_PER_RANK * rank,
        "lora_dropout": network.config.lora.dropout, "target_modules": sorted(loras),
        "base_model_name_or_path": network.config.foundation.weights_of(modality),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if block.projection is not None:
        save_file({k: v.detach().cpu() for k, v in block.projection.state_dict().items()},
                  str(folder / "projection.safetensors"))
    return folder


def _loras(block: EncoderBlock, encoder: Encoder) -> dict[str, LoRA | ConvLoRA]:
    """Return every LoRA by the name of the library's module that it adapts."""
    if block.patch is not None:
        return {VILT_PATCHES: block.patch}
    found: dict[str, LoRA | ConvLoRA] = {}
    for layer, lora in zip(encoder.layers, block.layers, strict=True):
        found[layer.names["query"]] = lora.query
        found[layer.names["value"]] = lora.value
    return found
