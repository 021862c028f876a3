"""Over messages: clients that leave, and runs that go on from earlier ones with newcomers."""

import pytest
from safetensors.torch import load_file

from tapfl.engine.departures import leave
from tapfl.engine.flower.nodes import Patience
from tapfl.engine.flower.resident import Resident
from tapfl.engine.record import read_record
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.events import Message
from tests.engine.flower.memory import EVERYTHING, InMemory, residents, served
from tests.engine.flower.test_identical import comparable, events
from tests.engine.test_departures import Leaving
from tests.engine.test_resume import Stop
from tests.engine.test_start import LARGER, longer
from tests.experiment import tiny_experiment

GROUPS = [["shapes", "words"], ["news"], ["looks"]]


def small(folder, **more):
    return tiny_experiment(folder, **{
        "methods": ["tap", "fedper+ditto"],
        "train": {"rounds": 3, "cohort": 3, "local_steps": 1}, "data": {"train": 12, "test": 2},
        "post": {"steps": 1}} | more)


def close(nodes):
    for node in nodes:
        node.close()


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The same run in one process and on three nodes."""
    folder = tmp_path_factory.mktemp("before")
    config = small(folder)
    run(config, folder / "here", device="cpu")
    nodes = residents(config, folder, GROUPS)
    served(config, folder / "there", InMemory(nodes))
    close(nodes)
    return config, folder


def larger(config, folder, rounds, start):
    (folder / "larger.yaml").write_text(LARGER)
    federation = config.federation.model_copy(update={"file": str(folder / "larger.yaml")})
    return longer(config, rounds, start, federation=federation)


def nodes_of(config, folder, starts):
    """Nodes in new folders: the clients of each, and where it starts."""
    return [Resident(config.model_copy(update={"start": str(start)}), clients, folder / f"new{i}",
                     allow=EVERYTHING) for i, (clients, start) in enumerate(starts)]


def test_a_node_knows_the_run_that_it_was_in(before):
    _, folder = before
    assert read_record(folder / "node1").id == read_record(folder / "there").id != ""


@pytest.mark.long
def test_everybody_goes_on_with_a_newcomer_as_in_one_process(before, tmp_path):
    config, folder = before
    here = run(larger(config, tmp_path, 5, folder / "here"), tmp_path / "here", device="cpu")
    config = larger(config, tmp_path, 5, folder / "there")
    starts = [*((group, folder / f"node{i}") for i, group in enumerate(GROUPS)),
              (["late"], "new")]
    nodes = nodes_of(config, tmp_path, starts)
    there = served(config, tmp_path / "there", InMemory(nodes))
    close(nodes)
    assert comparable(here) == there
    assert events(tmp_path / "here") == events(tmp_path / "there")
    assert {row["client"] for row in there} == {"shapes", "words", "news", "looks", "late"}
    one, other = (load_file(tmp_path / where / "models" / "tap" / "words.safetensors")
                  for where in ("here", "new0"))
    assert all(one[name].equal(other[name]) for name in one)


def refusals(config, out, nodes):
    """Return what a server says of nodes that it does not take."""
    said = []
    with pytest.raises(TapflError, match="clients are connected"):
        served(config, out, InMemory(nodes), notify=lambda event: said.append(str(event))
               if isinstance(event, Message) else None)
    close(nodes)
    return " ".join(text for text in said if text.startswith("refused"))


def test_an_old_client_needs_its_earlier_folder(before, tmp_path):
    config, folder = before
    on = longer(config, 4, folder / "there")
    said = refusals(on, tmp_path / "out", nodes_of(on, tmp_path, [(["news"], "new")]))
    assert "client 'news' starts anew, but was in the run that the server goes on from" in said


def test_the_folder_of_another_run_is_refused(before, tmp_path):
    config, folder = before
    on = longer(config, 4, folder / "there")
    said = refusals(on, tmp_path / "out", nodes_of(on, tmp_path, [(["news"], folder / "here")]))
    assert f"goes on from run {read_record(folder / 'here').id}, the server from" in said


def test_a_node_that_goes_on_does_not_fit_a_run_that_does_not(before, tmp_path):
    config, folder = before
    on = longer(config, 4, folder / "there")
    said = refusals(longer(config, 4, None), tmp_path / "out",
                    nodes_of(on, tmp_path, [(["news"], folder / "node1")]))
    assert "configuration" in said


@pytest.mark.long
def test_a_client_leaves_as_in_one_process(before, tmp_path):
    config, _ = before
    here = run(config, tmp_path / "here", device="cpu",
               notify=Leaving(tmp_path / "here", 1, "news"))
    nodes = residents(config, tmp_path, GROUPS)
    there = served(config, tmp_path / "there", InMemory(nodes),
                   notify=Leaving(tmp_path / "there", 1, "news"))
    close(nodes)
    assert comparable(here) == there
    # The report of its last round is not asked for any more.
    one, other = ([event for event in events(tmp_path / where)
                   if event.get("client") != "news" or event["event"] == "left"]
                  for where in ("here", "there"))
    assert one == other
    assert [event["client"] for event in other if event["event"] == "left"] == ["news"] * 2
    assert "news" not in {row["client"] for row in there}
    assert any((tmp_path / "node1" / "state" / "fedavg" / "clients" / "tap" / "news").iterdir())


@pytest.mark.long
def test_a_server_goes_on_without_the_node_of_a_client_that_left(before, tmp_path):
    config, _ = before
    nodes = residents(config, tmp_path, GROUPS)
    with pytest.raises(KeyboardInterrupt):
        served(config, tmp_path / "out", InMemory(nodes), notify=Stop(at_round=1))
    leave(tmp_path / "out", ["news"])
    patience = Patience(join=0.2, hello=0.2, round=5, finish=5, poll=0.001)
    rows = served(config, tmp_path / "out", InMemory([nodes[0], nodes[2]]), resume=True,
                  patience=patience)
    assert {row["client"] for row in rows} == {"shapes", "words", "looks"}
    close(nodes)


@pytest.mark.long
def test_a_nodes_folder_is_complete_without_who_left(before, tmp_path):
    config, _ = before
    nodes = residents(config, tmp_path, GROUPS)
    leave(tmp_path / "node0", ["words"])
    served(config, tmp_path / "out", InMemory(nodes), notify=Leaving(tmp_path / "out", 0, "words"))
    close(nodes)
    assert read_record(tmp_path / "node0").finished
