"""The eight data sets, from a mirror of the hub; runs where TAPFL_DATA names one."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tapfl.config import load_config
from tapfl.data import hub, templates
from tapfl.data.participants import load_federation
from tapfl.data.prepare import picture
from tapfl.data.sources import load_data
from tapfl.data.table import hub_table
from tapfl.errors import TapflError
from tapfl.events import DataPrepared, nobody
from tapfl.model.foundation import load_tokenizer
from tapfl.tasks import Task

MIRROR = os.environ.get("TAPFL_DATA")
real = pytest.mark.skipif(not MIRROR, reason="needs a mirror of the hub in TAPFL_DATA")
TASKS = load_federation(load_config("flava").federation).task_table()
LABELS = {"tiny-imagenet": 200, "cifar100": 100, "agnews": 4}


class Listener:
    def __init__(self):
        self.said, self.told = [], []

    def __call__(self, event):
        if isinstance(event, DataPrepared):
            self.told.append((event.name, event.done, event.total))
        else:
            self.said.append(str(event))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(load_config("mini").foundation)


def load(tokenizer, name, folder=MIRROR, task=None, listener=nobody, **settings):
    pytest.importorskip("datasets")
    more = [f"data.{key}={value}" for key, value in settings.items()]
    config = load_config("flava", ["data.source=hub", f"data.folder={folder}", *more])
    task = task or TASKS[name]
    return load_data(config, {task.name: task}, tokenizer, 256, notify=listener)[task.name]


def rows(name, split, subset=None):
    table = hub_table(hub.SETS[name].id, split, subset, MIRROR)
    return [row for _, some in table.chunks() for row in some]


def keys(data):
    """What a sample is, to compare samples of two splits."""
    parts = []
    if data.images is not None:
        parts.append([image.numpy().tobytes() for image in data.images])
    if data.text is not None:
        parts.append([bytes(ids.numpy()) for ids in data.text.ids])
    return list(zip(*parts, strict=True))


@real
@pytest.mark.parametrize("name", list(TASKS))
def test_every_data_set_loads_whole(name, tokenizer):
    train, test = load(tokenizer, name)
    known = hub.SETS[name]
    whole = sum(len(rows(name, known.train, subset)) for subset in known.subsets)
    if known.test is None:
        assert len(train) + len(test) == whole
        assert len(test) == whole // 5
    else:
        assert len(train) == whole
        assert len(test) == sum(len(rows(name, known.test, s)) for s in known.subsets)
    for data in (train, test):
        assert (data.images is not None) == ("image" in TASKS[name].modalities)
        assert (data.text is not None) == ("text" in TASKS[name].modalities)
        if data.images is not None:
            assert data.images.shape[1:] == (3, 64, 64)
            assert data.images.float().std() > 20
        if name in LABELS:
            assert set(np.unique(data.labels)) == set(range(LABELS[name]))
        if TASKS[name].kind == "text_generation":
            assert len(data.references) == len(data)


@real
@pytest.mark.parametrize("name", ["tiny-imagenet", "cifar100", "caltech256", "vqa"])
def test_test_data_never_overlap_training_data(name, tokenizer):
    train, test = load(tokenizer, name)
    assert not set(keys(train)) & set(keys(test))


@real
@pytest.mark.parametrize("name", ["mmlu", "agnews", "commongen"])
def test_test_texts_never_overlap_training_texts(name):
    """Compared as written: long questions of MMLU begin alike and are cut."""
    known = hub.SETS[name]
    train, test = ({known.words(row) for subset in known.subsets
                    for row in rows(name, split, subset)} for split in (known.train, known.test))
    assert not train & test


@real
def test_templates_are_the_papers(tokenizer):
    def words(name, **options):
        data = load(tokenizer, name, **options)[0]
        return tokenizer.decode(data.text.ids[0][:data.text.lengths[0]],
                                skip_special_tokens=True), data.references[0]

    row = rows("mmlu", "test", "professional_law")[0]
    text, answer = words("mmlu")
    prompt, response = templates.mmlu(row["subject"], row["question"], row["choices"],
                                      row["answer"])
    assert prompt.startswith("The following is a multiple-choice question about "
                             "professional_law.\nChoose the correct answer from the options "
                             "below.\nQuestion: ")
    assert answer == response
    assert answer.startswith("Correct answer on professional_law: ")
    assert text[:40] == tokenizer.decode(tokenizer(prompt)["input_ids"],
                                         skip_special_tokens=True)[:40]
    row = rows("commongen", "train")[0]
    assert words("commongen")[1] == f"Description: {row['target']}"
    asked = {f"Answer: {r['multiple_choice_answer']}" for r in rows("vqa", "validation")}
    assert words("vqa")[1] in asked


@real
def test_news_are_title_and_description_and_labels_begin_at_zero(tokenizer):
    data = load(tokenizer, "agnews")[0]
    row = rows("agnews", "train")[7]
    ids = tokenizer(f"{row['title']} {row['description']}", truncation=True,
                    max_length=256)["input_ids"]
    assert data.text.ids[7][:data.text.lengths[7]].tolist() == ids
    assert data.labels[7] == row["label"] - 1


@real
def test_the_split_of_vqa_follows_the_seed(tokenizer):
    first, again, other = (load(tokenizer, "vqa", seed=seed)[1] for seed in (0, 0, 1))
    assert first.references == again.references
    assert first.references != other.references


@real
def test_sizes_can_be_limited(tokenizer):
    train, test = load(tokenizer, "cifar100", train=50, test=7)
    assert (len(train), len(test)) == (50, 7)


@real
def test_a_second_start_reads_the_cache(tokenizer):
    listener = Listener()
    load(tokenizer, "caltech256")
    load(tokenizer, "caltech256", listener=listener)
    assert listener.told == []


@pytest.fixture
def mirror(tmp_path):
    """A mirror with one small, partly broken data set."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "hub" / "uoft-cs" / "cifar100" / "data"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pictures = []
        for number in range(12):
            Image.new("L", (8, 8), number * 20).save(tmp_path / "x.png")
            pictures.append({"bytes": (tmp_path / "x.png").read_bytes(), "path": None})
        if split == "train":
            pictures[3] = {"bytes": b"no picture", "path": None}
            pictures[5] = {"bytes": pictures[5]["bytes"][:40], "path": None}
        labels = [number % 100 for number in range(12)]
        if split == "train":
            labels[7] = 100
        datasets.Dataset.from_dict({"img": pictures, "fine_label": labels}).to_parquet(
            str(folder / f"{split}-00000-of-00001.parquet"))
    return tmp_path / "hub"


