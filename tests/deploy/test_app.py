"""A run that dies is submitted again; one that has said its last word is left alone."""

import json

import pytest

from tapfl.deploy.app import START, TRIES, App, stop_app
from tapfl.deploy.processes import Processes, recorded
from tapfl.deploy.server import follow
from tapfl.deploy.status import status
from tapfl.deploy.supervise import STEADY
from tapfl.engine.process import identity, is_running
from tapfl.errors import TapflError
from tests.deploy.test_supervise import SLEEPS, Clock

GONE = {"pid": 1 << 22, "started": "1"}  # larger than any id


@pytest.fixture
def app(tmp_path):
    clock, said, submitted = Clock(), [], []
    path = tmp_path / "serverapp.json"
    found = App(lambda: submitted.append(clock.now), path, said.append, clock)
    found.begin()
    return found, clock, said, submitted, path


def test_a_run_that_goes_on_is_left_alone(app):
    found, clock, said, submitted, path = app
    path.write_text(json.dumps(identity()))
    for _ in range(5):
        found.look()
        clock.now += 1000
    assert (len(submitted), said) == (1, [])


def test_a_run_that_is_gone_is_submitted_again(app):
    found, clock, said, submitted, path = app
    path.write_text(json.dumps(GONE))
    found.look()
    assert said == []  # its last words may not have been read
    found.look()
    assert said == ["the run's process is gone; submitting it again in 1 s"]
    found.look()
    assert len(submitted) == 1
    clock.now += 1
    found.look()
    assert len(submitted) == 2
    assert not path.exists()  # until the new one says who it is
    found.look(), found.look()
    assert len(said) == 1


def test_one_that_flower_never_starts_is_submitted_again(app):
    found, clock, said, _, _ = app
    clock.now += START - 1
    found.look(), found.look()
    assert said == []
    clock.now += 2
    found.look(), found.look()
    assert len(said) == 1


def test_one_that_dies_again_and_again_is_given_up(app):
    found, clock, _, submitted, path = app

    def again_and_again():
        for _ in range(100):
            path.write_text(json.dumps(GONE))
            found.look()
            clock.now += 1

    with pytest.raises(TapflError, match=f"as {TRIES} times before"):
        again_and_again()
    assert len(submitted) == TRIES + 1


def test_a_submission_that_fails_is_tried_again(tmp_path):
    clock, said = Clock(), []

    def submit():
        if clock.now > 100:
            raise TapflError("submitting the run failed: no answer")

    found = App(submit, tmp_path / "serverapp.json", said.append, clock)
    found.begin()
    clock.now += STEADY
    found.lost("the run has lost its SuperLink")
    clock.now += 1
    found.look()
    assert said == ["the run has lost its SuperLink; submitting it again in 1 s",
                    "submitting the run failed: no answer; submitting it again in 2 s"]


def test_what_is_left_of_a_run_is_ended(tmp_path):
    processes = Processes(tmp_path)
    processes.start("app", SLEEPS)
    who = recorded(tmp_path)["app"]
    (tmp_path / "serverapp.json").write_text(json.dumps(who | {"started": "1"}))
    stop_app(tmp_path)
    assert is_running(who)  # another process has that id
    (tmp_path / "serverapp.json").write_text(json.dumps(who))
    stop_app(tmp_path)
    assert not is_running(who)
    processes.stop()


def test_the_words_of_earlier_starts_end_nothing(tmp_path):
    log, looks = tmp_path / "log.jsonl", []
    log.write_text('{"says": "stopped: too few"}\n')
    position = log.stat().st_size

    def look():
        looks.append(1)
        with log.open("a") as file:
            file.write('{"says": "goes on"}\n{"says": "finished"}\n{"says": "half')

    assert [said["says"] for said in follow(log, look, position)] == ["goes on", "finished"]
    assert len(looks) == 1


@pytest.mark.parametrize(("texts", "state"), [
    (["starts"], "under way"), (["starts", "stopped: why"], "stopped: why"),
    (["starts", "stopped: why", "goes on", "waiting"], "under way"),
    (["starts", "finished"], "finished"),
    (["starts", "the run's process is gone; submitting it again in 1 s"], "under way")])
def test_the_state_is_that_of_the_last_start(tmp_path, texts, state):
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "log.jsonl").write_text(
        "".join(json.dumps({"says": text}) + "\n" for text in texts))
    assert status(tmp_path)["state"] == state


def test_what_a_node_says_of_itself_is_no_news_of_the_server(tmp_path):
    own = ["node 7 joined with ward", "proxy ended with status 1; starting it again in 1 s"]
    quoted = ["refused: node 8: code of tapfl x joined with ward, the server has y",
              "node 8: no hello (Flower says: node 9 joined with ward; starting it again in 1 s)"]
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "log.jsonl").write_text(
        "".join(json.dumps({"says": text}) + "\n" for text in [*own, *quoted]))
    found = status(tmp_path)
    assert (found["nodes"], found["restarts"]) == (own[:1], own[1:])
    assert found["refused"] == quoted[:1]
