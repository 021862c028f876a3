"""Samples, label mixes and bytes by round in a report."""

import base64
import hashlib
import io
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from tapfl.cli import main
from tapfl.engine.files import write_checked_json
from tapfl.engine.labels import TaskLabels
from tapfl.engine.run import run
from tapfl.engine.samples import (
    picture_path,
    read_inputs,
    read_predictions,
    sampled_clients,
    samples_path,
)
from tapfl.errors import TapflError
from tapfl.evaluation.metrics import exact_match
from tapfl.model.summary import MIB
from tapfl.report.footprint import footprint
from tapfl.report.gather import gather
from tapfl.report.html import render
from tapfl.report.html_learning import _pieces
from tapfl.report.label_mix import bars, evenness, label_mix
from tests.experiment import read_events, tiny_experiment
from tests.report.pages import Page
from tests.report.runs import write_run
from tests.report.test_html import HOSTILE, copied

METHODS = ["local", "fedavg", "tap"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_experiment(folder, methods=METHODS, train={"rounds": 3, "local_steps": 1},
                             post={"steps": 1}, evaluation={"samples": 2})
    run(config, folder / "out")
    return folder / "out"


def page_of(folder, **options):
    page = Page(render(gather([folder]), **options))
    page.check()
    return page


def edit(path, change):
    """Change a file of samples and give it a checksum that fits."""
    values = json.loads(path.read_text())
    values.pop("sha256")
    change(values)
    write_checked_json(path, values)


def test_every_sample_and_every_prediction_is_shown(finished):
    page = page_of(finished)
    cards = [a for _, a in page.elements if a.get("class", "").startswith("card")
             and "data-wrong" in a]
    pictures, wrong = 0, 0
    for client in sampled_clients(finished):
        inputs = read_inputs(finished, client)
        found = {m: read_predictions(finished, client, m) for m in METHODS}
        for task, shown in inputs.tasks.items():
            pictures += len(shown.pictures)
            for text in (*shown.texts, *shown.answers):
                assert text in page.text
            for predictions in (each.tasks[task] for each in found.values()):
                pictures += len(predictions.pictures)
                assert all(text in page.text for text in predictions.texts)
                wrong += sum(labels[0] != label for labels, label in
                             zip(predictions.labels, shown.labels, strict=False))
                wrong += sum(not right for right in exact_match(
                    predictions.texts, shown.answers if predictions.texts else []))
    assert page.count("img") == pictures > 0
    assert sum(len(a["data-wrong"].split()) for a in cards) == wrong > 0
    assert len(cards) == sum(len(task.rows) for client in sampled_clients(finished)
                             for task in read_inputs(finished, client).tasks.values())
    assert page.text.count("✗") == wrong
    assert page.text.count("wrong: ") == wrong  # a screen reader says it, too


def test_pictures_are_those_of_the_samples(finished):
    """Lossy, but recognisable: close to its own picture, and closer than to any other."""
    text = render(gather([finished]))
    shown = [np.asarray(Image.open(io.BytesIO(base64.b64decode(found)))).astype(float)
             for found in re.findall(r'src="data:image/webp;base64,([^"]+)"', text)]
    path = samples_path(finished, "shapes")
    own = np.asarray(Image.open(picture_path(path, "tiny-imagenet", 0))).astype(float)
    errors = sorted(np.abs(each - own).mean() for each in shown)
    assert errors[0] < 20  # the picture has noise, which WebP takes away
    assert errors[1] > 1.5 * errors[0]


def test_no_byte_of_a_sample_is_in_a_report_without_them(finished, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(finished), "--no-samples", "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    for client in sampled_clients(finished):
        inputs = read_inputs(finished, client)
        for task, shown in inputs.tasks.items():
            answers = [t for m in METHODS
                       for t in read_predictions(finished, client, m).tasks[task].texts]
            assert not [t for t in (*shown.texts, *shown.answers, *answers) if t and t in text]
    assert "data:image" not in text
    assert "<img" not in text
    assert "img-src 'none'" in text
    assert "section-samples" not in text


def test_the_content_policy_allows_pictures_of_the_page_itself(finished):
    text = render(gather([finished]))
    (policy,) = re.findall(r'Security-Policy" content="([^"]*)"', text)
    assert policy.endswith("img-src data:")
    assert "default-src 'none'" in policy


def test_hostile_texts_are_only_texts(finished, tmp_path):
    folder = copied(finished, tmp_path / "run")

    def inputs(values):
        for task in values["tasks"].values():
            for key in ("texts", "answers", "classes"):
                task[key] = [HOSTILE] * len(task[key])

    def predictions(values):
        for task in values["tasks"].values():
            task["texts"] = [HOSTILE] * len(task["texts"])

    for client in sampled_clients(folder):
        edit(samples_path(folder, client), inputs)
        for method in METHODS:
            edit(samples_path(folder, client, method), predictions)
    page = page_of(folder)
    assert "<script>alert('a')</script>\"><img src=x onerror=alert(1)>" in page.text
    assert "\u202e" not in page.text
    assert page.count("script") == 1


def test_values_that_are_not_numbers(finished, tmp_path):
    folder = copied(finished, tmp_path / "run")

    def spoil(values):
        for task in values["tasks"].values():
            task["probabilities"] = [[None] * len(each) for each in task["probabilities"]]
            task["scores"] = {m: [None] * len(v) for m, v in task["scores"].items()}

    for client in sampled_clients(folder):
        edit(samples_path(folder, client, "tap"), spoil)
    page = page_of(folder)
    assert "mse not a number" in page.text
    shown = read_inputs(folder, "news").tasks["agnews"]
    best = read_predictions(folder, "news", "tap").tasks["agnews"].labels[0][0]
    assert f"{shown.name_of(best)} not a number" in page.text


def test_a_method_without_predictions_is_left_out(finished, tmp_path):
    """Such as one that was finished by an earlier version, before the run was resumed."""
    folder = copied(finished, tmp_path / "run")
    for client in sampled_clients(folder):
        shutil.rmtree(samples_path(folder, client, "fedavg").parent)
    summaries = re.findall(r"client \w+: 2 samples; right: ([^<]*)<", render(gather([folder])))
    assert summaries
    assert all(re.fullmatch(r"local \d, tap \d", each) for each in summaries)


def test_no_text_task_and_no_names(tmp_path):
    federation = ("tasks:\n  shapes: {kind: image_classification, modalities: [image], "
                  "classes: 2}\nclients:\n  - {name: only, tasks: {shapes: 1}}\n")
    config = tiny_experiment(tmp_path, methods=["fedavg"], data={"source": "synthetic"},
                             train={"rounds": 1, "cohort": 1, "local_steps": 1},
                             evaluation={"samples": 6})
    (tmp_path / "federation.yaml").write_text(federation)
    run(config, tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert page.count("img") == 6
    assert re.search("label: [01]", page.text)


def test_a_run_without_samples_says_so(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    assert "kept no samples" in page.text
    assert "label mix" not in page.text


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda f: samples_path(f, "looks").write_text("{}"), "inputs.json: damaged"),
    (lambda f: samples_path(f, "looks", "tap").write_text("{}"), "predictions.json: damaged"),
    (lambda f: picture_path(samples_path(f, "looks"), "vqa", 0).unlink(), "not a readable picture"),
    (lambda f: picture_path(samples_path(f, "looks"), "vqa", 0).write_bytes(b"<svg>"), "damaged"),
    (lambda f: edit(samples_path(f, "looks"), lambda v: v["tasks"]["vqa"].update(rows=[0, 1])),
     "of other samples"),
    (lambda f: edit(samples_path(f, "looks"), lambda v: v["tasks"].update(
        {"../../x": v["tasks"].pop("vqa")})), "unknown task '../../x'"),
    (lambda f: edit(samples_path(f, "looks"), lambda v: v.update(more=1)), "unknown key 'more'"),
    (lambda f: shutil.copytree(f / "samples" / "looks", f / "samples" / "not a name"),
     "is not a name"),
    (lambda f: (f / "labels.json").write_text("[]"), "labels.json: damaged"),
])
def test_bad_input_is_one_line(finished, tmp_path, capsys, spoil, message):
    folder = copied(finished, tmp_path / "run")
    spoil(folder)
    assert main(["report", str(folder)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_picture_of_another_size_is_refused(finished, tmp_path):
    folder = copied(finished, tmp_path / "run")
    listing = samples_path(folder, "looks")
    path = picture_path(listing, "vqa", 0)
    Image.new("RGB", (9, 70)).save(path)

    def change(values):
        values["tasks"]["vqa"]["pictures"][0] = hashlib.sha256(path.read_bytes()).hexdigest()

    edit(listing, change)
    with pytest.raises(TapflError, match="9 x 70 pixels, expected 64 x 64"):
        render(gather([folder]))


# Labels


def test_label_mixes_are_those_of_the_clients(finished):
    gathered, page = gather([finished]), page_of(finished)
    counts = gathered.labels["news"]["agnews"].counts
    names = gathered.record.classes["agnews"]
    most = max(range(len(counts)), key=lambda i: counts[i])
    held = sum(map(bool, counts))
    assert (f"{held} of 4 labels, most: {names[most]} {100 * counts[most] / sum(counts):.0f}%"
            in page.text)
    assert f"{names[most]} {counts[most]}" in page.text


def test_a_label_mix():
    even = label_mix(TaskLabels(samples=4, counts=[2, 2]), ["cat", "<b>"])
    assert float(even.value) == pytest.approx(1)
    assert "&lt;b&gt; 50%" in even.shown
    assert label_mix(TaskLabels(samples=3, counts=[0, 3]), []).value == "0.0000"
    assert "1 100%" in label_mix(TaskLabels(samples=3, counts=[0, 3]), []).shown
    for empty in (None, TaskLabels(samples=3), TaskLabels(samples=0, counts=[0, 0])):
        assert label_mix(empty, []).shown == ""
    assert evenness([1, 1, 2]) == pytest.approx(1.5 * np.log(2) / np.log(3))
    many = label_mix(TaskLabels(samples=400, counts=[2] * 200), [str(i) for i in range(200)])
    assert "and 188 more" in many.shown
    assert bars([1] * 200).count("M") == 40
    assert bars([1, 0, 5]).count("M") == 2


# Bytes


def test_bytes_by_round_add_up(finished):
    traffic = footprint(finished).traffic["fedavg"]
    events = [e for e in read_events(finished, "round") if e["method"] == "fedavg"]
    for sent, event in zip(traffic.by_round, events, strict=True):
        assert sum(sent.values()) == event["bytes_up"]
    for block, total in traffic.blocks.items():
        assert sum(sent.get(block, 0) for sent in traffic.by_round) == total
    page = page_of(finished)
    sent = traffic.by_round[1]
    block = max(sent, key=sent.get)
    assert f"{block}, round 2: {sent[block] / MIB:.3g} MiB" in page.text
    assert "MiB to the server by round and block" in page.text


def test_rounds_of_long_runs_are_added_up():
    by_round = [{"a": 1}, {"b": 2}, {"a": 3}, {"a": 4}, {"a": 5}]
    assert _pieces(by_round, 5) == [(str(i + 1), each) for i, each in enumerate(by_round)]
    assert _pieces(by_round, 3) == [("1–2", {"a": 1, "b": 2}), ("3–4", {"a": 7}), ("5–5", {"a": 5})]
    assert _pieces([], 3) == []
