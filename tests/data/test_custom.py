import json
from fractions import Fraction

import numpy as np
import pytest

from tapfl.config import load_config
from tapfl.data.federation import Federation
from tapfl.data.participants import load_federation
from tapfl.data.sources import load_data
from tapfl.engine.build import own_data
from tapfl.errors import TapflError
from tapfl.model.foundation import load_tokenizer

pytest.importorskip("datasets")
from PIL import Image

TASKS = {
    "scan": "{kind: image_classification, modalities: [image], classes: [dark, light]}",
    "code": "{kind: text_classification, modalities: [text], classes: [A, B]}",
    "ask": "{kind: text_generation, modalities: [image, text]}",
    "copy": "{kind: image_generation, modalities: [image]}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(load_config("mini").foundation)


def write(folder, clients, tasks=tuple(TASKS), extra=None):
    lines = ["tasks:", *(f"  {name}: {TASKS[name]}" for name in tasks), *(extra or ()), "clients:"]
    path = folder / "federation.yaml"
    path.write_text("\n".join([*lines, *(f"  - {c}" for c in clients)]))
    return load_config("mini", [f"federation.file={path}", "federation.groups=1"])


def open_(config, tokenizer):
    file = load_federation(config.federation)
    splits = load_data(config, file.task_table(), tokenizer, 256, own=own_data(config, file))
    federation = Federation(file, splits, config.federation, 0)
    federation.check()
    return federation


def pictures(folder, count=10):
    for name, shade in (("dark", 10), ("light", 240)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (9, 7), (shade, number, 0)).save(folder / name / f"{number}.png")


def test_a_folder_of_pictures(tmp_path, tokenizer):
    pictures(tmp_path / "a")
    pictures(tmp_path / "b", 5)
    config = write(tmp_path, ["{name: x, tasks: {scan: {path: a}}}",
                              "{name: y, tasks: {scan: {path: b, test: 0.5}}}"], ["scan"])
    federation = open_(config, tokenizer)
    for name, sizes in (("x", (16, 4)), ("y", (5, 5))):
        train, test = federation.splits.of_client("scan", name)
        assert (len(train), len(test)) == sizes
        assert train.classes == ("dark", "light")
        for data in (train, test):
            shade = data.images[:, 0].float().mean(dim=(1, 2))
            assert ((shade > 100).long() == data.labels).all()
    x, y = federation
    assert (x.samples, y.samples) == (16, 5)
    assert [len(c.tests["scan"][1]) for c in (x, y)] == [4, 5]
    # In a simulation, the others' test data are there for general_ metrics.
    ((data, rows),) = federation.others(x, "scan")
    assert (data, len(rows)) == (y.tests["scan"][0], 5)
    data = config.data.model_copy(update={"train": 3, "test": 2})
    few = open_(config.model_copy(update={"data": data}), tokenizer)
    assert [(c.samples, len(c.tests["scan"][1])) for c in few] == [(3, 2), (3, 2)]
    # The same task, reconstructed instead.
    config = write(tmp_path, ["{name: x, tasks: {copy: {path: a}}}"], ["copy"])
    assert open_(config, tokenizer).splits.of_client("copy", "x")[0].labels is None


def test_names_of_pictures_and_folders_mean_nothing_but_the_class(tmp_path, tokenizer):
    """Neither `train_3.png` nor a class called `train` is a split; one class may be all."""
    pictures(tmp_path / "a")
    for number in range(4):
        (tmp_path / "a" / "dark" / f"{number}.png").rename(
            tmp_path / "a" / "dark" / f"train_{number}-test.png")
    (tmp_path / "a" / "light").rename(tmp_path / "a" / "train")
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("not a picture")
    for number in range(3):
        (tmp_path / "a" / "dark" / f"{number + 5}.png").rename(tmp_path / "b" / f"{number}.png")
    (tmp_path / "one" / "dark").mkdir(parents=True)
    for path in (tmp_path / "b").iterdir():
        path.rename(tmp_path / "one" / "dark" / path.name)
    task = "  scan: {kind: image_classification, modalities: [image], classes: [dark, train]}"
    federation = open_(write(tmp_path, ["{name: x, tasks: {scan: {path: a}}}",
                                        "{name: y, tasks: {scan: {path: one}}}"], [], [task]),
                       tokenizer)
    x, y = federation
    assert x.samples + len(x.tests["scan"][1]) == 17
    (train, rows), = y.data.holdings
    assert set(train.labels[rows].tolist()) == {0}
    test, rows = x.tests["scan"]
    assert set(test.labels[rows].tolist()) <= {0, 1}


def test_splits_of_a_folder(tmp_path, tokenizer):
    pictures(tmp_path / "a" / "train", 4)
    pictures(tmp_path / "a" / "held", 2)
    config = write(tmp_path, ["{name: x, tasks: {scan: {path: a, test: held}}}"], ["scan"])
    train, test = open_(config, tokenizer).splits.of_client("scan", "x")
    assert (len(train), len(test)) == (8, 4)
    config = write(tmp_path, ["{name: x, tasks: {scan: {path: a, test: nope}}}"], ["scan"])
    with pytest.raises(TapflError, match="no folder 'nope'"):
        open_(config, tokenizer)


def test_numbers_of_classes_are_read_from_folders_names(tmp_path, tokenizer):
    for number in range(11):
        (tmp_path / "a" / str(number)).mkdir(parents=True)
        for copy in range(2):
            Image.new("L", (4, 4), number).save(tmp_path / "a" / str(number) / f"{copy}.png")
    task = "  scan: {kind: image_classification, modalities: [image], classes: 11}"
    config = write(tmp_path, ["{name: x, tasks: {scan: {path: a}}}"], [], [task])
    train, _ = open_(config, tokenizer).splits.of_client("scan", "x")
    assert (train.images[:, 0, 0, 0].long() == train.labels).all()
    (tmp_path / "a" / "3").rename(tmp_path / "a" / "three")
    for number in range(4, 11):
        (tmp_path / "a" / str(number)).rename(tmp_path / "a" / f"x{number}")
    with pytest.raises(TapflError, match="give the classes by their names"):
        open_(config, tokenizer)


def test_text_files_are_read_as_written_and_bad_lines_are_broken_rows(tmp_path, tokenizer):
    task = "  code: {kind: text_classification, modalities: [text], classes: ['01', '02', 'true']}"
    (tmp_path / "a.csv").write_bytes(
        b"\xef\xbb\xbftext,label\nNA,01\nnull,02\nshort\n\xff\xfe,true\nd,01\ne,02,more\nf,02\n")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "2020-01-01", "label": "01"}\nnot json\n[1]\n'
        + "".join(json.dumps({"text": f"x{n}", "label": "02"}) + "\n" for n in range(4)))
    config = write(tmp_path, ["{name: x, tasks: {code: {path: a.csv}}}",
                              "{name: y, tasks: {code: {path: b.jsonl}}}"], [], [task])
    x, y = open_(config, tokenizer)
    assert x.samples + len(x.tests["code"][1]) == 4
    assert y.samples + len(y.tests["code"][1]) == 5


