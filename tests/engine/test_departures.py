"""Clients that leave: while a run goes on, before it is resumed, and where another one starts."""

import json
import shutil

import pytest

from tapfl.cli import main
from tapfl.engine.departures import FILE, Departures, leave, leavers
from tapfl.engine.results import read_results
from tapfl.engine.rounds import Rounds
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.events import Left, RoundEnded, RunStarted
from tapfl.federated.server import Server
from tapfl.report.html import write_report
from tests.engine.flower.memory import Killed, while_alive
from tests.engine.test_resume import Stop, same_run
from tests.experiment import read_events, tiny_experiment

GONE = "shapes"


def small(folder, **more):
    return tiny_experiment(folder, **{
        "methods": ["fedavg", "tap"], "train": {"rounds": 6, "cohort": 3, "local_steps": 1},
        "data": {"train": 12, "test": 3}, "post": {"steps": 1}} | more)


class Leaving:
    """Say that a client leaves, when a round is over: as another process would."""

    def __init__(self, out, after, client=GONE):
        self.out, self.after, self.client, self.seen = out, after, client, []

    def __call__(self, event):
        if isinstance(event, Left):
            self.seen.append((event.round, event.client))
        if isinstance(event, RoundEnded) and event.round == self.after:
            leave(self.out, [self.client])


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A run that a client leaves after the third of six rounds."""
    folder = tmp_path_factory.mktemp("left")
    config, leaving = small(folder), Leaving(folder / "out", after=2)
    run(config, folder / "out", notify=leaving)
    return config, folder / "out", leaving


def test_it_is_in_no_later_round(left):
    _, out, leaving = left
    cohorts = {event["round"]: event["cohort"] for event in read_events(out, "round")}
    assert any(GONE in cohort for round_, cohort in cohorts.items() if round_ <= 2)
    assert not any(GONE in cohort for round_, cohort in cohorts.items() if round_ > 2)
    assert all(len(cohort) == 3 for cohort in cohorts.values())  # others come in its place
    assert read_events(out, "left") == [
        {"event": "left", "method": "fedavg", "round": 3, "client": GONE}]
    assert leaving.seen == [(3, GONE)]


def test_it_has_no_results_and_keeps_what_it_has(left):
    _, out, _ = left
    assert {row["client"] for row in read_results(out / "results.csv")} == {
        "news", "looks", "words"}
    assert not (out / "models" / "tap" / f"{GONE}.safetensors").exists()
    kept = out / "state" / "fedavg" / "clients" / "tap" / GONE
    assert {int(path.stem) for path in kept.iterdir()} <= {0, 1, 2}
    assert any(kept.iterdir())
    assert json.loads((out / "run.json").read_text())["left"] == {GONE: {"fedavg": 3}}


def test_the_report_says_since_when(left):
    page = write_report([left[1]]).read_text()
    assert f"{GONE} has left: fedavg went on without it from round 4 on" in page
    assert "missing answer" not in page


def test_before_it_left_everything_is_as_usual(left, tmp_path):
    config, out, _ = left
    run(config, tmp_path / "whole")
    events = [[{k: v for k, v in event.items() if k != "seconds"} for event in read_events(each)
               if event["round"] <= 2] for each in (out, tmp_path / "whole")]
    assert events[0] == events[1]


@pytest.mark.parametrize("at_round", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_killed_run_lets_it_leave_in_the_same_round(left, tmp_path, monkeypatch, at_round):
    """Killed before, in and after the round: it goes back to a checkpoint before the departure."""
    config, out, _ = left

    class KilledWhileLeaving(Leaving):
        def __call__(self, event):
            super().__call__(event)
            if isinstance(event, RoundEnded) and event.round == at_round:
                raise Killed

    monkeypatch.setattr(Rounds, "commit", while_alive)
    with pytest.raises(Killed):
        run(config, tmp_path / "out", notify=KilledWhileLeaving(tmp_path / "out", after=2))
    run(config, tmp_path / "out", resume=True)
    if at_round > 2:  # it had left already, and goes back to round 2
        same_run(tmp_path / "out", out)
    else:  # nobody had noticed yet: the next round is the one that follows the checkpoint
        assert [e["round"] for e in read_events(tmp_path / "out", "left")] == [2]


def test_a_stopped_run_is_resumed_without_it(left, tmp_path):
    config, out, _ = left
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_round=2))
    assert leave(tmp_path / "out", [GONE]) == [GONE]
    run(config, tmp_path / "out", resume=True)
    same_run(tmp_path / "out", out)


@pytest.mark.long
def test_it_leaves_when_all_rounds_are_over(left, tmp_path):
    config, _, _ = left
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_round=5))
    leave(tmp_path / "out", [GONE])
    rows = run(config, tmp_path / "out", resume=True)
    assert GONE not in {row["client"] for row in rows}
    assert [event["round"] for event in read_events(tmp_path / "out", "left")] == [6]


def test_a_run_that_starts_from_it_does_without_it(left, tmp_path):
    config, out, _ = left
    train = config.train.model_copy(update={"rounds": 8})
    rows = run(config.model_copy(update={"train": train, "start": str(out)}), tmp_path / "on")
    assert GONE not in {row["client"] for row in rows}
    assert [event["round"] for event in read_events(tmp_path / "on", "left")] == [6]
    assert leavers(tmp_path / "on") == [GONE]


def test_who_leaves_later_has_had_its_part(tmp_path):
    """A federated run that was complete keeps its results, also when the whole run is resumed."""
    config = small(tmp_path, methods=["fedavg", "fedprox"],
                   train={"rounds": 1, "cohort": 4, "local_steps": 1})
    out = tmp_path / "out"

    def between(event):
        if isinstance(event, RunStarted) and event.method == "fedprox":
            leave(out, [GONE])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, out, notify=between)
    rows = run(config, out, resume=True)
    assert {row["method"] for row in rows if row["client"] == GONE} == {"fedavg"}
    assert [(e["method"], e["round"]) for e in read_events(out, "left")] == [("fedprox", 0)]


def test_who_left_is_away_from_later_federated_runs(left, tmp_path):
    config = small(tmp_path, methods=["fedavg", "fedprox"], train={"rounds": 2, "cohort": 3})
    out = tmp_path / "out"
    rows = run(config, out, notify=Leaving(out, after=1))
    assert {row["method"] for row in rows if row["client"] == GONE} <= {"constant"}
    assert [(e["method"], e["round"]) for e in read_events(out, "left")] == [
        ("fedavg", 2), ("fedprox", 0)]
    assert json.loads((out / "run.json").read_text())["left"] == {
        GONE: {"fedavg": 2, "fedprox": 0}}


def test_cohorts_depend_on_who_is_there(left):
    server = Server(None, clients=10, cohort=4, seed=1)
    assert server.cohort(3) == server.cohort(3, ())
    assert server.cohort(3, {2, 5}) == server.cohort(3, [5, 2])
    assert all(not {2, 5} & set(server.cohort(t, {2, 5})) for t in range(50))
    assert server.cohort(0, set(range(1, 10))) == [0]


def test_from_the_command_line(left, tmp_path, capsys):
    shutil.copytree(left[1], tmp_path / "out")
    assert main(["leave", str(tmp_path / "out"), "news", GONE]) == 0
    out = capsys.readouterr().out
    assert f"{GONE}: has left already" in out
    assert "leaving: news; a run that starts from this one does without them" in out
    assert leavers(tmp_path / "out") == [GONE, "news"]


@pytest.mark.parametrize(("words", "message"), [
    (["nowhere", "news"], "nowhere: no run here (run.json is missing)"),
    (["RUN", "newz"], "unknown client 'newz'"),
    (["RUN", "news", "looks", "words"], "nobody would be left"),
])
def test_bad_input_is_one_line(left, tmp_path, capsys, words, message):
    shutil.copytree(left[1], tmp_path / "RUN")
    assert main(["leave", str(tmp_path / words[0]), *words[1:]]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert leavers(tmp_path / "RUN") == [GONE]


@pytest.mark.parametrize("content", ['{"clients": ["news"]}', "{", '{"clients": 3}'])
def test_a_damaged_file_stops_the_run(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(TapflError, match=r"leave.json: damaged"):
        Departures(tmp_path, tmp_path / "state").gone(0)
