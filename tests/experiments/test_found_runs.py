"""Which runs are there already: whole, unfinished, damaged, of another version."""

import json
import shutil
from pathlib import Path

import pytest

from tapfl.engine.results import read_results
from tapfl.experiments import plan as module
from tapfl.experiments.catalogue import Experiment, Part
from tapfl.experiments.plan import make_plan
from tapfl.experiments.results import seeds_of
from tests.experiments.tiny import FIRST, SECOND, contents, make_runs, tiny_model


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Both experiments with one seed: the model, and the folder with the finished run."""
    folder = tmp_path_factory.mktemp("plan")
    model, out = tiny_model(folder), folder / "out"
    make_runs(make_plan([FIRST, SECOND], model, True, [41], out))
    return model, out


@pytest.fixture
def copied(done, tmp_path):
    model, out = done
    return model, shutil.copytree(out, tmp_path / "out")


def only_run(out):
    (folder,) = (out / "runs").iterdir()
    return folder


def change_record(folder, **values):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_finished_runs_are_found_under_the_parts_names(done):
    model, out = done
    plan = make_plan([FIRST, SECOND], model, True, [41], out)
    assert not plan.missing
    assert (plan.complete_runs, plan.has(0), plan.has(1), len(plan.finished)) == (1, True, True, 1)
    (seed,) = seeds_of(plan, 1, 0)
    run = only_run(out)
    assert seed.sources == {"fedavg": (run, "fedavg"), "tap": (run, "tap-2"),
                            "mine": (run, "mine-2")}
    kept = read_results(run / "results.csv")
    for name, there in (("tap", "tap-2"), ("mine", "mine-2")):
        mine = [row for row in seed.rows if row["method"] == name]
        assert mine
        assert mine == [row | {"method": name} for row in kept if row["method"] == there]
    assert {row["method"] for row in seed.rows} == {"fedavg", "tap", "mine", "constant"}
    scores = seed.scores(["tap"])
    assert {key[0] for key in scores} == {"tap"}
    assert {e["method"] for e in seed.events("tap", "replacement")} == {"tap-2"}


def test_a_run_that_lacks_a_model_is_followed_by_one_that_has_it(done):
    model, out = done
    third = Experiment("third", "?", (Part("more", ("tap", "tap-nokd")),))
    plan = make_plan([third], model, True, [41, 42], out)
    assert (plan.federated_runs, plan.complete_runs, plan.has(0)) == (2, 0, False)
    assert not any(run.config.checkpoint.models for run in plan.missing)
    more, new = plan.missing
    assert more.config.methods == ["tap-nokd"]
    assert more.folder.name == f"{only_run(out).name}-2"
    assert new.config.methods == ["tap", "tap-nokd"]


def test_an_unfinished_run_is_resumed_and_what_it_lacks_is_added(copied):
    model, out = copied
    change_record(only_run(out), finished=False)
    third = Experiment("third", "?", (Part("more", ("tap", "tap-nokd")),))
    plan = make_plan([FIRST, third], model, True, [41], out, data=out)
    resumed, more = plan.missing
    assert (resumed.resumes, resumed.folder) == (True, only_run(out))
    assert len(resumed.keys) == 3
    assert resumed.config.data.folder == str(out)  # the mirror may have moved
    assert (more.resumes, more.config.methods) == (False, ["tap-nokd"])
    assert plan.complete_runs == 0


def test_an_unfinished_run_without_a_wanted_model_is_left_alone(copied):
    model, out = copied
    change_record(only_run(out), finished=False)
    third = Experiment("third", "?", (Part("more", ("tap-nokd",)),))
    (run,) = make_plan([third], model, True, [41], out).missing
    assert (run.resumes, run.config.methods) == (False, ["tap-nokd"])


def test_a_resumed_run_reads_the_data_of_this_command_alone(copied):
    model, out = copied
    config = json.loads((only_run(out) / "run.json").read_text())["config"]
    config["data"]["folder"] = "gone"
    change_record(only_run(out), finished=False, config=config)
    (run,) = make_plan([FIRST], model, True, [41], out).missing
    assert (run.resumes, run.config.data.folder) == (True, None)


def lines_kept(share, more=""):
    """Return what leaves the first lines of a file alone, and adds something."""
    def spoil(path):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:int(share * len(lines))]) + more)
    return spoil


def without(*words):
    """Return what takes one line away that has all these words."""
    def spoil(path):
        lines = path.read_text().splitlines(keepends=True)
        lines.remove(next(line for line in lines if all(word in line for word in words)))
        path.write_text("".join(lines))
    return spoil


@pytest.mark.parametrize(("name", "spoil", "fault"), [
    ("results.csv", Path.unlink, "missing"),
    ("results.csv", lambda path: path.write_bytes(b"\x00\xff\n"), "not the results of a run"),
    ("results.csv", lambda path: path.write_text("a,b\n"), "expected the columns seed, method"),
    ("results.csv", lambda path: path.write_text(path.read_text()[:-1]),
     "damaged: its last line is cut off"),
    ("results.csv", lines_kept(0.5), "damaged: it has no accuracy of tap"),
    ("results.csv", lines_kept(0.99), "of constant for client "),
    ("results.csv", without("tap", "accuracy"), "damaged: it has no accuracy of tap for client "),
    ("results.csv", lines_kept(0.5, "41,tap,"), "damaged: its last line is cut off"),
    ("results.csv", lines_kept(0.5, "41,tap,\n"), "not the results of a run"),
    ("events.jsonl", Path.unlink, "missing"),
    ("events.jsonl", lines_kept(1.0, '{"event": "rou'), "not the events of a run"),
    ("events.jsonl", lines_kept(1.0, "{}\n"), "not an event of a run"),
    ("events.jsonl", lines_kept(0.5), "damaged: it has 1 of the 2 rounds of fedavg"),
    ("run.json", Path.unlink, "not a readable record"),
    ("run.json", lambda path: path.write_text("{"), "not a readable record")])
def test_a_damaged_run_counts_as_not_there_and_stays(copied, name, spoil, fault):
    model, out = copied
    folder = only_run(out)
    spoil(folder / name)
    before = contents(folder)
    plan = make_plan([FIRST], model, True, [41], out)
    (run,) = plan.missing
    assert not run.resumes
    assert run.folder == folder.with_name(f"{folder.name}-2")
    (line,) = plan.unused
    assert line.startswith(str(folder / name))
    assert fault in line
    assert "\n" not in line
    assert not make_plan([FIRST], model, True, [42], out).unused  # another run: it is not asked for
    assert contents(folder) == before


def test_several_damaged_runs_all_stay(copied):
    model, out = copied
    folder = only_run(out)
    (folder / "results.csv").write_text("")
    shutil.copytree(folder, folder.with_name(f"{folder.name}-2"))
    (run,) = make_plan([FIRST], model, True, [41], out).missing
    assert run.folder == folder.with_name(f"{folder.name}-3")


def test_a_damaged_run_of_another_version_is_not_spoken_of(copied, monkeypatch):
    model, out = copied
    (only_run(out) / "run.json").write_text("{")
    monkeypatch.setattr(module, "code_digest", lambda: "f" * 16)
    assert not make_plan([FIRST], model, True, [41], out).unused
    assert make_plan([FIRST], model, True, [41], out, any_version=True).unused


def test_a_damaged_run_is_not_spoken_of_once_there_is_another(copied, done):
    model, out = copied
    folder = only_run(out)
    (folder / "results.csv").write_text("")
    (run,) = make_plan([FIRST], model, True, [41], out).missing
    shutil.copytree(only_run(done[1]), run.folder)
    plan = make_plan([FIRST], model, True, [41], out)
    assert (plan.missing, plan.unused) == ([], [])
    assert {found for found, _ in plan.there.values()} == {run.folder}


def test_other_versions_count_only_if_asked_for(copied, monkeypatch):
    model, out = copied
    monkeypatch.setattr(module, "code_digest", lambda: "f" * 16)
    plan = make_plan([FIRST], model, True, [41], out)
    assert [run.folder.name[-6:] for run in plan.missing] == ["ffffff"]
    assert len(plan.finished) == 1  # how long it took is worth knowing
    old = make_plan([FIRST], model, True, [41], out, any_version=True)
    assert not old.missing
    # A run of this version comes first, whatever the folders are called.
    new = shutil.copytree(only_run(out), plan.missing[0].folder)
    change_record(new, environment={"code": "f" * 16})
    both = make_plan([FIRST], model, True, [41], out, any_version=True)
    assert {folder for folder, _ in both.there.values()} == {new}
    # An unfinished run of another version cannot be continued.
    shutil.rmtree(new)
    change_record(only_run(out), finished=False)
    again = make_plan([FIRST], model, True, [41], out, any_version=True)
    assert [run.resumes for run in again.missing] == [False]


def test_a_run_made_by_other_code_than_its_folder_says(copied):
    model, out = copied
    change_record(only_run(out), environment={"code": "f" * 16})
    assert make_plan([FIRST], model, True, [41], out).missing
    assert not make_plan([FIRST], model, True, [41], out, any_version=True).missing


def test_what_a_failed_start_left_is_no_run(done, tmp_path):
    model, _ = done
    (run,) = make_plan([FIRST], model, True, [41], tmp_path).missing
    run.folder.mkdir(parents=True)
    (run.folder / ".lock").touch()
    (again,) = make_plan([FIRST], model, True, [41], tmp_path).missing
    assert again.folder == run.folder