def test_unlabelled_rows_of_the_hub_are_broken_ones(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"),
                                  "label": datasets.ClassLabel(names=["B", "A"])})
    table = datasets.Dataset.from_dict({"text": list("abcdef"), "label": [0, 1, -1, 0, 1, -1]},
                                       features=features)
    table.to_parquet(str(tmp_path / "a.parquet"))
    config = write(tmp_path, ["{name: x, tasks: {code: {path: a.parquet, test: a.parquet}}}"],
                   ["code"])
    train, _ = open_(config, tokenizer).splits.of_client("code", "x")
    assert train.labels.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_files_with_named_columns(tmp_path, tokenizer, suffix):
    datasets = pytest.importorskip("datasets")
    rows = {"report": [f"report {n}" for n in range(10)], "icd": ["A", "B"] * 5}
    table, path = datasets.Dataset.from_dict(rows), str(tmp_path / f"reports{suffix}")
    if suffix == ".parquet":
        table.to_parquet(path)
    elif suffix == ".jsonl":
        table.to_json(path)
    else:
        table.to_csv(path, sep="\t" if suffix == ".tsv" else ",")
    config = write(tmp_path, [f"{{name: x, tasks: {{code: {{path: reports{suffix}, text: report, "
                              "label: icd}}}"], ["code"])
    (client,) = open_(config, tokenizer)
    data, chosen = client.data.holdings[0]
    words = [tokenizer.decode(data.text.ids[row][:data.text.lengths[row]],
                              skip_special_tokens=True) for row in chosen]
    assert len(words) == 8
    assert [int(word.split()[-1]) % 2 for word in words] == data.labels[chosen].tolist()


def test_questions_about_pictures_with_a_template(tmp_path, tokenizer):
    pictures(tmp_path / "seen")
    lines = [{"file": f"seen/dark/{n}.png", "q": f"why {n}?", "a": str(n)} for n in range(10)]
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    entry = '{path: q.jsonl, image: file, text: "Q: {q}", answer: "A: {a}!"}'
    config = write(tmp_path, [f"{{name: x, tasks: {{ask: {entry}}}}}"], ["ask"])
    (client,) = open_(config, tokenizer)
    data, chosen = client.data.holdings[0]
    assert set(data.references) <= {f"A: {n}!" for n in range(10)}
    number = int(data.references[chosen[0]][3:-1])
    assert data.images[chosen[0], 1].unique().tolist() == [number]
    text = tokenizer.decode(data.text.ids[chosen[0]], skip_special_tokens=True)
    assert text.replace(" ", "") == f"q:why{number}?"


