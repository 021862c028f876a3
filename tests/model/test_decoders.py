"""The decoders of the paper's three tables, spelled out."""

import pytest
import torch
import torch.nn.functional as F

from tapfl.errors import TapflError
from tapfl.model.decoders import ImageHead, TextHead, classification_head


def test_flava_classification_head():
    head = classification_head("flava", 8, 3).eval()
    x = torch.randn(2, 8)
    hidden = F.relu(x @ head[0].weight.T + head[0].bias)
    assert hidden.shape[1] == 4
    torch.testing.assert_close(head(x), hidden @ head[3].weight.T + head[3].bias)
    assert head[2].p == 0.3


def test_vilt_classification_head():
    torch.manual_seed(0)
    head = classification_head("vilt", 8, 3).eval()
    x = torch.randn(2, 8)
    expected = x
    for start, width in ((0, 32), (4, 8)):
        expected = F.linear(expected, head[start].weight, head[start].bias)
        expected = F.gelu(F.layer_norm(expected, (width,)))
    assert [head[i].p for i in (3, 7)] == [0.1, 0.1]
    expected = F.linear(expected, head[8].weight, head[8].bias)
    torch.testing.assert_close(head(x), expected)


def test_image_head():
    torch.manual_seed(0)
    head, x = ImageHead(8), torch.randn(2, 8)
    y = F.linear(x, head.projection.weight, head.projection.bias).view(2, 64, 8, 8)
    for index, channels, side in ((0, 32, 16), (2, 16, 32), (4, 3, 64)):
        layer = head.layers[index]
        y = F.conv_transpose2d(y, layer.weight, layer.bias, stride=2, padding=1)
        assert y.shape == (2, channels, side, side)
        y = F.relu(y) if index < 4 else y
    torch.testing.assert_close(head(x), y)


def test_text_head_is_tied_unless_asked():
    tied, untied = TextHead(16, 50, 9), TextHead(16, 50, 9, tied=False)
    extra = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert extra == 50 * 16
    assert untied.output.bias is None
    assert (tied.heads, tied.condition_heads, tied.up.out_features) == (4, 8, 32)


def test_width_must_suit_the_heads():
    with pytest.raises(TapflError, match="must be a multiple of both, it is 12"):
        TextHead(12, 50, 9)
