import copy

import pytest
import torch
from torch import nn

from tapfl.blocks import BlockState, decoder_block, paths
from tapfl.errors import TapflError
from tapfl.model.backbone import RoutedBackbone, StandardBackbone, Tokens, masked_mean
from tapfl.model.foundation import build_foundation
from tapfl.model.lora import Dropout
from tapfl.model.network import build_network
from tapfl.tasks import Batch
from tests.conftest import TASKS, make_batch, randomize, tiny_config

CONFIGS = {
    "flava": tiny_config(), "vilt": tiny_config("vilt"), "pair": tiny_config("pair"),
    "deep": tiny_config(backbone={"layers_per_stage": 2}),
    "standard": tiny_config(backbone={"kind": "standard"}),
    "untied": tiny_config(decoder={"tie_embeddings": False}),
}


@pytest.fixture(scope="module", params=CONFIGS)
def any_network(request):
    return randomize(build_network(CONFIGS[request.param], TASKS)).eval()


@pytest.mark.parametrize("name", TASKS)
def test_outputs_and_gradients(any_network, name):
    task, batch = TASKS[name], make_batch(TASKS[name])
    any_network.train()
    any_network.zero_grad()
    outputs = any_network(name, batch, latents=True)
    shape = {"image_classification": (3, task.classes), "text_classification": (3, task.classes),
             "image_generation": (3, 3, 64, 64), "text_generation": (3, 5, 120)}[task.kind]
    assert tuple(outputs.prediction.shape) == shape
    assert set(outputs.latents) == set(task.modalities)
    assert all(v.shape == (3, 32) for v in outputs.latents.values())
    any_network.loss(name, outputs, batch).backward()
    touched = {n for n, block in any_network.blocks.items()
               if any(p.grad is not None and p.grad.abs().sum() > 0 for p in block.parameters())}
    assert touched == set(any_network.ownership.blocks_of_task(name))
    any_network.eval()


def test_trainable_names_are_exactly_the_blocks(any_network):
    """Trap 5: nothing of the base trains, everything in a block does."""
    trainable = {n for n, p in any_network.named_parameters() if p.requires_grad}
    assert trainable == {f"blocks.{n}" for n, _ in any_network.blocks.named_parameters()}
    assert set(any_network.blocks) == set(any_network.ownership.all_blocks())
    assert {n for n, _ in any_network.named_parameters()} - trainable
    assert not any_network.foundation.train().training


