import copy
import random

import pytest
import torch
from safetensors.torch import save_file

from tapfl.blocks import BlockAverage, BlockState, Ownership, average, check_block, paths
from tapfl.errors import TapflError
from tests.conftest import TASKS

OWNERSHIP = Ownership(TASKS)


def test_task_owns_the_four_paths_of_its_modality():
    assert set(OWNERSHIP.blocks_of_task("pets")) == {
        "encoder/image",
        "mote/image/attention", "mote/image/expert/image_classification",
        "mote/image/expert/shared",
        "mote/shared/attention", "mote/shared/expert/image_classification",
        "mote/shared/expert/shared",
        "mome/image_classification/attention", "mome/image_classification/expert/image",
        "mome/image_classification/expert/shared",
        "mome/shared/attention", "mome/shared/expert/image", "mome/shared/expert/shared",
        "decoder/pets",
    }


def test_generation_heads_are_shared_classification_heads_are_not():
    assert "decoder/text_generation" in OWNERSHIP.blocks_of_task("vqa")
    assert "decoder/text_generation" in OWNERSHIP.blocks_of_task("story")
    assert "decoder/plants" not in OWNERSHIP.blocks_of(["image"], ["pets"])


def test_client_owns_the_union_of_its_tasks_and_no_unused_expert():
    own = set(OWNERSHIP.blocks_of(["image", "text"], ["paint", "story"]))
    assert own == {*OWNERSHIP.blocks_of_task("paint"), *OWNERSHIP.blocks_of_task("story")}
    assert "mote/text/expert/image_generation" not in own


def test_standard_backbone_is_one_block():
    standard = Ownership(TASKS, backbone="standard")
    assert standard.blocks_of_task("vqa") == (
        "encoder/image", "encoder/text", "backbone", "decoder/text_generation")


def test_encoder_without_trainable_parts_has_no_block():
    assert "encoder/text" not in Ownership(TASKS, "routed", ("image",)).blocks_of_task("vqa")


