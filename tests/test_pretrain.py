import pytest
from safetensors.torch import load_file, save_file

from tapfl.config import FoundationConfig, load_config
from tapfl.data.participants import load_federation
from tapfl.data.sources import load_data
from tapfl.errors import TapflError
from tapfl.evaluation.probe import linear_probe
from tapfl.model.foundation import build_foundation, load_tokenizer
from tapfl.pretrain import pretrain_mini


def test_pretraining_learns_and_loads(tmp_path):
    seen = []
    path = pretrain_mini(tmp_path / "mini.safetensors", steps=12, batch=8, pool=64,
                         progress=lambda step, losses: seen.append(losses))
    assert set(seen[0]) == {"image", "text", "paired image", "paired text", "joint image",
                            "joint text", "match"}
    assert seen[-1]["image"] < seen[0]["image"]
    assert path.stat().st_size < 8e6
    base = build_foundation(FoundationConfig(name="mini", weights=str(path)))
    assert not base.is_random
    assert not any(p.requires_grad for p in base.parameters())
    tensors = load_file(path)
    del tensors["norm.weight"]
    save_file(tensors, path)
    with pytest.raises(TapflError, match=r"tensor 'norm\.weight' is missing"):
        build_foundation(FoundationConfig(name="mini", weights=str(path)))


def test_the_shipped_weights_know_the_world():
    """Linear probes with 100 samples: pre-trained encoders beat random ones, clearly."""
    scores = {}
    for weights in ("shipped", "random"):
        config = load_config("quickstart", ["data.train=100", "data.test=300", "data.seed=77",
                                            f"foundation.weights={weights}"])
        tasks = {n: t for n, t in load_federation(config.federation).task_table().items()
                 if n in ("cifar100", "agnews")}
        data = load_data(config, tasks, load_tokenizer(config.foundation), 256)
        base = build_foundation(config.foundation)
        scores[weights] = {name: linear_probe(base, *data[name]) for name in tasks}
    assert scores["shipped"]["cifar100"] > scores["random"]["cifar100"] + 5
    assert scores["shipped"]["agnews"] > scores["random"]["agnews"] + 10
