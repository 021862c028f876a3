"""Data that is hostile or broken: one row is left out with a reason, the others are used."""

import csv
import json
import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tapfl.config import DataConfig, load_config
from tapfl.data import custom, hub, prepare
from tapfl.data.checksums import checksum, checksums
from tapfl.data.custom import DataEntry, OwnData
from tapfl.data.files import file_table, text_rows
from tapfl.data.prepare import Preparation, dropped_rows, picture
from tapfl.data.prompts import prompt
from tapfl.data.table import hub_table, whole_number
from tapfl.errors import TapflError
from tapfl.events import RowsDropped
from tapfl.model.foundation import load_tokenizer
from tapfl.tasks import Task

LETTERS = Task("code", "text_classification", ("text",), 2)
COPY = Task("copy", "image_generation", ("image",))
SCAN = Task("scan", "image_classification", ("image",), 2)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(load_config("mini").foundation)


@pytest.fixture
def in_time():
    """Fail, instead of waiting for ever, where something reads a pipe."""
    def within(action, seconds=60):
        outcome = []

        def call():
            try:
                outcome.append((action(), None))
            except Exception as error:
                outcome.append((None, error))

        worker = threading.Thread(target=call, daemon=True)
        worker.start()
        worker.join(seconds)
        assert outcome, "still reading"
        value, error = outcome[0]
        if error:
            raise error
        return value

    return within


def load(folder, name, tokenizer, task=LETTERS, names=(), **fields):
    """Load all rows of a file; return the samples, and what was dropped of it."""
    dropped = {"count": 0, "reasons": []}

    def listen(event):
        if isinstance(event, RowsDropped):
            dropped.update(of=event.rows, count=event.dropped, reasons=event.reasons)

    preparation = Preparation(tokenizer, 64, listen)
    entry = DataEntry(path=name, test=name, **fields)
    data, _ = custom.load(entry, task, OwnData(folder, {task.name: names} if names else {}),
                          DataConfig(), preparation)
    return data, dropped


def reasons(dropped):
    return {row: found["reason"] for found in dropped["reasons"] for row in found["rows"]}


def rows_of(path, **options):
    found = text_rows(path, strict=False, **options)
    return list(found.rows(0, found.count))


# Labels

@pytest.mark.parametrize(("value", "number"), [
    (1, 1), ("1", 1), (1.0, 1), (" 1 ", 1), ("1.0", 1), ("-1", -1), (0, 0), (np.float64(2), 2)])
def test_whole_numbers_are_labels(value, number):
    assert whole_number(value) == number


@pytest.mark.parametrize("value", [
    0.7, 1.9, "0.7", True, False, float("nan"), float("inf"), None, "", "one", "1_0", "٣", "0x1",
    [1], {}, 1e300, "1e0", "9" * 5000, pytest.param(10**5000, id="huge")])
def test_others_are_not(value):
    with pytest.raises(ValueError, match="is not a whole number"):
        whole_number(value)