def test_paths_cover_both_axes():
    assert [(p.mote_stack != "shared", p.mome_stack != "shared") for p in paths("text", "x")] == [
        (True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(("modalities", "tasks", "message"), [
    (["image"], ["nope"], "unknown task 'nope'"),
    (["sound"], ["pets"], "unknown modality 'sound'"),
    (["image"], ["vqa"], "task 'vqa' needs modality 'text'"),
    (["image", "text"], ["pets"], "modality 'text' is used by none"),
    (["image"], [], "at least one task"),
])
def test_bad_ownership(modalities, tasks, message):
    with pytest.raises(TapflError, match=message):
        OWNERSHIP.blocks_of(modalities, tasks)


@pytest.mark.parametrize("name", [
    "../etc", "encoder/../x", "encoder", "decoder/a/b", "mote/x", "mote/x/expert", "", "/decoder/x",
    "decoder/a..b", "decoder/ü", 7])
def test_bad_block_names(name):
    with pytest.raises(TapflError, match="not a block name"):
        check_block(name)


def test_every_owned_name_is_well_formed():
    for backbone in ("routed", "standard"):
        for name in Ownership(TASKS, backbone).all_blocks():
            assert check_block(name) == name


def test_extract_and_load_round_trip(network):
    state = BlockState.extract(network.blocks)
    other = copy.deepcopy(network.blocks)
    for parameter in other.parameters():
        parameter.data.zero_()
    state.load_into(other)
    for (name, a), (_, b) in zip(network.blocks.named_parameters(), other.named_parameters(),
                                 strict=True):
        assert torch.equal(a, b), name


def test_load_writes_in_place_and_only_what_is_named(network):
    parameters = dict(network.blocks.named_parameters())
    state = BlockState.extract(network.blocks)
    before = {k: (p.data_ptr(), p.detach().clone()) for k, p in parameters.items()}
    doubled = BlockState({k: v * 2 for k, v in state.items()}, state.shapes)
    doubled.load_into(network.blocks, ["encoder/text"])
    for key, parameter in parameters.items():
        pointer, old = before[key]
        assert parameter.data_ptr() == pointer
        factor = 2 if key.startswith("encoder/text.") else 1
        assert torch.equal(parameter, old * factor)


def test_extract_is_a_copy(network):
    state = BlockState.extract(network.blocks, ["decoder/pets"])
    kept = state["decoder/pets"].clone()
    network.blocks["decoder/pets"][0].weight.data.zero_()
    assert torch.equal(state["decoder/pets"], kept)


def test_save_and_load(network, tmp_path):
    state = BlockState.extract(network.blocks)
    state.save(tmp_path / "x.safetensors", {"round": "3"})
    back = BlockState.load(tmp_path / "x.safetensors")
    assert list(back) == list(state)
    for name in state:
        assert torch.equal(back[name], state[name])
        assert back.shapes[name] == state.shapes[name]
    back.load_into(network.blocks)


def test_size_and_bytes(network):
    state = BlockState.extract(network.blocks, ["decoder/pets"])
    assert state.size == 32 * 16 + 16 + 16 * 5 + 5
    assert state.nbytes == 4 * state.size


def test_replace_changes_exactly_the_named_blocks(network):
    mine = BlockState.extract(network.blocks)
    theirs = BlockState({k: v + 1 for k, v in mine.items()}, mine.shapes)
    before = mine.clone()
    mine.replace(theirs, OWNERSHIP.blocks_of_task("news"))
    for name in mine:
        expected = theirs if name in OWNERSHIP.blocks_of_task("news") else before
        assert torch.equal(mine[name], expected[name])


def _random_states(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    names = [f"decoder/d{i}" for i in range(5)]
    states, weights = [], []
    for _ in range(rng.randint(1, 6)):
        own = rng.sample(names, rng.randint(0, 5))
        states.append(BlockState({n: torch.randn(7) for n in own},
                                 {n: {"w": torch.Size([7])} for n in own}))
        weights.append(rng.choice([1, 3, 1000, 0.25]))
    return states, weights


@pytest.mark.parametrize("seed", range(20))
def test_average_against_brute_force(seed):
    states, weights = _random_states(seed)
    mean = average(states, weights)
    assert set(mean) == {n for s in states for n in s}
    for name in mean:
        owners = [(s[name].double(), w) for s, w in zip(states, weights, strict=True) if name in s]
        expected = sum(v * w for v, w in owners) / sum(w for _, w in owners)
        assert torch.allclose(mean[name].double(), expected, atol=1e-6)


def test_average_of_one_owner_is_exact():
    value = torch.randn(100)
    state = BlockState({"decoder/a": value}, {"decoder/a": {"w": value.shape}})
    assert torch.equal(average([state], [3])["decoder/a"], value)
    assert torch.equal(average([state, state], [3, 7])["decoder/a"], value)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_bad_weight(weight, network):
    with pytest.raises(TapflError, match="weight must be positive"):
        BlockAverage().add(BlockState.extract(network.blocks, ["decoder/pets"]), weight)


def test_bad_states(network, tmp_path):
    state = BlockState.extract(network.blocks, ["decoder/pets"])
    for use in (lambda: state["decoder/news"], lambda: state.replace(state, ["decoder/news"]),
                lambda: state.load_into(network.blocks, ["decoder/news"])):
        with pytest.raises(TapflError, match="no block 'decoder/news' here"):
            use()
    with pytest.raises(TapflError, match="no block 'decoder/pet'; did you mean 'decoder/pets'"):
        BlockState.extract(network.blocks, ["decoder/pet"])
    alien = BlockState(dict(state), {"decoder/pets": {"0.weight": torch.Size([3])}})
    with pytest.raises(TapflError, match=r"'0.bias' has shape None, expected \(16,\)"):
        alien.load_into(network.blocks)
    (tmp_path / "broken.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(TapflError, match=r"broken.safetensors: not a readable"):
        BlockState.load(tmp_path / "broken.safetensors")
    save_file({"../../evil:w": torch.zeros(1)}, tmp_path / "evil.safetensors")
    with pytest.raises(TapflError, match=r"evil\.safetensors: .*not a block name"):
        BlockState.load(tmp_path / "evil.safetensors")


def test_a_refused_contribution_does_not_count():
    mean = BlockAverage()
    mean.add(BlockState({"decoder/a": torch.zeros(2)}, {"decoder/a": {"w": torch.Size([2])}}), 1)
    with pytest.raises(TapflError, match="has shape"):
        mean.add(BlockState({"decoder/a": torch.ones(3)}, {"decoder/a": {"w": torch.Size([3])}}), 5)
    assert mean.weights == {"decoder/a": 1}
    assert torch.equal(mean.result()["decoder/a"], torch.zeros(2))


def test_parameters_that_were_exchanged_are_found(network):
    block = network.blocks["encoder/text"]
    BlockState.extract(network.blocks)
    sevens = {key: torch.full_like(value, 7.0) for key, value in block.state_dict().items()}
    block.load_state_dict(sevens, assign=True)
    state = BlockState.extract(network.blocks, ["encoder/text"])
    assert (state["encoder/text"] == 7).all()
    BlockState({"encoder/text": state["encoder/text"] - 4}, state.shapes).load_into(network.blocks)
    assert all((p == 3).all() for p in block.parameters())
