import numpy as np
import pytest
import torch

from tapfl.config import FederationConfig, load_config
from tapfl.data import miniature, templates
from tapfl.data.batches import Texts
from tapfl.data.federation import Federation
from tapfl.data.participants import load_federation
from tapfl.data.sources import load_data
from tapfl.errors import TapflError
from tapfl.model.foundation import load_tokenizer


@pytest.mark.parametrize("name", miniature.DATASETS)
def test_splits_are_seeded_and_disjoint(name):
    train, test = miniature.generate(name, 200, 50, seed=3)
    again, _ = miniature.generate(name, 200, 50, seed=3)
    other, _ = miniature.generate(name, 200, 50, seed=4)
    assert (len(train), len(test)) == (200, 50)

    def keys(samples):
        parts = [samples.texts or [""] * len(samples),
                 ["" if samples.images is None else i.tobytes() for i in
                  (samples.images if samples.images is not None else samples.texts)]]
        return list(zip(*parts, strict=True))

    assert keys(train) == keys(again) != keys(other)
    assert not set(keys(train)) & set(keys(test))
    if train.images is not None:
        assert train.images.shape == (200, 3, 64, 64)
        assert train.images.dtype == np.uint8
    if train.labels is not None:
        assert set(train.labels) == set(range(len(train.classes)))


def test_vqa_needs_picture_and_question():
    """The same question has different answers, and so has the same picture's kind of question."""
    train, _ = miniature.generate("vqa", 1000, 1, seed=0)
    by_question = {}
    for question, answer in zip(train.texts, train.answers, strict=True):
        by_question.setdefault(question, set()).add(answer)
    assert all(len(answers) >= 2 for answers in by_question.values())


def test_the_papers_templates():
    prompt, answer = templates.mmlu("law", "What?", ["a", "b", "c", "d"], 2)
    assert prompt == ("The following is a multiple-choice question about law.\n"
                      "Choose the correct answer from the options below.\n"
                      "Question: What?\nOptions:\nA. a\nB. b\nC. c\nD. d")
    assert answer == "Correct answer on law: C. c"
    assert templates.vqa("Who?", "me") == (
        "Answer the question based on the image.\nQuestion: Who?", "Answer: me")
    assert templates.commongen(["dog", "ball"], "x") == (
        "Generate an appropriate description from the concepts below.\nConcepts: dog, ball",
        "Description: x")


def test_every_word_of_the_world_is_one_piece():
    tokenizer = load_tokenizer(load_config("quickstart").foundation)
    for name in ("agnews", "mmlu", "vqa", "commongen"):
        train, _ = miniature.generate(name, 100, 1, seed=11)
        for text in [*train.texts, *(train.answers or [])]:
            pieces = tokenizer.tokenize(text)
            assert not [p for p in pieces if p.startswith("##")], text
            assert "[UNK]" not in pieces


def test_unknown_data_set():
    with pytest.raises(TapflError, match="no data set 'vqua'; did you mean 'vqa'"):
        miniature.generate("vqua", 1, 1, 0)
    with pytest.raises(TapflError, match=r"has 2520 samples, asked for 3001"):
        miniature.generate("commongen", 3000, 1, 0)


def test_ragged_tokens():
    tokenizer = load_tokenizer(load_config("quickstart").foundation)
    tokens = Texts.of(["red", "the red circle", "the"], tokenizer, 4)
    assert tokens.lengths.tolist() == [3, 4, 3]  # cut to four, with both ends marked
    rows = np.array([0, 2])
    ids, mask = tokens.rows(rows, torch.from_numpy(rows))
    assert ids.shape == (2, 3)
    assert mask is None
    rows = np.array([0, 1])
    ids, mask = tokens.rows(rows, torch.from_numpy(rows))
    assert mask.tolist() == [[True] * 3 + [False], [True] * 4]
    assert ids[0, 3] == tokenizer.pad_token_id


@pytest.fixture(scope="module")
def world():
    config = load_config("quickstart", ["data.train=300", "data.test=5"])
    file = load_federation(config.federation)
    return file, load_data(config, file.task_table(), load_tokenizer(config.foundation), 256)