def test_labels_in_files_and_on_the_hub(tmp_path, tokenizer):
    lines = [{"text": "a", "label": v} for v in (0, 0.7, 1.0, 1.9, "1", True, 0, 0, 1, None)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data, dropped = load(tmp_path, "a.jsonl", tokenizer)
    assert data.labels.tolist() == [0, 1, 1, 0, 0, 1]
    assert reasons(dropped)[1] == "label 0.7 is not a whole number"
    assert reasons(dropped)[5] == "label True is not a whole number"
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data, _ = load(tmp_path, "b.jsonl", tokenizer, names=("0", "1"))
    assert data.labels.tolist() == [0, 1, 1, 0, 0, 1]
    read = hub.SETS["agnews"].recipe(Task("agnews", "text_classification", ("text",), 4)).label
    assert read({"label": 2.0}) == 1
    for label in (2.7, True, float("nan"), None):
        with pytest.raises(ValueError, match="not a whole number"):
            read({"label": label})


def test_rows_of_the_hub_with_lists():
    words = hub.SETS["mmlu"].words
    row = {"subject": "law", "question": "?", "choices": ["a", "b"], "answer": 1}
    assert words(row)[1] == "Correct answer on law: B. b"
    for more in ({"answer": -1}, {"answer": 2}, {"answer": 0.5}, {"choices": "ab"},
                 {"choices": None}, {"choices": [None, "b"]}):
        with pytest.raises(ValueError, match=r"answer|choices|label"):
            words({**row, **more})
    with pytest.raises(ValueError, match="expected a list"):
        hub.SETS["commongen"].words({"concepts": "dog", "target": "x"})


# Text files

def test_rows_that_are_not_utf8(tmp_path, tokenizer):
    text = "text,label\nplain,0\ncafé,1\nmore,1\nstill,0\n"
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    data, dropped = load(tmp_path, "a.csv", tokenizer)
    assert len(data) == 3
    assert reasons(dropped) == {1: "not UTF-8; set `encoding`"}
    data, dropped = load(tmp_path, "a.csv", tokenizer, encoding="latin-1")
    assert (len(data), dropped["count"]) == (4, 0)
    assert rows_of(tmp_path / "a.csv", encoding="latin-1")[1]["text"] == "café"
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    assert rows_of(tmp_path / "a.jsonl") == [{"text": "a"}, "not UTF-8; set `encoding`"]
    assert rows_of(tmp_path / "a.jsonl", encoding="cp1252")[1] == {"text": "café"}
    assert rows_of(tmp_path / "a.jsonl", encoding="ascii")[1] == "not ascii"
    for encoding in ("utf-16", "utf-8"):
        (tmp_path / "b.csv").write_bytes(text.encode(encoding))
        assert len(rows_of(tmp_path / "b.csv", encoding=encoding)) == 4
    (tmp_path / "b.csv").write_bytes(text.encode("utf-16"))
    with pytest.raises(TapflError, match=r"first line.*not UTF-8; set `encoding`"):
        text_rows(tmp_path / "b.csv", strict=False)
    (tmp_path / "b.csv").write_bytes("größe,label\na,1\n".encode("latin-1"))
    with pytest.raises(TapflError, match=r"first line.*not UTF-8; set `encoding`"):
        text_rows(tmp_path / "b.csv", strict=False)


def test_one_bad_line_is_one_broken_row(tmp_path, tokenizer):
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(
        f'text,label\na,0\n{long},1\nn\0ul,1\n"two\nlines",1\n"{long[:150_000]}\nmore",1\nb,0\n'
        "c,0,0\nd,1\ne,0\nf,0\n")
    data, dropped = load(tmp_path, "a.csv", tokenizer)
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 0]
    assert reasons(dropped) == {
        1: "a value of more than 131072 characters; is a quote never closed?",
        4: "a value of more than 131072 characters; is a quote never closed?",
        2: "holds a NUL character", 6: "3 values, expected 2"}
    assert csv.field_size_limit() == 131_072  # as it was
    deep = '{"text": ' + "[" * 100_000 + "]" * 100_000 + ', "label": 0}'
    (tmp_path / "a.jsonl").write_text("\n".join([
        '{"text": "a", "label": 0}', deep, '{"text": "n\0ul", "label": 0}',
        '{"text": "n\\u0000ul", "label": 0}', '{"text": "\\ud800", "label": 0}',
        '{"text": "\\ud83d\\ude00", "label": 1}', '{"te\\ud800xt": "a", "label": 1}',
        '{"label": 1}', *['{"text": "b", "label": 1}'] * 6]))
    data, dropped = load(tmp_path, "a.jsonl", tokenizer)
    assert data.labels.tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    assert reasons(dropped) == {
        1: "not JSON (nested too deeply)", 2: "holds a NUL character", 3: "holds a NUL character",
        4: "holds half a character (a lone surrogate)",
        6: "holds half a character (a lone surrogate)", 7: "column 'text' is missing"}


def test_a_quote_that_is_never_closed_takes_one_row(tmp_path):
    for ending in ("d,1\n", "d,1\n" * 100_000, 'd,1 "" 2\n', ""):
        (tmp_path / "a.csv").write_text(f'text,label\na,0\n"b,1\nc,1\n{ending}')
        first, broken, third, *rest = rows_of(tmp_path / "a.csv")
        assert (first["text"], broken, third["text"]) == ("a", "a quote that is never closed", "c")
        assert len(rest) == ending.count("\n")
    (tmp_path / "a.csv").write_text('"text,label\na,0\n')
    with pytest.raises(TapflError, match="a quote that is never closed"):
        text_rows(tmp_path / "a.csv")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_pipes_and_devices_are_not_tables(tmp_path, suffix, in_time):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(TapflError, match="not a regular file"):
            in_time(lambda name=name: file_table(tmp_path / f"{name}{suffix}").content)
        if suffix != ".parquet":
            with pytest.raises(TapflError, match="not a regular file"):
                in_time(lambda name=name: text_rows(tmp_path / f"{name}{suffix}"))


