from fractions import Fraction

import pytest

from tapfl.config import FederationConfig
from tapfl.data.federation import layout_names, load_federation
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
