"""The fast way through a network against the plain one: outputs, losses, gradients."""

import dataclasses
import shutil

import pytest
import torch

pytest.importorskip("triton")

from tapfl.config import SpeedConfig
from tapfl.model import fast
from tapfl.model.foundation import build_foundation
from tapfl.model.layer import MAX_COLUMNS, Keys, Residual, TransformerLayer
from tapfl.model.lora import Dropout, Factors
from tapfl.model.network import Outputs, build_network
from tests import conftest
from tests.conftest import FLAVA, PAIR, TASKS, randomize, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tiny(name="flava", **sections):
    """A tiny configuration with heads of 16, which the kernels know; a pair's norm comes after."""
    config = tiny_config(name, **{"lora": {"dropout": 0.0}, **sections})
    two = {"num_attention_heads": 2}
    architecture = {**FLAVA, **two} if name == "flava" else {
        "image": {**PAIR["image"], **two, "hidden_size": 32, "num_hidden_layers": 1},
        "text": {**PAIR["text"], **two, "num_hidden_layers": 2}}
    foundation = config.foundation.model_copy(update={"architecture": architecture})
    return config.model_copy(update={"foundation": foundation})


def build(config, **options):
    return build_network(config, TASKS, device=DEVICE, **options)


def make_batch(task):
    return conftest.make_batch(task).to(DEVICE)


def layers(network):
    return [m for m in network.modules() if isinstance(m, TransformerLayer)]


def passes(network, task, batch, quick):
    for layer in layers(network):
        layer.fast = quick
    network.zero_grad()
    torch.manual_seed(0)
    outputs = network(task, batch, latents=True)
    loss = network.loss(task, outputs, batch)
    loss = loss + sum(v.square().mean() for v in outputs.latents.values())
    loss.backward()
    return outputs.prediction.detach(), {
        n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "sections", "task"), [
    pytest.param("flava", {}, "pets", marks=pytest.mark.long),
    pytest.param("flava", {}, "vqa", marks=pytest.mark.long),
    pytest.param("flava", {"backbone": {"layers_per_stage": 2}}, "vqa", marks=pytest.mark.long),
    ("flava", {"backbone": {"kind": "standard"}}, "news"),
    pytest.param("pair", {}, "vqa", marks=pytest.mark.long),
    ("pair", {"backbone": {"kind": "standard"}}, "news")])
def test_fast_equals_plain(name, sections, task):
    network = randomize(build(tiny(name, **sections))).eval()
    assert all(fast.suits(layer) for layer in layers(network))
    batch = make_batch(TASKS[task])
    plain, plain_gradients = passes(network, task, batch, False)
    quick, quick_gradients = passes(network, task, batch, True)
    torch.testing.assert_close(quick, plain, atol=2e-5, rtol=2e-5)
    assert set(quick_gradients) == set(plain_gradients)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(quick_gradients[name], gradient, atol=2e-5, rtol=2e-4, msg=name)


def test_a_pairs_image_encoder_goes_through_the_kernels():
    """DINOv2 scales what a layer adds; folded into the weights, it is a layer like any other."""
    config = tiny_config("pair", lora={"dropout": 0.0})
    image = {"model_type": "dinov2", "hidden_size": 32, "num_attention_heads": 2, "mlp_ratio": 2,
             "num_hidden_layers": 2, "image_size": 32, "patch_size": 8, "layerscale_value": 0.5}
    foundation = config.foundation.model_copy(
        update={"architecture": {**PAIR, "image": image}})
    network = randomize(build(config.model_copy(update={"foundation": foundation}))).eval()
    encoder = network.foundation.encoders["image"].layers
    assert all(fast.suits(layer) for layer in encoder)
    batch, found = make_batch(TASKS["pets"]), []
    for quick in (False, True):
        for layer in encoder:
            layer.fast = quick
        with torch.no_grad():
            found.append(network("pets", batch).prediction)
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=2e-5)


def post_norm_layer():
    layer = build(tiny("pair")).foundation.layers[0]
    assert not layer.pre_norm
    with torch.no_grad():
        for norm in (layer.norm1, layer.norm2):
            norm.weight.normal_(1, 0.3)
            norm.bias.normal_(0, 0.3)
    return layer