@settings(max_examples=200, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text('",\n\r\0aé\\{}[]:\t', max_size=60).map(str.encode))
def test_any_bytes_are_rows_or_one_line(tmp_path, data):
    for suffix in (".csv", ".tsv", ".jsonl"):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(data)
        try:
            rows = rows_of(path)
        except TapflError as error:
            rows = [str(error)]
        for row in rows:
            assert isinstance(row, dict) or row
            json.dumps(row, ensure_ascii=False).encode()


# Pictures

def test_special_files_are_no_pictures(tmp_path, tokenizer, in_time):
    for number in range(6):
        Image.new("L", (4, 4), number).save(tmp_path / f"{number}.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    with (tmp_path / "big.png").open("wb") as file:
        file.truncate(prepare.MAX_BYTES + 1)
    names = ["0.png", "/dev/zero", "pipe.png", "folder.png", "big.png", *(
        f"{n}.png" for n in range(1, 6)), "no.png"]
    (tmp_path / "p.csv").write_text("image\n" + "".join(f"{name}\n" for name in names))
    data, dropped = in_time(lambda: load(tmp_path, "p.csv", tokenizer, COPY))
    assert data.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    found = reasons(dropped)
    assert found[1] == found[2] == found[3] == "not a regular file"
    assert found[4] == "100 MB, expected at most 100 MB"
    assert "No such file" in found[10]
    for name in ("/dev/zero", tmp_path / "pipe.png"):
        with pytest.raises(OSError, match="not a regular file"):
            in_time(lambda name=name: picture(tmp_path / name))
    assert in_time(lambda: checksums(tmp_path, ["/dev/zero", "pipe.png"]))


def test_a_folder_of_pictures_with_odd_files(tmp_path, tokenizer, in_time):
    folder = tmp_path / "scans"
    for name in ("0", "1"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (4, 4), number).save(folder / name / f"{number}.png")
    odd = os.fsencode(folder / "1") + b"/caf\xe9.png"
    os.link(folder / "1" / "0.png", odd)
    os.mkfifo(folder / "0" / "pipe.png")
    (folder / "0" / "gone.png").symlink_to("nowhere.png")
    (folder / "0" / "._0.png").write_bytes(b"what a Mac leaves behind")
    data, dropped = in_time(lambda: load(tmp_path, "scans", tokenizer, SCAN))
    assert data.labels.tolist() == [0] * 4 + [1] * 4
    assert sorted(r.split(" (")[0] for r in reasons(dropped).values())[1:] == [
        "not a regular file", "the file name '1/caf\\udce9.png' is not UTF-8"]
    before = checksum(folder)
    os.unlink(odd)  # noqa: PTH108 (the name is bytes)
    assert checksum(folder) != before


def test_decompression_bombs_are_broken_rows(tmp_path, tokenizer, monkeypatch, recwarn):
    for number in range(4):
        Image.new("L", (4, 4), number).save(tmp_path / f"{number}.png")
    Image.new("1", (12_000, 12_000)).save(tmp_path / "4.png")
    Image.new("1", (20_000, 20_000)).save(tmp_path / "5.png")
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / "6.tiff")
    (tmp_path / "p.csv").write_text(
        "image\n" + "".join(f"{n}.png\n" for n in range(6)) + "6.tiff\n")
    data, dropped = load(tmp_path, "p.csv", tokenizer, COPY)
    assert len(data) == 4
    assert reasons(dropped)[4] == "12000 x 12000 pixels, expected at most 89478485"
    assert "decompression bomb" in reasons(dropped)[5]
    assert "NaN" in reasons(dropped)[6]
    assert not recwarn.list


@pytest.mark.parametrize("value", [3, True, [1], {"bytes": 3}, {"bytes": None}, b"", None, 2.5,
                                   b"nonsense", {}])
def test_values_that_are_no_pictures(value, tmp_path):
    with pytest.raises(ValueError, match=r"picture|cannot identify image; expected PNG") as caught:
        picture(value, tmp_path)
    assert "0x" not in str(caught.value)


