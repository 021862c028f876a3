"""``federation.clients``: some take part, and each holds what it would hold among all."""

import json

import pytest
import torch

from tapfl.blocks import Ownership
from tapfl.cli import main
from tapfl.config import FederationConfig, load_config
from tapfl.data.participants import client_ids, load_federation
from tapfl.engine.build import build
from tapfl.engine.record import read_record
from tapfl.engine.run import run
from tapfl.engine.validate import validate
from tapfl.errors import TapflError
from tapfl.federated.context import randomness
from tapfl.report.gather import owned_blocks
from tapfl.use.card import card_of
from tests.experiment import read_events, tiny_experiment

SOME = ["g1-looks", "g0-shapes"]  # not in the federation's order


def experiment(folder, clients=None, **sections):
    """Two groups of the tiny federation, with label skew and held-out data."""
    return tiny_experiment(folder, federation={
        "groups": 2, "dirichlet": 2.0, "holdout": 0.2, "clients": clients},
        data={"train": 80}, **sections)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The experiment with all clients, and with some."""
    folder = tmp_path_factory.mktemp("clients")
    return tuple(build(experiment(folder, clients), "cpu") for clients in (None, SOME))


def contents(client, context):
    """Everything that a client holds, and what it trains on first."""
    held = {}
    for what, parts in (("train", client.data.holdings), ("holdout", client.data.holdout),
                        ("test", client.tests.values())):
        for data, rows in parts:
            held[what, data.task.name] = [rows.tolist(), *tensors(data.batch(rows))]
    with randomness(context, client, 3, "federated") as rng:
        for number, parts in enumerate(client.data.minibatches(2, 5, rng)):
            for part in parts:
                held[number, part.task] = [part.weight, *tensors(part.batch)]
        held["dropout"] = [torch.rand(3)]
    return held


def tensors(batch):
    return [value for value in vars(batch).values() if value is not None]


def equal(one, other):
    return type(one) is type(other) and (
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)


def test_a_clients_data_are_the_same_with_and_without_the_others(both):
    everybody, some = both
    assert [c.id for c in some.federation] == ["g0-shapes", "g1-looks"]
    assert [m.index for m in some.federation.members] == [0, 1]
    for client in some.federation:
        found = contents(client, some.context)
        expected = contents(everybody.federation.find(client.id), everybody.context)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert len(values) == len(found[key])
            assert all(map(equal, found[key], values)), (client.id, key)
        assert some.federation.find(client.id).index == client.index
    with pytest.raises(TapflError, match="unknown client 'g0-looks'; did you mean 'g1-looks'"):
        some.federation.find("g0-looks")


def test_blocks_are_those_that_somebody_owns_and_start_alike(tmp_path, both):
    everybody = both[0].context
    some = build(experiment(tmp_path, ["g1-news", "g0-news"]), "cpu")
    expected, found = everybody.network().blocks, some.context.network().blocks
    ownership = Ownership(everybody.tasks)
    assert set(found) == set(ownership.blocks_of(None, ["agnews"])) < set(expected)
    for name, block in found.items():
        for key, value in block.state_dict().items():
            assert torch.equal(value, expected[name].state_dict()[key])
    base = everybody.foundation.state_dict()
    assert all(torch.equal(v, base[k]) for k, v in some.context.foundation.state_dict().items())
    assert [kind.id for kind in some.kinds] == ["g1-news"]
    assert [kind.id for kind in both[1].kinds] == ["g0-shapes", "g1-looks"]


def test_a_run_of_some_clients(tmp_path):
    """Without rounds a client's models depend on nobody else: they are those of the whole run."""
    found = {}
    for clients in (None, SOME):
        config = experiment(tmp_path, clients, methods=["fedavg+post", "tap"],
                            train={"rounds": 0}, post={"steps": 1})
        found[clients is None] = run(config, tmp_path / str(clients is None))
    assert found[False] == [row for row in found[True] if row["client"] in SOME]
    assert {row["client"] for row in found[False]} == set(SOME)
    record = read_record(tmp_path / "False")
    assert record.clients == 2
    assert [entry.name for entry in record.federation.clients] == ["shapes", "looks"]
    assert set(record.federation.tasks) == {"tiny-imagenet", "agnews", "vqa", "fmnist"}
    assert record.federation_sha256 == read_record(tmp_path / "True").federation_sha256
    assert list(owned_blocks(record)) == ["g0-shapes", "g1-looks"]
    assert card_of(tmp_path / "False", "g1-looks").client == "g1-looks"
    with pytest.raises(TapflError, match="unknown client 'g0-looks'; did you mean 'g1-looks'"):
        card_of(tmp_path / "False", "g0-looks")
    with pytest.raises(TapflError, match=r"expected one of g0-shapes, g1-looks$"):
        card_of(tmp_path / "False", None)


