"""Runs that go on from a stored one."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from tapfl.engine.results import read_results
from tapfl.engine.run import run
from tapfl.engine.validate import validate
from tapfl.errors import TapflError
from tapfl.report.html import write_report
from tests.engine.test_resume import Stop, same_files
from tests.experiment import FEDERATION, read_events, tiny_experiment

METHODS = ["tap", "ditto", "fedper"]  # with X, histories, and private blocks
LARGER = FEDERATION.replace(
    "clients:", """  cifar100: {kind: image_classification, modalities: [image], classes: 10}
clients:""").replace("{commongen: 1, fmnist: 1/2}", "{commongen: 1, fmnist: 1/2, cifar100: 1/3}")
LARGER += "  - {name: late, tasks: {cifar100: 1/3}}\n"


def small(folder, **more):
    return tiny_experiment(folder, **{
        "methods": METHODS, "train": {"rounds": 4, "local_steps": 1},
        "data": {"train": 12, "test": 3}, "post": {"steps": 1}} | more)


def longer(config, rounds, start, **more):
    train = config.train.model_copy(update={"rounds": rounds})
    return config.model_copy(update={"train": train, "start": start and str(start), **more})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four rounds."""
    folder = tmp_path_factory.mktemp("whole")
    config = small(folder)
    run(config, folder / "out")
    return config, folder / "out"


def files_of(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")
            if path.is_file()}


@pytest.mark.long
def test_going_on_is_the_same_as_one_long_run(whole, tmp_path):
    config, out = whole
    before = files_of(out)
    run(longer(config, 6, out), tmp_path / "on")
    assert files_of(out) == before
    run(longer(config, 6, None), tmp_path / "long")
    assert (tmp_path / "on" / "results.csv").read_bytes() == (
        tmp_path / "long" / "results.csv").read_bytes()
    for kind in ("models", "scores"):
        same_files(tmp_path / "on", tmp_path / "long", kind)
    rounds = [event["round"] for event in read_events(tmp_path / "on", "round")]
    assert sorted(set(rounds)) == [4, 5]


@pytest.fixture(scope="module")
def grown(whole, tmp_path_factory):
    """One more client and one more task, and nobody has trained yet."""
    config, out = whole
    folder = tmp_path_factory.mktemp("grown")
    (folder / "larger.yaml").write_text(LARGER)
    federation = config.federation.model_copy(update={"file": str(folder / "larger.yaml")})
    larger = longer(config, 4, out, federation=federation)
    run(larger, folder / "out")
    return larger, folder / "out"


def test_every_old_block_is_the_same(whole, grown):
    for method in ("fedavg", "fedper"):
        name = f"models/{method}/server.safetensors"
        old, new = load_file(whole[1] / name), load_file(grown[1] / name)
        assert set(old) < set(new)
        assert all(old[key].equal(new[key]) for key in old)
        assert {key.partition(":")[0] for key in set(new) - set(old)} == {"decoder/cifar100"}


def test_every_old_clients_model_is_the_same(whole, grown):
    """Clients with the same tasks end with the very same models."""
    for method in METHODS:
        for client in ("shapes", "news", "looks"):
            name = f"models/{method}/{client}.safetensors"
            old, new = load_file(whole[1] / name), load_file(grown[1] / name)
            assert set(old) == set(new)
            assert all(old[key].equal(new[key]) for key in old), (method, client)


def test_who_gets_a_task_keeps_its_other_blocks(whole, grown, tmp_path):
    """Its X goes on: what no task of it is trained with stays."""
    old = load_file(whole[1] / "state" / "fedavg" / "clients" / "tap" / "words" / newest(whole[1]))
    new = load_file(grown[1] / "state" / "fedavg" / "clients" / "tap" / "words" / newest(whole[1]))
    assert all(old[key].equal(new[key]) for key in old)
    rows = read_results(grown[1] / "results.csv")
    assert {row["client"] for row in rows if row["task"] == "cifar100"} == {"words", "late"}
    run(longer(grown[0], 7, grown[1]), tmp_path / "on")
    seen = {client for event in read_events(tmp_path / "on", "round")
            for client in event["contributors"].get("decoder/cifar100", ())}
    assert seen <= {"words", "late"}


def newest(out):
    folder = out / "state" / "fedavg" / "clients" / "tap" / "words"
    return max(path.name for path in folder.iterdir())


def test_the_record_says_what_it_went_on_from(whole, grown):
    before = json.loads((whole[1] / "run.json").read_text())
    record = json.loads((grown[1] / "run.json").read_text())
    assert record["id"] != before["id"]
    assert record["start"]["run"] == before["id"]
    assert set(record["start"]["clients"]) == {"shapes", "news", "looks", "words"}
    assert {name: each["round"] for name, each in record["start"]["models"].items()} == {
        "fedavg": 3, "fedper": 3}


@pytest.mark.parametrize("stop", [
    pytest.param(Stop(at_round=4), id="round"),
    pytest.param(Stop(at_client=1), id="end", marks=pytest.mark.long)])