# The library's cache

def write_mirror(folder, words):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    place = folder / "cais" / "mmlu"
    for subset in ("law", "medicine"):
        (place / subset).mkdir(parents=True)
        pq.write_table(pa.table({"question": [f"{subset} {word}" for word in words]}),
                       place / subset / "test-00000-of-00001.parquet")
    (place / "README.md").write_text("---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}/test-*\n"
        for name in ("law", "medicine")) + "---\n")
    return folder


def test_two_mirrors_that_share_a_readme(tmp_path):
    """The library tells them apart by README and name: it gave the rows of the first."""
    first = write_mirror(tmp_path / "a", ["one", "two"])
    second = write_mirror(tmp_path / "b", ["three", "four"])
    stamp = 1_700_000_000
    for path in (*first.rglob("*"), *second.rglob("*")):
        os.utime(path, (stamp, stamp))

    def questions(folder, subset="law"):
        table = hub_table("cais/mmlu", "test", subset, folder)
        return [row["question"] for _, rows in table.chunks() for row in rows]

    assert questions(first) == ["law one", "law two"]
    assert questions(second) == ["law three", "law four"]
    assert questions(first, "medicine") == ["medicine one", "medicine two"]
    (first / "cais").rename(tmp_path / "old")
    (second / "cais").rename(first / "cais")  # in the same place, too
    assert questions(first) == ["law three", "law four"]


def test_without_a_cache_that_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TAPFL_CACHE", str(tmp_path / "file"))
    folder = write_mirror(tmp_path / "a", ["one"])
    assert len(hub_table("cais/mmlu", "test", "law", folder)) == 1


def test_texts_in_parquet_that_are_not_utf8(tmp_path, tokenizer):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    words = pa.array([b"a", b"caf\xe9", b"c", b"d"], pa.binary())
    words = pa.StringArray.from_buffers(4, words.buffers()[1], words.buffers()[2])
    pq.write_table(pa.table({"text": words, "label": [0, 1, 1, 0]}), tmp_path / "a.parquet")
    data, dropped = load(tmp_path, "a.parquet", tokenizer)
    assert data.labels.tolist() == [0, 1, 0]
    assert "cannot be read" in reasons(dropped)[1]


# What is recorded

def test_dropped_rows_are_counted_by_reason():
    broken = [(n, "no label" if n % 2 else f"label {n}") for n in range(1000)]
    found = dropped_rows(broken)
    assert found["count"] == 1000
    assert len(found["reasons"]) == prepare.REASONS + 1
    assert sum(r["count"] for r in found["reasons"]) == 1000
    by = {r["reason"]: r for r in found["reasons"]}
    assert by["no label"] == {"reason": "no label", "count": 500, "rows": [1, 3, 5, 7, 9]}
    assert by["other reasons"]["count"] == 1000 - 500 - (prepare.REASONS - 1)


def test_dropped_rows_are_in_the_notes_and_found_again(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("text,label\n" + "a,0\n" * 9 + "b,7\n" * 3 + ",1\n")
    for _ in range(2):  # made, and from the cache
        _, dropped = load(tmp_path, "a.csv", tokenizer)
        assert dropped == {"of": 13, "count": 4, "reasons": [
            {"reason": "label 7, expected 0 to 1", "count": 3, "rows": [9, 10, 11]},
            {"reason": "its text is empty", "count": 1, "rows": [12]}]}


def test_labels_that_no_class_has_are_compared_once(tmp_path, tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(custom, "nearest", lambda word, names: asked.append(word) or "; no")
    (tmp_path / "a.csv").write_text("text,label\n" + "a,x\n" * 50 + "b,y\n" * 20)
    load(tmp_path, "a.csv", tokenizer, names=("x", "z"))
    assert asked == ["y"]


# Prompts

@pytest.mark.parametrize(("values", "entry"), [
    ({"text": "\ud800"}, None), ({"q": None}, DataEntry(path="x", text="q")),
    ({"q": "  "}, DataEntry(path="x", text="q")), ({"text": "a\udcff"}, DataEntry(path="x")),
    ({"q": None}, DataEntry(path="x", text="Q: {q}")), ({}, None)])
def test_prompts_without_a_text(values, entry):
    with pytest.raises(TapflError, match="task 'mine'"):
        prompt("mine", values, entry)
