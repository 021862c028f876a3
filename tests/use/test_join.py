"""Newcomers to a stored run: known and unknown tasks, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tapfl.cli import main
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.report.html import write_report
from tapfl.report.verdict import verdict
from tapfl.use.join import join
from tapfl.use.load import load
from tests.engine.test_resume import Stop
from tests.experiment import read_events, tiny_experiment

NEWCOMERS = """
tasks:
  agnews: {kind: text_classification, modalities: [text], classes: 4}
  cifar100: {kind: image_classification, modalities: [image], classes: 10}
clients:
  - {name: reader, tasks: {agnews: 1/3}}
  - {name: painter, tasks: {cifar100: 1/3}}
"""
METHODS = ["local", "fedavg+post", "tap", "ditto", "fedper", "fedper+post"]


def small(folder, **more):
    return tiny_experiment(folder, **{
        "methods": METHODS, "train": {"rounds": 2, "local_steps": 1},
        "data": {"train": 12, "test": 3}, "post": {"steps": 1}} | more)


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    run(small(folder), folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def newcomers(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "newcomers.yaml"
    path.write_text(NEWCOMERS)
    return path


@pytest.fixture(scope="module")
def joined(before, newcomers, tmp_path_factory):
    out = tmp_path_factory.mktemp("joined") / "out"
    here = {path: path.stat().st_mtime_ns for path in before.rglob("*")}
    found = join(before, newcomers, out, alone=True, device="cpu")
    assert {path: path.stat().st_mtime_ns for path in before.rglob("*")} == here
    return found, out


def test_methods_that_make_sense_and_those_that_do_not(joined):
    found, _ = joined
    assert found.config.methods == ["alone", "fedavg", "fedavg+post", "tap", "ditto", "fedper+post"]
    assert set(found.omitted) == {"local", "fedper"}
    for method in found.config.methods:
        rows = [row for row in found.rows if row["method"] == method]
        assert {(row["client"], row["task"]) for row in rows} == {
            ("reader", "agnews"), ("painter", "cifar100")}, method


def blocks(path):
    return {key.partition(":")[0] for key in load_file(path)}


def test_w_comes_from_the_run_and_the_rest_is_fresh(before, joined):
    old = load_file(before / "models" / "fedavg" / "server.safetensors")
    new = load_file(joined[1] / "models" / "fedavg" / "server.safetensors")
    assert {key.partition(":")[0] for key in set(new) - set(old)} == {"decoder/cifar100"}
    assert all(new[key].equal(old[key]) for key in set(new) & set(old))
    assert not [event for event in read_events(joined[1]) if event["event"] == "round"]


def test_without_steps_x_is_w(before, newcomers, tmp_path):
    join(before, newcomers, tmp_path / "out", device="cpu",
         overrides=["post.steps=0", "methods=[tap, fedavg+post]"])
    server = load_file(before / "models" / "fedavg" / "server.safetensors")
    for method in ("tap", "fedavg+post"):
        own = load_file(tmp_path / "out" / "models" / method / "reader.safetensors")
        assert "decoder/agnews" in {key.partition(":")[0] for key in own}
        assert all(own[key].equal(server[key]) for key in own), method


def test_alone_has_nothing_of_the_run(before, joined):
    server = load_file(before / "models" / "fedavg" / "server.safetensors")
    own = load_file(joined[1] / "models" / "alone" / "reader.safetensors")
    assert any(not own[key].equal(server[key]) for key in own)
    taken = load_file(joined[1] / "models" / "tap" / "reader.safetensors")
    assert set(taken) == set(own)


def test_the_folder_is_a_runs(joined):
    _, out = joined
    model = load(out, client="reader")
    assert model.card.method == "tap"
    assert model.predict("agnews", text="shares rise")["label"]
    report = verdict([out])
    assert (report.method, report.against) == ("tap", ("alone", "fedavg"))
    assert "reader" in write_report([out]).read_text()
    record = json.loads((out / "run.json").read_text())
    assert record["start"]["models"]["fedavg"]["round"] == 1
    assert record["start"]["clients"] == []


def test_a_run_that_was_stopped(newcomers, tmp_path):
    config = small(tmp_path, methods=["tap", "fedper+post"],
                   train={"rounds": 9, "local_steps": 1})
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped", notify=Stop(at_round=1))
    found = join(tmp_path / "stopped", newcomers, tmp_path / "out", device="cpu")
    assert found.config.train.rounds == 2
    assert found.config.methods == ["fedavg", "tap"]
    assert found.omitted == {"fedper+post": "the run has no stored model of it"}
    assert {row["client"] for row in found.rows} == {"reader", "painter"}


def test_from_the_command_line(before, newcomers, tmp_path, capsys):
    assert main(["join", str(before), "--federation", str(newcomers), "--out",
                 str(tmp_path / "out"), "--set", "methods=[local, tap]", "--quiet",
                 "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "omitted: local: its clients share nothing" in out
    assert (tmp_path / "out" / "report.html").is_file()


def _no_run(before, folder):
    shutil.rmtree(before)


def _no_models(before, folder):
    for name in ("models", "state"):
        shutil.rmtree(before / name)


def _known(before, folder):
    (folder / "newcomers.yaml").write_text(NEWCOMERS.replace("reader", "news"))


def _other_classes(before, folder):
    (folder / "newcomers.yaml").write_text(NEWCOMERS.replace("classes: 4", "classes: 5"))


def _no_file(before, folder):
    (folder / "newcomers.yaml").unlink()


@pytest.mark.parametrize(("spoil", "more", "message"), [
    (_no_run, [], "no run here (run.json is missing)"),
    (_no_models, [], "the run has no stored model of it"),
    (_known, [], "client 'news' is already one of"),
    (_other_classes, [], "task 'agnews'"),
    (_no_file, [], "federation.file: no such file"),
    (None, ["--set", "train.rounds=9"], "--set train.rounds: newcomers make their models at once"),
    (None, ["--set", "backbone.kind=standard"], "start: backbone"),
    (None, ["--set", "methods=[feddat]"], "feddat: the run has no stored model of it"),
    (None, ["--set", "methods=[own:Method]"], "name the folder that they are imported from"),
    (None, ["--set", "nonsense=1"], "nonsense"),
], ids=lambda value: getattr(value, "__name__", "-").strip("_"))
def test_bad_input_is_one_line(before, tmp_path, capsys, spoil, more, message):
    shutil.copytree(before, tmp_path / "run")
    (tmp_path / "newcomers.yaml").write_text(NEWCOMERS)
    if spoil:
        spoil(tmp_path / "run", tmp_path)
    words = ["join", str(tmp_path / "run"), "--federation", str(tmp_path / "newcomers.yaml"),
             "--out", str(tmp_path / "out"), "--device", "cpu", "--quiet", *more]
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not Path(tmp_path / "out").exists()


def test_newcomers_cannot_bring_code_that_nobody_named(before, newcomers, tmp_path):
    with pytest.raises(TapflError, match="name the folder"):
        join(before, newcomers, tmp_path / "out", overrides=["methods=[os:Path]"])