def test_an_interruption_changes_nothing(whole, tmp_path, stop):
    """Once it has begun, the other run is not needed any more."""
    config, out = whole
    shutil.copytree(out, tmp_path / "copy")
    on = longer(config, 5, tmp_path / "copy", methods=["tap"])
    run(on, tmp_path / "calm")
    with pytest.raises(KeyboardInterrupt):
        run(on, tmp_path / "stormy", notify=stop)
    assert "5 of 5" in write_report([tmp_path / "stormy"]).read_text()  # four are the other run's
    shutil.rmtree(tmp_path / "copy")
    run(on, tmp_path / "stormy", resume=True)
    assert (tmp_path / "calm" / "results.csv").read_bytes() == (
        tmp_path / "stormy" / "results.csv").read_bytes()
    same_files(tmp_path / "stormy", tmp_path / "calm", "models")


@pytest.mark.long
def test_a_run_that_was_stopped(whole, tmp_path):
    """It goes on from the last checkpoint; federated runs that it had not come to are refused."""
    config, _ = whole
    config = config.model_copy(update={"methods": ["tap"]})
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped", notify=Stop(at_round=2))
    run(longer(config, 6, tmp_path / "stopped"), tmp_path / "on")
    run(longer(config, 6, None), tmp_path / "long")
    same_files(tmp_path / "on", tmp_path / "long", "models")
    both = config.model_copy(update={"methods": ["tap", "fedper"]})
    with pytest.raises(KeyboardInterrupt):
        run(both, tmp_path / "early", notify=Stop(at_round=2))
    with pytest.raises(TapflError, match=r"early: has no stored model of 'fedper'"):
        run(longer(both, 6, tmp_path / "early"), tmp_path / "no")


BAD = {
    "no such run": ({"start": "nowhere"}, r"start: nowhere: no run here \(run.json is missing\)"),
    "new": ({"start": "new"}, "start: 'new' is for a node"),
    "another seed": ({"seed": 8}, "start: seed: .* was made with 7, this run has 8"),
    "another backbone": ({"backbone": {"kind": "standard"}}, "start: backbone: .*routed"),
    "another foundation": ({"foundation": {"name": "mini", "architecture": None}},
                           "start: foundation: .*flava"),
    "other ranks": ({"lora": {"expert_rank": 3}}, "start: lora.expert_rank: .*with 2.*has 3"),
    "fewer rounds": ({"train": {"rounds": 3}}, "train.rounds: 3 for 'fedavg', but 4 are behind"),
    "another method": ({"methods": ["feddat"]}, "no federated run 'feddat', only fedavg, fedper"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(whole, tmp_path, case):
    _, out = whole
    changes, message = BAD[case]
    bad = small(tmp_path, **{"start": str(out), **changes})
    with pytest.raises(TapflError, match=message):
        run(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("methods", "rounds", "message"), [
    (["tap"], 3, "train.rounds: 3"), (["feddat"], 4, "no federated run 'feddat'")])
def test_validate_says_so_beforehand(whole, methods, rounds, message):
    config, out = whole
    with pytest.raises(TapflError, match=message):
        validate(longer(config, rounds, out, methods=methods), config_only=True)
    assert "4 clients" in validate(longer(config, 4, out), config_only=True)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("classes: 8", "classes: 9", "task 'tiny-imagenet'"),
    ("{tiny-imagenet: 1, agnews: 1/2}", "{tiny-imagenet: 1}", "'shapes' had the task 'agnews'"),
])
def test_another_federation_that_does_not_fit(whole, tmp_path, old, new, message):
    config, out = whole
    (tmp_path / "other.yaml").write_text(FEDERATION.replace(old, new))
    federation = config.federation.model_copy(update={"file": str(tmp_path / "other.yaml")})
    with pytest.raises(TapflError, match=message):
        run(longer(config, 4, out, federation=federation), tmp_path / "out")


def test_other_methods_under_the_same_names(tmp_path):
    config = small(tmp_path, methods=["x", "y"], train={"rounds": 1, "local_steps": 1}, variants={
        "x": {"of": "fedprox"}, "y": {"of": "fedprox+ditto"}})
    run(config, tmp_path / "out")
    for of, message in ((("fedavg", "fedavg+ditto"), "method 'x': .*fedprox, this run has fedavg"),
                        (("fedprox", "fedprox+tap"), "method 'y': .*ditto, this run has tap")):
        other = small(tmp_path, methods=["x", "y"], train={"rounds": 2, "local_steps": 1},
                      variants={"x": {"of": of[0]}, "y": {"of": of[1]}},
                      start=str(tmp_path / "out"))
        with pytest.raises(TapflError, match=message):
            run(other, tmp_path / "no")


@pytest.mark.parametrize("damage", ["models", "state", "client"])
def test_a_run_without_what_is_needed(whole, tmp_path, damage):
    config, out = whole
    shutil.copytree(out, tmp_path / "copy")
    if damage == "client":
        for path in (tmp_path / "copy" / "state" / "fedavg" / "clients" / "tap").rglob("*.s*"):
            path.unlink()
        message = "start: .*tap.*missing"
    else:
        shutil.rmtree(tmp_path / "copy" / "state")
        message = "what its clients keep is not there"
    if damage == "models":
        shutil.rmtree(tmp_path / "copy" / "models")
        message = "has no stored model of 'fedavg'"
    with pytest.raises(TapflError, match=message):
        run(longer(config, 5, tmp_path / "copy"), tmp_path / "out")


def test_local_begins_from_nothing_where_there_was_none(whole, tmp_path):
    config, out = whole
    run(longer(config, 4, out, methods=["tap", "local"]), tmp_path / "out")
    assert [(event["method"], event["round"]) for event in read_events(tmp_path / "out", "round")
            ] == [("local", round_) for round_ in range(4)]