def test_broken_rows_are_counted_and_named(mirror, tokenizer):
    for _ in range(2):  # made, and found again
        listener = Listener()
        train, test = load(tokenizer, "cifar100", mirror, listener=listener)
        assert (len(train), len(test)) == (9, 12)
        assert train.labels.tolist() == [0, 1, 2, 4, 6, 8, 9, 10, 11]
        assert train.images[3].unique().tolist() == [80]
        (said,) = listener.said
        assert "3 of 12 rows are broken" in said
        assert "row 3: cannot identify image" in said
        assert "row 7: label 100, expected 0 to 99" in said


def test_rows_without_words_are_broken_ones(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "sh0416" / "ag_news" / "data"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        datasets.Dataset.from_dict({
            "label": [1, 2, 3, 4], "title": ["a", None, "c", "d"],
            "description": ["x", "y", " ", "z"]}).to_parquet(
                str(folder / f"{split}-00000-of-00001.parquet"))
    listener = Listener()
    train, _ = load(tokenizer, "agnews", tmp_path, listener=listener)
    assert train.labels.tolist() == [0, 3]
    assert "row 1: column 'title' is empty" in listener.said[0]
    assert "row 2: column 'description' is empty" in listener.said[0]


def test_a_row_of_the_hub_cannot_name_a_file(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "secret.png")
    for value in (str(tmp_path / "secret.png"),
                  {"bytes": None, "path": str(tmp_path / "secret.png")}):
        with pytest.raises(ValueError, match="picture"):
            picture(value)


def test_deep_greys_are_scaled_not_clipped(tmp_path):
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    values = picture(tmp_path / "deep.png")[0]
    assert abs(float(values.mean()) - 127.5) < 2
    assert values.max() > 250
    single = Image.fromarray(np.linspace(-3, 5, 64 * 64).reshape(64, 64).astype(np.float32))
    assert 120 < picture(single)[0].mean() < 135


def test_changed_content_and_settings_are_prepared_anew(mirror, tokenizer):
    datasets = pytest.importorskip("datasets")
    before = load(tokenizer, "cifar100", mirror)[1]
    path = mirror / "uoft-cs/cifar100/data/test-00000-of-00001.parquet"
    datasets.load_dataset("parquet", data_files=str(path), split="train").select(
        range(4)).to_parquet(str(path))
    assert (len(before), len(load(tokenizer, "cifar100", mirror)[1])) == (12, 4)
    reconstruct = Task("cifar100", "image_generation", ("image",))
    assert load(tokenizer, "cifar100", mirror, reconstruct)[1].labels is None


def test_bad_mirrors_and_tasks(mirror, tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    with pytest.raises(TapflError, match="holds no folder 'sh0416/ag_news'"):
        load(tokenizer, "agnews", mirror)
    with pytest.raises(TapflError, match="not one of the eight"):
        load(tokenizer, None, mirror, Task("birds", "image_generation", ("image",)))
    with pytest.raises(TapflError, match="has no texts"):
        load(tokenizer, None, mirror, Task("cifar100", "text_classification", ("text",), 3))
    with pytest.raises(TapflError, match="has no answers"):
        load(tokenizer, None, mirror, Task("cifar100", "text_generation", ("image",)))
    path = mirror / "uoft-cs/cifar100/data/train-00000-of-00001.parquet"
    path.with_name("test-00000-of-00001.parquet").unlink()
    datasets.Dataset.from_dict({"img": [b"x"] * 3, "label": [0] * 3}).to_parquet(str(path))
    with pytest.raises(TapflError, match=r"column 'fine_label' is missing; there are: img, label"):
        load(tokenizer, "cifar100", mirror)
    datasets.Dataset.from_dict({"img": [b"x"] * 3, "fine_label": [0] * 3}).to_parquet(str(path))
    with pytest.raises(TapflError, match="3 of 3 rows are broken"):
        load(tokenizer, "cifar100", mirror)
    path.write_bytes(b"not parquet")
    with pytest.raises(TapflError, match="cannot read this data set"):
        load(tokenizer, "cifar100", mirror)
    shutil.rmtree(Path(mirror) / "uoft-cs")
    with pytest.raises(TapflError, match="not a hub id"):
        hub_table("../secrets", "train", None, mirror)
