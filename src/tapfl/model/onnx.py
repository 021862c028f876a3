"""Read a vision transformer out of an ONNX file: tensors only, nothing is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tapfl.errors import TapflError

Array = NDArray[np.float32]
PLACE = "/backbone/"
DINOV2_SMALL = {
    "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 384,
    "num_hidden_layers": 12, "num_attention_heads": 6, "mlp_ratio": 4, "patch_size": 14,
    "image_size": 518, "use_mask_token": False, "layer_norm_eps": 1e-6, "qkv_bias": True,
}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def write_dinov2(file: Path, folder: Path) -> None:
    """Write the ViT of an ONNX file as a folder that the transformers library reads."""
    state = read_vit(file)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.from_numpy(value.copy()) for name, value in state.items()},
              str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DINOV2_SMALL, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGENET, indent=2))


def read_vit(file: Path) -> dict[str, Array]:
    """Return the tensors of the module ``backbone`` by their names in the library."""
    onnx = _import_onnx(file)
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(str(file), load_external_data=False).graph
        # No weight is of another type than float, and none is read from another file: only this
        # one's checksum was verified.
        tensors = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer
                   if t.data_type == onnx.TensorProto.FLOAT
                   and t.data_location != onnx.TensorProto.EXTERNAL}
        return _vit(tensors, {node.name: list(node.input) for node in graph.node})
    except (DecodeError, OSError, ValueError, IndexError, KeyError) as error:
        raise TapflError(f"{file}: no vision transformer can be read from it "
                         f"({type(error).__name__}: {error})") from None


def _vit(tensors: dict[str, Array], inputs: dict[str, list[str]]) -> dict[str, Array]:
    """Name the tensors; ``inputs`` has what every node reads."""
    state = {name.removeprefix("backbone."): value for name, value in tensors.items()
             if name.startswith("backbone.")}
    for node, names in inputs.items():
        # A traced model stores the weights of linear layers without names and transposed: the
        # product that uses one has the layer's name.
        if node.startswith(PLACE) and node.endswith("/MatMul") and names[1] in tensors:
            place = node.removeprefix(PLACE).removesuffix("MatMul").replace("/", ".")
            state[f"{place}weight"] = tensors[names[1]].T
    first, grid = (tensors[inputs[f"{PLACE}embeddings/{node}"][0]]
                   for node in ("Concat_6", "Reshape_1"))
    state["embeddings.position_embeddings"] = np.concatenate([first, grid], axis=1)
    return state


def _import_onnx(file: Path) -> Any:
    """Import the package where it is used: only one kind of weights needs it."""
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError as error:
        raise TapflError(f"{file}: reading it needs the package onnx, which cannot be imported "
                         f"({error}): pip install 'onnx>=1.20,<2'") from None
    return onnx