@pytest.mark.parametrize("name", ["news", "story", "vqa"])
def test_padding_changes_nothing(any_network, name):
    """Trap 6: attention and pooling leave padding out."""
    batch = make_batch(TASKS[name])
    padded = copy.copy(batch)
    padded.text = nn.functional.pad(batch.text, (0, 6), value=17)
    padded.text_mask = nn.functional.pad(batch.text_mask, (0, 6), value=False)
    a = any_network(name, batch, latents=True)
    b = any_network(name, padded, latents=True)
    torch.testing.assert_close(a.prediction, b.prediction, atol=1e-5, rtol=1e-5)
    for modality in a.latents:
        torch.testing.assert_close(a.latents[modality], b.latents[modality], atol=1e-5, rtol=1e-5)
    if name != "news":
        padded.answer = nn.functional.pad(batch.answer, (0, 3), value=9)
        padded.answer_mask = nn.functional.pad(batch.answer_mask, (0, 3), value=False)
        torch.testing.assert_close(any_network.loss(name, any_network(name, padded), padded),
                                   any_network.loss(name, a, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("owned", [["pets"], ["news"], ["story", "paint"], ["vqa"]])
def test_a_clients_own_network_equals_the_servers(any_network, owned):
    own = build_network(any_network.config, TASKS, owned).eval()
    assert set(own.blocks) == set(any_network.ownership.blocks_of(None, owned))
    BlockState.extract(any_network.blocks, own.blocks).load_into(own.blocks)
    for name in owned:
        batch = make_batch(TASKS[name])
        assert torch.equal(own(name, batch).prediction, any_network(name, batch).prediction)


def test_a_client_builds_only_the_encoders_it_owns():
    own = build_network(tiny_config(), TASKS, ["news"])
    assert list(own.foundation.encoders) == ["text"]


def test_networks_share_one_foundation(flava_base):
    a = build_network(tiny_config(), TASKS, ["news"], foundation=flava_base)
    b = build_network(tiny_config(), TASKS, ["news"], foundation=flava_base, seed=1)
    frozen = {p.data_ptr() for p in a.parameters() if not p.requires_grad}
    assert frozen == {p.data_ptr() for p in b.parameters() if not p.requires_grad}
    assert not torch.equal(a.blocks["decoder/news"][0].weight, b.blocks["decoder/news"][0].weight)


def test_initial_blocks_do_not_depend_on_what_else_is_built(flava_base):
    server = build_network(tiny_config(), TASKS, foundation=flava_base)
    client = build_network(tiny_config(), TASKS, ["vqa"], foundation=flava_base)
    state = BlockState.extract(server.blocks)
    for name, value in BlockState.extract(client.blocks).items():
        assert torch.equal(value, state[name])


def _one_path_at_a_time(network, tokens, kind):
    """The routed backbone as the paper draws it: every path alone, every layer from scratch."""
    def lora(module, h):
        return 2 * h @ module.a.T @ module.b.T

    def run(x, layer, mask, attention, experts):
        h = layer.norm1(x)
        dq = torch.cat([lora(a.query, s) for a, s in zip(attention, split(h), strict=True)], 1)
        dv = torch.cat([lora(a.value, s) for a, s in zip(attention, split(h), strict=True)], 1)
        q, k, v = layer.query(h) + dq, layer.key(h), layer.value(h) + dv
        heads = [t.unflatten(-1, (layer.heads, -1)).transpose(1, 2) for t in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(-1, -2) / heads[0].shape[-1] ** 0.5
        mixed = scores.masked_fill(~mask, -1e9).softmax(-1) @ heads[2]
        x = x + layer.out(mixed.transpose(1, 2).flatten(2))
        h = layer.norm2(x)
        inner = layer.up(h) + torch.cat(
            [lora(e.up, s) for e, s in zip(experts, split(h), strict=True)], 1)
        inner = layer.activation(inner)
        return x + layer.down(inner) + torch.cat(
            [lora(e.down, s) for e, s in zip(experts, split(inner), strict=True)], 1)

    def split(x):
        return x.split(list(tokens.lengths.values()), dim=1)

    length = tokens.values.shape[1]
    real = tokens.mask if tokens.mask is not None else torch.ones(
        tokens.values.shape[:2], dtype=torch.bool)
    everything = real[:, None, None, :].expand(-1, 1, length, -1)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(tokens.lengths.values())])
    private = everything & (ids[:, None] == ids[None, :])
    stage = len(network.foundation.layers) // 2
    results, latent = [], None
    for index in range(4):
        routes = [paths(m, kind)[index] for m in tokens.lengths]
        x = tokens.values
        for depth in range(stage):
            x = run(x, network.foundation.layers[depth], private if index < 2 else everything,
                    [network.blocks[f"mote/{r.mote_stack}/attention"][depth] for r in routes],
                    [network.blocks[f"mote/{r.mote_stack}/expert/{r.mote_expert}"][depth]
                     for r in routes])
        latent = x if index == 0 else latent
        for depth in range(stage):
            x = run(x, network.foundation.layers[stage + depth], everything,
                    [network.blocks[f"mome/{r.mome_stack}/attention"][depth] for r in routes],
                    [network.blocks[f"mome/{r.mome_stack}/expert/{r.mome_expert}"][depth]
                     for r in routes])
        results.append(x)
    return sum(results) / 4, latent


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("modalities", [("image",), ("text",), ("image", "text")])
def test_routed_backbone_equals_one_path_at_a_time(layers, modalities):
    config = tiny_config(backbone={"layers_per_stage": layers})
    network = randomize(build_network(config, TASKS)).eval()
    kind = "text_classification" if modalities == ("text",) else "text_generation"
    if modalities == ("image",):
        kind = "image_generation"
    parts = {m: torch.randn(3, 5 if m == "image" else 4, 32) for m in modalities}
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    tokens = Tokens.join(parts, {m: mask if m == "text" else None for m in modalities})
    ours, after = RoutedBackbone(list(network.foundation.layers), network.blocks, Dropout(), None)(
        tokens, kind)
    theirs, expected = _one_path_at_a_time(network, tokens, kind)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after.first(), expected, atol=1e-5, rtol=1e-5)


def test_modalities_meet_in_the_backbone(network):
    """A question's tokens depend on the image, so that visual questions can be answered."""
    batch = make_batch(TASKS["vqa"])
    tokens, before = network.encode(TASKS["vqa"], batch)
    batch.image = 255 - batch.image
    changed, after = network.encode(TASKS["vqa"], batch)
    text = slice(tokens.lengths["image"], None)
    assert not torch.allclose(tokens.values[:, text], changed.values[:, text], atol=1e-4)
    assert torch.equal(before.first()[:, text], after.first()[:, text])


