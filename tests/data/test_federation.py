from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tapfl.config import FederationConfig
from tapfl.data.federation import Federation, Member
from tapfl.data.layout import FederationFile
from tapfl.data.participants import layout_names, load_federation
from tapfl.data.skew import deal
from tapfl.data.sources import Splits
from tapfl.errors import TapflError


@pytest.mark.parametrize("layout", layout_names())
def test_layouts_hand_out_every_data_set_once(layout):
    federation = load_federation(FederationConfig(layout=layout))
    for task in federation.tasks:
        assert sum(c.tasks.get(task, Fraction(0)) for c in federation.clients) == 1
    assert len(federation.clients) == 10


def test_the_papers_flava_layout():
    clients = load_federation(FederationConfig(layout="flava")).clients
    assert [sorted(c.tasks) for c in clients] == [
        ["tiny-imagenet"], ["agnews"], ["agnews"], ["caltech256"], ["vqa"], ["vqa"], ["mmlu"],
        ["agnews", "cifar100"], ["commongen", "fmnist"], ["caltech256", "commongen"]]
    assert clients[7].tasks["agnews"] == Fraction(1, 3)


GOOD_TASK = "tasks: {t: {kind: text_generation, modalities: [text]}}\n"


@pytest.mark.parametrize(("text", "message"), [
    (GOOD_TASK + "clients: [{name: a, tasks: {u: 1}}]", "client 'a': unknown task 'u'"),
    (GOOD_TASK + "clients: [{name: a, tasks: {t: 1}}, {name: a, tasks: {t: 1}}]", "there twice"),
    (GOOD_TASK + "clients: [{name: a, tasks: {t: 2/3}}, {name: b, tasks: {t: 1/2}}]",
     "add up to 7/6"),
    (GOOD_TASK + "clients: [{name: ../a, tasks: {t: 1}}]", "not a name"),
    (GOOD_TASK + "clients: [{name: a, tasks: {t: 1/0}}]", "expected a share"),
    (GOOD_TASK + "clients: [{name: a, tasks: {t: 1e-99999999}}]", "expected a share"),
    (GOOD_TASK + "clients: [{name: a.b, tasks: {t: 1}}]", "not a name"),
    (GOOD_TASK + "clients: [{name: a, tasks: {t: 2}}]", "at most 1"),
    (GOOD_TASK + "clients: []", "clients: "),
    ("tasks: {t: {kind: singing, modalities: [text]}}\nclients: [{name: a, tasks: {t: 1}}]",
     "unknown kind 'singing'"),
    ("tasks: {t: {kind: text_generation, modalities: [text]}, "
     "u: {kind: text_generation, modalities: [text]}}\nclients: [{name: a, tasks: {t: 1}}]",
     "task 'u' is held by no client"),
])
def test_bad_federation_files(tmp_path, text, message):
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(TapflError, match=message) as caught:
        load_federation(FederationConfig(file=str(path)))
    assert "f.yaml" in str(caught.value)


def test_missing_federation_file():
    with pytest.raises(TapflError, match=r"no such file: nope\.yaml"):
        load_federation(FederationConfig(file="nope.yaml"))


@pytest.mark.parametrize(("classes", "shares", "groups"), [
    ("", ["1/2", "1/2"], 3), (", classes: 2", ["1"], 1),
    (", classes: 2", ["{path: a}", "{path: b}"], 1)])
def test_label_skew_needs_labels_that_clients_share(tmp_path, classes, shares, groups):
    path = tmp_path / "f.yaml"
    kind = "image_classification" if classes else "image_generation"
    path.write_text(f"tasks: {{t: {{kind: {kind}, modalities: [image]{classes}}}}}\nclients:\n"
                    + "".join(f"  - {{name: c{i}, tasks: {{t: {share}}}}}\n"
                              for i, share in enumerate(shares)))
    config = FederationConfig(file=str(path), groups=groups)
    load_federation(config)
    with pytest.raises(TapflError, match=r"^federation\.dirichlet: no two clients of .*f\.yaml"):
        load_federation(config.model_copy(update={"dirichlet": 0.3}))


def _federation(groups, samples=120):
    """A federation whose data are numbers of samples and nothing else."""
    file = load_federation(FederationConfig(layout="flava"))
    splits = {task: (range(samples * groups), range(0)) for task in file.tasks}
    return Federation(file, Splits(splits), FederationConfig(groups=groups), 1)


@pytest.mark.parametrize("groups", [1, 3, 12])
def test_find_is_the_inverse_of_id_of(groups):
    federation = _federation(groups)
    for index in range(len(federation)):
        assert federation.find(federation.id_of(index)).index == index