def test_a_changed_picture_is_seen(tmp_path, tokenizer):
    """A table that names pictures is told apart by what is in them, too."""
    for number in range(4):
        Image.new("L", (4, 4), 10).save(tmp_path / f"{number}.png")
    (tmp_path / "p.csv").write_text("image\n" + "".join(f"{n}.png\n" for n in range(4)))
    config = write(tmp_path, ["{name: x, tasks: {copy: {path: p.csv}}}"], ["copy"])
    images = open_(config, tokenizer).splits.of_client("copy", "x")[0].images
    assert images.unique().tolist() == [10]
    for number in range(4):
        Image.new("L", (4, 4), 20).save(tmp_path / f"{number}.png")
    images = open_(config, tokenizer).splits.of_client("copy", "x")[0].images
    assert images.unique().tolist() == [20]


def test_a_tasks_data_in_shares_and_a_test_file_of_its_own(tmp_path, tokenizer):
    for name, count in (("train", 12), ("test", 3)):
        (tmp_path / f"{name}.csv").write_text(
            "text,label\n" + "".join(f"{name} {n},{'AB'[n % 2]}\n" for n in range(count)))
    task = ("  code: {kind: text_classification, modalities: [text], classes: [A, B], "
            "data: {path: train.csv, test: test.csv}}")
    config = write(tmp_path, ["{name: x, tasks: {code: 1/3}}", "{name: y, tasks: {code: 2/3}}"],
                   [], [task])
    federation = open_(config, tokenizer)
    assert [c.samples for c in federation] == [4, 8]
    assert len(federation.splits["code"][1]) == 3
    assert all(np.array_equal(c.tests["code"][1], np.arange(3)) for c in federation)
    assert load_federation(config.federation).clients[0].tasks["code"] == Fraction(1, 3)


GOOD = "{path: a.csv}"


@pytest.mark.parametrize(("clients", "message"), [
    (["{name: x, tasks: {code: {path: no.csv}}}"], r"no\.csv: no such file"),
    (["{name: x, tasks: {code: {path: a.xls}}}"], r"a\.xls: expected a folder of pictures or one"),
    (["{name: x, tasks: {code: {path: a.csv, text: words}}}"],
     r"a\.csv: column 'words' is missing; there are: text, label"),
    (["{name: x, tasks: {code: {path: a.csv, text: '{text} {more}'}}}"], "column 'more' is miss"),
    (["{name: x, tasks: {code: {path: a.csv, hub: a/b}}}"], "either a path or a hub id"),
    (["{name: x, tasks: {code: {path: a.csv, test: 1.5}}}"], "between 0 and 1"),
    (["{name: x, tasks: {code: {path: a.csv, test: valid}}}"], "a file has no split 'valid'"),
    (["{name: x, tasks: {code: {path: a.csv, colour: 1}}}"],
     r"unknown key 'clients\.0\.tasks\.code\.data\.colour'"),
    (["{name: x, tasks: {code: {path: b.csv}}}"], "label 'C'"),
    (["{name: x, tasks: {code: {path: one.csv}}}"], "too few for training and test"),
    (["{name: x, tasks: {code: {path: empty.csv}}}"], r"empty\.csv"),
    ([f"{{name: x, tasks: {{code: {GOOD}}}}}", "{name: y, tasks: {code: 1/2}}"],
     "either its clients bring data of their own"),
    (["{name: x, tasks: {code: {hub: ../a}}}"], "not a hub id"),
    (["{name: x, tasks: {code: {path: a.csv, encoding: utf-9}}}"],
     r"code\.data\.encoding: not a known encoding of text; .*got 'utf-9'"),
    (["{name: x, tasks: {code: {path: a.csv, encoding: hex}}}"], "not a known encoding"),
    (["{name: x, tasks: {code: {path: a.csv, encoding: \"a\\0\"}}}"], "not a known encoding"),
    (["{name: x, tasks: {code: {hub: a/b, encoding: utf-8}}}"], "not for a hub id"),
    (["{name: x, tasks: {code: {path: a.parquet, encoding: utf-8}}}"], "an encoding is for"),
    (["{name: x, tasks: {code: {path: twice.csv}}}"], "two columns are called 'text'"),
    ([f"{{name: x, tasks: {{code: {{path: {'a' * 300}.csv}}}}}}"], "at most 255 bytes"),
])
def test_bad_entries(tmp_path, tokenizer, clients, message):
    (tmp_path / "a.csv").write_text("text,label\nx,A\ny,B\nz,A\n")
    (tmp_path / "a.xls").write_text("x")
    (tmp_path / "b.csv").write_text("text,label\nx,C\ny,C\nz,A\n")
    (tmp_path / "one.csv").write_text("text,label\nx,A\n")
    (tmp_path / "empty.csv").write_text("text,label\n")
    (tmp_path / "twice.csv").write_text("text,text,label\na,b,A\n")
    with pytest.raises(TapflError, match=message):
        open_(write(tmp_path, clients, ["code"]), tokenizer)


def test_groups_cannot_share_a_clients_own_files(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("text,label\nx,A\ny,B\nz,A\n")
    config = write(tmp_path, [f"{{name: x, tasks: {{code: {GOOD}}}}}"], ["code"])
    federation = config.federation.model_copy(update={"groups": 2})
    with pytest.raises(TapflError, match="groups"):
        open_(config.model_copy(update={"federation": federation}), tokenizer)