def test_text_generation_depends_on_its_condition(any_network):
    """Trap 2: another input gives other logits; so does no condition at all."""
    batch = make_batch(TASKS["story"])
    other = copy.copy(batch)
    other.text = batch.text.flip(0).clamp(min=5)
    a, b = (any_network("story", x).prediction for x in (batch, other))
    assert (a - b).abs().max() > 1e-4
    head = any_network.blocks["decoder/text_generation"]
    tokens, _ = any_network.encode(TASKS["story"], batch)
    with_condition = head(batch.answer, head.start(tokens.values, tokens.mask))
    without = head(batch.answer, head.start(torch.zeros_like(tokens.values), tokens.mask))
    assert (with_condition - without).abs().max() > 1e-4


def test_text_generation_is_autoregressive(network):
    """A later token never changes an earlier prediction."""
    batch = make_batch(TASKS["story"])
    a = network("story", batch).prediction
    batch.answer = batch.answer.clone()
    batch.answer[:, 4] = 7
    b = network("story", batch).prediction
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert (a[:, 4] - b[:, 4]).abs().max() > 1e-5


@pytest.mark.parametrize("name", ["story", "vqa"])
def test_generate_equals_decoding_without_a_cache(network, name):
    batch = make_batch(TASKS[name])
    written = network.generate(name, batch, start=2, end=3, pad=0, max_new_tokens=9)
    tokens, _ = network.encode(TASKS[name], batch)
    head = network.blocks["decoder/text_generation"]
    ids = torch.full((3, 1), 2)
    for _ in range(written.shape[1]):
        following = head(ids, head.start(tokens.values, tokens.mask))[:, -1].argmax(-1)
        ids = torch.cat([ids, following[:, None]], dim=1)
    ended = torch.zeros(3, dtype=torch.bool)
    for step in range(written.shape[1]):
        expected = ids[:, step + 1].masked_fill(ended, 0)
        assert torch.equal(written[:, step], expected)
        ended |= expected == 3


def test_generate_stops_at_the_end_token(network):
    batch = make_batch(TASKS["story"])
    first = network.generate("story", batch, start=2, end=-1, pad=0, max_new_tokens=1)
    end = int(first[0, 0])
    written = network.generate("story", batch, start=2, end=end, pad=0, max_new_tokens=8)
    row = written[0].tolist()
    assert row == [end] + [0] * (len(row) - 1)


def test_generate_is_greedy_in_training_too(network):
    batch = make_batch(TASKS["story"])
    expected = network.generate("story", batch, start=2, end=-1, pad=0, max_new_tokens=9)
    network.train()
    for _ in range(3):
        written = network.generate("story", batch, start=2, end=-1, pad=0, max_new_tokens=9)
        assert torch.equal(written, expected)
    with pytest.raises(TapflError, match="at least 1"):
        network.generate("story", batch, start=2, end=3, pad=0, max_new_tokens=0)


def test_generation_stays_within_the_position_table(network):
    batch = make_batch(TASKS["story"])
    written = network.generate("story", batch, start=2, end=-1, pad=0, max_new_tokens=10_000)
    assert written.shape[1] == network.foundation.max_text


def test_bf16_compute_keeps_fp32_trainables():
    config = tiny_config()
    exact = randomize(build_network(config, TASKS)).eval()
    half = randomize(build_network(config, TASKS)).eval()
    half.foundation.to(torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in half.blocks.parameters())
    assert all(p.dtype == torch.bfloat16 for p in half.foundation.parameters())
    for name in TASKS:
        batch = make_batch(TASKS[name])
        a, b = exact(name, batch), half(name, batch)
        error = (a.prediction - b.prediction.float()).norm() / a.prediction.norm()
        assert error < 0.05, (name, error)
        half.loss(name, b, batch).backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in half.blocks.parameters())


def test_lora_dropout_only_in_training(network):
    batch = make_batch(TASKS["pets"])
    assert torch.equal(network("pets", batch).prediction, network("pets", batch).prediction)
    network.train()
    a, _ = network.encode(TASKS["pets"], batch)
    b, _ = network.encode(TASKS["pets"], batch)
    assert not torch.equal(a.values, b.values)


def test_adapters_act_after_every_feed_forward_network(any_network):
    batch, seen = make_batch(TASKS["vqa"]), []

    def adapter(place, index, h):
        seen.append((place, index))
        return h + 0.1

    before = any_network("vqa", batch).prediction
    any_network.adapter = adapter
    after = any_network("vqa", batch).prediction
    any_network.adapter = None
    depth = any_network.config.backbone.layers_per_stage
    places = {("mote", depth), ("mome", depth)}
    if any_network.config.backbone.kind == "standard":
        places = {("backbone", 2 * depth)}
    places |= {(f"encoder/{m}", len(e.layers)) for m, e in any_network.foundation.encoders.items()}
    assert sorted(seen) == sorted((p, i) for p, count in places for i in range(count))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", ["pets", "news", "paint"])
