"""Runs that are interrupted, damaged or starved of disk, and go on."""

import json
import math
import shutil
from pathlib import Path

import pytest

from tapfl.blocks import BlockState
from tapfl.config import CheckpointConfig
from tapfl.engine.checkpoints import Checkpoints
from tapfl.engine.run import run
from tapfl.engine.turn import ClientTurn
from tapfl.errors import TapflError
from tapfl.events import ClientFinished, Message, RoundEnded
from tests.experiment import read_events, tiny_experiment


def _stable(folder, event=None):
    """Events without what the clock says."""
    return [{k: v for k, v in e.items() if k != "seconds"} for e in read_events(folder, event)]


def same_run(one, other):
    assert (one / "results.csv").read_bytes() == (other / "results.csv").read_bytes()
    assert _stable(one) == _stable(other)
    for kind in ("models", "scores"):
        same_files(one, other, kind)


def same_files(one, other, kind):
    files = {p.relative_to(other): p for p in (other / kind).rglob("*.safetensors")}
    assert files
    assert {p.relative_to(one) for p in (one / kind).rglob("*.safetensors")} == set(files)
    assert all((one / name).read_bytes() == path.read_bytes() for name, path in files.items())


class Stop:
    """Press Ctrl-C in the middle of things."""

    def __init__(self, at_round=None, at_client=None):
        self.at_round, self.at_client, self.said = at_round, at_client, []

    def __call__(self, event):
        if isinstance(event, Message):
            self.said.append(str(event))
        if isinstance(event, RoundEnded) and event.round == self.at_round:
            raise KeyboardInterrupt
        if isinstance(event, ClientFinished) and event.done == self.at_client:
            raise KeyboardInterrupt


def newest_checkpoint(out, method="fedavg"):
    return Checkpoints(out / "state" / method / "checkpoints", method).newest


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    config = tiny_experiment(folder, methods=["fedavg+post", "tap"],
                             train={"rounds": 6, "local_steps": 1}, post={"steps": 1})
    run(config, folder / "out")
    return config, folder / "out"


@pytest.fixture(scope="module")
def halted(calm, tmp_path_factory):
    """The same run, stopped after its last round."""
    out = tmp_path_factory.mktemp("halted") / "out"
    with pytest.raises(KeyboardInterrupt):
        run(calm[0], out, notify=Stop(at_round=5))
    return out


@pytest.fixture
def out(halted, tmp_path):
    """A copy of the run that was stopped."""
    return Path(shutil.copytree(halted, tmp_path / "out"))


def test_the_time_of_a_killed_piece_counts(out, calm):
    """A killed process leaves when it began; how long it lived, its last event tells."""
    record = json.loads((out / "run.json").read_text())
    assert record["began"] is None
    began = (out / "events.jsonl").stat().st_mtime - 1000
    (out / "run.json").write_text(json.dumps(record | {"began": began, "seconds": 50.0}))
    run(calm[0], out, resume=True)
    record = json.loads((out / "run.json").read_text())
    assert record["began"] is None
    assert 1050 < record["seconds"] < 1150


@pytest.mark.parametrize("stop", [
    pytest.param(Stop(at_round=0), marks=pytest.mark.long),
    pytest.param(Stop(at_round=3), marks=pytest.mark.long), Stop(at_client=2)])
def test_ctrl_c_commits_and_resumes(tmp_path, calm, stop):
    config, expected = calm
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=stop)
    assert not json.loads((tmp_path / "out" / "run.json").read_text())["finished"]
    if stop.at_round is not None:
        assert newest_checkpoint(tmp_path / "out") == stop.at_round
    run(config, tmp_path / "out", resume=True)
    for name in ("results.csv",):
        assert (tmp_path / "out" / name).read_bytes() == (expected / name).read_bytes()
    assert _stable(tmp_path / "out", None) == _stable(expected, None)


def test_ctrl_c_in_the_middle_of_a_round(tmp_path, calm, monkeypatch):
    """The half-finished round leaves no trace, in no file."""
    config, expected = calm
    real, turns = ClientTurn.personalize, [0]

    def client(self, *arguments):
        result = real(self, *arguments)
        turns[0] += 1
        if turns[0] == 7:  # the first of two clients in the fourth round has just replaced blocks
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(ClientTurn, "personalize", client)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out")
    assert newest_checkpoint(tmp_path / "out") == 2
    run(config, tmp_path / "out", resume=True)
    assert (tmp_path / "out/results.csv").read_bytes() == (expected / "results.csv").read_bytes()
    assert _stable(tmp_path / "out", None) == _stable(expected, None)