def factors(count, columns, inputs, outputs, cut=None):
    return Factors(*(torch.randn(count, *s, device=DEVICE).mul_(0.2).requires_grad_()
                     for s in ((columns, inputs), (outputs, columns))), Dropout(), cut)


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_norm_after_the_sum(lora, checkpointing):
    """Two layers, one after the other, whose paths branch in the first attention."""
    torch.manual_seed(0)
    layer, x = post_norm_layer(), torch.randn(1, 3, 9, 32, device=DEVICE, requires_grad=True)
    mask = torch.arange(9, device=DEVICE) < torch.tensor([[9], [7], [5]], device=DEVICE)
    keys = Keys(mask, cut=4, privates=1 if lora else 0)
    streams = 2 if lora else 1
    chosen = [factors(streams, 4, 32, 96, 4), factors(streams, 4, 32, 64, 4),
              factors(streams, 4, 64, 32, 4), factors(streams, 2, 32, 96)] if lora else [None] * 4
    layer.checkpointing, found = checkpointing, []
    inputs = [x, *(t for f in chosen if f for t in (f.a, f.b))]
    weight = torch.randn(streams, 3, 9, 32, device=DEVICE)
    for quick in (False, True):
        layer.fast = quick
        between = layer.feed_forward(layer.attend(Residual(x), keys, chosen[0]), *chosen[1:3])
        assert (between.norm is not None) == quick  # taken by the next step
        out = layer.feed_forward(layer.attend(between, keys, chosen[3]),
                                 adapter=lambda h: 2 * torch.tanh(h))
        loss = (out.total() * weight).sum() + between.first().square().sum()
        found.append([out.total().detach(), out.first().detach(),
                      *torch.autograd.grad(loss, inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=2e-4)


@pytest.mark.parametrize("lora", [True, False])
def test_a_whole_text_encoder_whose_norms_come_after(lora):
    network = randomize(build(tiny("pair"))).eval()
    encoder = network.foundation.encoders["text"]
    block = network.blocks["encoder/text"] if lora else None
    batch, found = make_batch(TASKS["news"]), []
    for quick in (False, True):
        for layer in encoder.layers:
            layer.fast = quick
        network.zero_grad()
        out = encoder(batch.text, batch.text_mask, block)
        if lora:
            out.square().sum().backward()
        found.append([out.detach(), *(p.grad.clone() for p in (block.parameters() if lora else ())
                                      if p.grad is not None)])
    assert len(found[0]) == (1 + 4 * len(encoder.layers) if lora else 1)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=2e-4)


def test_a_pending_norm_is_taken_before_a_step_that_goes_the_plain_way():
    """Of one layer, some steps may suit the kernels and others have too many columns."""
    torch.manual_seed(0)
    layer, x = post_norm_layer(), torch.randn(1, 2, 5, 32, device=DEVICE)
    many, found = factors(1, MAX_COLUMNS + 1, 32, 64), []
    for quick in (False, True):
        layer.fast = quick
        found.append(layer.feed_forward(layer.attend(Residual(x), Keys()), many).total())
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)


@pytest.mark.long
def test_dropout_of_the_kernels_leaves_the_mean_alone():
    network = randomize(build(tiny(lora={"dropout": 0.3})))
    batch = make_batch(TASKS["news"])
    for layer in layers(network):
        layer.fast = True
    with torch.no_grad():
        exact = network.eval()("news", batch).prediction
        torch.manual_seed(1)
        network.train()
        heads = [m for m in network.modules() if isinstance(m, torch.nn.Dropout)]
        for head in heads:
            head.p = 0.0
        drawn = torch.stack([network("news", batch).prediction for _ in range(12)])
    assert not torch.equal(drawn[0], drawn[1])
    spread = drawn.std(dim=0).mean()
    assert (drawn.mean(dim=0) - exact).abs().mean() < spread


@pytest.mark.long
def test_checkpointing_gives_the_same_gradients():
    network = randomize(build(tiny(lora={"dropout": 0.3}))).train()
    for quick in (False, True):
        check_checkpointing(network, "pets", quick)


@pytest.mark.long
def test_checkpointing_where_the_norm_comes_after():
    network = randomize(build(tiny("pair", lora={"dropout": 0.3}))).train()
    check_checkpointing(network, "news", quick=True)