@pytest.mark.parametrize("dirichlet", [None, 0.1, 100.0])
@pytest.mark.parametrize("groups", [1, 3])
def test_every_sample_belongs_to_exactly_one_client(world, groups, dirichlet):
    file, splits = world
    federation = Federation(file, splits, FederationConfig(groups=groups, dirichlet=dirichlet), 1)
    assert len(federation) == 10 * groups
    held = {task: [] for task in splits}
    for client in federation:
        assert client.samples > 0
        for data, rows in client.data.holdings:
            held[data.task.name] += rows.tolist()
    for rows in held.values():
        assert sorted(rows) == list(range(300))


def test_group_shares_are_equal(world):
    file, splits = world
    federation = Federation(file, splits, FederationConfig(groups=3), 1)
    assert {c.samples for c in federation if c.id.endswith("-0")} == {100}
    assert abs(federation.find("g1-1").samples - 100 / 3) <= 1


def test_dirichlet_skews_labels(world):
    file, splits = world

    def skew(alpha):
        federation = Federation(file, splits, FederationConfig(groups=1, dirichlet=alpha), 1)
        largest = []
        for client in federation:
            for data, rows in client.data.holdings:
                if data.task.name == "agnews" and len(rows) > 5:
                    counts = torch.bincount(data.labels[torch.from_numpy(rows)], minlength=4)
                    largest.append(float(counts.max()) / float(counts.sum()))
        return sum(largest) / len(largest)

    assert skew(0.1) > skew(100.0) + 0.15


def test_holdout(world):
    file, splits = world
    federation = Federation(file, splits, FederationConfig(groups=1, holdout=0.1), 1)
    for client in federation:
        for (_, kept), (_, held) in zip(client.data.holdings, client.data.holdout, strict=True):
            assert len(held) == int(0.1 * (len(kept) + len(held)))
            assert not set(kept) & set(held)


def test_one_sample_at_least_is_held_out(world):
    file, splits = world
    federation = Federation(file, splits, FederationConfig(groups=10, holdout=0.01), 1)
    federation.check()
    for client in federation[:10]:
        assert [len(held) for _, held in client.data.holdout] == [1] * len(client.tasks)


def test_too_little_to_hold_out(world):
    file, splits = world
    with pytest.raises(TapflError, match=r"holdout: client 'g\d+-\d' has 1 sample\(s\)"):
        Federation(file, splits, FederationConfig(groups=60, holdout=0.01), 1).check()


def test_federations_that_cannot_be(world):
    file, splits = world
    with pytest.raises(TapflError, match="400 groups are too many for the 300 samples"):
        Federation(file, splits, FederationConfig(groups=400), 1)
    federation = Federation(file, splits, FederationConfig(groups=1), 1)
    with pytest.raises(TapflError, match="unknown client '77'"):
        federation.find("77")
    with pytest.raises(IndexError):
        federation[10]


def test_minibatches_are_uniform_over_the_clients_data(world):
    file, splits = world
    client = Federation(file, splits, FederationConfig(groups=1), 1)[8]
    total = client.samples
    drawn = list(client.data.minibatches(total // 10, 10, np.random.default_rng(0)))
    counts = {"commongen": 0, "fmnist": 0}
    for parts in drawn:
        assert sum(p.weight for p in parts) == pytest.approx(1)
        assert sum(p.samples for p in parts) == 10
        for part in parts:
            assert part.weight == part.samples / 10
            counts[part.task] += part.samples
    assert counts["fmnist"] == pytest.approx(300, abs=10)
    assert counts["commongen"] == pytest.approx(150, abs=10)


def test_a_batch_larger_than_the_data(world):
    file, splits = world
    client = Federation(file, splits, FederationConfig(groups=1), 1)[1]
    (parts,) = client.data.minibatches(1, 10_000, np.random.default_rng(0))
    assert sum(p.samples for p in parts) == client.samples


def test_labels_must_fit_the_federation_file():
    config = load_config("quickstart", ["federation.layout=flava", "data.train=10"])
    file = load_federation(config.federation)
    with pytest.raises(TapflError, match="has 8 classes, the federation file says 200"):
        load_data(config, file.task_table(), load_tokenizer(config.foundation), 256)
