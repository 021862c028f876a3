"""Every kernel against plain torch, on tiny sizes; without a GPU in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tapfl.kernels import memory
from tapfl.kernels.attention import BACKWARD, Attention, max_tokens
from tapfl.kernels.columns import Columns
from tapfl.kernels.entropy import CrossEntropy
from tapfl.kernels.gelu import GeluPrologue
from tapfl.kernels.linear import FrozenLinear
from tapfl.kernels.norm import NormPrologue

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, TOKENS, CUT, WIDTH, RANK, BRANCHES, STREAMS = 3, 10, 6, 24, 2, 2, 2
ROWS = BATCH * TOKENS


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def randn(*shape, grad=False):
    return torch.randn(*shape, device=DEVICE).requires_grad_(grad)


def seed():
    return torch.randint(2**31, (2,), device=DEVICE)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def beside(h, low, total):
    """``[h | low | 1 | 0]``."""
    ones = torch.ones_like(h[..., :1])
    zeros = torch.zeros(*h.shape[:-1], total - low.shape[-1] - 1, device=h.device)
    return torch.cat([h, low, ones, zeros], dim=-1)


def gradients(outputs, weights, inputs):
    total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs)


def weights_for(h, width, used):
    weight = torch.randn_like(h)
    weight[..., width + used:] = 0  # nothing flows into the ones and zeros
    return weight


def norm_inputs():
    used = BRANCHES * 2 * RANK
    return (randn(1, ROWS, WIDTH, grad=True), randn(STREAMS, ROWS, WIDTH, grad=True),
            randn(STREAMS, used, WIDTH, grad=True), randn(WIDTH), randn(WIDTH),
            Columns(used, BRANCHES, TOKENS, CUT, RANK))


def kept(x, y, gamma, beta, p, chosen):
    """Where dropout keeps, found by looking through columns of the identity."""
    eye, found = torch.eye(WIDTH, device=DEVICE), []
    for first in range(0, WIDTH, 8):
        a = eye[first:first + 8].expand(STREAMS, -1, -1).contiguous()
        _, h = NormPrologue.apply(x, y, a, gamma, beta, 1e-5, Columns(8), p, chosen,
                                  False)
        found.append(h[..., WIDTH:WIDTH + 8] != 0)
    return torch.cat(found, dim=-1)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("post", [False, True])
def test_norm(p, post):
    x, y, a, gamma, beta, columns = norm_inputs()
    chosen, used = seed(), columns.used
    goes_on, h = NormPrologue.apply(x, y, a, gamma, beta, 1e-5, columns, p, chosen, post)
    total = x + y
    normed = F.layer_norm(total, (WIDTH,), gamma, beta)
    dropped = normed
    if p:
        mask = kept(x, y, gamma, beta, p, chosen)
        assert abs(mask.float().mean() - (1 - p)) < 0.05
        dropped = normed * mask / (1 - round(p * 2**16) / 2**16)
    late_row = torch.arange(ROWS, device=DEVICE) % TOKENS >= CUT
    late_column = torch.arange(used, device=DEVICE) % (used // BRANCHES) >= RANK
    low = dropped @ a.transpose(1, 2) * (late_row[:, None] == late_column[None, :])
    expected, residual = beside(normed, low, columns.total), normed if post else total
    close(goes_on, residual)
    close(h, expected)
    weights = [torch.randn_like(residual), weights_for(h, WIDTH, used)]
    for ours, theirs in zip(gradients((goes_on, h), weights, (x, y, a)),
                            gradients((residual, expected), weights, (x, y, a)), strict=True):
        close(ours, theirs)


def test_norm_after_the_sum_reads_what_goes_on_from_another():
    """What goes on is a part of wider rows; the next kernel takes it from there."""
    x, y, a, gamma, beta, columns = norm_inputs()
    more = randn(STREAMS, ROWS, WIDTH, grad=True)
    between, h = NormPrologue.apply(x, y, a, gamma, beta, 1e-5, columns, 0.0, seed(), True)
    assert between.stride(1) == h.shape[2]
    out, last = NormPrologue.apply(between, more, None, gamma, beta, 1e-5, None, 0.0, seed(), True)
    once = F.layer_norm(x + y, (WIDTH,), gamma, beta)
    expected = F.layer_norm(once + more, (WIDTH,), gamma, beta)
    close(out, expected)
    weights = [weights_for(h, WIDTH, 0), torch.randn_like(last)]
    for ours, theirs in zip(
            gradients((h[..., :WIDTH], last), [weights[0][..., :WIDTH], weights[1]], (x, y, more)),
            gradients((once, expected), [weights[0][..., :WIDTH], weights[1]], (x, y, more)),
            strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("summed", [True, False])
def test_no_norm(summed):
    x, y, a, _, _, columns = norm_inputs()
    y = y if summed else None
    a = a if summed else a[:1]
    goes_on, h = NormPrologue.apply(x, y, a, None, None, 0.0, columns, 0.0, seed(), True)
    total = x + y if summed else x * 1
    late_row = torch.arange(ROWS, device=DEVICE) % TOKENS >= CUT
    late_column = torch.arange(columns.used, device=DEVICE) % (columns.used // BRANCHES) >= RANK
    low = total @ a.transpose(1, 2) * (late_row[:, None] == late_column[None, :])
    expected = beside(total, low, columns.total)
    close(goes_on, total)
    close(h, expected)
    weights = [torch.randn_like(total), weights_for(h, WIDTH, columns.used)]
    inputs = [t for t in (x, y, a) if t is not None]
    for ours, theirs in zip(gradients((goes_on, h), weights, inputs),
                            gradients((total, expected), weights, inputs), strict=True):
        close(ours, theirs)


def test_norm_alone():
    x, gamma, beta = randn(2, 7, WIDTH, grad=True), randn(WIDTH), randn(WIDTH)
    s, h = NormPrologue.apply(x, None, None, gamma, beta, 1e-5, None, 0.0, seed(), False)
    expected = F.layer_norm(x, (WIDTH,), gamma, beta)
    close(h, expected)
    weights = [torch.randn_like(s), torch.randn_like(h)]
    close(gradients((s, h), weights, [x])[0], gradients((x * 1, expected), weights, [x])[0])


def test_many_columns_of_lora():
    """More than a few columns go another way in the backward pass."""
    x, a = randn(1, 20, WIDTH, grad=True), randn(1, 50, WIDTH, grad=True)
    gamma, beta, columns = randn(WIDTH), randn(WIDTH), Columns(50)
    _, h = NormPrologue.apply(x, None, a, gamma, beta, 1e-5, columns, 0.0, seed(), False)
    normed = F.layer_norm(x, (WIDTH,), gamma, beta)
    expected = beside(normed, normed @ a.transpose(1, 2), columns.total)
    weights = [weights_for(h, WIDTH, 50)]
    for ours, theirs in zip(gradients([h], weights, (x, a)), gradients([expected], weights, (x, a)),
                            strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-5)


def test_dropout_is_another_with_another_seed_and_the_same_with_the_same():
    x, y, a, gamma, beta, columns = norm_inputs()
    one, other = seed(), seed()
    runs = [NormPrologue.apply(x, y, a, gamma, beta, 1e-5, columns, 0.5, s, False)[1]
            for s in (one, one, other)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("lora", [True, False])
def test_gelu(lora):
    u = randn(STREAMS, 20, BRANCHES, 40, grad=True)
    a = randn(STREAMS * BRANCHES, 3, 40, grad=True)
    columns = Columns(3) if lora else None
    h = GeluPrologue.apply(u, a if lora else None, columns, 0.0, seed())
    plain = F.gelu(u).permute(0, 2, 1, 3).flatten(0, 1)
    expected = beside(plain, plain @ a.transpose(1, 2), 16) if lora else plain
    close(h, expected)
    weights, inputs = [weights_for(h, 40, 3) if lora else torch.randn_like(h)], [u, a][:1 + lora]
    for ours, theirs in zip(gradients([h], weights, inputs), gradients([expected], weights, inputs),
                            strict=True):
        close(ours, theirs)


def test_gelu_of_a_long_row_and_of_large_values():
    u = torch.cat([randn(1000), torch.tensor([-30.0, -5.0, 0.0, 5.0, 30.0] * 4 + [1e4] * 4)
                   .to(DEVICE)]).view(1, 4, 1, 256).requires_grad_(True)
    h = GeluPrologue.apply(u, None, None, 0.0, seed())
    close(h.flatten(), F.gelu(u).flatten())
    close(torch.autograd.grad(h.sum(), u)[0], torch.autograd.grad(F.gelu(u).sum(), u)[0])


@pytest.mark.parametrize("words", [37, 2048, 5001])  # less than a block, one, several
def test_cross_entropy(words):
    logits = (randn(9, words) * 4).requires_grad_(True)
    target = torch.randint(0, words, (9,), device=DEVICE)
    target[0], target[1], target[4] = 0, words - 1, -100
    loss = CrossEntropy.apply(logits, target)
    expected = F.cross_entropy(logits, target, ignore_index=-100, reduction="none")
    close(loss, expected)
    assert loss[4] == 0
    weights = [torch.randn_like(loss)]
    close(gradients([loss], weights, [logits])[0], gradients([expected], weights, [logits])[0])
    close(torch.autograd.grad(CrossEntropy.apply(logits, target).sum(), logits)[0],
          torch.autograd.grad(F.cross_entropy(logits, target, reduction="sum"), logits)[0])


def test_cross_entropy_of_extreme_logits():
    logits = torch.full((4, 50), -1e4, device=DEVICE)
    logits[0, 3], logits[1], logits[2, 7] = 1e4, 0.0, float("nan")
    target = torch.tensor([3, 3, 3, 3], device=DEVICE)
    loss = CrossEntropy.apply(logits, target)
    close(loss[[0, 1, 3]], F.cross_entropy(logits, target, reduction="none")[[0, 1, 3]])
    assert loss[2].isnan()  # a model that has diverged shows


def test_frozen_linear():
    width, outputs, used = 8, 6, 4
    h = beside(randn(2, 9, width), randn(2, 9, used), 16).requires_grad_(True)
    weight, bias, b = randn(outputs, width), randn(outputs), randn(2, 2 * outputs, used, grad=True)
    out = FrozenLinear.apply(h, weight, bias, b)
    plain = (h[..., :width] @ weight.T + bias).repeat(1, 1, 2)
    plain = plain + h[..., width:width + used] @ b.transpose(1, 2)
    close(out, plain)
    weights = [torch.randn_like(out)]
    (dh, db), (dh2, db2) = (gradients([o], weights, (h, b)) for o in (out, plain))
    close(dh[..., :width + used], dh2[..., :width + used])
    close(db, db2)


@pytest.mark.parametrize(("streams", "tokens", "branches", "masked", "cut", "privates"), [
    (1, 37, 1, False, 0, 0), (1, 37, 2, True, 0, 0), (2, 20, 2, True, 13, 2),
    (1, 130, 1, True, 100, 1), (1, 260, 1, True, 100, 1)])
def test_attention(streams, tokens, branches, masked, cut, privates):
    batch, heads, size = 2, 2, 16
    width, count = heads * size, streams * branches
    qkv = randn(streams, batch, tokens, branches, 3 * width, grad=True)
    mask = None
    may = torch.ones(count, batch, 1, tokens, tokens, dtype=torch.bool, device=DEVICE)
    if masked:
        lengths = torch.tensor([[tokens], [tokens // 2 + 4]], device=DEVICE)
        mask = torch.arange(tokens, device=DEVICE) < lengths
        mask[:, cut] = True
        may &= mask[None, :, None, None, :]
    if privates:
        late = torch.arange(tokens, device=DEVICE) >= cut
        may[:privates] &= late[:, None] == late[None, :]
    out = Attention.apply(qkv, mask, heads, cut, privates)
    q, k, v = (qkv.permute(0, 3, 1, 2, 4).reshape(count * batch, tokens, 3, heads, size)
               .permute(2, 0, 3, 1, 4))
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=may.flatten(0, 1))
    plain = plain.transpose(1, 2).reshape(out.shape)
    close(out, plain)
    weights = [torch.randn_like(out)]
    close(gradients([out], weights, [qkv])[0], gradients([plain], weights, [qkv])[0])


@pytest.mark.parametrize("tokens", [20, 70])
def test_attention_to_nothing_is_zero(tokens):
    """A row that only pads a minibatch sees no key; the others are not touched by it."""
    qkv = randn(1, 2, tokens, 1, 96, grad=True)
    mask = torch.ones(2, tokens, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    out = Attention.apply(qkv, mask, 2, 0, 0)
    alone = Attention.apply(qkv[:, :1], mask[:1], 2, 0, 0)
    assert torch.equal(out[:, :1], alone)
    assert not out[:, 1].any()
    (gradient,) = torch.autograd.grad(out.square().sum(), qkv)
    assert gradient[:, 0].abs().min() > 0
    assert not gradient[:, 1].any()


@pytest.mark.parametrize(("kibibytes", "longest"), [
    (227, {16: 512, 32: 512, 64: 256}), (163, {16: 512, 32: 512, 64: 256}),
    (99, {16: 512, 32: 256, 64: 128})])
def test_gpus_with_little_shared_memory_get_smaller_programs(monkeypatch, kibibytes, longest):
    class Properties:
        shared_memory_per_block_optin = kibibytes * 1024

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    memory.plenty.cache_clear()
    try:
        device = torch.device("cuda")
        assert {size: max_tokens(size, device) for size in longest} == longest
        assert memory.stages(device) == ({"num_stages": 1} if kibibytes < 160 else {})
    finally:
        memory.plenty.cache_clear()
    assert max(longest.values()) in BACKWARD
    assert memory.plenty(torch.device("cpu"))