def test_heads_read_the_normalised_mean_of_real_tokens(any_network, name):
    """The whole way after the backbone, by hand: final norm, mean over real tokens, head."""
    task, batch = TASKS[name], make_batch(TASKS[name])
    backbone = RoutedBackbone if any_network.config.backbone.kind == "routed" else StandardBackbone
    parts = {m: any_network._modality(task, m, batch, Dropout()) for m in task.modalities}
    tokens = Tokens.join(parts, {m: batch.text_mask if m == "text" else None for m in parts})
    values, _ = backbone(list(any_network.foundation.layers), any_network.blocks, Dropout(), None)(
        tokens, task.kind)
    norm = any_network.foundation.norm
    if norm is not None:
        values = nn.functional.layer_norm(values, (32,), norm.weight, norm.bias, norm.eps)
    real = tokens.mask if tokens.mask is not None else torch.ones(values.shape[:2])
    pooled = torch.stack([v[m.bool()].mean(0) for v, m in zip(values, real, strict=True)])
    expected = any_network.blocks[decoder_block(task)](pooled)
    torch.testing.assert_close(any_network(name, batch).prediction, expected, atol=1e-5, rtol=1e-5)


def test_dropout_acts_on_every_lora(flava_base):
    """Each LoRA alone, with the others at zero, makes two training passes differ."""
    network = build_network(tiny_config(), TASKS, foundation=flava_base)
    batch = make_batch(TASKS["pets"])
    for name in network.ownership.blocks_of_task("pets"):
        if name.startswith("decoder"):
            continue
        for key, parameter in network.blocks[name].named_parameters():
            if not key.endswith(".b"):
                continue
            with torch.no_grad():
                parameter.fill_(0.3)
            network.train()
            a, b = (network.encode(TASKS["pets"], batch)[0].values for _ in range(2))
            assert not torch.equal(a, b), (name, key)
            with torch.no_grad():
                parameter.zero_()


def test_masked_mean():
    x = torch.tensor([[[1.0], [3.0], [100.0]]])
    assert masked_mean(x, torch.tensor([[True, True, False]])).item() == 2
    assert masked_mean(x, None).item() == pytest.approx(104 / 3)


def _bad(**fields):
    return lambda b: Batch(**{**vars(b), **fields})


@pytest.mark.parametrize(("task", "change", "message"), [
    ("nope", _bad(), "unknown task 'nope'"),
    ("pets", _bad(image=None), "task 'pets' needs batch.image"),
    ("pets", _bad(image=torch.zeros(3, 1, 64, 64, dtype=torch.uint8)), "expected 3 channels"),
    ("pets", _bad(image=torch.zeros(3, 3, 32, 32, dtype=torch.uint8)), "expected 64x64 pixels"),
    ("pets", _bad(image=torch.zeros(3, 3, 64, 64)), "expected uint8"),
    ("news", _bad(text=torch.zeros(3, 300, dtype=torch.long), text_mask=None),
     "text of 300 tokens is longer than the 256 that flava allows"),
    ("story", _bad(answer=torch.zeros(3, 300, dtype=torch.long), answer_mask=None),
     "answer of 300 tokens"),
    ("story", _bad(answer=torch.zeros(3, 1, dtype=torch.long), answer_mask=None), "answer: exp"),
    ("news", _bad(text=torch.zeros(3, dtype=torch.long), text_mask=None), "text: expected token"),
    ("news", _bad(text_mask=torch.ones(3, 7, dtype=torch.long)), "text_mask: expected booleans"),
    ("news", _bad(text_mask=torch.ones(3, 4, dtype=torch.bool)), "text_mask: expected booleans"),
])
def test_bad_batches(network, task, change, message):
    batch = make_batch(TASKS.get(task, TASKS["vqa"]))
    with pytest.raises(TapflError, match=message):
        network(task, change(batch))


def test_only_text_generation_writes_text(network):
    with pytest.raises(TapflError, match="only text_generation writes text"):
        network.generate("news", make_batch(TASKS["news"]), start=2, end=3, pad=0)


def test_unknown_task_in_a_clients_network():
    with pytest.raises(TapflError, match="unknown task 'petz'; did you mean 'pets'"):
        build_network(tiny_config(), TASKS, ["petz"])


def test_meta_device_allocates_nothing():
    base = build_foundation(tiny_config().foundation, device="meta")
    network = build_network(tiny_config(), TASKS, device="meta", foundation=base)
    assert all(p.is_meta for p in network.parameters())