def test_crash_then_ctrl_c_before_the_first_checkpoint(tmp_path, calm, monkeypatch):
    """A segment of events that no checkpoint knows of is forgotten, not padded."""
    config, expected = calm
    config = config.model_copy(update={"checkpoint": CheckpointConfig(every=100)})
    out, real, turns = tmp_path / "out", ClientTurn.personalize, [0]

    def client(self, *arguments):
        result = real(self, *arguments)
        turns[0] += 1
        if turns[0] in (5, 6):
            raise RuntimeError("crash") if turns[0] == 5 else KeyboardInterrupt
        return result

    monkeypatch.setattr(ClientTurn, "personalize", client)
    with pytest.raises(RuntimeError, match="crash"):
        run(config, out)
    with pytest.raises(KeyboardInterrupt):
        run(config, out, resume=True)
    run(config, out, resume=True)
    assert (out / "results.csv").read_bytes() == (expected / "results.csv").read_bytes()
    assert _stable(out, None) == _stable(expected, None)


def test_damaged_records(tmp_path, calm):
    config, expected = calm
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_client=2))
    final = sorted((tmp_path / "out/state/fedavg/final").glob("*.json"))
    final[0].write_text("{")
    run(config, tmp_path / "out", resume=True)
    assert (tmp_path / "out/results.csv").read_bytes() == (expected / "results.csv").read_bytes()
    (tmp_path / "out/results.csv").unlink()
    run(config, tmp_path / "out", resume=True)
    assert (tmp_path / "out/results.csv").read_bytes() == (expected / "results.csv").read_bytes()
    for path in (tmp_path / "out/state/fedavg/checkpoints").glob("*.json"):
        path.write_text("{")
    (tmp_path / "out/results.csv").unlink()
    with pytest.raises(TapflError, match=r"damaged \(not readable\)"):
        run(config, tmp_path / "out", resume=True)


def test_a_changed_federation_file(tmp_path):
    config = tiny_experiment(tmp_path, train={"rounds": 2})
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_round=0))
    path = tmp_path / "federation.yaml"
    path.write_text(path.read_text().replace("agnews: 1/2}}", "agnews: 1/3}}"))
    with pytest.raises(TapflError, match="the federation file has changed"):
        run(config, tmp_path / "out", resume=True)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(TapflError, match="no run to resume here"):
        run(tiny_experiment(tmp_path), tmp_path / "typo", resume=True)
    (tmp_path / "died").mkdir()
    (tmp_path / "died" / ".run.json.partial").write_text("{")
    run(tiny_experiment(tmp_path, train={"rounds": 0}, post={"steps": 0}), tmp_path / "died",
        resume=True)


def test_a_complete_run_stays_as_it_is(calm):
    config, out = calm
    before = (out / "results.csv").read_bytes()
    rows = run(config, out, resume=True)
    assert (out / "results.csv").read_bytes() == before
    assert len(rows) == len(before.splitlines()) - 1


def test_damaged_checkpoint_falls_back_to_the_previous_one(out, calm):
    config, expected = calm
    newest = sorted((out / "state/fedavg/checkpoints").glob("*.safetensors"))[-1]
    data = bytearray(newest.read_bytes())
    data[-5] ^= 0xFF
    newest.write_bytes(data)
    watch = Stop()
    run(config, out, resume=True, notify=watch)
    assert "damaged" in watch.said[0]
    assert "going back to round" in watch.said[0]
    assert (out / "results.csv").read_bytes() == (expected / "results.csv").read_bytes()


