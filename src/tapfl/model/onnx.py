"""Read a vision transformer out of an ONNX file: tensors only, no library, nothing is run.

An ONNX file is a protobuf message. Of it we need the graph's tensors and, because a traced model
stores the weights of its linear layers without names, the nodes that use them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tapfl.errors import TapflError

# Numbers of the fields that are read, by message.
GRAPH = 7
NODE, INITIALIZER = 1, 5
NODE_INPUT, NODE_NAME = 1, 3
DIMS, KIND, NAME, RAW = 1, 2, 8, 9
FLOAT32 = 1

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
    try:
        state = read_vit(file)
    except (ValueError, IndexError, KeyError, StopIteration) as error:
        raise TapflError(f"{file}: no vision transformer can be read from it ({error})") from None
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.from_numpy(value.copy()) for name, value in state.items()},
              str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(DINOV2_SMALL, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGENET, indent=2))


def read_vit(file: Path) -> dict[str, Array]:
    """Return the tensors of the module ``backbone`` by their names in the library."""
    graph = next(value for number, value in _fields(memoryview(file.read_bytes()))
                 if number == GRAPH)
    tensors: dict[str, Array] = {}
    inputs: dict[str, list[str]] = {}
    for number, value in _fields(graph):
        if number == INITIALIZER:
            name, array = _tensor(value)
            tensors[name] = array
        elif number == NODE:
            name, inputs_of = _node(value)
            inputs[name] = inputs_of
    state = {name.removeprefix("backbone."): value for name, value in tensors.items()
             if name.startswith("backbone.")}
    for node, names in inputs.items():
        # The product of a linear layer knows the layer's place; its weight is stored transposed.
        if node.startswith(PLACE) and node.endswith("/MatMul") and names[1] in tensors:
            place = node.removeprefix(PLACE).removesuffix("MatMul").replace("/", ".")
            state[f"{place}weight"] = tensors[names[1]].T
    first, grid = (tensors[inputs[f"{PLACE}embeddings/{node}"][0]]
                   for node in ("Concat_6", "Reshape_1"))
    state["embeddings.position_embeddings"] = np.concatenate([first, grid], axis=1)
    return state


def _node(message: memoryview) -> tuple[str, list[str]]:
    name, inputs = "", []
    for number, value in _fields(message):
        if number == NODE_INPUT:
            inputs.append(bytes(value).decode())
        elif number == NODE_NAME:
            name = bytes(value).decode()
    return name, inputs


def _tensor(message: memoryview) -> tuple[str, Array]:
    name, kind, dims, raw = "", 0, list[int](), memoryview(b"")
    for number, value in _fields(message):
        if number == DIMS:
            dims.append(value)
        elif number == KIND:
            kind = value
        elif number == NAME:
            name = bytes(value).decode()
        elif number == RAW:
            raw = value
    if kind != FLOAT32 or not raw:
        return name, np.zeros(0, np.float32)  # constants of the graph; no weight is one
    return name, np.frombuffer(raw, "<f4").reshape(dims)


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of every field; whole numbers come as such."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        if key & 7 == 0:
            value, at = _number(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 2:
            size, at = _number(message, at)
        if size is None or at + size > len(message):
            raise ValueError(f"not a protobuf message: byte {at}")
        yield key >> 3, message[at:at + size]
        at += size


def _number(message: memoryview, at: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at, value = at + 1, value | (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
