"""Who owns each block, counted against the ownership rules."""

import pytest

from tapfl.config import FederationConfig, load_config
from tapfl.data.participants import load_federation
from tapfl.theory.federation import ownerships
from tests.experiment import FEDERATION


@pytest.fixture(scope="module")
def miniature():
    return ownerships(load_config("quickstart"))


def test_owners_against_brute_force(miniature):
    owned = miniature.owned()
    file = load_federation(FederationConfig(layout="miniature"))
    clients = [list(entry.tasks) for _ in range(3) for entry in file.clients]
    assert owned.clients == len(clients) == 30
    names = miniature.ownership.all_blocks()
    assert set(owned.owners) == set(names)
    for block in names:
        having = [tasks for tasks in clients
                  if any(block in miniature.ownership.blocks_of_task(task) for task in tasks)]
        assert owned.owners[block] == len(having), block
    assert owned.owners["mote/shared/attention"] == 30
    assert owned.owners["decoder/agnews"] == 9


def test_a_federation_file_by_hand(tmp_path):
    (tmp_path / "f.yaml").write_text(FEDERATION)
    config = load_config("mini", [f"federation.file={tmp_path / 'f.yaml'}", "federation.groups=1"])
    owned = ownerships(config).owned()
    assert owned.clients == 4
    assert owned.owners["encoder/image"] == 3  # shapes, looks, words
    assert owned.owners["decoder/agnews"] == 2  # shapes, news
    assert owned.owners["decoder/text_generation"] == 2  # looks, words
    assert owned.owners["mome/text_generation/expert/image"] == 1  # looks


def test_some_clients_alone_take_part():
    config = load_config("quickstart", ["federation.clients=[g0-1, g2-1, g0-7]"])
    owned = ownerships(config).owned()
    assert owned.clients == 3
    assert (owned.owners["decoder/agnews"], owned.owners["decoder/cifar100"]) == (3, 1)


def test_a_model_without_trained_word_embeddings_has_no_such_block():
    assert "encoder/text" not in ownerships(load_config("vilt")).owned().owners


def test_pairs_are_added_one_by_one(miniature):
    pairs = miniature.pairs()
    assert [name for name, _ in pairs][::6] == ["image tiny-imagenet", "image+text vqa"]
    counts = [len(owned.owners) for _, owned in pairs]
    assert counts == sorted(counts)
    assert pairs[-1][1] == miniature.owned()
    inverse = [sum(1 / k for k in owned.owners.values()) for _, owned in pairs]
    assert inverse[1] < inverse[0]  # cifar100 brings owners to shared blocks: C_K falls
    assert inverse[2] > inverse[1]


def test_a_single_pair(miniature):
    owned = miniature.owned(["agnews"])
    assert owned.clients == 9
    assert set(owned.owners.values()) == {9}
    assert set(owned.owners) == set(miniature.ownership.blocks_of_task("agnews"))
