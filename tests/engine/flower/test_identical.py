"""Over messages or in one process: the same results, events and models."""

import json

import pytest
from safetensors.torch import load_file

from tapfl.engine.run import run
from tapfl.report.html import write_report
from tapfl.use.load import load
from tests.engine.flower.memory import InMemory, residents, served
from tests.experiment import read_events, tiny_experiment

GROUPS = [["shapes", "words"], ["news"], ["looks"]]
METHODS = ["fedavg", "fedavg+post", "tap", "fedrep", "feddat+tap", "tap-soft"]


def comparable(rows):
    return [row for row in rows if not row["metric"].startswith("general_")]


def events(folder):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in read_events(folder)]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same experiment in one process, and on three nodes whose answers come in any order."""
    folder = tmp_path_factory.mktemp("flower")
    config = tiny_experiment(folder, methods=METHODS, evaluation={"every": 2, "sample": 2},
                             train={"rounds": 3}, data={"train": 12, "test": 2},
                             post={"steps": 1})
    here = run(config, folder / "here", device="cpu")
    nodes = residents(config, folder, GROUPS)
    there = served(config, folder / "there", InMemory(nodes))
    for node in nodes:
        node.close()
    return folder, comparable(here), there


def test_results_are_the_same(both):
    _, here, there = both
    assert here == there


def test_events_are_the_same_in_the_same_order(both):
    folder, *_ = both
    assert events(folder / "here") == events(folder / "there")
    assert any(event["event"] == "replacement" for event in events(folder / "there"))


def test_models_are_the_same_and_stay_with_their_clients(both):
    folder, *_ = both
    hosts = {client: f"node{i}" for i, group in enumerate(GROUPS) for client in group}
    models = [p for p in (folder / "here" / "models").rglob("*.safetensors")
              if p.stem != "server"]
    assert len(models) == 4 * 5  # FedAvg's own model is the server's
    for path in models:
        where = path.relative_to(folder / "here")
        one, other = load_file(path), load_file(folder / hosts[path.stem] / where)
        assert set(one) == set(other)
        assert all(one[name].equal(other[name]) for name in one)
        assert not (folder / "there" / where).exists()
    server = "models/fedavg/server.safetensors"
    one, other = load_file(folder / "here" / server), load_file(folder / "there" / server)
    assert all(one[name].equal(other[name]) for name in one)


def test_a_nodes_folder_is_a_run_of_its_own(both):
    folder, *_ = both
    record = json.loads((folder / "node0" / "run.json").read_text())
    assert record["finished"]
    assert record["clients"] == 2
    model = load(folder / "node0", client="shapes")
    assert model.predict("agnews", text="shares rise") is not None
    page = write_report([folder / "node0"]).read_text()
    assert "shapes" in page
    assert "looks" not in page
    own = {event["client"] for event in read_events(folder / "node0")}
    assert own == {"shapes", "words"}
