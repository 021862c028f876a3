import numpy as np
import pytest
import torch

from tapfl.config import DataConfig, load_config
from tapfl.data.participants import load_federation
from tapfl.data.sources import load_data
from tapfl.data.synthetic import MAX_REFERENCES, SHAPES, generate
from tapfl.errors import TapflError
from tapfl.model.foundation import load_tokenizer
from tapfl.tasks import Task
from tests.experiment import FederatedRun, read_events, tiny_experiment

FLAVA = load_federation(load_config("flava").federation).task_table()
TEXTS = ["agnews", "mmlu", "vqa", "commongen"]
PAPER = {"tiny-imagenet": (100_000, 10_000), "cifar100": (50_000, 10_000),
         "fmnist": (60_000, 10_000), "caltech256": (24_485, 6_122), "agnews": (120_000, 7_600),
         "mmlu": (2_711, 301), "vqa": (17_148, 4_287), "commongen": (67_389, 4_018)}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(load_config("mini").foundation)


def make(tokenizer, task, limit=256, **settings):
    task = FLAVA[task] if isinstance(task, str) else task
    return generate(DataConfig(source="synthetic", **settings), task, tokenizer, limit, "cpu")


def test_every_task_of_the_paper_has_its_sizes():
    assert {name: (shape.train, shape.test) for name, shape in SHAPES.items()} == PAPER
    assert set(FLAVA) == set(SHAPES)


@pytest.mark.parametrize("name", TEXTS)
def test_whole_data_sets(name, tokenizer):
    train, test = make(tokenizer, name, test=None if name != "agnews" else 10)
    size, of_test = PAPER[name]
    assert len(train) == size
    most = MAX_REFERENCES if FLAVA[name].kind == "text_generation" else 10
    assert len(test) == min(of_test, most)
    if test.answers is not None:
        assert len(test.references) == len(test)


def test_a_number_caps_a_size(tokenizer):
    config = load_config("flava", ["data.source=synthetic", "data.train=40", "data.test=7"])
    splits = load_data(config, FLAVA, tokenizer, 256)
    assert set(splits) == set(FLAVA)
    assert {tuple(map(len, both)) for both in splits.values()} == {(40, 7)}
    assert tuple(map(len, make(tokenizer, "mmlu", train=10**6, test=10**6))) == PAPER["mmlu"]


@pytest.mark.parametrize(("name", "part", "low", "high", "mean"), [
    ("agnews", "text", 8, 256, 52), ("mmlu", "text", 40, 512, 190), ("mmlu", "answers", 8, 14, 11),
    ("vqa", "text", 8, 24, 11), ("vqa", "answers", 6, 12, 8), ("commongen", "text", 14, 24, 18),
    ("commongen", "answers", 8, 30, 15)])
def test_lengths(name, part, low, high, mean, tokenizer):
    lengths = getattr(make(tokenizer, name, limit=512)[0], part).lengths
    assert lengths.dtype == np.int64
    assert low <= lengths.min() <= lengths.max() <= high
    assert lengths.mean() == pytest.approx(mean, rel=0.05)


def test_news_have_the_spread_of_the_real_ones(tokenizer):
    lengths = make(tokenizer, "agnews")[0].text.lengths
    assert np.percentile(lengths, [5, 95]) == pytest.approx([33, 75], abs=2)


@pytest.mark.parametrize("limit", [40, 5])
def test_texts_are_cut_at_the_models_limit(limit, tokenizer):
    for name in TEXTS:
        data, _ = make(tokenizer, name, limit, train=50, test=5)
        assert data.text.ids.shape[1] == data.text.lengths.max() <= limit


@pytest.mark.parametrize("part", ["text", "answers"])
def test_words_stand_between_cls_and_sep(part, tokenizer):
    texts = getattr(make(tokenizer, "commongen", train=300)[0], part)
    assert texts.ids.dtype == torch.int32
    special = set(tokenizer.all_special_ids)
    for row, length in zip(texts.ids.tolist(), texts.lengths, strict=True):
        words, padding = row[1:length - 1], row[length:]
        assert row[0] == tokenizer.cls_token_id
        assert row[length - 1] == tokenizer.sep_token_id
        assert set(padding) <= {tokenizer.pad_token_id}
        assert not special & set(words)
        assert all(5 <= word < len(tokenizer) for word in words)


def test_labels_and_images_use_their_whole_range(tokenizer):
    data, _ = make(tokenizer, "cifar100", train=3000, test=1)
    assert data.images.shape == (3000, 3, 64, 64)
    assert data.images.dtype == torch.uint8
    assert set(data.labels.tolist()) == set(range(100))
    counts = torch.bincount(data.images[:100].flatten().long(), minlength=256)
    assert counts.min() > 0.9 * counts.float().mean()


def test_the_seed_decides(tokenizer):
    def fingerprint(seed):
        train, test = make(tokenizer, "vqa", train=20, test=20, seed=seed)
        return [(d.images, d.text.ids, d.answers.ids) for d in (train, test)]

    first, again, other = fingerprint(3), fingerprint(3), fingerprint(4)
    for split in range(2):
        assert all(map(torch.equal, first[split], again[split]))
        assert not torch.equal(first[split][0], other[split][0])
    assert not torch.equal(first[0][0], first[1][0])


def test_an_unknown_data_set_follows_from_its_kind(tokenizer):
    train, test = make(tokenizer, Task("mine", "text_generation", ("image", "text")), train=100)
    assert (len(train), len(test)) == (100, 1000)
    assert set(train.text.lengths) == {64}
    assert train.images is not None
    assert train.labels is None
    assert len(make(tokenizer, Task("yours", "text_classification", ("text",), 3))[0]) == 10_000


def test_a_round_on_synthetic_data(tmp_path):
    config = tiny_experiment(tmp_path, data={"source": "synthetic"}, train={"rounds": 1})
    run = FederatedRun(config, tmp_path / "run")
    rows = run.run()
    assert len(read_events(tmp_path / "run", "round")) == 1
    assert all(np.isfinite(row["value"]) for row in rows)


def test_a_source_must_be_known():
    with pytest.raises(TapflError, match="'miniature', 'hub' or 'synthetic'"):
        load_config("mini", ["data.source=real"])