def check_checkpointing(network, task, quick):
    batch, found = make_batch(TASKS[task]), []
    for checkpointing in (False, True):
        for layer in layers(network):
            layer.checkpointing = checkpointing
        found.append(passes(network, task, batch, quick)[1])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


@pytest.mark.long
def test_checkpointing_of_ranks_that_the_kernels_leave_alone():
    network = randomize(build(tiny(lora={"expert_rank": 65, "dropout": 0.5})))
    check_checkpointing(network.train(), "news", quick=True)


@pytest.mark.long
def test_large_ranks_and_other_layers_go_the_plain_way():
    config = tiny(lora={"expert_rank": MAX_COLUMNS + 1, "attention_rank": 2, "dropout": 0.0})
    network = randomize(build(config)).eval()
    batch = make_batch(TASKS["news"])
    plain, _ = passes(network, "news", batch, False)
    quick, _ = passes(network, "news", batch, True)
    torch.testing.assert_close(quick, plain, atol=2e-5, rtol=2e-5)
    relu = tiny("pair").foundation.architecture
    relu = {**relu, "text": {**relu["text"], "hidden_act": "relu"}}
    foundation = build_foundation(tiny("pair").foundation.model_copy(
        update={"architecture": relu}))
    assert not any(fast.suits(layer) for layer in foundation.layers)


@pytest.mark.parametrize("name", ["flava", "pair"])
def test_speed_is_set_on_half_precision_only(name):
    foundation = build(tiny(name)).foundation
    assert foundation.speed_up(SpeedConfig()).execution_modes["kernels"] == 0
    foundation.to(torch.bfloat16)
    count = len(layers(foundation))
    modes = foundation.speed_up(SpeedConfig()).execution_modes
    assert modes == {"kernels": count, "compiled": 0, "plain": 0}
    compiled = foundation.speed_up(SpeedConfig(kernels=False), compiled=True)
    assert compiled.execution_modes["compiled"] == count


def test_another_network_on_the_base_leaves_packed_weights_in_place():
    """A recorded step reads them where they were when it was recorded."""
    config = tiny()
    network = build(config)
    layer = layers(network)[0]
    weight, bias = layer.packed()
    build(config, foundation=network.foundation)
    assert layer.packed()[0] is weight
    assert layer.query.weight.data_ptr() == weight.data_ptr()
    assert layer.value.bias.data_ptr() == bias.chunk(3)[2].data_ptr()
    with torch.no_grad():
        layer.key.weight.fill_(3.0)
    assert (layer.packed()[0].chunk(3)[1] == 3).all()
    network.foundation.to(torch.bfloat16)
    assert layer.packed()[0].dtype == torch.bfloat16


def test_weights_that_train_are_never_packed_for_good():
    layer = layers(build(tiny()))[0]
    x = torch.randn(2, 5, 32, device=DEVICE)
    layer(x)
    layer.requires_grad_(True)
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    assert layer.query.weight.grad is not None


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.long
@torch.no_grad()
def test_compiled_equals_plain():
    layer = layers(build(tiny()))[0]
    x = torch.randn(2, 5, 32, device=DEVICE)
    plain = layer(x)
    layer.compiled = True
    torch.testing.assert_close(layer(x), plain)


@pytest.mark.parametrize("task", ["story", "vqa"])
def test_the_loss_of_text_by_a_kernel_is_the_plain_one(task):
    network, batch = build(tiny()), make_batch(TASKS[task])
    words = network.foundation.vocabulary
    logits = torch.randn(3, 5, words, device=DEVICE, requires_grad=True)
    batches = [batch, dataclasses.replace(batch, answer_mask=None), dataclasses.replace(
        batch, real=torch.tensor([True, False, True], device=DEVICE)), dataclasses.replace(
        batch, whole=torch.tensor([8, 40], device=DEVICE))]
    for one in batches:
        found = []
        for quick in (False, True):
            network.foundation.layers[0].fast = quick
            loss = network.loss(task, Outputs(logits, {}), one)
            found.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
        torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    # At some places alone: all targets that count are there, and some that do not.
    some = dataclasses.replace(batches[2], places=torch.arange(15, device=DEVICE)[[
        *range(5), *range(6, 15)]])
    few = logits.flatten(0, 1)[some.places]
    loss = network.loss(task, Outputs(few, {}), some)
    torch.testing.assert_close(loss, network.loss(task, Outputs(logits, {}), batches[2]))
