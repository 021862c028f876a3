"""`--data` is for configurations that read a mirror of the hub; others refuse it, in one line."""

import pytest

from tapfl.cli import main
from tapfl.config import Config, load_config
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.use.mirror import with_mirror
from tests.experiment import tiny_experiment
from tests.use.test_join import NEWCOMERS

TASKS = "tasks:\n  code: {{kind: text_classification, modalities: [text], classes: [A, B]{}}}\n"
CLIENTS = "clients:\n  - {{name: x, tasks: {{code: {}}}}}\n"


def config_of(folder, task, client, source):
    file = folder / "federation.yaml"
    file.write_text(TASKS.format(task) + CLIENTS.format(client))
    return Config.model_validate({"federation": {"file": str(file)}, "data": {"source": source}})


@pytest.mark.parametrize(("task", "client", "source"), [
    ("", "1", "hub"), (", data: {hub: owner/name}", "1", "miniature"),
    ("", "{hub: owner/name}", "synthetic")])
def test_a_folder_that_is_read_is_taken(tmp_path, task, client, source):
    config = config_of(tmp_path, task, client, source)
    assert with_mirror(config, tmp_path).data.folder == str(tmp_path)
    assert with_mirror(config, None) is config
    with pytest.raises(TapflError, match="nowhere: no such folder"):
        with_mirror(config, tmp_path / "nowhere")


@pytest.mark.parametrize(("task", "client", "source", "why"), [
    ("", "1", "miniature", r"its data are made \(data.source: miniature\)"),
    ("", "1", "synthetic", r"its data are made \(data.source: synthetic\)"),
    (", data: {path: a.csv}", "1", "hub", "its federation file names the files"),
    ("", "{path: a.csv}", "hub", "its federation file names the files")])
def test_a_folder_that_nothing_is_read_from_is_refused(tmp_path, task, client, source, why):
    config = config_of(tmp_path, task, client, source)
    with pytest.raises(TapflError, match=f"--data .*: this configuration reads no data folder: "
                                         f"{why}; omit --data"):
        with_mirror(config, tmp_path)
    assert with_mirror(config, None) is config


def test_only_data_of_those_who_take_part_count(tmp_path):
    file = tmp_path / "federation.yaml"
    file.write_text(TASKS.format("") + "clients:\n  - {name: x, tasks: {code: {path: a.csv}}}\n"
                    "  - {name: y, tasks: {code: {hub: owner/name}}}\n")
    config = Config.model_validate({"federation": {"file": str(file)}})
    assert with_mirror(config, tmp_path).data.folder == str(tmp_path)
    alone = config.federation.model_copy(update={"clients": ["g0-x"]})
    with pytest.raises(TapflError, match="reads no data folder"):
        with_mirror(config.model_copy(update={"federation": alone}), tmp_path)


def test_an_empty_name_is_no_folder():
    with pytest.raises(TapflError, match="--data : no such folder"):
        with_mirror(load_config("flava"), "")


def test_presets():
    assert with_mirror(load_config("flava"), ".").data.folder == "."
    with pytest.raises(TapflError, match="reads no data folder"):
        with_mirror(load_config("quickstart"), ".")


@pytest.mark.parametrize("words", [
    "run quickstart --out out", "run quickstart --seeds 41,42 --out out", "validate quickstart",
    "validate quickstart --config-only", "deploy local quickstart --out out"])
def test_commands_refuse_it_before_anything_is_written(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "--data", "."]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tapfl: --data .: this configuration reads no data folder: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_stored_run_refuses_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = tiny_experiment(tmp_path, methods=["fedavg"], train={"rounds": 1, "local_steps": 1})
    run(config, "stored")
    (tmp_path / "new.yaml").write_text(NEWCOMERS)
    there = sorted(tmp_path.iterdir())
    for words in ("run --resume --out stored", "bound stored",
                  "join stored --federation new.yaml --out new"):
        assert main([*words.split(), "--data", "."]) == 2
        assert "--data .: this configuration reads no data folder" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == there


def test_the_bound_of_a_layout_reads_no_data(capsys):
    assert main(["bound", "quickstart", "--data", "nowhere"]) == 2
    assert "--data nowhere: goes with the folder of a run" in capsys.readouterr().err
