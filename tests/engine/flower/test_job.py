"""What a server is to run: read from Flower's run-config."""

import json
import tomllib
from pathlib import Path

import pytest

from tapfl.config import load_config
from tapfl.engine.flower.job import Job, Log, job_of
from tapfl.engine.flower.nodes import Patience
from tapfl.errors import TapflError
from tapfl.events import ClientFinished, Message, Missing, RoundEnded

APP = Path(__file__).parents[3] / "examples" / "flower" / "pyproject.toml"


def shipped(**changes):
    """Return the run-config of the example, changed as `flwr run --run-config` would."""
    return tomllib.loads(APP.read_text())["tool"]["flwr"]["app"]["config"] | changes


def test_a_preset_and_changes(tmp_path):
    job = job_of(shipped(out=str(tmp_path), set="train.rounds=3 'methods=[fedavg, tap]'",
                         round=60, minimum=2))
    assert job.config == load_config("quickstart", ["train.rounds=3", "methods=[fedavg, tap]"])
    assert job.out == tmp_path
    assert job.log == tmp_path / "deploy" / "log.jsonl"
    assert job.patience == Patience(round=60, minimum=2)
    assert job.device == "cpu"


def test_the_example_changes_no_default(tmp_path):
    assert job_of(shipped(out=str(tmp_path))) == Job(
        config=load_config("quickstart"), out=tmp_path, log=tmp_path / "deploy" / "log.jsonl")


def test_a_jobs_file(tmp_path):
    job = Job(config=load_config("quickstart"), out=tmp_path, log=tmp_path / "log.jsonl")
    job.save(tmp_path / "job.json")
    assert job_of({"job": str(tmp_path / "job.json")}) == job


@pytest.mark.parametrize(("changes", "line"), [
    ({}, "expected 'job', or 'preset' and an absolute path as 'out'"),
    ({"out": "runs/mine"}, "an absolute path as 'out'"),
    ({"preset": "", "out": "/x"}, "expected 'job', or 'preset'"),
    ({"out": "/x", "outt": "/y"}, "run-config: unknown key 'outt'; did you mean 'out'?"),
    ({"out": "/x", "preset": "quickstrat"}, "quickstrat"),
    ({"out": "/x", "set": "train.rounds='3"}, "run-config: set: No closing quotation"),
    ({"out": "/x", "set": "train.rounds=many"}, "train.rounds"),
    ({"out": "/x", "compression": "gzip"}, "run-config: compression"),
    ({"out": "/x", "minimum": "two"}, "run-config: patience.minimum"),
    ({"job": "/nowhere/job.json"}, "/nowhere/job.json")])
def test_what_cannot_be_run_is_one_line(changes, line):
    with pytest.raises(TapflError) as error:
        job_of(shipped(**changes))
    assert line in str(error.value)


def test_its_log_is_kept_and_said_in_words(tmp_path):
    said = []
    log = Log(tmp_path / "deploy" / "log.jsonl", said.append)
    for event in (Message("starts"), ClientFinished("a", 1, 2), Missing("tap", 1, "a", "late"),
                  RoundEnded("tap", 1, ["a", "b"], 0.1, {}, 2_500_000, 1, 3.21, {})):
        log(event)
    assert said == ["starts", "round 2: a: missing: late",
                    "tap: round 2 · a b · 3.2 s · 2.50 MB up"]
    lines = [json.loads(line) for line in log._path.read_text().splitlines()]
    assert [set(line) & {"says", "event", "cohort"} for line in lines] == [
        {"says"}, {"event"}, {"cohort"}]