@pytest.mark.parametrize("groups", [1, 3])
def test_find_refuses_what_is_nobodys_id(groups):
    federation = _federation(groups)
    name = federation.file.clients[2].name
    ids = {federation.id_of(i) for i in range(len(federation))}
    for wrong in ("", "g", "g-", "g0-", name, f"g0-{name}", f"g00-{name}", f"g3-{name}",
                  f"g-1-{name}", f"g1-{name}\n", f"G1-{name}", f"g{'9' * 5000}-{name}",
                  f"g\u0661-{name}", f" {name}"):
        if wrong not in ids:
            with pytest.raises(TapflError, match="unknown client"):
                federation.find(wrong)


def test_find_suggests_the_nearest_among_ten_thousand():
    federation = _federation(1000, samples=12)
    assert federation.find("g999-3").index == 9993
    name = federation.id_of(9993)
    with pytest.raises(TapflError, match=f"did you mean '{name[:-1]}") as caught:
        federation.find(name + "x")
    assert len(str(caught.value)) < 200
    with pytest.raises(TapflError, match="unknown client 'g1000-3'; did you mean") as caught:
        federation.find("g1000-3")
    with pytest.raises(TapflError, match="unknown client 'zebra'; known: g0-0, ") as caught:
        federation.find("zebra")
    assert len(str(caught.value)) < 2000


def test_a_look_up_touches_one_client(monkeypatch):
    """Neither an index nor an id makes a federation go through its clients."""
    federation = _federation(1000, samples=12)
    named, real = [], Federation.id_of

    def id_of(self, index):
        named.append(index)
        return real(self, index)

    monkeypatch.setattr(Federation, "id_of", id_of)
    federation.find("g500-3")
    federation[17]
    assert named == [5003, 17]


@pytest.mark.parametrize("groups", [1, 7])
def test_parts_follow_each_other_in_every_data_set(groups):
    """Against the definition: what all kinds before it hold, summed up each time."""
    federation = _federation(groups)
    clients = federation.file.clients
    for index in range(len(federation)):
        group, kind = divmod(index, len(clients))
        for task, share in clients[kind].tasks.items():
            before = sum((c.tasks.get(task, Fraction(0)) for c in clients[:kind]), Fraction(0))
            assert federation._interval(index, task) == (
                (group + before) / groups, (group + before + share) / groups)


@settings(max_examples=40, deadline=None)
@given(groups=st.integers(1, 6), samples=st.integers(20, 200), seed=st.integers(0, 99),
       holdout=st.sampled_from([0.0, 0.1, 0.4]),
       shares=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_partitions_are_disjoint_and_as_large_as_the_shares(groups, samples, seed, holdout,
                                                            shares):
    """Whatever the shares: nobody has another's row, all rows are somebody's, sizes are right."""
    total = sum(shares)
    file = FederationFile.model_validate({
        "tasks": {"t": {"kind": "text_generation", "modalities": ["text"]}},
        "clients": [{"name": f"c{i}", "tasks": {"t": f"{s}/{total}"}}
                    for i, s in enumerate(shares)]})
    splits = Splits({"t": (range(samples), range(3))})
    config = FederationConfig(groups=groups, holdout=holdout)
    try:
        federation = Federation(file, splits, config, seed)
        federation.check()
    except TapflError:
        assume(False)  # somebody would have nothing: refused, and tested above
    seen = []
    for client, member in zip(federation, federation.members, strict=True):
        share = Fraction(shares[client.index % len(shares)], total)
        rows = np.concatenate([r for part in (client.data.holdings, client.data.holdout)
                               for _, r in part])
        assert abs(len(rows) - float(share * samples / groups)) <= 1
        assert (member.id, member.tasks, member.samples) == (client.id, ("t",), client.samples)
        assert type(member) is Member
        assert client.samples == len(client.data.holdings[0][1])
        seen += rows.tolist()
    assert sorted(seen) == list(range(samples))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), concentration=st.floats(0.05, 50), clients=st.integers(1, 8),
       classes=st.integers(2, 6))
def test_label_skew_deals_every_row_once(seed, concentration, clients, classes):
    rng = np.random.default_rng(seed)
    labels, tests = rng.integers(0, classes, 120), rng.integers(0, classes, 30)
    train, test = deal(rng.permutation(120), labels, tests, np.full(clients, 1 / clients),
                       concentration, rng)
    assert sorted(np.concatenate(train).tolist()) == list(range(120))
    assert sorted(np.concatenate(test).tolist()) == list(range(30))
    assert all(len(rows) for rows in train)