def test_cohorts_are_drawn_from_those_who_take_part(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg"], post={"steps": 1},
                             federation={"clients": ["words", "news", "shapes"]},
                             train={"rounds": 6, "local_steps": 1})
    run(config, tmp_path / "out")
    cohorts = [tuple(e["cohort"]) for e in read_events(tmp_path / "out", "round")]
    assert {len(cohort) for cohort in cohorts} == {2}
    assert {client for cohort in cohorts for client in cohort} == {"shapes", "news", "words"}


def test_files_of_those_who_do_not_take_part_are_not_needed(tmp_path):
    rows = "".join(f"text {n},{'AB'[n % 2]}\n" for n in range(10))
    (tmp_path / "here.csv").write_text("text,label\n" + rows)
    (tmp_path / "own.yaml").write_text(
        "tasks:\n  code: {kind: text_classification, modalities: [text], classes: [A, B]}\n"
        "clients:\n  - {name: away, tasks: {code: {path: gone.csv}}}\n"
        "  - {name: here, tasks: {code: {path: here.csv}}}\n")
    config = tiny_experiment(tmp_path, federation={
        "file": str(tmp_path / "own.yaml"), "clients": ["here"]})
    assert validate(config) == "1 methods in 1 federated run(s), 1 clients, 1 tasks"
    with pytest.raises(TapflError, match=r"gone\.csv"):
        validate(tiny_experiment(tmp_path, federation={"file": str(tmp_path / "own.yaml")}))


@pytest.mark.parametrize(("groups", "clients", "message"), [
    (1, "[tiny]", "federation.clients: unknown client 'tiny'; known: 0, 1, 2, "),
    (2, "[g0-3, g2-3]", "federation.clients: unknown client 'g2-3'; did you mean 'g"),
    (2, "['3']", "federation.clients: unknown client '3'; known: g0-0, "),
    (2, "[g0-3, g0-3]", "federation.clients: 'g0-3' is there twice"),
    (2, "[]", "federation.clients: "),
    (2, "g0-3", "federation.clients: "),
    (2, "[3]", "federation.clients.0: "),
])
def test_ids_that_are_nobodys(capsys, groups, clients, message):
    words = ["validate", "quickstart", "--config-only", "--set", f"federation.groups={groups}"]
    assert main([*words, "--set", f"federation.clients={clients}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_counts_of_a_plan(capsys):
    words = ["validate", "quickstart", "--config-only", "--set", "federation.clients=[g1-0, g0-4]"]
    assert main(words) == 0
    assert "2 clients" in capsys.readouterr().out
    config = load_config("quickstart", ["federation.clients=[g1-0, g0-4]"])
    assert list(client_ids(load_federation(config.federation), config.federation)) == [
        "g0-4", "g1-0"]
    assert hash(FederationConfig(clients=["a"])) != hash(FederationConfig())  # plans are cached
    assert json.loads(config.model_dump_json())["federation"]["clients"] == ["g1-0", "g0-4"]
    assert main(["model", "quickstart", "--set", "federation.clients=[g1-0]", "--json"]) == 0
    assert [c["name"] for c in json.loads(capsys.readouterr().out)["clients"]] == ["0"]