def test_no_sound_checkpoint_is_one_clear_line(out, calm):
    for path in (out / "state/fedavg/checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(TapflError, match="no sound checkpoint is left"):
        run(calm[0], out, resume=True)


def test_full_disk(tmp_path, calm, monkeypatch):
    """The write that fails says so; what was written before still loads."""
    config, expected = calm
    real, count = BlockState.save, [0]

    def save(self, path, metadata=None):
        count[0] += 1
        if count[0] == 12:
            raise OSError(28, "No space left on device")
        real(self, path, metadata)

    monkeypatch.setattr(BlockState, "save", save)
    with pytest.raises(TapflError, match=r"cannot be written .*No space left.*--resume"):
        run(config, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.partial"))
    run(config, tmp_path / "out", resume=True)
    assert (tmp_path / "out/results.csv").read_bytes() == (expected / "results.csv").read_bytes()


def test_resume_refuses_another_configuration(tmp_path, calm):
    config, out = calm
    other = config.model_copy(update={"seed": 8})
    with pytest.raises(TapflError, match="started with another 'seed'"):
        run(other, out, resume=True)
    with pytest.raises(TapflError, match="already holds a run"):
        run(config, out)


def test_folders_that_are_in_the_way(tmp_path):
    config = tiny_experiment(tmp_path)
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "file").write_text("mine")
    with pytest.raises(TapflError, match="is in the way"):
        run(config, tmp_path / "busy")
    (tmp_path / "plain").write_text("mine")
    with pytest.raises(TapflError, match=r"is in the way|cannot make"):
        run(config, tmp_path / "plain")
    assert (tmp_path / "busy" / "file").read_text() == "mine"


def test_same_seed_same_results_other_seed_others(tmp_path, calm):
    config, out = calm
    run(config, tmp_path / "again")
    assert (tmp_path / "again/results.csv").read_bytes() == (out / "results.csv").read_bytes()
    run(config.model_copy(update={"seed": 8}), tmp_path / "other")
    assert (tmp_path / "other/results.csv").read_bytes() != (out / "results.csv").read_bytes()


def test_bf16_runs_and_says_so(tmp_path):
    config = tiny_experiment(tmp_path, precision="bf16", train={"rounds": 1, "local_steps": 1},
                             methods=["feddat+tap"])
    rows = run(config, tmp_path / "out")
    assert all(math.isfinite(r["value"]) for r in rows)
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["config"]["precision"] == "bf16"


def test_old_client_files_are_forgotten(tmp_path):
    config = tiny_experiment(tmp_path, train={"rounds": 6, "cohort": 2, "local_steps": 1},
                             federation={"clients": ["shapes", "news"]}, checkpoint={"every": 1})
    run(config, tmp_path / "out")
    folders = list((tmp_path / "out/state/fedavg/clients/tap").iterdir())
    assert len(folders) == 2
    for folder in folders:  # each was written in every round
        assert len(list(folder.iterdir())) <= 4
    assert len(list((tmp_path / "out/state/fedavg/checkpoints").glob("*.json"))) == 2


def test_what_a_run_writes(calm):
    config, out = calm
    header, *lines = (out / "results.csv").read_text().splitlines()
    assert header == "seed,method,client,task,dataset,metric,value,samples"
    # Seven client tasks, two of them with two metrics; those two have a constant answer, too.
    assert len(lines) == 2 * (7 + 2) + 2 * 2
    assert [line.split(",")[1:4] for line in lines[-4:]] == [
        ["constant", client, task] for client, task in (("looks", "vqa"), ("words", "commongen"))
        for _ in range(2)]
    record = json.loads((out / "run.json").read_text())
    assert record["finished"]
    assert record["random_weights"]
    assert record["config"]["seed"] == config.seed
    assert record["parameters"]["trainable"] == sum(record["parameters"]["blocks"].values())
    assert record["memory"]["peak_rss"] > 0
    assert record["seconds"] > 0
    assert {e["event"] for e in read_events(out)} == {"round", "replacement", "personal"}
    for method in ("fedavg+post", "tap"):
        assert len(list((out / "models" / method).glob("*.safetensors"))) == 4
    assert not [p for p in out.rglob("*") if p.suffix in (".pkl", ".pt", ".bin")]


def test_a_run_is_not_resumed_with_other_data_or_metrics(tmp_path):
    """What it has so far and what would come do not go together."""
    import csv

    path = tmp_path / "texts.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((f"text {n}", "AB"[n % 2])
                                                         for n in range(10))])
    federation = tmp_path / "own.yaml"
    federation.write_text(
        "tasks:\n  code: {kind: text_classification, modalities: [text], classes: [A, B]}\n"
        "clients:\n  - {name: x, tasks: {code: {path: texts.csv}}}\n")
    config = tiny_experiment(tmp_path, federation={"file": str(federation)},
                             train={"rounds": 2, "cohort": 1})

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", notify=Stop(at_round=0))
    whole = path.read_text()
    path.write_text(whole.replace("text 3", "other words"))
    with pytest.raises(TapflError, match="started with other data"):
        run(config, tmp_path / "run", resume=True)
    path.write_text(whole)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(record | {"metrics": {"meteor": {}}}))
    with pytest.raises(TapflError, match="other metrics of text"):
        run(config, tmp_path / "run", resume=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert run(config, tmp_path / "run", resume=True)
